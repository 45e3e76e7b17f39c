"""Fragments that wait, first come first served, each call for one taking its neighbours along.

A disk moves 1 MiB in one call far faster than 32 times 32 KiB.  So whoever takes the oldest fragment
also gets those that wait and continue it in the file, upwards and downwards, in whatever order
they came: a backward pass reads backwards.  Merging never crosses the end of a file or exceeds a
block; what is taken along overtakes others, which delays them by nothing but its own bytes.

Not thread-safe: the engine's lock guards it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tierstore_backends.files.io.io_request import Direction, Fragment, PartsRun

BATCH_PIECES = 512
"""The most fragments in one call: each needs two I/O vectors at most, and Linux takes 1,024."""


class FragmentQueue:
    """One direction's queue.

    Args:
        batch_bytes: the most that is moved at once.
        segment_bytes: a batch does not cross a multiple of this.
    """

    def __init__(self, batch_bytes: int, segment_bytes: int) -> None:
        self._batch_bytes = batch_bytes
        self._segment_bytes = segment_bytes
        self._order: deque[Fragment] = deque()  # also those taken along, until they come to the front
        self._by_start: dict[int, Fragment] = {}  # waiting fragments only; two reads of one slot: the later
        self._by_end: dict[int, Fragment] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, fragment: Fragment) -> None:
        """Let ``fragment`` wait."""
        fragment.is_queued = True
        self._order.append(fragment)
        self._count += 1
        if isinstance(fragment, PartsRun):  # has no neighbours
            return
        self._by_start[fragment.address] = fragment
        self._by_end[fragment.end] = fragment

    def take(self, most: int) -> list[Fragment]:
        """Return the oldest fragment and its neighbours: at most ``most``, in file order; or none."""
        while self._order:
            oldest = self._order.popleft()
            if oldest.is_queued:
                self._remove(oldest)
                if isinstance(oldest, PartsRun):
                    return [oldest]
                return self._with_neighbours(oldest, min(most, BATCH_PIECES))
        return []

    def _with_neighbours(self, oldest: Fragment, most: int) -> list[Fragment]:
        room = self._batch_bytes - (oldest.end - oldest.address)
        above: list[Fragment] = []
        end = oldest.end
        while len(above) + 1 < most and end % self._segment_bytes:
            fragment = self._by_start.get(end)
            if fragment is None or fragment.end - end > room:
                break
            self._remove(fragment)
            above.append(fragment)
            room -= fragment.end - end
            end = fragment.end
        below: list[Fragment] = []
        start = oldest.address
        while len(above) + len(below) + 1 < most and start % self._segment_bytes:
            fragment = self._by_end.get(start)
            if fragment is None or start - fragment.address > room:
                break
            self._remove(fragment)
            below.append(fragment)
            room -= start - fragment.address
            start = fragment.address
        below.reverse()
        return [*below, oldest, *above]

    def _remove(self, fragment: Fragment) -> None:
        fragment.is_queued = False
        self._count -= 1
        if self._by_start.get(fragment.address) is fragment:
            del self._by_start[fragment.address]
        if self._by_end.get(fragment.end) is fragment:
            del self._by_end[fragment.end]


class FragmentQueues:
    """A queue for each direction; whoever takes gets reads before writes (rule 1 of an engine).

    Args:
        batch_bytes: the most that is moved at once.
        segment_bytes: a batch does not cross a multiple of this.
    """

    def __init__(self, batch_bytes: int, segment_bytes: int) -> None:
        self.reads = FragmentQueue(batch_bytes, segment_bytes)
        self.writes = FragmentQueue(batch_bytes, segment_bytes)

    def __bool__(self) -> bool:
        return bool(self.reads or self.writes)

    def put(self, fragments: Sequence[Fragment]) -> None:
        """Let fragments of one transfer wait."""
        queue = self.reads if fragments[0].transfer.direction is Direction.READ else self.writes
        for fragment in fragments:
            queue.put(fragment)

    def take(self, most: int, *, reads_only: bool = False) -> list[Fragment]:
        """Return the oldest read and its neighbours, or else those of a write: at most ``most``; or none."""
        return self.reads.take(most) or ([] if reads_only else self.writes.take(most))
