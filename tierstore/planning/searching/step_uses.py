"""What a step needs when, whatever is where: what estimates of one program have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tierstore.planning.program import ByteKind, Program
from tierstore.planning.searching.spans import UseWindow, usage_of, windows_of

ByMoment = Sequence[Sequence[tuple[str, UseWindow]]]


@dataclass(frozen=True, slots=True)
class StepUses:
    """What a step needs when, whatever is where.

    Attributes:
        program: as it is placed.
        swapped: activations that may leave.
        windows: by key of what a store holds.
        opens: by moment, what it opens.
        closes: by moment, what it closes.
        needed: by moment, keys whose bytes it needs.
        own_bytes: by moment, of the program's.
    """

    program: Program
    swapped: frozenset[str]
    windows: Mapping[str, Sequence[UseWindow]]
    opens: ByMoment
    closes: ByMoment
    needed: Sequence[Sequence[str]]
    own_bytes: Sequence[int]


def step_uses(program: Program, swapped: Sequence[str]) -> StepUses:
    """Return what a step needs when.

    Args:
        program: as it is placed.
        swapped: activations that may leave.
    """
    own = _own_keys(program).difference(swapped)
    windows = {key: found for key, found in windows_of(program).items() if key not in own}
    opens, closes = _by_moment(windows, len(program.moments))
    needed = [[key for key, window in opened if not window.is_made] for opened in opens]
    own_bytes = usage_of(program, swapped=swapped).own_bytes
    return StepUses(program, frozenset(swapped), windows, opens, closes, needed, own_bytes)


def _own_keys(program: Program) -> set[str]:
    """Return the keys of what no store holds."""
    own = (ByteKind.ACTIVATION, ByteKind.WORKSPACE)
    return {key for key, datum in program.data.items() if datum.kind in own}


def _by_moment(
    windows: Mapping[str, Sequence[UseWindow]], moments: int
) -> tuple[list[list[tuple[str, UseWindow]]], list[list[tuple[str, UseWindow]]]]:
    """Return what each moment opens and what it closes."""
    opens: list[list[tuple[str, UseWindow]]] = [[] for _ in range(moments)]
    closes: list[list[tuple[str, UseWindow]]] = [[] for _ in range(moments)]
    for key, found in windows.items():
        for window in found:
            opens[window.opens].append((key, window))
            closes[window.closes].append((key, window))
    return opens, closes
