"""Memory that the disk can reach, lent for what cannot go straight: bounded, and kept.

Fresh pages cost more than the copy that they are for, so the memory stays; its pages become real
only where they are used.  Not thread-safe: it belongs to whoever runs the BatchIo that it belongs to.
"""

from __future__ import annotations

import mmap

from tierstore.units import align_up
from tierstore_backends.files.extents import Extent, RangeSet


class Bounce:
    """Page-aligned memory that is lent in ranges.

    Args:
        nbytes: how much there is.
    """

    def __init__(self, nbytes: int) -> None:
        nbytes = align_up(nbytes, mmap.PAGESIZE)
        self._memory = memoryview(mmap.mmap(-1, nbytes))
        self._free = RangeSet()
        self._free.add(0, nbytes)

    def take(self, nbytes: int) -> Extent | None:
        """Lend ``nbytes`` of memory, the lowest that are free for the sake of warm pages; or none."""
        return self._free.take_best(nbytes)

    def view(self, extent: Extent) -> memoryview:
        """Return the memory of ``extent``."""
        return self._memory[extent[0] : extent[1]]

    def give(self, extent: Extent) -> None:
        """Take back what was lent."""
        self._free.add(*extent)
