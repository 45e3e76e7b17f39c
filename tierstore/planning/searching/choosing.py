"""Choose a placement: alternatives are ordered by an estimate, and the best of them simulated.

1. What was given and today's rules are always simulated: the choice is never predicted to be slower.  It is
   the fastest, or what moves less and takes little longer, where that is asked for.
2. Counts bound the work, never clocks: the same question has the same answer.
3. From the given placement, one lever after the other is pulled where the estimate says that it helps, twice
   around.  Simulated are the best by the estimate, the best that one lever alone makes, what becomes of each
   way to make room when the other levers follow it, and then what is close to the best of those (`Effort`).
4. Of a long program that is done with its layers joined, and the best of it simulated in full.  Joined, a
   program tells well what becomes of activations and where optimizers step, and little of shares of tiers:
   where these matter, or the full program takes another time, the best is tried with those that were given.
5. Under `Effort.EXHAUSTIVE` every combination of levers is simulated on a fixed grid of quotas, up to the one
   that there is: over quotas on the grid, more room is then never predicted to be slower.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from tierstore.errors import CapacityError
from tierstore.planning.coarsening import MOST, Coarsening, coarsen
from tierstore.planning.homes import CPU
from tierstore.planning.machine import Machine, TierMedium
from tierstore.planning.placement import Placement
from tierstore.planning.program import ByteKind, Phase, Program
from tierstore.planning.searching.alternatives import GRID, Levers, differences, neighbours, todays
from tierstore.planning.searching.bound import Solve, lower_bound
from tierstore.planning.searching.estimate import Estimator
from tierstore.planning.searching.spans import usage_of
from tierstore.planning.simulating import Conditions, simulate
from tierstore.planning.timeline import COMPUTE, StallCause, Timeline

_ROUNDS = 2
_MOST_MOMENTS = MOST
_ESTIMATED_USES = 150_000  # about two seconds of a slow core
_SIMULATED_USES = 20_000  # each goes through the ledger some thirty times
_LEAST_ESTIMATES = 8
_LEAST_SIMULATIONS = 2
_MOST_ESTIMATES = 200
_ALIKE = 1e-3
_CLOSE = 1.03  # joined, a program takes some percent more or less, and its placements alike
_TRUSTED = 0.01  # a joined program that takes as long as the full one does
_REFINED = Levers.HIGH | Levers.AHEAD  # what an estimate knows least about
_MAKE_ROOM = Levers.SWAP | Levers.RECOMPUTE
_OCTAVES = 6  # below the quota: less than a sixty-fourth of it is no quota


class Effort(enum.Enum):
    """How many placements are simulated, beside what was given and today's rules."""

    LITTLE = 2
    USUAL = 6
    EXHAUSTIVE = 0  # all: for small programs


@dataclass(frozen=True)
class Rejected:
    """A placement that was simulated and not chosen.

    Attributes:
        placement: which.
        step_s: seconds a step; ``None``: it does not fit.
        why: a sentence.
    """

    placement: Placement
    step_s: float | None
    why: str


@dataclass(frozen=True)
class Choice:
    """What a search found.

    Attributes:
        placement: that is chosen.
        timeline: of it, simulated.
        bound_s: no placement makes steps shorter than this.
        why: a sentence, with numbers.
        rejected: what else was simulated, in that order.
    """

    placement: Placement
    timeline: Timeline
    bound_s: float
    why: str
    rejected: tuple[Rejected, ...]


