"""Which huge pages of a block may be in memory, and which of them were used lately.  Pure arithmetic.

Blocks ask for huge pages, so memory comes 2 MiB at a time: one byte that is written brings all of
its page.  Huge pages are therefore what is counted, and what is given back: a part of one would split
it, and memory that comes back in small pages comes several times slower.

1. A page that was ever used counts as in memory until it is forgotten.
2. A page is idle when it was not used since the last `age`.
3. Where a block begins or ends inside a huge page, the page counts as far as the block has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tierstore.units import MIB

HUGE_PAGE_BYTES = 2 * MIB
_ABSENT, _IDLE, _USED = b"\0", b"\1", b"\2"
_IDLE_RUN = re.compile(_IDLE + b"+")


class HugePages:
    """The huge pages of one block.  Not thread-safe.

    Offsets count from where the block begins.  A method costs some ten nanoseconds per huge page,
    on top of a microsecond.

    Args:
        nbytes: the length of the block, above 0.
        lead_bytes: how far into its first huge page the block begins.
    """

    def __init__(self, nbytes: int, lead_bytes: int) -> None:
        self._nbytes = nbytes
        self._lead_bytes = lead_bytes
        self._states = bytearray(-(-(lead_bytes + nbytes) // HUGE_PAGE_BYTES))

    @property
    def resident_bytes(self) -> int:
        """At most this much of the block is in memory."""
        states = self._states
        nbytes = (len(states) - states.count(_ABSENT)) * HUGE_PAGE_BYTES
        if states[0]:
            nbytes -= self._lead_bytes
        if states[-1]:
            nbytes -= len(states) * HUGE_PAGE_BYTES - self._lead_bytes - self._nbytes
        return nbytes

    def use(self, offset: int, nbytes: int) -> None:
        """Note that a range is used: all pages that have a byte of it."""
        first = (self._lead_bytes + offset) // HUGE_PAGE_BYTES
        count = (self._lead_bytes + offset + nbytes - 1) // HUGE_PAGE_BYTES + 1 - first
        self._states[first : first + count] = _USED * count

    def forget(self, offset: int, nbytes: int) -> None:
        """Note that a range is not in memory any more: the pages that lie wholly inside."""
        first, end = self._inside(offset, nbytes)
        self._states[first:end] = _ABSENT * (end - first)

    def whole_bytes(self, offset: int, nbytes: int) -> int:
        """Return the bytes of the huge pages that lie wholly inside a range."""
        first, end = self._inside(offset, nbytes)
        begin_bytes = max(first * HUGE_PAGE_BYTES - self._lead_bytes, 0)
        return max(0, min(end * HUGE_PAGE_BYTES - self._lead_bytes, self._nbytes) - begin_bytes)

    def idle(self, offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Iterate over the runs of idle pages wholly inside a range, as (offset, nbytes)."""
        for run in _IDLE_RUN.finditer(bytes(self._states), *self._inside(offset, nbytes)):
            first = max(run.start() * HUGE_PAGE_BYTES - self._lead_bytes, 0)
            yield first, min(run.end() * HUGE_PAGE_BYTES - self._lead_bytes, self._nbytes) - first

    def age(self) -> None:
        """Begin a new count of what is used: what is in memory is idle until it is used again."""
        self._states = self._states.replace(_USED, _IDLE)

    def _inside(self, offset: int, nbytes: int) -> tuple[int, int]:
        """Return the first page that lies wholly inside a range and the one after the last.

        Where none does, what comes after the last may come before the first.
        """
        end = offset + nbytes
        first_page = -(-(self._lead_bytes + offset) // HUGE_PAGE_BYTES) if offset > 0 else 0
        end_page = (self._lead_bytes + end) // HUGE_PAGE_BYTES if end < self._nbytes else len(self._states)
        return first_page, end_page
