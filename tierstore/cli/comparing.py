"""Two plans side by side: what each takes, and where they place things differently."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from tierstore.cli.seconds import format_seconds
from tierstore.planning import Placement, Timeline
from tierstore.units import format_bytes

_NONE = "-"


class Planned(Protocol):
    """What was found for one program on one machine."""

    @property
    def placement(self) -> Placement | None:
        """Where everything lives; ``None``: nowhere, as it does not fit."""

    @property
    def timeline(self) -> Timeline | None:
        """What happens when; ``None``: it does not fit."""

    @property
    def bound_s(self) -> float | None:
        """Seconds that no placement's step is shorter than; ``None``: unknown."""

    @property
    def why(self) -> str:
        """Why it was chosen, or does not fit."""


def compare_table(a: Planned, b: Planned, *, names: tuple[str, str] = ("a", "b")) -> str:
    """Return a table of both, and what differs between their placements as lines of ``-`` and ``+``.

    Args:
        a: what ``b`` is compared with.
        b: the other one.
        names: of the two, for the head.
    """
    rows: list[tuple[str, ...]] = [("", *names, f"{names[1]} / {names[0]}")]
    rows += [
        (title, *(_NONE if value is None else show(value) for value in values), _ratio(*values))
        for title, show, values in _figures(a, b)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(row, widths) for row in rows]
    unfit = [
        f"{name} does not fit: {each.why}" for name, each in zip(names, (a, b), strict=True) if _unfit(each)
    ]
    differing = _differing(a.placement, b.placement, names)
    return "\n".join([*lines, *unfit, "", *(differing or ["the same placement"])])


def compare_json(a: Planned, b: Planned) -> dict[str, object]:
    """Return both as plain values, under ``a`` and ``b``, and ratios of ``b`` to ``a`` by figure."""
    ratios = {
        title: b_value / a_value for title, _, (a_value, b_value) in _figures(a, b) if a_value and b_value
    }
    return {"a": _plain(a), "b": _plain(b), "ratios": ratios}


def _figures(
    a: Planned, b: Planned
) -> Iterator[tuple[str, Callable[[float], str], tuple[float | None, float | None]]]:
    """Yield each figure's title, how it is shown, and what it is of both."""
    pair = (a.timeline, b.timeline)
    yield "seconds of a step", format_seconds, _of_both([each.step_s if each else None for each in pair])
    yield "no step is shorter than", format_seconds, (a.bound_s, b.bound_s)
    stalls: list[Mapping[str, float]] = [
        {cause.value: stall_s for cause, stall_s in each.stall_s.items()} if each else {} for each in pair
    ]
    for name in _names(stalls):
        yield f"stalled for {name}", format_seconds, _of_both([each.get(name) for each in stalls])
    moved: list[Mapping[str, float]] = [each.moved_bytes if each else {} for each in pair]
    for name in _names(moved):
        yield f"bytes of a step {name}", _bytes, _of_both([each.get(name) for each in moved])
    peaks: list[Mapping[str, float]] = [each.peak_bytes if each else {} for each in pair]
    for name in _names(peaks):
        yield f"peak of {name}", _bytes, _of_both([each.get(name) for each in peaks])


def _of_both(values: list[float | None]) -> tuple[float | None, float | None]:
    first, second = values
    return first, second


def _plain(planned: Planned) -> dict[str, object]:
    timeline = planned.timeline
    found: dict[str, object] = {"fits": timeline is not None, "why": planned.why, "bound_s": planned.bound_s}
    if timeline is not None:
        found |= {
            "step_s": timeline.step_s,
            "stall_s": {cause.value: stall_s for cause, stall_s in timeline.stall_s.items()},
            "moved_bytes": timeline.moved_bytes,
            "peak_bytes": timeline.peak_bytes,
        }
    return {**found, "placement": planned.placement and planned.placement.to_mapping()}


def _differing(a: Placement | None, b: Placement | None, names: tuple[str, str]) -> list[str]:
    """Return the lines of two placements that differ, with nothing around them."""
    first, second = ("no placement" if each is None else str(each) for each in (a, b))
    lines = difflib.unified_diff(first.splitlines(), second.splitlines(), *names, n=0, lineterm="")
    return list(lines)


def _unfit(planned: Planned) -> bool:
    return planned.timeline is None


def _names(mappings: list[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def _ratio(a: float | None, b: float | None) -> str:
    return f"{b / a:.3f}" if a and b is not None else _NONE


def _bytes(nbytes: float) -> str:
    return format_bytes(round(nbytes))


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    title, *cells = row
    shown = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
    return "  ".join([title.ljust(widths[0]), *shown]).rstrip()
