"""What ``tierstore plan`` found, as data, and what follows from it: what bounds a step, how far from ideal.

A *busy share* is the part of a step in which something works: the device on moments, a link or what several
links share on bytes.  What is busiest bounds the step; where nothing is busy, waiting for each other does.

Pure: values in, values out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tierstore.planning import Interval, Machine, Placement, Program, StallCause, Timeline
from tierstore.planning.timeline import COMPUTE, HOST

_BOUND_SHARE = 0.75
"""What is busy for less of a step does not bound it alone."""


@dataclass(frozen=True)
class PlanResult:
    """What was found for one program on one machine.

    Attributes:
        program: what was asked about.
        machine: with the quotas of the run.
        placement: that was chosen or given; ``None``: none was found that fits.
        timeline: of it; ``None``: it does not fit.
        bound_s: seconds that no placement's step is shorter than; ``None``: unknown.
        why: it was chosen, or does not fit.
        rejected: other placements that were simulated, and their seconds; ``None``: it did not fit.
        remedies: sentences: the least changes that make it fit.
        assumptions: sentences: what was not known.
        asked: the program before the machine's seconds were put into it; ``None``: it is not kept.
    """

    program: Program
    machine: Machine
    placement: Placement | None = None
    timeline: Timeline | None = None
    bound_s: float | None = None
    why: str = ""
    rejected: tuple[tuple[str, float | None], ...] = ()
    remedies: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = field(default=())
    asked: Program | None = None

    @property
    def fits(self) -> bool:
        """Whether there is a placement with which the program runs on the machine."""
        return self.timeline is not None


@dataclass(frozen=True, slots=True)
class StepBound:
    """What bounds a step.

    Attributes:
        name: `COMPUTE`, a link's name, a share's name, `HOST` or a cause of waiting.
        share: of the step that it is busy, or waited for.
        is_waiting: whether nothing is busy enough to bound the step: it waits.
    """

    name: str
    share: float
    is_waiting: bool = False


def busy_shares(timeline: Timeline, machine: Machine) -> dict[str, float]:
    """Return what part of a step in the steady state each thing works, most first.

    What the machine computes is taken from the timeline, what moves from bytes and rates.
    """
    step_s = timeline.step_s
    if step_s <= 0:
        return {}
    moved = timeline.moved_bytes
    seconds = {
        COMPUTE: _lane_s(timeline, COMPUTE),
        HOST: _lane_s(timeline, HOST),
        **{link.name: moved.get(link.name, 0) / link.bytes_per_s for link in machine.links},
        **{
            name: sum(moved.get(link.name, 0) for link in machine.links if name in link.shares) / rate
            for name, rate in machine.shares.items()
        },
        **{network.name: _lane_s(timeline, network.name) for network in machine.network},
    }
    found = {name: busy_s / step_s for name, busy_s in seconds.items() if busy_s > 0}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def step_bound(timeline: Timeline, machine: Machine) -> StepBound:
    """Return what bounds a step in the steady state."""
    shares = busy_shares(timeline, machine)
    busiest, share = next(iter(shares.items()), (COMPUTE, 0.0))
    stalls = timeline.stall_s
    if share >= _BOUND_SHARE or not stalls:
        return StepBound(busiest, share)
    cause = max(stalls, key=lambda each: stalls[each])
    waited = stalls[cause] / timeline.step_s
    if waited <= share:
        return StepBound(busiest, share)
    return StepBound(cause.value, waited, is_waiting=True)


def ideal_s(program: Program, machine: Machine) -> float:
    """Return the seconds of a step that never waits: of unlimited memory on the device."""
    if machine.has_streams:
        return program.compute_s
    return program.compute_s + sum(moment.host_s for moment in program.moments)


def to_mapping(result: PlanResult) -> dict[str, object]:
    """Return plain values for JSON: seconds, bytes, and shares of 1."""
    program, machine = result.program, result.machine
    return {
        "fits": result.fits,
        "program": {
            "name": program.name,
            "source": program.source,
            "fingerprint": program.fingerprint,
            "moments": len(program.moments),
            "data_bytes": kind_bytes(program),
            "facts": dict(program.facts),
        },
        "machine": {
            "name": machine.name,
            "capacity_bytes": {tier.name: tier.capacity_bytes for tier in machine.tiers},
            "sources": dict(machine.sources),
        },
        "ideal_s": ideal_s(program, machine),
        **_predicted(result),
        "why": result.why,
        "rejected": [{"name": name, "step_s": step_s} for name, step_s in result.rejected],
        "remedies": list(result.remedies),
        "assumptions": list(result.assumptions),
        "placement": None if result.placement is None else result.placement.to_mapping(),
    }


def share_of_ideal(result: PlanResult) -> float | None:
    """Return how much of the speed of unlimited memory is reached; ``None``: nothing takes time."""
    if result.timeline is None or result.timeline.step_s <= 0:
        return None
    return ideal_s(result.program, result.machine) / result.timeline.step_s


def kind_bytes(program: Program) -> dict[str, int]:
    """Return the bytes of all data by kind, most first."""
    found: dict[str, int] = {}
    for datum in program.data.values():
        found[datum.kind.value] = found.get(datum.kind.value, 0) + datum.nbytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def by_cause(stalls: Mapping[StallCause, float]) -> dict[str, float]:
    """Return seconds of waiting by the name of their cause, most first."""
    ordered = sorted(stalls.items(), key=lambda item: -item[1])
    return {cause.value: seconds for cause, seconds in ordered if seconds > 0}


def _predicted(result: PlanResult) -> dict[str, object]:
    """Return what only a program that fits has; ``None`` for all of it where it does not."""
    timeline = result.timeline
    if timeline is None:
        names = ("step_s", "share_of_ideal", "bound_s", "bounded_by", "busy", "waiting_s", "moved_bytes")
        return dict.fromkeys((*names, "peak_bytes", "account"))
    bound = step_bound(timeline, result.machine)
    account = timeline.account
    return {
        "step_s": timeline.step_s,
        "share_of_ideal": share_of_ideal(result),
        "bound_s": result.bound_s,
        "bounded_by": {"name": bound.name, "share": bound.share, "is_waiting": bound.is_waiting},
        "busy": busy_shares(timeline, result.machine),
        "waiting_s": by_cause(timeline.stall_s),
        "moved_bytes": timeline.moved_bytes,
        "peak_bytes": timeline.peak_bytes,
        "account": {
            "at_s": account.at_s,
            "nbytes": account.nbytes,
            "moment": account.moment,
            "kinds": {kind.value: nbytes for kind, nbytes in account.kinds.items()},
            "largest": [{"key": key, "nbytes": nbytes} for key, nbytes in account.largest],
        },
    }


def _lane_s(timeline: Timeline, lane: str) -> float:
    """Return the seconds of one steady step in which something goes on in a lane."""
    begin_s, end_s = timeline.steady[0].begin_s, timeline.steady[-1].end_s
    busy_s, until_s = 0.0, begin_s
    for interval in _within(timeline, lane):
        first, last = max(interval.begin_s, until_s), min(interval.end_s, end_s)
        if last > first:
            busy_s += last - first
            until_s = last
    return busy_s / len(timeline.steady)


def _within(timeline: Timeline, lane: str) -> Iterator[Interval]:
    """Yield the intervals of a lane, in order of their begin."""
    return (each for each in timeline.intervals if each.lane == lane)
