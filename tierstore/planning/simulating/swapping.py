"""Activations that leave the device between forward and backward, as marks say.

What a mark means is adopted by the store when it is made and copied down at once.  Its room on the device is
given up three times ``ahead`` nodes later, or when forward ends; it begins to come back ``ahead`` nodes of
the backward graph before its use.  Backward takes the moments of forward the other way round.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from tierstore.errors import CapacityError
from tierstore.planning.homes import PlacedMark, Treatment
from tierstore.planning.program import Datum, Does, Moment, Phase, Program
from tierstore.planning.simulating.ledger_store import LedgerStore
from tierstore.planning.simulating.marking import mark_of
from tierstore.planning.simulating.windows import KeyWindows

_LEAVING = 3  # times as many nodes later as it comes back ahead


class Swapping:
    """Moves what marks mean.

    Args:
        program: whose activations.
        marks: of its placement.
        store: where they go.
        windows: told of their uses.
    """

    def __init__(
        self, program: Program, marks: Sequence[PlacedMark], store: LedgerStore, windows: KeyWindows
    ) -> None:
        self._store = store
        self._windows = windows
        self._can_leave = len(store.names) > 1 and store.is_device_first
        self._ahead = {
            key: mark.ahead
            for key, datum in program.data.items()
            if (mark := mark_of(datum, marks)) is not None and mark.treatment is Treatment.SWAP
        }
        self._leaving, self._coming = _schedule(program.moments, self._ahead)
        self._here: dict[str, None] = {}
        for key in self._ahead:
            windows.let_pass(key)

    def is_marked(self, key: str) -> bool:
        """Say whether a key is swapped."""
        return key in self._ahead

    def begin_step(self) -> None:
        """Another step begins: nothing of the last one is there."""
        self._here.clear()

    def make(self, datum: Datum) -> None:
        """An activation was made: it is the store's, and on its way down."""
        try:
            self._store.put(datum.key, datum.nbytes, 0)
        except CapacityError:
            self._store.put(datum.key, datum.nbytes, None)
        if self._can_leave and self._store.is_ready(datum.key, 0):
            self._store.fetch([datum.key], 1)
            self._here[datum.key] = None
        self._windows.note(datum.key)

    def begin_moment(self, number: int) -> None:
        """Bring what is needed so many nodes after a moment."""
        for key in self._coming.get(number, ()):
            self._store.prefetch([key], 0)

    def end_moment(self, number: int) -> None:
        """Let go what was made so many nodes before."""
        for key in self._leaving.get(number, ()):
            self._leave(key)

    def end_forward(self) -> None:
        """Let everything go."""
        for key in list(self._here):
            self._leave(key)

    def _leave(self, key: str) -> None:
        if key in self._here:
            del self._here[key]
            if key in self._store:
                self._store.evict(key, 1)


_Schedule = dict[int, list[str]]


def _schedule(moments: Sequence[Moment], ahead: Mapping[str, int]) -> tuple[_Schedule, _Schedule]:
    """Return by moment what leaves after it, and what begins to come back before it."""
    leaving: _Schedule = {}
    coming: _Schedule = {}
    ranges = _node_ranges(moments)
    made: dict[str, int] = {}
    leaves_after = functools.cache(functools.partial(_leaves_after, moments, ranges))
    comes_before = functools.cache(functools.partial(_comes_before, moments, ranges))
    for number, moment in enumerate(moments):
        for use in moment.uses:
            if use.key not in ahead:
                continue
            if use.does is Does.MAKE:
                made[use.key] = number
                leaving.setdefault(leaves_after(number, ahead[use.key]), []).append(use.key)
            elif moment.phase is Phase.BACKWARD and use.does is Does.READ and use.key in made:
                coming.setdefault(comes_before(number, ahead[use.key]), []).append(use.key)
                del made[use.key]
    return leaving, coming


def _node_ranges(moments: Sequence[Moment]) -> list[tuple[int, int]]:
    """Return of each moment the numbers of its nodes: from, and to before."""
    ranges: list[tuple[int, int]] = []
    open_moments: dict[str, list[tuple[int, int]]] = {}
    made = left = 0
    for moment in moments:
        nodes = max(1, moment.nodes)
        if moment.phase is Phase.FORWARD:
            ranges.append((made, made + nodes))
            open_moments.setdefault(moment.name, []).append(ranges[-1])
            made = left = made + nodes
        elif moment.phase is Phase.BACKWARD and open_moments.get(moment.name):
            ranges.append(open_moments[moment.name].pop())
            left = ranges[-1][0]
        else:
            ranges.append((left, left))
    return ranges


def _leaves_after(
    moments: Sequence[Moment], ranges: Sequence[tuple[int, int]], number: int, ahead: int
) -> int:
    """Return the moment of forward after which what a moment has made leaves; -1: when forward ends."""
    made = ranges[number][1]
    for later in range(number, len(moments)):
        if moments[later].phase is not Phase.FORWARD:
            return -1
        if ranges[later][1] - made >= _LEAVING * ahead:
            return later
    return -1


def _comes_before(
    moments: Sequence[Moment], ranges: Sequence[tuple[int, int]], number: int, ahead: int
) -> int:
    """Return the moment of backward that runs the node so far before a moment's first."""
    wanted = ranges[number][1] + ahead
    first = number
    while first and moments[first - 1].phase is Phase.BACKWARD and ranges[first][1] < wanted:
        first -= 1
    return first