def search(
    program: Program,
    machine: Machine,
    *,
    given: Placement = Placement(),  # noqa: B008 - it is frozen
    levers: Levers = Levers.ALL,
    effort: Effort = Effort.USUAL,
    conditions: Conditions = Conditions(),  # noqa: B008 - it is frozen
    solve: Solve | None = None,
    spare: float = 0.0,
) -> Choice:
    """Choose a placement of a program on a machine.

    Args:
        program: that is placed.
        machine: that it runs on.
        given: to start from; what no lever is for stays as it says.  If it places no bundle, and says nothing
            else, the search starts from today's rules.
        levers: what may be changed.
        effort: how many placements are simulated.
        conditions: of the run.
        solve: solves linear programs, for a closer bound; ``None``: the simple bound is told.
        spare: for which share of the fastest step others may be longer that move less.  Of those the one is
            chosen whose step and copies, one after the other, take least: what a prediction hides behind
            computing may have to be waited for, and bytes are sure.

    Raises:
        CapacityError: nothing that was simulated fits; the text is that of what was given.
    """
    trials = _Trials(program, machine, conditions, spare)
    today = todays(program, machine)
    base = today if given == Placement() else given
    trials.simulate(base)
    if not trials.fastest(1) and not _may_hold(program, machine):
        return trials.choice(base, 0.0)  # raises: no lever makes room for what is there from step to step
    trials.simulate(today)
    if effort is Effort.EXHAUSTIVE:
        for placement in _on_grid(program, machine, _combined(program, machine, base, levers)):
            trials.simulate(placement)
    else:
        _simulate_best_of_joint(trials, program, machine, base, levers, conditions, effort)
    bound_s = lower_bound(program, machine, given=base, levers=levers, conditions=conditions, solve=solve)
    return trials.choice(base, bound_s)


def _may_hold(program: Program, machine: Machine) -> bool:
    """Say whether all tiers together have room for parameters, buffers and state."""
    kept = (ByteKind.PARAMETERS, ByteKind.BUFFER, ByteKind.STATE)
    needed_bytes = sum(datum.nbytes for datum in program.data.values() if datum.kind in kept)
    return needed_bytes <= sum(tier.capacity_bytes for tier in machine.tiers)


# ---------------------------------------------------------------------- what is simulated


class _Trials:
    """What was simulated, in order."""

    def __init__(
        self, program: Program, machine: Machine, conditions: Conditions, spare: float = 0.0
    ) -> None:
        self._program = program
        self._machine = machine
        self._conditions = conditions
        self._spare = spare
        self._found: dict[str, tuple[Placement, Timeline | CapacityError]] = {}

    def simulate(self, placement: Placement) -> None:
        """Simulate a placement, unless it was."""
        name = repr(placement)  # mappings in it are not hashed, but all of it is printed
        if name not in self._found:
            try:
                outcome: Timeline | CapacityError = simulate(
                    self._program, self._machine, placement, conditions=self._conditions
                )
            except CapacityError as error:
                outcome = error
            self._found[name] = placement, outcome

    def step_s(self, placement: Placement) -> float:
        """Return how long a step takes, simulated once; infinite: it does not fit."""
        self.simulate(placement)
        return _seconds(self._found[repr(placement)][1])

    def fastest(self, most: int, *, within: float = math.inf) -> list[Placement]:
        """Return the fastest so far, at most so many; of those that are equally fast the first ones.

        Args:
            most: how many.
            within: times as long as the fastest one none of them takes.
        """
        fitting = [each for each in self._found.values() if isinstance(each[1], Timeline)]
        ordered = sorted(fitting, key=lambda each: _seconds(each[1]))[:most]
        limit_s = _seconds(ordered[0][1]) * within if ordered else 0.0
        return [placement for placement, timeline in ordered if _seconds(timeline) <= limit_s]

    def choice(self, base: Placement, bound_s: float) -> Choice:
        """Return the fastest, or what spares bytes beside it; of those that are equally good the first one.

        Nothing is chosen that is slower than what was given, or than today's rules.
        """
        fitting = [
            (placement, outcome)
            for placement, outcome in self._found.values()
            if isinstance(outcome, Timeline)
        ]
        if not fitting:
            first = next(outcome for _, outcome in self._found.values())
            assert isinstance(first, CapacityError)
            raise first
        fastest = min(fitting, key=lambda each: each[1].step_s)
        limit_s = fastest[1].step_s * (1 + self._spare)
        for name in (repr(base), repr(todays(self._program, self._machine))) if self._spare else ():
            limit_s = min(limit_s, _seconds(self._found[name][1]))
        near = [each for each in fitting if each[1].step_s <= limit_s] if self._spare else [fastest]
        chosen, timeline = min(near, key=lambda each: self._with_copies_s(each[1]))
        rejected = tuple(
            self._rejected(placement, outcome, base)
            for placement, outcome in self._found.values()
            if placement is not chosen
        )
        why = self._why(chosen, timeline, base, bound_s)
        return Choice(chosen, timeline, bound_s, why, rejected)

    def _with_copies_s(self, timeline: Timeline) -> float:
        """Return what a step and its copies take, one after the other."""
        return timeline.step_s + copies_s(self._machine, timeline.moved_bytes)

    def _rejected(self, placement: Placement, outcome: Timeline | CapacityError, base: Placement) -> Rejected:
        told = self._told(placement, base)
        if isinstance(outcome, CapacityError):
            return Rejected(placement, None, f"{told}: it does not fit: {outcome}")
        return Rejected(placement, outcome.step_s, f"{told}: predicted {outcome.step_s:.4g} s a step")

    def _told(self, placement: Placement, base: Placement) -> str:
        return ", ".join(differences(placement, base)) or "as given"

    def _why(self, chosen: Placement, timeline: Timeline, base: Placement, bound_s: float) -> str:
        bound = f" (no placement can take less than {bound_s:.4g})"
        told = f"{self._told(chosen, base)}: predicted {timeline.step_s:.4g} s a step{bound}"
        former = self._found[repr(base)][1]
        if isinstance(former, CapacityError):
            told += ", and what was given does not fit"
        elif chosen is not base:
            told += f", {former.step_s:.4g} as given"
        return f"{told}; what bounds it: {bounded_by(timeline)}"


