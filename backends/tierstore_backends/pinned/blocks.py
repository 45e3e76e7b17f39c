"""One block of host memory: mapped, page-locked if it can be, given back whole.

Promises: memory is registered with the device once, unregistered before it is unmapped, and unmapped
only when no tensor refers to it any more.  A block knows nothing of slots.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

from tierstore.units import align_up
from tierstore_backends.pinned.pages import HUGE_PAGE_BYTES, HugePages
from tierstore_backends.pinned.registrars import Registrar

PAGE_BYTES = 4096


class Block:
    """``nbytes`` of anonymous memory, from huge pages where the system has them.

    Not thread-safe.  Untouched memory costs nothing until it is first written, unless it is
    page-locked.

    Args:
        nbytes: its length, above 0.

    Raises:
        OSError: the system has no such room.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.used_bytes = 0  # kept by the pool
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower, not wrong
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._pages = HugePages(nbytes, self._address % HUGE_PAGE_BYTES)
        self._registrar: Registrar | None = None

    @property
    def is_pinned(self) -> bool:
        """Whether the memory is page-locked."""
        return self._registrar is not None

    @property
    def resident_bytes(self) -> int:
        """At most this much memory is in use: all of it if page-locked, else the huge pages touched."""
        return self.nbytes if self.is_pinned else self._pages.resident_bytes

    def pin(self, registrar: Registrar) -> None:
        """Page-lock the memory until `release`.

        Raises:
            BackendError: the registrar refuses; the block is pageable then, and usable.
        """
        registrar.register(self._address, self.nbytes)
        self._registrar = registrar

    def memory(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` (above 0) at ``offset`` as a tensor with a storage of its own.

        The storage begins at the first of these bytes and keeps the whole mapping alive.
        """
        self._pages.use(offset, nbytes)
        if not self.is_pinned:
            # The first write to a huge page brings all of it: now, before what is beside the range goes back.
            for edge in (offset, offset + nbytes - 1):
                self._map[edge] = self._map[edge]
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=offset, count=nbytes)

    def note_use(self, offset: int, nbytes: int) -> None:
        """Take in that a range was in use until now."""
        self._pages.use(offset, nbytes)

    def discard(self, offset: int, nbytes: int) -> int:
        """Give the pages that lie wholly inside a range back to the system; their bytes are lost.

        Returns how many of the bytes that went back `resident_bytes` still counts, as their huge pages
        have others beside them.

        Page-locked memory stays: it cannot be given back in parts.  So does what the system does not
        take, such as memory that the program locked as a whole.
        """
        if self.is_pinned:
            return 0
        first, end = align_up(offset, PAGE_BYTES), offset + nbytes
        if end < self.nbytes:  # a page that the block ends in is its own
            end = end // PAGE_BYTES * PAGE_BYTES
        if end > first:
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_DONTNEED, first, end - first)
                self._pages.forget(offset, nbytes)
                return end - first - self._pages.whole_bytes(offset, nbytes)
        return 0

    def discard_idle(self, offset: int, nbytes: int, least_bytes: int) -> None:
        """Give back what of a free range nobody used since the last `age`: stretches of ``least_bytes``."""
        for idle_offset, idle_bytes in self._pages.idle(offset, nbytes):
            if idle_bytes >= least_bytes:
                self.discard(idle_offset, idle_bytes)

    def age(self) -> None:
        """Call idle, from now on, what is not used from now on."""
        self._pages.age()

    def release(self) -> None:
        """Unlock the memory and let go of it: it is unmapped when the last tensor on it dies.

        Raises:
            BackendError: it could not be unlocked; then it stays mapped.
        """
        if self._registrar is not None:
            self._registrar.unregister(self._address)
            self._registrar = None
        del self._map
