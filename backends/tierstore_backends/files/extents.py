"""Where bytes live: slots as extents in one linear address space.  Pure: no I/O, no lock.

Rule 1: live and free bytes together are the capacity, always; so the files can never hold more.
Rule 2: a request that fits into what is free is never refused: where no single range takes it, the
slot gets several extents, largest ranges first.
Rule 3: the smallest range that fits is taken from its low end, the lowest among equals; so slots
reserved one after another lie one after another, and old addresses are used before new ones.
Rule 4: a layout may begin with extents that are live already; what lies between them is free.
Rule 5: addresses that a smaller capacity no longer covers are *retired*: neither live nor free,
until the capacity grows again.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence

from tierstore.errors import CapacityError
from tierstore.units import align_up, format_bytes

Extent = tuple[int, int]
"""A range of addresses: the first, and one past the last.

A plain tuple: the garbage collector stops looking at those, and every slot keeps one.
"""


class RangeSet:
    """Disjoint ranges that join where they touch, findable by address and by length."""

    def __init__(self, ranges: Iterable[Extent] = ()) -> None:
        """Begin with ``ranges`` that are sorted and do not touch."""
        self._ends = dict(ranges)  # by start
        self._starts = list(self._ends)  # sorted; as are the pairs (length, start)
        self._lengths = sorted((end - start, start) for start, end in self._ends.items())
        self.total_bytes = sum(length for length, _ in self._lengths)

    def __iter__(self) -> Iterator[Extent]:
        """Yield the ranges from low to high addresses."""
        return ((start, self._ends[start]) for start in self._starts)

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def last(self) -> Extent | None:
        """The range with the highest addresses, if there is any."""
        return (self._starts[-1], self._ends[self._starts[-1]]) if self._starts else None

    def add(self, start: int, end: int) -> None:
        """Add addresses that are not in the set; join them with their neighbours.

        Raises:
            ValueError: some of them are in the set.
        """
        index = bisect.bisect_left(self._starts, start)
        following = self._starts[index] if index < len(self._starts) else None
        before = self._starts[index - 1] if index else None
        if (following is not None and following < end) or (before is not None and self._ends[before] > start):
            raise ValueError(f"[{start}, {end}) is there already")
        if following == end:
            end = self._remove(following)
        if before is not None and self._ends[before] == start:
            self._remove(before)
            start = before
        self._insert(start, end)

    def take_best(self, nbytes: int) -> Extent | None:
        """Take ``nbytes`` from the low end of the smallest range that has them, if one has."""
        index = bisect.bisect_left(self._lengths, (nbytes, -1))
        if index == len(self._lengths):
            return None
        return self.take_low(self._lengths[index][1], nbytes)

    def take_largest(self) -> Extent:
        """Take the largest range, whole."""
        start = self._lengths[-1][1]
        return start, self._remove(start)

    def take_low(self, start: int, nbytes: int) -> Extent:
        """Take ``nbytes`` from the low end of the range at ``start``."""
        end = self._remove(start)
        if end - start > nbytes:
            self._insert(start + nbytes, end)
        return start, min(end, start + nbytes)

    def take_high(self, start: int, nbytes: int) -> Extent:
        """Take ``nbytes`` from the high end of the range at ``start``."""
        end = self._remove(start)
        if end - start > nbytes:
            self._insert(start, end - nbytes)
        return max(start, end - nbytes), end

    def _insert(self, start: int, end: int) -> None:
        bisect.insort(self._starts, start)
        bisect.insort(self._lengths, (end - start, start))
        self._ends[start] = end
        self.total_bytes += end - start

    def _remove(self, start: int) -> int:
        """Remove the range at ``start``; return where it ends."""
        end = self._ends.pop(start)
        del self._starts[bisect.bisect_left(self._starts, start)]
        del self._lengths[bisect.bisect_left(self._lengths, (end - start, start))]
        self.total_bytes -= end - start
        return end


class Layout:
    """The books of one address space.

    Args:
        capacity_bytes: live and free bytes together; rounded down to the alignment.
        alignment_bytes: every extent begins at and has a multiple of it.
        live: what is reserved from the beginning: sorted, aligned, no two overlapping.

    Raises:
        CapacityError: ``live`` is more than the capacity.
    """

    def __init__(self, capacity_bytes: int, alignment_bytes: int, live: Sequence[Extent] = ()) -> None:
        self._alignment_bytes = alignment_bytes
        self._live_bytes = sum(end - start for start, end in live)
        self._end = live[-1][1] if live else 0  # one past the highest that is live, free, or retired below
        self._free = RangeSet(_between(live))
        self._retired = RangeSet()
        if self._live_bytes > capacity_bytes:
            raise CapacityError(
                f"{format_bytes(self._live_bytes)} are in use in the files, and the capacity is only "
                f"{format_bytes(capacity_bytes)}: enlarge it",
                needed_bytes=self._live_bytes,
                free_bytes=capacity_bytes,
            )
        self.resize(capacity_bytes)

    @property
    def end(self) -> int:
        """One past the highest address in use."""
        return self._end

    @property
    def free_bytes(self) -> int:
        """What can still be reserved, in however many extents."""
        return self._free.total_bytes

    @property
    def free_ranges(self) -> list[Extent]:
        """What is free, lowest first."""
        return list(self._free)

    @property
    def retired_ranges(self) -> list[Extent]:
        """What belongs to no capacity, though something above it does; lowest first."""
        return list(self._retired)

    @property
    def live_bytes(self) -> int:
        """What is reserved."""
        return self._live_bytes

    @property
    def is_dense(self) -> bool:
        """Whether every address below ``end`` is live or free."""
        return not len(self._retired)

    @property
    def tail_start(self) -> int:
        """The lowest address from which on everything is free."""
        last = self._free.last
        return last[0] if last is not None and last[1] == self._end else self._end

    def reserve(self, nbytes: int) -> tuple[Extent, ...]:
        """Take extents for ``nbytes``, rounded up to the alignment.

        Raises:
            CapacityError: fewer bytes are free.
        """
        needed_bytes = align_up(nbytes, self._alignment_bytes)
        if needed_bytes > self.free_bytes:
            raise CapacityError(
                f"a slot of {format_bytes(needed_bytes)} does not fit into files with "
                f"{format_bytes(self.free_bytes)} free of {format_bytes(self._live_bytes + self.free_bytes)}",
                needed_bytes=needed_bytes,
                free_bytes=self.free_bytes,
            )
        self._live_bytes += needed_bytes
        extents: list[Extent] = []
        while needed_bytes:
            start, end = self._free.take_best(needed_bytes) or self._free.take_largest()
            extents.append((start, end))
            needed_bytes -= end - start
        return tuple(extents)

    def free(self, extents: Sequence[Extent]) -> None:
        """Take back what ``reserve`` gave."""
        for start, end in extents:
            self._free.add(start, end)
            self._live_bytes -= end - start

    def resize(self, capacity_bytes: int) -> list[Extent]:
        """Make live and free bytes together ``capacity_bytes``.

        Returns:
            The ranges that were retired: their bytes are to be given back.

        Raises:
            CapacityError: more is live.
        """
        capacity_bytes -= capacity_bytes % self._alignment_bytes
        surplus_bytes = self._live_bytes + self.free_bytes - capacity_bytes
        if surplus_bytes > self.free_bytes:
            raise CapacityError(
                f"the files cannot shrink to {format_bytes(capacity_bytes)}: "
                f"{format_bytes(self._live_bytes)} are in use",
                needed_bytes=self._live_bytes,
                free_bytes=capacity_bytes,
            )
        retired: list[Extent] = []
        while surplus_bytes > 0:
            last = self._free.last
            assert last is not None  # the surplus is free
            start, end = self._free.take_high(last[0], surplus_bytes)
            self._retired.add(start, end)
            retired.append((start, end))
            surplus_bytes -= end - start
        self._lower_end()
        self._revive(-surplus_bytes)
        return retired

    def _lower_end(self) -> None:
        last = self._retired.last
        if last is not None and last[1] == self._end:
            self._end = last[0]
            self._retired.take_low(last[0], last[1] - last[0])

    def _revive(self, nbytes: int) -> None:
        """Free ``nbytes`` more: retired addresses first, the lowest first, then new ones."""
        while nbytes and len(self._retired):
            lowest = next(iter(self._retired))
            start, end = self._retired.take_low(lowest[0], nbytes)
            self._free.add(start, end)
            nbytes -= end - start
        if nbytes:
            self._free.add(self._end, self._end + nbytes)
            self._end += nbytes


def _between(live: Sequence[Extent]) -> Iterator[Extent]:
    """Yield what lies below and between extents that are sorted and do not overlap."""
    for (_, start), (end, _) in itertools.pairwise([(0, 0), *live]):
        if start < end:
            yield start, end
