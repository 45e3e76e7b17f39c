"""When each key of a program is idle, and how many bytes each moment needs anyway.

1. A key is *in use* from the moment that opens a window on it to the one that closes it.  It is *idle* from
   one such time to the next that needs its bytes; what lives from step to step is idle over the step's end,
   too.  Nobody needs a key before it is made, nor after its last use in a step that makes it again.
2. What the store never holds is the program's own: standing bytes, what each moment says, and activations
   from their ``MAKE`` to their ``END``, unless they are asked for as keys.

One pass over the program: O(uses).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tierstore.planning.program import ByteKind, Does, KeyUse, Program


@dataclass(frozen=True, slots=True)
class IdleSpan:
    """An idle interval of one key, with at least one moment strictly inside.

    Attributes:
        key: whose.
        nbytes: of it.
        begin: the moment that closed its window.
        end: the moment that opens the next; counted on beyond the last one where that is in the next step.
        is_changed: whether its bytes were written since it was idle the last time.
    """

    key: str
    nbytes: int
    begin: int
    end: int
    is_changed: bool

    def inside(self, moments: int) -> Iterator[tuple[int, int]]:
        """Yield the moments strictly inside as ranges, first to behind the last, of so many moments."""
        first, end = self.begin + 1, self.end
        if first < min(end, moments):
            yield first, min(end, moments)
        if end > moments:
            yield max(first - moments, 0), end - moments


@dataclass(frozen=True)
class StepUsage:
    """What a step needs when.

    Attributes:
        spans: idle intervals, in the order of their keys and of time.
        leased_bytes: of keys in use, for each moment; what a moment makes is not among them.
        made_bytes: of keys that each moment makes.
        own_bytes: that are the program's, for each moment, while it computes.
    """

    spans: tuple[IdleSpan, ...]
    leased_bytes: tuple[int, ...]
    made_bytes: tuple[int, ...]
    own_bytes: tuple[int, ...]

    @property
    def used_bytes(self) -> tuple[int, ...]:
        """What each moment needs anyway: the least that the first tier must have is the largest."""
        return tuple(map(sum, zip(self.leased_bytes, self.made_bytes, self.own_bytes, strict=True)))


@dataclass(slots=True)
class UseWindow:
    """A time for which a key is in use.

    Attributes:
        opens: the first moment.
        closes: the last one.
        is_made: whether nobody needs what was there before.
        is_changed: whether it is written.
        is_ended: whether nobody needs it behind it.
    """

    opens: int
    closes: int
    is_made: bool = False
    is_changed: bool = False
    is_ended: bool = False


def windows_of(program: Program) -> dict[str, list[UseWindow]]:
    """Return when each key is in use, in order; windows that overlap are one."""
    last = len(program.moments) - 1
    found: dict[str, list[UseWindow]] = {}
    for number, moment in enumerate(program.moments):
        for use in moment.uses:
            windows = found.setdefault(use.key, [])
            if use.does is Does.END:
                _end(windows, number)
            elif windows and number <= windows[-1].closes and not windows[-1].is_ended:
                _join(windows[-1], use, number, last)
            else:
                window = UseWindow(number, number, is_made=use.does is Does.MAKE)
                windows.append(window)
                _join(window, use, number, last)
    return found


def _end(windows: list[UseWindow], number: int) -> None:
    if not windows:
        windows.append(UseWindow(number, number))
    windows[-1].is_ended = True


def _join(window: UseWindow, use: KeyUse, number: int, last: int) -> None:
    window.closes = min(max(window.closes, number + use.moments - 1), last)
    window.is_changed |= use.does is not Does.READ


def usage_of(program: Program, *, swapped: Iterable[str] = ()) -> StepUsage:
    """Return what a step needs when.

    Args:
        program: whose step.
        swapped: activations that are keys of the store.
    """
    keys = frozenset(swapped)
    moments = len(program.moments)
    leased, made, own = _Levels(moments), _Levels(moments), _Levels(moments)
    spans: list[IdleSpan] = []
    for key, windows in windows_of(program).items():
        datum = program.data[key]
        is_own = datum.kind is ByteKind.WORKSPACE or (datum.kind is ByteKind.ACTIVATION and key not in keys)
        if is_own:
            for first, end in _lives(windows, moments):
                own.add(first, end, datum.nbytes)
            continue
        for window in windows:
            made.add(window.opens, window.opens + window.is_made, datum.nbytes)
            leased.add(window.opens + window.is_made, window.closes + 1, datum.nbytes)
        spans += _spans(key, datum.nbytes, windows, moments)
    beside = [
        moment.live_bytes + moment.workspace_bytes + program.standing_bytes for moment in program.moments
    ]
    return StepUsage(
        tuple(spans),
        tuple(leased.sums()),
        tuple(made.sums()),
        tuple(map(sum, zip(own.sums(), beside, strict=True))),
    )


class _Levels:
    """A sum for each moment of what is added to ranges."""

    def __init__(self, moments: int) -> None:
        self._changes = [0] * (moments + 1)

    def add(self, first: int, end: int, nbytes: int) -> None:
        if first < end:
            self._changes[first] += nbytes
            self._changes[end] -= nbytes

    def sums(self) -> list[int]:
        return list(itertools.accumulate(self._changes[:-1]))


def _lives(windows: list[UseWindow], moments: int) -> Iterator[tuple[int, int]]:
    """Yield the moments in which a datum that no store holds exists, first to behind the last."""
    if not any(window.is_made for window in windows):
        yield 0, moments
        return
    first = 0
    for number, window in enumerate(windows):
        first = window.opens if window.is_made else first
        is_last = number + 1 == len(windows) or windows[number + 1].is_made
        if is_last:
            yield first, window.closes + 1


def _spans(key: str, nbytes: int, windows: list[UseWindow], moments: int) -> Iterator[IdleSpan]:
    following = [*windows[1:], None]
    for window, after in zip(windows, following, strict=True):
        next_window = windows[0] if after is None else after
        end = next_window.opens + (moments if after is None else 0)
        is_idle = not next_window.is_made and not window.is_ended and end - window.closes > 1
        if is_idle:
            yield IdleSpan(key, nbytes, window.closes, end, window.is_changed)
