"""io_uring through the ``liburing`` package: the ring, and nothing of what goes through it.

Three things about the package shape this (as of 2026.3.30; it is an extra, and young):

- None of its calls gives the interpreter's lock away.  So nothing here waits in the kernel by it: the ring
  signals an eventfd when a call has ended, and a wait is a read of that, which does give the lock away.
- Its ``Iovec`` keeps a reference to every buffer for ever, and takes no addresses.  So submission entries
  are written where the kernel has them, in memory that it shares with us by its documented offsets
  (``io_uring_setup(2)``); a probe reads one back through the package before any is used.
- Results are attributes that raise, an exception object each.

And its wheels may be built for a CPU that this is not: a process of its own tries them first.

Knows nothing of fragments and checksums.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import mmap
import os
import select
import struct
from pathlib import Path
from types import ModuleType
from typing import Final

from tierstore.alone import fault_alone
from tierstore.errors import BackendError, InvariantError
from tierstore_backends.files.io.io_request import Direction
from tierstore_backends.files.io.syscalls import KernelCall

# <linux/io_uring.h>: opcode, flags, priority, fd, offset, address, length, flags of the operation, user data
_ENTRY = struct.Struct("=BBHiQQIIQ24x")
_ENTRIES_OFFSET = 0x10000000  # IORING_OFF_SQES
_USER_DATA = struct.Struct("=32xQ")
_READV, _WRITEV, _READ, _WRITE = 1, 2, 22, 23  # IORING_OP_*
_ASYNC = 1 << 4  # IOSQE_ASYNC
_NEEDED = (
    "Cqe", "Ring", "io_uring_cq_advance", "io_uring_cq_ready", "io_uring_get_sqe", "io_uring_peek_cqe",
    "io_uring_prep_nop", "io_uring_queue_exit", "io_uring_queue_init", "io_uring_register_eventfd",
    "io_uring_sqe_set_data64", "io_uring_submit",
)  # fmt: skip
_TRIAL: Final = str(Path(__file__).with_name("io_uring_trial.py"))
_AGAIN = frozenset({errno.EAGAIN, errno.EBUSY, errno.EINTR})
_PATIENCE_S = 5.0  # for an operation that does nothing
_RETRY_S = 0.01  # the kernel is out of memory for requests and nothing of ours is under way


class UringRing:
    """See `tierstore_backends.files.io.syscalls.Ring`.

    Args:
        entries: the most calls at a time.
        is_direct: whether transfers go past the page cache.  Those through it would be copied while they
            are submitted, with the interpreter's lock held, if the kernel's own threads did not do it.

    Raises:
        OSError: the kernel refuses it.
        BackendError: the package is not there, or is another one.
    """

    def __init__(self, entries: int, *, is_direct: bool) -> None:
        self._flags = 0 if is_direct else _ASYNC
        self._uring = _package()
        self._entries = 1 << (entries - 1).bit_length()
        self._ring = self._uring.Ring()
        self._uring.io_uring_queue_init(self._entries, self._ring)
        try:
            self._slots = mmap.mmap(
                self._ring.ring_fd, self._entries * _ENTRY.size, offset=_ENTRIES_OFFSET, flags=mmap.MAP_SHARED
            )
            self._signal = os.eventfd(0, os.EFD_CLOEXEC)
            self._uring.io_uring_register_eventfd(self._ring, self._signal)
        except BaseException:
            self._uring.io_uring_queue_exit(self._ring)
            raise
        self._poll = select.poll()
        self._poll.register(self._signal, select.POLLIN)
        self._ended = self._uring.Cqe()
        self._put_count = 0
        self._unsubmitted = 0
        self._under_way = 0
        self._vectors: dict[int, ctypes.Array[ctypes.c_uint64]] = {}  # by token: the kernel reads them
        try:
            self._try_out()
        except BaseException:
            self.close()
            raise

    def put(self, token: int, call: KernelCall) -> None:
        """See `Ring`."""
        is_write = call.direction is Direction.WRITE
        if len(call.vector) == 1:
            operation = _WRITE if is_write else _READ
            address, length = _address(call.vector[0]), len(call.vector[0])
        else:
            operation, length = _WRITEV if is_write else _READV, len(call.vector)
            parts = [number for view in call.vector for number in (_address(view), len(view))]
            self._vectors[token] = vector = (ctypes.c_uint64 * len(parts))(*parts)
            address = ctypes.addressof(vector)
        at = self._next_entry()
        _ENTRY.pack_into(
            self._slots, at, operation, self._flags, 0, call.fd, call.offset, address, length, 0, token
        )

    def submit(self) -> None:
        """See `Ring`."""
        while self._unsubmitted:
            try:
                count = self._uring.io_uring_submit(self._ring)
            except OSError as error:
                if error.errno not in _AGAIN:
                    raise
                return  # they stay in the ring, and go with the next
            self._unsubmitted -= count
            self._under_way += count

    def reap(self) -> list[tuple[int, int]]:
        """See `Ring`."""
        ended: list[tuple[int, int]] = []
        for _ in range(self._uring.io_uring_cq_ready(self._ring)):
            self._uring.io_uring_peek_cqe(self._ring, self._ended)
            entry = self._ended[0]
            token = entry.user_data
            try:
                result = entry.res
            except OSError as error:
                result = -(error.errno or errno.EIO)
            self._uring.io_uring_cq_advance(self._ring, 1)
            self._vectors.pop(token, None)
            ended.append((token, result))
        self._under_way -= len(ended)
        return ended

    def wait(self, timeout_s: float | None) -> None:
        """See `Ring`."""
        if self._unsubmitted and not self._under_way:
            timeout_s = _RETRY_S if timeout_s is None else min(timeout_s, _RETRY_S)
        if timeout_s is None or self._poll.poll(timeout_s * 1000):
            os.read(self._signal, 8)

    def wake(self) -> None:
        """See `Ring`."""
        os.eventfd_write(self._signal, 1)

    def close(self) -> None:
        """See `Ring`."""
        self._slots.close()  # which has a descriptor of its own
        self._uring.io_uring_queue_exit(self._ring)
        os.close(self._signal)

    def _next_entry(self) -> int:
        """Take a submission entry; return where it is in the memory that we share with the kernel."""
        if self._uring.io_uring_get_sqe(self._ring) is None:
            raise InvariantError(f"more than {self._entries} calls were put into one ring")
        at = self._put_count % self._entries * _ENTRY.size
        self._put_count += 1
        self._unsubmitted += 1
        return at

    def _try_out(self) -> None:
        """See that an entry is where it should be, and that its end is told.

        Raises:
            BackendError: it is not, or is not.
        """
        mark = int.from_bytes(os.urandom(7))
        entry = self._uring.io_uring_get_sqe(self._ring)
        self._uring.io_uring_prep_nop(entry)
        self._uring.io_uring_sqe_set_data64(entry, mark)
        self._put_count += 1
        self._unsubmitted += 1
        (found,) = _USER_DATA.unpack_from(self._slots, 0)
        self.submit()
        self.wait(_PATIENCE_S)
        if found != mark or self.reap() != [(mark, 0)]:
            raise BackendError("the ring is not laid out as io_uring_setup(2) says, or does nothing")


def _package() -> ModuleType:
    """Import liburing.

    Raises:
        BackendError: it is not there, or has not the functions that are used here, or would kill the process.
    """
    fault = fault_alone("liburing", script=_TRIAL)
    if fault is not None:
        raise BackendError(
            f"the liburing package cannot be used here: {fault}. "
            f"'pip install --force-reinstall --no-binary liburing liburing' builds it for this machine"
        )
    try:
        uring = importlib.import_module("liburing")
    except ImportError as error:
        raise BackendError(
            f"the liburing package cannot be imported ({error}): pip install 'tierstore[io-uring]'"
        ) from error
    missing = [name for name in _NEEDED if not hasattr(uring, name)]
    if missing:
        raise BackendError(
            f"the liburing package here has no {missing[0]}: pip install -U 'tierstore[io-uring]'"
        )
    return uring


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
