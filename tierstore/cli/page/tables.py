"""A page's tables: what timelines say in numbers, for people who do not see pictures, and for everybody else.

Every name in them is escaped; a table has a caption, and headings of columns and of rows.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tierstore.cli.seconds import format_seconds
from tierstore.planning import ByteKind, StallCause, Timeline
from tierstore.units import format_bytes

KIND_TITLES: Mapping[ByteKind, str] = {
    ByteKind.PARAMETERS: "parameters",
    ByteKind.GRADIENT: "gradients",
    ByteKind.STATE: "state",
    ByteKind.BUFFER: "buffers",
    ByteKind.ACTIVATION: "activations",
    ByteKind.INPUT: "inputs",
    ByteKind.WORKSPACE: "workspace",
}
"""What kinds of bytes are called where there are many of each."""

_NOTHING = "–"  # noqa: RUF001 - a dash in a cell, not a minus
_STEPS_SHOWN = 50


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of numbers: one of each timeline; ``None``: it has none."""

    title: str
    values: Sequence[float | None]
    shown: Callable[[float], str]


def totals_table(timelines: Sequence[Timeline], bound_s: float | None) -> str:
    """Return the table of one step in the steady state: seconds, stalls, bytes and peaks."""
    rows = [
        _Row("seconds of a step", [each.step_s if each.steps else None for each in timelines], format_seconds)
    ]
    if bound_s is not None:
        rows.append(_Row("no placement is faster than", [bound_s] * len(timelines), format_seconds))
    stalls = [each.stall_s if each.steps else {} for each in timelines]
    rows += [
        _Row(f"stalled for {cause.value}", [each.get(cause) for each in stalls], format_seconds)
        for cause in StallCause
        if any(each.get(cause) for each in stalls)
    ]
    moved = [each.moved_bytes if each.steps else {} for each in timelines]
    rows += [_Row(f"moved {link}", [each.get(link) for each in moved], _bytes) for link in _names(moved)]
    peaks = [each.peak_bytes for each in timelines]
    rows += [_Row(f"peak of {tier}", [each.get(tier) for each in peaks], _bytes) for tier in _names(peaks)]
    return _table("One step in the steady state", timelines, rows)


def account_table(timelines: Sequence[Timeline]) -> str:
    """Return the table of who held the first tier's bytes when most was held."""
    accounts = [each.account for each in timelines]
    rows = [_Row("time", [each.at_s for each in accounts], format_seconds)]
    for kind, title in KIND_TITLES.items():
        rows.append(_Row(title, [each.kinds.get(kind, 0) for each in accounts], _bytes))
    rows.append(_Row("altogether", [each.nbytes for each in accounts], _bytes))
    largest = [dict(each.largest) for each in accounts]
    rows += [_Row(f"key {key}", [each.get(key) for each in largest], _bytes) for key in _names(largest)]
    moments = [f"{_title(each)}: {each.account.moment}" for each in timelines if each.account.moment]
    during = f" ({'; '.join(moments)})" if moments else ""
    return _table(f"The peak of the first tier by kind{during}", timelines, rows)


def steps_table(timelines: Sequence[Timeline]) -> str:
    """Return the table of the last steps, one a row; nothing where no timeline has any."""
    most = max((len(each.steps) for each in timelines), default=0)
    shown = range(max(0, most - _STEPS_SHOWN), most)
    rows = [
        _Row(
            f"step {number + 1}",
            [each.steps[number].seconds if number < len(each.steps) else None for each in timelines],
            format_seconds,
        )
        for number in shown
    ]
    caption = "Seconds of each step" if most == len(shown) else f"Seconds of steps from {shown.start + 1} on"
    return _table(caption, timelines, rows) if rows else ""


def assumptions_list(timelines: Sequence[Timeline]) -> str:
    """Return what was not known, as a list; nothing where everything was."""
    lines = [f"{_title(each)}: {line}" for each in timelines for line in each.assumptions]
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<h2>What was assumed</h2><ul>{items}</ul>" if items else ""


def _table(caption: str, timelines: Sequence[Timeline], rows: Iterable[_Row]) -> str:
    is_pair = len(timelines) == 2
    columns = ["", *[_title(each) for each in timelines], *["second of first"] * is_pair]
    head = "".join(f'<th scope="col">{html.escape(each)}</th>' for each in columns)
    body = "".join(_row(row, is_pair) for row in rows)
    return (
        f"<table><caption>{html.escape(caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _row(row: _Row, is_pair: bool) -> str:
    cells = [_NOTHING if value is None else row.shown(value) for value in row.values]
    if is_pair:
        first, second = row.values
        cells.append(f"{second / first:.3f}" if first and second is not None else _NOTHING)
    shown = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
    return f'<tr><th scope="row">{html.escape(row.title)}</th>{shown}</tr>'


def _title(timeline: Timeline) -> str:
    return f"{timeline.name} ({timeline.source})"


def _names(mappings: Iterable[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def _bytes(nbytes: float) -> str:
    return format_bytes(round(nbytes))
