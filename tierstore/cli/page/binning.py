"""Many intervals as few bars, and many changes as few: what a page can hold and a browser can draw.

1. Joining loses no byte, no busy second and no interval of the count: they are added up.
2. There are never more bars of a lane than asked for, whatever the intervals are.
3. What is largest is seen: a bar has the name of its longest interval, and of changes the largest are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tierstore.planning import Interval

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bar:
    """One or several intervals of one lane.

    Attributes:
        begin_s, end_s: of the first that begins and the last that ends.
        longest: whose name is shown.
        count: how many intervals it is.
        busy_s: their seconds, added up.
        nbytes: that moved in all of them.
    """

    begin_s: float
    end_s: float
    longest: Interval
    count: int
    busy_s: float
    nbytes: int


def bars_of(intervals: Sequence[Interval], most: int) -> list[Bar]:
    """Return the intervals of one lane as at most ``most`` bars, in order of their begin.

    As many as that or fewer stay what they are.  More are joined with those that begin in the same one of
    ``most`` equal parts of the time from the first begin to the last.
    """
    ordered = sorted(intervals, key=lambda each: (each.begin_s, each.end_s))
    if len(ordered) <= most:
        return [_joined([each]) for each in ordered]
    parts = _parts(ordered, [each.begin_s for each in ordered], most)
    return [_joined(part) for part in parts]


def largest_of(
    changes: Sequence[T], most: int, time_of: Callable[[T], float], size_of: Callable[[T], int]
) -> list[T]:
    """Return at most ``most`` of the changes of a size: of each part of the time the largest, and the last.

    Args:
        changes: in order of their time.
        most: at least 2.
        time_of: says when a change was.
        size_of: says how much there was from then on.
    """
    if len(changes) <= most:
        return list(changes)
    parts = _parts(changes[:-1], [time_of(each) for each in changes[:-1]], most - 1)
    return [max(part, key=size_of) for part in parts] + [changes[-1]]


def _parts(members: Sequence[T], times_s: Sequence[float], most: int) -> list[list[T]]:
    """Return members in order, those together whose times are in the same one of ``most`` parts."""
    first_s = times_s[0]
    width_s = (times_s[-1] - first_s) / most
    parts: dict[int, list[T]] = {}
    for member, at_s in zip(members, times_s, strict=True):
        number = min(most - 1, int((at_s - first_s) / width_s)) if width_s else 0
        parts.setdefault(number, []).append(member)
    return list(parts.values())


def _joined(part: Sequence[Interval]) -> Bar:
    longest = max(part, key=lambda each: each.end_s - each.begin_s)
    return Bar(
        part[0].begin_s,
        max(each.end_s for each in part),
        longest,
        len(part),
        math.fsum(each.end_s - each.begin_s for each in part),
        sum(each.nbytes for each in part),
    )