def _seconds(outcome: Timeline | CapacityError) -> float:
    return outcome.step_s if isinstance(outcome, Timeline) else math.inf


def copies_s(machine: Machine, moved_bytes: Mapping[str, float]) -> float:
    """Return how long copies take one after the other, each alone on its link.

    Args:
        machine: with the links.
        moved_bytes: by link's name; what skips tiers passes the links between them.
    """
    rates = {link.name: link.bytes_per_s for link in machine.links}
    names = [tier.name for tier in machine.tiers]
    seconds = 0.0
    for name, nbytes in moved_bytes.items():
        begin, end = map(names.index, name.split("->"))
        way = names[begin : end + 1] if begin < end else names[end : begin + 1][::-1]
        passed = [name] if name in rates else [f"{a}->{b}" for a, b in itertools.pairwise(way)]
        seconds += sum(nbytes / rates[each] for each in passed)
    return seconds


def bounded_by(timeline: Timeline) -> str:
    """Return what a step is spent on most: computing, or a link that is waited for.

    Args:
        timeline: whose steady state is looked at.
    """
    stalls = timeline.stall_s
    if sum(stalls.values()) <= timeline.step_s / 10 or not stalls:
        return COMPUTE
    cause = max(StallCause, key=lambda each: stalls.get(each, 0.0))
    begin_s = timeline.steady[0].begin_s
    busy: dict[str, float] = {}
    for each in timeline.intervals:
        if each.nbytes and each.end_s > begin_s:
            busy[each.lane] = busy.get(each.lane, 0.0) + each.end_s - max(each.begin_s, begin_s)
    lane = max(busy, key=lambda name: busy[name], default="")
    return f"{lane} ({cause.value})" if lane else cause.value


# ---------------------------------------------------------------------- the usual effort


