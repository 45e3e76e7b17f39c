"""What the C library does with memory that was freed."""

from __future__ import annotations

import ctypes

from tierstore.units import MIB

_M_MMAP_THRESHOLD = -3  # malloc.h
_RETURNED_BYTES = 64 * MIB  # at a time: walking the heap takes some milliseconds
_STEPS = 3  # after which the heap looks the same from step to step, measured


def give_freed_memory_back() -> None:
    """Let the C library return every freed piece of 1 MiB and more to the system at once.

    By itself glibc raises that bound to 32 MiB as pieces are freed (mallopt(3), M_MMAP_THRESHOLD), and
    gradients, fresh state and pages of tables then leave holes in its heap that no quota knows of: measured,
    three times the host quota.  Holds for the process; other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MIB)


def return_free_memory() -> None:
    """Let the C library return what is free in its heap now (malloc_trim(3)); others are left as they are."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class FreedMemory:
    """Host memory that the store has copies of, and that is free from then on.

    Where pieces are kept by the C library (see `give_freed_memory_back`) they are holes between what a step
    makes: measured, a model with all of it in host memory had 1.6 times the memory of plain training.  Where
    holes are returned as they come to be, and when the next steps begin, it is 1.05 times.  At their ends is
    too early: gradients are still there, whose holes the next ones do not fit into.
    """

    def __init__(self) -> None:
        self._nbytes = 0
        self._steps = 0

    def note(self, nbytes: int) -> None:
        """Take in that so many bytes are free; many together are returned to the system."""
        self._nbytes += nbytes
        if self._nbytes >= _RETURNED_BYTES:
            self._nbytes, self._steps = 0, _STEPS
            return_free_memory()

    def begin_forward(self) -> None:
        """Return what is free, at the beginning of a few steps after that."""
        if self._steps:
            self._steps -= 1
            return_free_memory()
