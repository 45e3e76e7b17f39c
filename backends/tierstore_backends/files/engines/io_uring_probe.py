"""Whether an engine works in a directory: found out by using it, never by tables.

Kernels and containers refuse io_uring in many ways (it is compiled out, switched off by ``sysctl``, or
filtered), and some file systems take part in it only half.  So a page is written and read through a ring.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from pathlib import Path

from tierstore.errors import BackendError
from tierstore_backends.files.addressing.direct_io_probe import IoMode
from tierstore_backends.files.directory.ownership import PROBE_NAME
from tierstore_backends.files.io.io_request import Direction
from tierstore_backends.files.io.syscalls import KernelCall, Ring, Syscalls

_PATIENCE_S = 5.0  # for one page
_REFUSALS = {
    errno.ENOSYS: "this kernel has no io_uring",
    errno.EPERM: "the kernel forbids io_uring here (sysctl kernel.io_uring_disabled, or a seccomp filter)",
    errno.EACCES: "the kernel forbids io_uring here (a security module)",
    errno.ENOMEM: "there is not enough lockable memory for a ring (ulimit -l)",
}


def ring_fault(folder: Path, mode: IoMode, syscalls: Syscalls) -> str | None:
    """Say why io_uring cannot be used for files in ``folder``; ``None``: it can.

    Args:
        folder: where one file is made that is gone afterwards.
        mode: how files are opened there.
        syscalls: the way to the kernel.
    """
    try:
        ring = syscalls.open_ring(2, is_direct=mode.is_direct)
    except BackendError as error:
        return str(error)
    except OSError as error:
        return _REFUSALS.get(error.errno or 0, f"the kernel refuses a ring: {error}")
    try:
        return _page_fault(ring, folder / PROBE_NAME, mode)
    except OSError as error:
        return f"a page could not be moved through a ring: {error}"
    finally:
        ring.close()


def _page_fault(ring: Ring, path: Path, mode: IoMode) -> str | None:
    """Write a page and read it back."""
    fd = os.open(path, mode.flags, 0o600)
    try:
        with mmap.mmap(-1, mode.alignment_bytes) as memory, memoryview(memory) as page:
            written = os.urandom(len(page))
            page[:] = written
            count = _moved(ring, KernelCall(Direction.WRITE, fd, 0, [page], 0))
            page[:] = bytes(len(page))
            count = min(count, _moved(ring, KernelCall(Direction.READ, fd, 0, [page], 0)))
            if count != len(page):
                return f"{count} of {len(page)} bytes were moved through a ring"
            return None if page == written else "a page came back different through a ring"
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


def _moved(ring: Ring, call: KernelCall) -> int:
    """Carry one call out; return how many bytes moved."""
    ring.put(1, call)
    ring.submit()
    until_s = time.monotonic() + _PATIENCE_S
    while not (ended := ring.reap()):
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(errno.ETIMEDOUT, f"no answer for {_PATIENCE_S} s")
        ring.wait(left_s)
    (_, count), *_ = ended
    if count < 0:
        raise OSError(-count, os.strerror(-count))
    return count
