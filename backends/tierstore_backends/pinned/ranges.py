"""Which bytes of a set of blocks are free: best fit, split and merge.  Pure arithmetic.

A block is a span of addresses; spans are told apart by a gap, so that ranges never merge across.
Addresses are numbers: nothing here knows of memory.

1. A range is taken from the smallest free range that it fits, and what is left over stays free.
2. Free ranges that touch are one range.
3. The bytes free and taken add up to the bytes of the blocks, always.
4. A mark on a free range is forgotten as soon as the range is split, or is a part of a longer one.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from tierstore.units import align_up


class FreeRanges:
    """The free ranges of some blocks.  Not thread-safe.

    Every method costs a binary search and a move inside one sorted list: microseconds with
    thousands of ranges.
    """

    def __init__(self) -> None:
        self._nbytes_by_start: dict[int, int] = {}
        self._start_by_end: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []  # (nbytes, start), sorted
        self._marks: dict[int, int] = {}  # by start
        self.free_bytes = 0
        self.marked_bytes = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Iterate over (start, nbytes), in no order."""
        return iter(self._nbytes_by_start.items())

    def of_at_least(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Iterate over (start, nbytes) of the ranges of this length and more, longest last."""
        for index in range(bisect.bisect_left(self._by_size, (nbytes, 0)), len(self._by_size)):
            free_bytes, start = self._by_size[index]
            yield start, free_bytes

    @property
    def largest_bytes(self) -> int:
        """The length of the longest free range."""
        return self._by_size[-1][0] if self._by_size else 0

    def mark(self, start: int, marked_bytes: int) -> None:
        """Note a number of bytes at the free range that starts at ``start``: `marked_bytes` is their sum."""
        self.marked_bytes += marked_bytes - self._marks.get(start, 0)
        self._marks[start] = marked_bytes

    def is_marked(self, start: int) -> bool:
        """Whether the free range that starts at ``start`` is still the one that was marked."""
        return start in self._marks

    def take(self, nbytes: int, alignment_bytes: int) -> int | None:
        """Take the best fitting range and return where it starts; ``None`` if none fits.

        Args:
            nbytes: its length, above 0.
            alignment_bytes: it starts at a multiple of this.
        """
        for index in range(bisect.bisect_left(self._by_size, (nbytes, 0)), len(self._by_size)):
            free_bytes, start = self._by_size[index]
            first = align_up(start, alignment_bytes)
            if first + nbytes <= start + free_bytes:
                break
        else:
            return None
        del self._by_size[index]
        self._forget(start, free_bytes)
        if first > start:
            self._insert(start, first - start)
        if first + nbytes < start + free_bytes:
            self._insert(first + nbytes, start + free_bytes - first - nbytes)
        return first

    def give(self, start: int, nbytes: int) -> tuple[int, int]:
        """Make a range free and return the free range, as (start, nbytes), that it is now part of."""
        end = start + nbytes
        following_bytes = self._nbytes_by_start.get(end)
        if following_bytes is not None:
            self.remove(end, following_bytes)
            nbytes += following_bytes
        preceding = self._start_by_end.get(start)
        if preceding is not None:
            preceding_bytes = start - preceding
            self.remove(preceding, preceding_bytes)
            start, nbytes = preceding, nbytes + preceding_bytes
        self._insert(start, nbytes)
        return start, nbytes

    def remove(self, start: int, nbytes: int) -> None:
        """Withdraw one whole free range.

        Raises:
            KeyError: it is not one.
        """
        if self._nbytes_by_start.get(start) != nbytes:
            raise KeyError(f"{nbytes} bytes at {start} are not a free range")
        del self._by_size[bisect.bisect_left(self._by_size, (nbytes, start))]
        self._forget(start, nbytes)

    def _insert(self, start: int, nbytes: int) -> None:
        bisect.insort(self._by_size, (nbytes, start))
        self._nbytes_by_start[start] = nbytes
        self._start_by_end[start + nbytes] = start
        self.free_bytes += nbytes

    def _forget(self, start: int, nbytes: int) -> None:
        del self._nbytes_by_start[start]
        del self._start_by_end[start + nbytes]
        self.free_bytes -= nbytes
        if self._marks:
            self.marked_bytes -= self._marks.pop(start, 0)
