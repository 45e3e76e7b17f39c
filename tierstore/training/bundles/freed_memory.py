"""What the C library does with memory that was freed."""

from __future__ import annotations

import ctypes

from tierstore.units import MIB

_M_MMAP_THRESHOLD = -3  # malloc.h


def give_freed_memory_back() -> None:
    """Let the C library return every freed piece of 1 MiB and more to the system at once.

    By itself glibc raises that bound to 32 MiB as pieces are freed (mallopt(3), M_MMAP_THRESHOLD), and
    gradients, fresh state and pages of tables then leave holes in its heap that no quota knows of: measured,
    three times the host quota.  Holds for the process; other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MIB)
