"""How fast a step can be at best: seconds that no placement is shorter than.

A linear relaxation: every idle span may be kept in part, and every choice made in part.

1. Of each span a share stays in the first tier, another one in those above the last; the rest comes back from
   the last one.  At the moments that are looked at, what stays and what is in use fit.
2. A step is as long as computing takes, and as long as each set of links needs for what comes and goes.
3. A layer that is recomputed moves nothing of its activations and computes its forward again.  A bundle that
   the host steps needs nothing on the device then, and the host takes its time.
4. What may be stepped early is left out where its order is not certain.

Whatever is left out makes the bound lower, never wrong.  Without a solver there is the simple bound: what is
too much at one moment has to come back in every step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tierstore.planning.homes import CPU
from tierstore.planning.machine import LinkFigures, Machine, TierMedium
from tierstore.planning.placement import Placement
from tierstore.planning.program import ByteKind, Does, Phase, Program, Unit
from tierstore.planning.searching.alternatives import Levers
from tierstore.planning.searching.spans import IdleSpan, usage_of
from tierstore.planning.simulating import Conditions

_CHECKED = 100  # moments
_ENTRIES = 1_000_000  # of the rows that say what fits
_TOLERANCE = 1e-6  # of a solver


@dataclass
class SparseRows:
    """Inequalities: the sum of values times variables is at most the limit, row by row.

    Attributes:
        rows: numbers of rows.
        columns: of each entry, the variable.
        values: of each entry.
        limits: of each row.
    """

    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    def add(self, entries: dict[int, float], limit: float) -> None:
        """Add a row; its largest entry becomes 1."""
        scale = max((abs(value) for value in entries.values()), default=0.0) or 1.0
        for column, value in entries.items():
            if value:
                self.rows.append(len(self.limits))
                self.columns.append(column)
                self.values.append(value / scale)
        self.limits.append(limit / scale)


class Solve(Protocol):
    """Solves linear programs."""

    def __call__(self, costs: Sequence[float], rows: SparseRows, most: Sequence[float]) -> float | None:
        """Return the least sum of costs times variables; ``None``: there is none, or it was not found.

        Args:
            costs: of each variable.
            rows: what has to hold.
            most: what each variable is at most; all are at least 0.
        """


def lower_bound(
    program: Program,
    machine: Machine,
    *,
    given: Placement = Placement(),  # noqa: B008 - it is frozen
    levers: Levers = Levers.ALL,
    conditions: Conditions = Conditions(),  # noqa: B008 - it is frozen
    solve: Solve | None = None,
) -> float:
    """Return seconds that no step in a steady state is shorter than.

    Args:
        program: whose step.
        machine: that it runs on.
        given: what computes where by it stays so.
        levers: that may be pulled.
        conditions: of the run.
        solve: the solver; ``None``: the simple bound alone.
    """
    relaxed = _Relaxation(program, machine, given, levers, conditions)
    simple_s = relaxed.simple_s()
    if solve is None:
        return simple_s
    found = relaxed.solved_s(solve)
    return simple_s if found is None else max(simple_s, found)


@dataclass(frozen=True, slots=True)
class _Relief:
    """A choice that frees bytes and moves: its variable is the share of it that is made.

    Attributes:
        compute_s: more that the device computes; negative: less.
        host_s: that the host does.
    """

    compute_s: float
    host_s: float = 0.0


class _Relaxation:
    """The linear program of one question."""

    def __init__(
        self, program: Program, machine: Machine, given: Placement, levers: Levers, conditions: Conditions
    ) -> None:
        self._program = program
        self._machine = machine
        elsewhere = _elsewhere(program, machine, given)
        activations = [key for key, datum in program.data.items() if datum.kind is ByteKind.ACTIVATION]
        usage = usage_of(program, swapped=activations)
        early = {
            unit.bundle for unit in program.units if unit.may_step_ahead or conditions.optimizer_in_backward
        }
        self._choices: dict[object, _Relief] = {}
        self._stepped: dict[int, list[tuple[Unit, int]]] = _steps(program)
        self._host_steps(given, levers)
        if Levers.RECOMPUTE in levers or given.marks:
            self._recomputed()
        doubtful = _doubtful_keys(program, early)
        self._spans = [
            span
            for span in usage.spans
            if span.key not in elsewhere and span.key not in doubtful and not self._is_torn(span, early)
        ]
        away = self._step_bytes(early)
        elsewhere_bytes = usage_of(program).leased_bytes if elsewhere else None
        # Without a device nothing divides host memory: the program's own bytes take nothing of a quota.
        is_shared = machine.tiers[0].medium is TierMedium.DEVICE
        self._used = [
            0 if elsewhere_bytes else leased + (own if is_shared else 0) - away[number]
            for number, (leased, own) in enumerate(zip(usage.leased_bytes, usage.own_bytes, strict=True))
        ]

    # --- what may be chosen -------------------------------------------------------------------

    def _host_steps(self, given: Placement, levers: Levers) -> None:
        for unit, number in (each for found in self._stepped.values() for each in found):
            homes = given.bundles.get(unit.bundle)
            is_forced = homes is not None and homes.state.device == CPU
            if unit.host_step_s is not None and (Levers.HOST_STEPS in levers or is_forced):
                moment = self._program.moments[number]
                self._choices["host", unit.bundle] = _Relief(
                    -(moment.compute_s + self._host_s(number)), unit.host_step_s
                )

    def _host_s(self, number: int) -> float:
        return 0.0 if self._machine.has_streams else self._program.moments[number].host_s

    def _recomputed(self) -> None:
        made: dict[int, float] = {}
        for moment in self._program.moments:
            makes = any(
                use.does is Does.MAKE and self._program.data[use.key].kind is ByteKind.ACTIVATION
                for use in moment.uses
            )
            if moment.phase is Phase.FORWARD and makes:
                for layer in {self._program.data[use.key].layer for use in moment.uses}:
                    if layer is not None:
                        # parts of a layer may be recomputed alone: only the cheapest moment is certain
                        made[layer] = min(made.get(layer, math.inf), moment.compute_s)
        for layer, compute_s in made.items():
            self._choices["again", layer] = _Relief(compute_s)

    def _choice_of(self, span: IdleSpan) -> object:
        """Return the choice that frees a span."""
        datum = self._program.data[span.key]
        if datum.kind is ByteKind.ACTIVATION:
            return "again", datum.layer
        if datum.kind in (ByteKind.STATE, ByteKind.GRADIENT):
            return "host", datum.owner
        number = span.end % len(self._program.moments)
        is_stepped = any(unit.bundle == span.key for unit, _ in self._stepped.get(number, []))
        return ("host", span.key) if is_stepped else None

    def _is_torn(self, span: IdleSpan, early: set[str]) -> bool:
        """Say whether a span ends where a bundle may have been stepped already."""
        number = span.end % len(self._program.moments)
        return any(
            unit.bundle == span.key and unit.bundle in early for unit, _ in self._stepped.get(number, [])
        )

    def _step_bytes(self, early: set[str]) -> list[int]:
        """Return what is not certain of each moment: of steps that may be made elsewhere, or earlier."""
        away = [0] * len(self._program.moments)
        for number, found in self._stepped.items():
            for unit, _ in found:
                if unit.bundle in early or ("host", unit.bundle) in self._choices:
                    keys = {unit.bundle, unit.state, *unit.gradients}
                    used = {
                        use.key for use in self._program.moments[number].uses if use.does is not Does.MAKE
                    }
                    away[number] += sum(self._program.data[key].nbytes for key in keys & used if key)
        return away

    # --- bounds -------------------------------------------------------------------------------

    @property
    def _compute_s(self) -> float:
        moments = self._program.moments
        return math.fsum(moment.compute_s + self._host_s(number) for number, moment in enumerate(moments))

    def simple_s(self) -> float:
        """Return the bound that needs no solver."""
        spared = math.fsum(-min(each.compute_s, 0.0) for each in self._choices.values())
        around = [0] * (len(self._used) + 1)
        for span in self._spans:
            if self._choice_of(span) not in self._choices:
                for first, end in span.inside(len(self._used)):
                    around[first] += span.nbytes
                    around[end] -= span.nbytes
        capacity = self._machine.tiers[0].capacity_bytes
        held = map(sum, zip(self._used, itertools.accumulate(around[:-1]), strict=True))
        excess = max((each - capacity for each in held), default=0)
        moving_s = _moving_s(excess, self._links(self._machine.tiers[1:], into=True))
        return max(self._compute_s - spared, moving_s, 0.0)

    def _links(self, tiers: Sequence[object], *, into: bool) -> list[LinkFigures]:
        """Return links between the first tier and those below."""
        del tiers
        first = self._machine.tiers[0].name
        return [link for link in self._machine.links if (link.target if into else link.source) == first]

    def solved_s(self, solve: Solve) -> float | None:
        """Return what a solver makes of it; ``None``: nothing."""
        spans, choices = self._spans, list(self._choices)
        has_middle = len(self._machine.tiers) > 2
        count = len(spans)
        middle = count if has_middle else 0
        first_choice = count + middle
        numbers = {name: first_choice + number for number, name in enumerate(choices)}
        seconds = first_choice + len(choices)
        unit_s = self._scale_s()
        rows = SparseRows()
        compute = {numbers[name]: self._choices[name].compute_s for name in choices}
        rows.add({**compute, seconds: -unit_s}, -self._compute_s)
        rows.add({**{numbers[name]: self._choices[name].host_s for name in choices}, seconds: -unit_s}, 0.0)
        freeing = [numbers.get(self._choice_of(span)) for span in spans]
        for number in range(count):
            whole = {number: 1.0, **({count + number: 1.0} if has_middle else {})}
            if freeing[number] is not None:
                whole[freeing[number] or 0] = 1.0
            if len(whole) > 1:
                rows.add(whole, 1.0)
        self._add_room(rows, has_middle=has_middle)
        for links, is_last, is_out in self._flows():
            self._add_flow(rows, links, freeing, seconds, unit_s, is_last=is_last, is_out=is_out)
        most = [1.0] * seconds + [math.inf]
        found = solve([0.0] * seconds + [1.0], rows, most)
        return None if found is None else found * unit_s * (1 - _TOLERANCE) - _TOLERANCE * unit_s * 1e-3

    def _scale_s(self) -> float:
        """Return about how long a step takes, so that numbers are near 1."""
        rates = [link.bytes_per_s for link in self._machine.links if math.isfinite(link.bytes_per_s)]
        moved = sum(span.nbytes for span in self._spans)
        return self._compute_s + moved / min(rates, default=math.inf) or 1.0

    def _add_room(self, rows: SparseRows, *, has_middle: bool) -> None:
        moments, tiers = len(self._used), self._machine.tiers
        most = max(8, min(_CHECKED, _ENTRIES // max(len(self._spans), 1)))
        stride = max(moments // most, 1)
        checked = range(0, moments, stride)
        around: dict[int, list[int]] = {number: [] for number in checked}
        for place, span in enumerate(self._spans):
            for first, end in span.inside(moments):
                for number in range(-(-first // stride) * stride, end, stride):
                    around[number].append(place)
        for number, places in around.items():
            kept = {place: float(self._spans[place].nbytes) for place in places}
            if not kept:
                continue
            rows.add(kept, max(tiers[0].capacity_bytes - self._used[number], 0))
            if has_middle:
                above = {len(self._spans) + place: float(self._spans[place].nbytes) for place in places}
                room = sum(tier.capacity_bytes for tier in tiers[:-1]) - self._used[number]
                rows.add({**kept, **above}, max(room, 0))

    def _flows(self) -> Iterator[tuple[list[LinkFigures], bool, bool]]:
        """Yield links, whether they are those of the last tier, and whether bytes leave the first one."""
        if len(self._machine.tiers) == 1:
            return
        last = self._machine.tiers[-1].name
        yield self._links((), into=True), False, False
        yield self._links((), into=False), False, True
        if len(self._machine.tiers) > 2:
            yield [link for link in self._machine.links if link.source == last], True, False
            yield [link for link in self._machine.links if link.target == last], True, True

    def _add_flow(
        self,
        rows: SparseRows,
        links: Sequence[LinkFigures],
        freeing: Sequence[int | None],
        seconds: int,
        unit_s: float,
        *,
        is_last: bool,
        is_out: bool,
    ) -> None:
        rate = sum(link.bytes_per_s for link in links)
        if math.isinf(rate):
            return
        # What is left of 1 moves: sum(nbytes * (1 - kept)) <= rate * seconds + burst.
        entries: dict[int, float] = {seconds: -rate * unit_s}
        moved = 0.0
        for number, span in enumerate(self._spans):
            if is_out and not (span.is_changed and self._goes_out(span)):
                continue
            moved += span.nbytes
            entries[number] = -float(span.nbytes)
            if is_last:
                entries[len(self._spans) + number] = -float(span.nbytes)
            choice = freeing[number]
            if choice is not None:
                entries[choice] = entries.get(choice, 0.0) - span.nbytes
        rows.add(entries, sum(link.bytes_per_s * link.burst_s for link in links) - moved)

    def _goes_out(self, span: IdleSpan) -> bool:
        """Say whether a changed span's bytes are the device's: the host may have made them."""
        number = span.begin
        return not any(
            unit.bundle == span.key and ("host", unit.bundle) in self._choices
            for unit, _ in self._stepped.get(number, [])
        )


def _moving_s(nbytes: int, links: Sequence[LinkFigures]) -> float:
    rate = sum(link.bytes_per_s for link in links)
    if nbytes <= 0 or not links or math.isinf(rate):
        return 0.0
    return max(nbytes / rate - max(link.burst_s for link in links), 0.0)


def _elsewhere(program: Program, machine: Machine, given: Placement) -> frozenset[str]:
    """Return the keys that are never computed with in the first tier."""
    if machine.tiers[0].medium is not TierMedium.DEVICE:
        return frozenset()
    bundles = {key for key, homes in given.bundles.items() if homes.parameters.device == CPU}
    return frozenset(key for key, datum in program.data.items() if (datum.owner or key) in bundles)


def _steps(program: Program) -> dict[int, list[tuple[Unit, int]]]:
    """Return by moment which units it steps."""
    units = {unit.bundle: unit for unit in program.units}
    return {
        number: [(units[use.key], number) for use in moment.uses if use.key in units]
        for number, moment in enumerate(program.moments)
        if moment.phase is Phase.OPTIMIZER
    }


def _doubtful_keys(program: Program, early: set[str]) -> frozenset[str]:
    """Return the keys of what is used at no certain time: gradients and state of early steps."""
    return frozenset(
        key
        for unit in program.units
        if unit.bundle in early
        for key in (unit.state, *unit.gradients)
        if key is not None
    )
