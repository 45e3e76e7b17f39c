"""Host memory for the copies that `Store.get` hands out.

The operating system clears fresh pages before it gives them out, which on many machines costs more
than the copy itself.  Memory of outputs that nobody refers to any more is used again, up to a bound.
"""

from __future__ import annotations

import mmap
import threading
import weakref

import numpy as np
import torch

from tierstore import forks

SMALLEST_BYTES = 1024**2
ALIGNMENT_BYTES = 64  # as torch's own allocations
KEPT_BYTES = 256 * 1024**2


def host_memory(nbytes: int) -> torch.Tensor:
    """Return fresh host memory as a one-dimensional uint8 tensor, where torch's own would begin.

    Not torch's own: whoever meters an emulated device by its operations would take that for device memory.
    """
    if nbytes == 0:  # numpy's has a stride of 0, and cannot be viewed as another type
        return torch.empty(0, dtype=torch.uint8)
    array = np.empty(nbytes + ALIGNMENT_BYTES, dtype=np.uint8)
    start = -array.ctypes.data % ALIGNMENT_BYTES
    return torch.from_numpy(array[start : start + nbytes])


class OutputBufferPool:
    """Hands out host memory; takes it back when the last tensor over it is gone.  Thread-safe.

    Args:
        kept_bytes: how much memory that nobody uses is kept for the next outputs.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._process = forks.here()
        self._lock = threading.RLock()  # guards the next two; re-entered by finalizers
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._idle_bytes = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` of host memory as a one-dimensional uint8 tensor with its own storage."""
        if nbytes < SMALLEST_BYTES:
            return host_memory(nbytes)
        memory = self._reuse(nbytes)
        if memory is None:
            memory = mmap.mmap(-1, nbytes)
            memory.madvise(mmap.MADV_HUGEPAGE)
        array = np.frombuffer(memory, dtype=np.uint8)
        weakref.finalize(array, self._give_back, nbytes, memory).atexit = False
        return torch.from_numpy(array)

    def _reuse(self, nbytes: int) -> mmap.mmap | None:
        with self._lock:
            idle = self._idle.get(nbytes)
            if not idle:
                return None
            self._idle_bytes -= nbytes
            return idle.pop()

    def _give_back(self, nbytes: int, memory: mmap.mmap) -> None:
        if self._process is not forks.here():  # a thread that a fork's child does not have may hold the lock
            return
        with self._lock:
            if self._idle_bytes + nbytes <= self._kept_bytes:
                self._idle.setdefault(nbytes, []).append(memory)
                self._idle_bytes += nbytes

    def clear(self) -> None:
        """Forget what is kept, and keep nothing from now on."""
        with self._lock:
            self._kept_bytes = 0
            self._idle.clear()
            self._idle_bytes = 0
