"""The kernel itself, as `tierstore_backends.files.io.syscalls.Syscalls`."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path

from tierstore_backends.files.io.syscalls import FileStreams, Ring, Syscalls

_KEEP_SIZE = 0x01  # <linux/falloc.h>
_PUNCH_HOLE = 0x02


class _Kernel:
    """The real thing."""

    def __init__(self) -> None:
        # Only Linux has it; elsewhere files grow as they are written and holes stay.
        self._fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
        if self._fallocate is not None:
            self._fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
            self._fallocate.restype = ctypes.c_int

    def read(self, fd: int, vector: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, vector, offset)

    def write(self, fd: int, vector: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, vector, offset)

    def open_streams(self, path_of: Callable[[int], Path], executor: Executor) -> FileStreams:
        from tierstore_backends.files.io.aio_streams import AioStreams  # asyncio is only for who asks for it

        return AioStreams(path_of, executor)

    def open_ring(self, entries: int, *, is_direct: bool) -> Ring:
        from tierstore_backends.files.io.io_uring import UringRing  # an extra

        return UringRing(entries, is_direct=is_direct)

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        # Not os.posix_fallocate: where a file system cannot, that writes zeros byte by byte.
        self._change(fd, 0, offset, nbytes)

    def punch(self, fd: int, offset: int, nbytes: int) -> None:
        self._change(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_folder(self, fd: int) -> None:
        os.fsync(fd)  # a new name is no data: fdatasync may pass it over

    def _change(self, fd: int, mode: int, offset: int, nbytes: int) -> None:
        if self._fallocate is None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        if self._fallocate(fd, mode, offset, nbytes):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))


KERNEL: Syscalls = _Kernel()
