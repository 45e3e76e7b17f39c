"""What the page's script draws of a timeline, as plain values.

Columns instead of rows, and names once: 2 x 10^5 bars are about 12 MB.  Times are seconds, sizes bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from tierstore.cli.page.binning import Bar, bars_of, largest_of
from tierstore.errors import UsageError
from tierstore.planning import ByteKind, Interval, Timeline
from tierstore.quoting import named

_LEAST_BARS = 64  # of a lane, however many lanes there are
_DIGITS = 9  # of a second: nanoseconds
_CHANGES = 20_000  # of what a tier or a kind holds; a screen has fewer points


def drawn(timelines: Sequence[Timeline], most_bars: int) -> list[dict[str, object]]:
    """Return what is drawn of timelines that share a page of at most ``most_bars`` bars.

    Raises:
        UsageError: a time is no finite number, or an interval ends before it begins.
    """
    lanes = [_lanes(timeline) for timeline in timelines]
    most = max(_LEAST_BARS, most_bars // max(1, sum(len(each) for each in lanes)))
    if sum(len(timeline.intervals) for timeline in timelines) <= most_bars:
        most = most_bars
    return [_of_one(timeline, each, most) for timeline, each in zip(timelines, lanes, strict=True)]


def _of_one(timeline: Timeline, lanes: Mapping[str, Sequence[Interval]], most: int) -> dict[str, object]:
    names = _Numbered()
    return {
        "name": timeline.name,
        "source": timeline.source,
        "intervals": len(timeline.intervals),
        "lanes": [
            {"name": lane, **_columns(bars_of(members, most), names)} for lane, members in lanes.items()
        ],
        "held": _held(timeline),
        "charges": {tier: _charges(timeline, tier) for tier in timeline.charges},
        "steps": [[_s(step.begin_s), _s(step.end_s)] for step in timeline.steps],
        "period": timeline.period,
        "peak": [_s(timeline.account.at_s), timeline.account.nbytes],
        "names": list(names),
    }


class _Numbered:
    """Texts by number, each once; 0 is none."""

    def __init__(self) -> None:
        self._numbers: dict[str | None, int] = {None: 0}

    def number(self, text: str | None) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def __iter__(self) -> Iterator[str | None]:
        return iter(self._numbers)


def _columns(bars: Sequence[Bar], names: _Numbered) -> dict[str, object]:
    """Return bars as columns; what is the same of all of a lane is not written."""
    columns: dict[str, list[float]] = {
        "begin": [_s(bar.begin_s) for bar in bars],
        "end": [_s(bar.end_s) for bar in bars],
        "label": [names.number(bar.longest.name) for bar in bars],
        "key": [names.number(bar.longest.key) for bar in bars],
        "nbytes": [bar.nbytes for bar in bars],
        "cause": [names.number(bar.longest.cause and bar.longest.cause.value) for bar in bars],
    }
    if any(bar.count > 1 for bar in bars):
        columns |= {"count": [bar.count for bar in bars], "busy": [_s(bar.busy_s) for bar in bars]}
    return {name: column for name, column in columns.items() if name in ("begin", "end") or any(column)}


def _held(timeline: Timeline) -> dict[str, object]:
    changes = largest_of(timeline.held, _CHANGES, lambda each: each[0], lambda each: sum(each[1].values()))
    there = [kind for kind in ByteKind if any(kinds.get(kind) for _, kinds in changes)]
    return {
        "time": [_s(_checked(at_s, "held")) for at_s, _ in changes],
        "kinds": {kind.value: [kinds.get(kind, 0) for _, kinds in changes] for kind in there},
    }


def _charges(timeline: Timeline, tier: str) -> dict[str, object]:
    changes = largest_of(timeline.charges[tier], _CHANGES, lambda each: each[0], lambda each: each[1])
    return {
        "time": [_s(_checked(at_s, f"charges of {named(tier)}")) for at_s, _ in changes],
        "nbytes": [nbytes for _, nbytes in changes],
    }


def _lanes(timeline: Timeline) -> dict[str, list[Interval]]:
    """Return intervals by lane, in the order in which lanes are first used."""
    lanes: dict[str, list[Interval]] = {}
    for each in timeline.intervals:
        where = f"{named(each.name)} in lane {named(each.lane)}"
        _checked(each.begin_s, where)
        if _checked(each.end_s, where) < each.begin_s:
            raise UsageError(f"{where} ends at {each.end_s} s, before it begins at {each.begin_s} s")
        lanes.setdefault(each.lane, []).append(each)
    return lanes


def _checked(at_s: float, where: str) -> float:
    if not math.isfinite(at_s):
        raise UsageError(f"{where}: a time of {at_s} s cannot be drawn; accepted: a finite number")
    return at_s


def _s(seconds: float) -> float:
    return round(seconds, _DIGITS)
