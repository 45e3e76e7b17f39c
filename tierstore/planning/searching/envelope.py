"""The least step that a machine, or one with slower links, can be predicted to have: never worse for more.

A simulated step may get longer where a link gets faster: copies that come earlier can be in each other's way.
Who wants to know what more buys asks for the *envelope*: the best over all rates on a grid that are no
faster, as a faster link can wait, and over all quotas on a grid that are no larger (`Effort.EXHAUSTIVE`).

What is looked at for less is looked at for more, too.  Rates are left out where no placement can be faster
than the best one so far (`lower_bound`), and all below them with them: that loses nothing but a billionth.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from tierstore.errors import CapacityError
from tierstore.planning.machine import Machine
from tierstore.planning.placement import Placement
from tierstore.planning.program import Program
from tierstore.planning.searching.alternatives import Levers
from tierstore.planning.searching.bound import Solve, lower_bound
from tierstore.planning.searching.choosing import Choice, Effort, search
from tierstore.planning.simulating import Conditions

RATIO = 4
"""Between one rate of the grid and the next."""

_RATES = tuple(float(RATIO**power) for power in range(25, -1, -1))  # from a petabyte a second down to a byte

_NO_LESS = 1 - 1e-9  # sums of seconds are rounded

_Pair = frozenset[str]
_Point = tuple[int, ...]


@dataclass(frozen=True)
class Optimum:
    """The least step that was found.

    Attributes:
        machine: on which it is predicted: the one that was asked for, or that with slower links.
        choice: the placement, and what is predicted.
    """

    machine: Machine
    choice: Choice


def optimum(
    program: Program,
    machine: Machine,
    *,
    given: Placement = Placement(),  # noqa: B008 - it is frozen
    levers: Levers = Levers.ALL,
    conditions: Conditions = Conditions(),  # noqa: B008 - it is frozen
    solve: Solve | None = None,
) -> Optimum:
    """Return the best of a machine and of those with slower links on the grid.

    Both directions between two tiers have one rate on the grid.  Over quotas and rates that are on their
    grids (eighths of an octave of bytes, powers of 4 of bytes a second), more is never predicted to be
    slower.  Every combination of levers is simulated for every rate: for small programs.

    Args:
        program: that is placed.
        machine: that it runs on.
        given: as of `search`.
        levers: as of `search`.
        conditions: of the run.
        solve: as of `search`; it leaves out more.

    Raises:
        CapacityError: nothing fits.
    """
    rates = _rates_of(machine)
    best: Optimum | None = None
    refused: CapacityError | None = None
    hopeless: list[_Point] = []
    for point in _points(rates):
        slower = _at(machine, rates, point)
        is_known = any(point) and slower == machine  # its rates are on the grid
        if is_known or any(all(map(operator.ge, point, each)) for each in hopeless):
            continue
        bound_s = lower_bound(program, slower, given=given, levers=levers, conditions=conditions, solve=solve)
        if best is not None and bound_s >= best.choice.timeline.step_s * _NO_LESS:
            hopeless.append(point)
            continue
        try:
            found = search(
                program,
                slower,
                given=given,
                levers=levers,
                effort=Effort.EXHAUSTIVE,
                conditions=conditions,
                solve=solve,
            )
        except CapacityError as error:
            refused = refused or error
        else:
            best = _faster(best, Optimum(slower, found))
    if best is None:
        assert refused is not None
        raise refused
    return best


def _faster(former: Optimum | None, found: Optimum) -> Optimum:
    """Return the one with the shorter step; of those that are equally fast the first one."""
    if former is None or found.choice.timeline.step_s < former.choice.timeline.step_s:
        return found
    return former


def _rates_of(machine: Machine) -> Mapping[_Pair, tuple[float | None, ...]]:
    """Return, for tiers that have links between them, what their rate may be; ``None``: as it is."""
    own: dict[_Pair, float] = {}
    for link in machine.links:
        pair = frozenset((link.source, link.target))
        own[pair] = min(own.get(pair, math.inf), link.bytes_per_s)
    return {pair: (None, *(each for each in _RATES if each <= rate)) for pair, rate in own.items()}


def _points(rates: Mapping[_Pair, tuple[float | None, ...]]) -> Iterator[_Point]:
    """Yield how far down each rate is: the fastest first, so that what cannot be better is left out early."""
    depths = [range(len(each)) for each in rates.values()]
    yield from sorted(itertools.product(*depths), key=lambda point: (sum(point), point))


def _at(machine: Machine, rates: Mapping[_Pair, tuple[float | None, ...]], point: _Point) -> Machine:
    found = {pair: each[down] for (pair, each), down in zip(rates.items(), point, strict=True)}
    if all(rate is None for rate in found.values()):
        return machine
    links = []
    for link in machine.links:
        rate = found[frozenset((link.source, link.target))]
        links.append(link if rate is None else replace(link, bytes_per_s=rate))
    return replace(machine, links=tuple(links))