class _Estimates:
    """What was estimated, in order, and how many more may be."""

    def __init__(self, program: Program, machine: Machine, conditions: Conditions, most: int) -> None:
        self._program = program
        self._machine = machine
        is_divided = conditions.is_divided and machine.tiers[0].medium is TierMedium.DEVICE
        self._estimator = Estimator(program, machine, is_divided=is_divided)
        self._found: dict[str, tuple[float, Placement]] = {}
        self.left = most

    def step_s(self, placement: Placement) -> float:
        """Estimate a placement, unless it was."""
        name = repr(placement)
        if name not in self._found:
            self._found[name] = self._estimator.estimate(placement).step_s, placement
            self.left -= 1
        return self._found[name][0]

    def best_of(self, current: Placement, levers: Levers) -> Placement:
        """Return the best that one pull of some levers makes of a placement; itself, if nothing is better."""
        for lever in neighbours(self._program, self._machine, current, levers):
            options = list(lever.options)
            if len(options) > self.left and math.isinf(self.step_s(current)):
                # Where nothing fits, and looks run out, what changes most comes first, and something is left.
                options = options[::-1][: self.left // 2]
            for option in options[: max(self.left, 0)]:
                current = min(current, option, key=self.step_s)
        return current

    def ranked(self) -> Iterator[Placement]:
        """Yield the best first; of those that take the same time by the estimate the first one."""
        former = -1.0
        for step_s, placement in sorted(self._found.values(), key=lambda each: each[0]):
            if not math.isclose(step_s, former, rel_tol=_ALIKE) or math.isinf(step_s):
                yield placement
                former = step_s


def _simulate_best_of_joint(
    trials: _Trials,
    program: Program,
    machine: Machine,
    base: Placement,
    levers: Levers,
    conditions: Conditions,
    effort: Effort,
) -> None:
    """Look at a large program with its layers joined, and simulate the best of that in full.

    Where nothing fits so, less is joined: single moments need less room.  Neither are layers joined where
    marks name operators, or collectives moments, or where nothing may change but shares of tiers.
    """
    names_parts = bool(conditions.exchanges.begun) or any(mark.operators for mark in base.marks)
    is_joined = False
    for in_layers in (False,) if names_parts or not levers & ~_REFINED else (True, False):
        joint = coarsen(program, _MOST_MOMENTS, in_layers=in_layers)
        narrowed = joint.narrowed(base)
        if joint.program is program or joint.spread(narrowed) != base:
            continue  # what was given of single bundles would be lost
        is_joined = True
        rough = _Trials(joint.program, machine, conditions)
        rough.simulate(narrowed)
        if in_layers:
            _simulate_best(rough, joint.program, machine, narrowed, levers, conditions, Effort.LITTLE)
            _simulate_fastest(trials, joint, rough, base)
        else:
            _simulate_best(rough, joint.program, machine, narrowed, levers, conditions, effort)
            uses = sum(len(moment.uses) for moment in program.moments)
            most = _LEAST_SIMULATIONS if uses <= _SIMULATED_USES // 2 else 1
            for placement in rough.fastest(most, within=_CLOSE):
                trials.simulate(joint.spread(placement))
        if rough.fastest(1) and trials.fastest(1):
            return
    if not is_joined:
        _simulate_best(trials, program, machine, base, levers, conditions, effort)


def _simulate_fastest(trials: _Trials, joint: Coarsening, rough: _Trials, base: Placement) -> None:
    """Simulate in full what is fastest joined; with the shares that were given, too, if they matter."""
    for best in rough.fastest(1):
        as_given = replace(best, high=base.high, ahead=base.ahead)
        seconds = rough.step_s(best), rough.step_s(as_given), trials.step_s(joint.spread(best))
        if max(seconds) > (1 + _TRUSTED) * min(seconds):
            trials.simulate(joint.spread(as_given))


def _simulate_best(
    trials: _Trials,
    program: Program,
    machine: Machine,
    base: Placement,
    levers: Levers,
    conditions: Conditions,
    effort: Effort,
) -> None:
    """Simulate what is best by the estimate, and then what is close to what is best by the simulator."""
    uses = sum(len(moment.uses) for moment in program.moments) + len(program.moments)
    estimates = _Estimates(
        program, machine, conditions, max(_LEAST_ESTIMATES, min(_MOST_ESTIMATES, _ESTIMATED_USES // uses))
    )
    current = base
    for _ in range(_ROUNDS):
        for lever in _ordered(levers, fits=math.isfinite(estimates.step_s(current))):
            current = estimates.best_of(current, lever)
    single = [estimates.best_of(base, lever) for lever in levers]
    most = max(_LEAST_SIMULATIONS, min(effort.value, _SIMULATED_USES // uses))
    several = list(itertools.islice(estimates.ranked(), max(most // 2, 1)))
    for placement in (*several, *sorted(single, key=estimates.step_s)[: most - len(several)]):
        trials.simulate(placement)
    for lever in _MAKE_ROOM & levers:  # the estimate does not know well which of them is the better one
        followed = estimates.best_of(base, lever)
        for other in levers & ~_MAKE_ROOM:
            followed = estimates.best_of(followed, other)
        trials.simulate(followed)
    for lever in _REFINED & levers:
        best = next(iter(trials.fastest(1)), base)
        options = [option for found in neighbours(program, machine, best, lever) for option in found.options]
        for option in sorted(options, key=estimates.step_s)[: most // 2]:
            trials.simulate(option)


def _ordered(levers: Levers, *, fits: bool) -> list[Levers]:
    """Return the levers one by one; where nothing fits those first that make room for activations."""
    return sorted(levers, key=lambda lever: not fits and lever not in _MAKE_ROOM)


# ---------------------------------------------------------------------- all of them


def _combined(program: Program, machine: Machine, base: Placement, levers: Levers) -> list[Placement]:
    """Return every combination of what the levers make of a placement; shares are for the grid."""
    found = {repr(base): base}
    for lever in levers & ~Levers.SHARES:
        for placement in list(found.values()):
            for each in neighbours(program, machine, placement, lever):
                found.update((repr(option), option) for option in each.options)
    return list(found.values())


def grid_of(quota_bytes: int) -> list[int]:
    """Return the quotas that are looked at for one: the same for all, up to it, the largest first.

    Args:
        quota_bytes: the largest that may be used; it is the first one, on the grid or not.
    """
    if quota_bytes <= 1:
        return [quota_bytes]
    highest = math.floor(math.log2(quota_bytes) * GRID)
    points = [math.floor(2 ** (number / GRID)) for number in range(highest, highest - _OCTAVES * GRID, -1)]
    return list(dict.fromkeys([quota_bytes, *(point for point in points if 0 < point <= quota_bytes)]))


def _on_grid(program: Program, machine: Machine, placements: list[Placement]) -> Iterator[Placement]:
    first = machine.tiers[0]
    leased = zip(program.moments, usage_of(program).leased_bytes, strict=True)
    is_elsewhere = any(
        homes.parameters.device == CPU for each in placements for homes in each.bundles.values()
    )
    least = max((nbytes for moment, nbytes in leased if moment.phase is Phase.FORWARD), default=0)
    for placement in placements:
        used = math.floor(Fraction(placement.shares.get(first.name, 1.0)) * first.capacity_bytes)
        for quota_bytes in grid_of(used):
            if quota_bytes < least and not is_elsewhere:
                break  # what forward uses at once does not fit
            share = _share_of(quota_bytes, first.capacity_bytes)
            yield replace(placement, shares={**placement.shares, first.name: share})


def _share_of(quota_bytes: int, capacity_bytes: int) -> float:
    """Return the share of a capacity that is just so many bytes, rounded down."""
    share = quota_bytes / capacity_bytes
    while math.floor(Fraction(share) * capacity_bytes) < quota_bytes:
        share = math.nextafter(share, 2.0)
    return share
