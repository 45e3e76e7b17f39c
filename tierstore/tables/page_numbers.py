"""Numbers of pages: small ones, for arrays that say something of each page that a table has met.

A table whose pages are few gives each its own number.  One of 2**40 rows numbers pages as it meets them, in
a hash table, so that it costs what was touched.  Both answer for thousands of pages in a few calls of NumPy.

Rule: a number, once given, stays.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int64]

MOST_DENSE: Final = 1 << 22
"""Pages up to which each has its own number: arrays over them are then 32 MiB an item of 8 bytes, of which
untouched parts take no memory; pages of 4 KiB come to 16 GiB."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # Knuth: multiplied by it, neighbours come to lie far apart
_NOBODY = -1


class PageNumbers(Protocol):
    """See the module."""

    def find(self, pages: Pages) -> Numbers:
        """Return the number of each page, in any order and with repeats; -1 of those without."""
        ...

    def give(self, pages: Pages) -> Numbers:
        """Return the number of each of these distinct pages; those without one get one."""
        ...

    def pages_of(self, numbers: Numbers) -> Pages:
        """Return the pages that were given these numbers."""
        ...

    @property
    def size(self) -> int:
        """One more than the largest number given."""
        ...


class OwnNumbers:
    """Each page's number is its own.

    Args:
        pages: how many there are.
    """

    def __init__(self, pages: int) -> None:
        self.size = pages

    def find(self, pages: Pages) -> Numbers:
        """See `PageNumbers.find`."""
        return pages

    def give(self, pages: Pages) -> Numbers:
        """See `PageNumbers.give`."""
        return pages

    def pages_of(self, numbers: Numbers) -> Pages:
        """See `PageNumbers.pages_of`."""
        return numbers


class HashedNumbers:
    """Pages are numbered as they come.

    A hash table with open addressing and linear probing, at most half full; nothing is ever taken out.
    """

    def __init__(self) -> None:
        self.size = 0
        self._pages = np.full(1024, _NOBODY)
        self._numbers = np.zeros(1024, dtype=np.int64)

    def find(self, pages: Pages) -> Numbers:
        """See `PageNumbers.find`."""
        numbers = np.full(len(pages), _NOBODY)
        pending, slots = np.arange(len(pages)), self._first_slots(pages)
        while len(pending):
            there = self._pages[slots]
            found = there == pages[pending]
            numbers[pending[found]] = self._numbers[slots[found]]
            on = ~found & (there != _NOBODY)
            pending, slots = pending[on], self._next_slots(slots[on])
        return numbers

    def give(self, pages: Pages) -> Numbers:
        """See `PageNumbers.give`."""
        numbers = self.find(pages)
        unknown = np.flatnonzero(numbers == _NOBODY)
        if len(unknown):
            given = np.arange(self.size, self.size + len(unknown))
            numbers[unknown] = given
            self.size += len(unknown)
            if self.size * 2 > len(self._pages):
                self._enlarge()
            self._insert(pages[unknown], given)
        return numbers

    def pages_of(self, numbers: Numbers) -> Pages:
        """See `PageNumbers.pages_of`."""
        return self._by_number()[numbers]

    def _by_number(self) -> Pages:
        filled = np.flatnonzero(self._pages != _NOBODY)
        pages = np.empty(len(filled), dtype=np.int64)
        pages[self._numbers[filled]] = self._pages[filled]
        return pages

    def _insert(self, pages: Pages, numbers: Numbers) -> None:
        """Put in distinct pages that are not there."""
        pending, slots = np.arange(len(pages)), self._first_slots(pages)
        while len(pending):
            free = self._pages[slots] == _NOBODY
            self._pages[slots[free]] = pages[pending[free]]  # of several that want one slot, one gets it
            won = self._pages[slots] == pages[pending]
            self._numbers[slots[won]] = numbers[pending[won]]
            pending, slots = pending[~won], self._next_slots(slots[~won])

    def _enlarge(self) -> None:
        pages = self._by_number()
        slots = 1 << (self.size * 4 - 1).bit_length()
        self._pages = np.full(slots, _NOBODY)
        self._numbers = np.zeros(slots, dtype=np.int64)
        self._insert(pages, np.arange(len(pages)))

    def _first_slots(self, pages: Pages) -> Numbers:
        bits = len(self._pages).bit_length() - 1
        return ((pages.astype(np.uint64) * _GOLDEN) >> np.uint64(64 - bits)).astype(np.int64)

    def _next_slots(self, slots: Numbers) -> Numbers:
        return (slots + 1) & (len(self._pages) - 1)


def numbers_for(pages: int) -> PageNumbers:
    """Return what numbers the pages of a table that has so many."""
    return OwnNumbers(pages) if pages <= MOST_DENSE else HashedNumbers()
