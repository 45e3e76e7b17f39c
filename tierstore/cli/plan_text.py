"""What ``tierstore plan`` found, as a person reads it: one fact a line, with what it is about before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tierstore.cli.plan_result import (
    PlanResult,
    StepBound,
    busy_shares,
    by_cause,
    ideal_s,
    kind_bytes,
    share_of_ideal,
    step_bound,
)
from tierstore.cli.seconds import format_seconds
from tierstore.planning import Timeline
from tierstore.planning.timeline import COMPUTE
from tierstore.training.tracing import RESIDENT_PEAK
from tierstore.units import format_bytes

_SHOWN_LARGEST = 3
_SHOWN_BUSY = 4


def to_lines(result: PlanResult) -> Iterator[str]:
    """Yield what is said of a result."""
    yield _line("program", _program(result))
    if RESIDENT_PEAK in result.program.facts:
        plain = format_bytes(int(result.program.facts[RESIDENT_PEAK]))
        yield _line("plain", f"{plain} at most, if all of it stayed on the device")
    yield _line("machine", _machine(result))
    yield _line("fits", "yes" if result.fits else "no")
    if result.timeline is not None:
        yield from _predicted(result, result.timeline)
    if result.why:
        yield _line("why", result.why)
    for remedy in result.remedies:
        yield _line("remedy", remedy)
    for assumption in result.assumptions:
        yield _line("assumed", assumption)


def share_text(share: float) -> str:
    """Return a share as a percentage."""
    return f"{share * 100:.1f} %" if share < 0.1 else f"{share * 100:.0f} %"


def bound_text(bound: StepBound) -> str:
    """Return what bounds a step, in words."""
    if bound.is_waiting:
        return f"waiting ({bound.name}): {share_text(bound.share)} of the step; nothing is busy throughout"
    what = "computing" if bound.name == COMPUTE else bound.name
    return f"{what}: busy {share_text(bound.share)} of the step"


def _line(about: str, text: str) -> str:
    return f"{about:<9} {' '.join(text.split())}"


def _program(result: PlanResult) -> str:
    program = result.program
    sources = {"model": "from the model alone", "trace": "as a run recorded it", "hand": "written by hand"}
    parts = [
        f"{program.name}, {sources.get(program.source, program.source)}: {len(program.moments)} moments",
        _sizes(kind_bytes(program)),
        ", ".join(f"{name} {value}" for name, value in program.facts.items() if name != RESIDENT_PEAK),
    ]
    return "; ".join(part for part in parts if part)


def _machine(result: PlanResult) -> str:
    capacities = {tier.name: tier.capacity_bytes for tier in result.machine.tiers}
    return f"{result.machine.name}: {_sizes(capacities)}"


def _sizes(sizes: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {format_bytes(int(nbytes))}" for name, nbytes in sizes.items())


def _predicted(result: PlanResult, timeline: Timeline) -> Iterator[str]:
    yield _line("step", "; ".join(_step(result, timeline)))
    yield _line("bounds", bound_text(step_bound(timeline, result.machine)))
    others = list(busy_shares(timeline, result.machine).items())[:_SHOWN_BUSY]
    yield _line("busy", ", ".join(f"{name} {share_text(share)}" for name, share in others) or "nothing")
    stalls = by_cause(timeline.stall_s)
    waits = ", ".join(f"{cause} {format_seconds(seconds)}" for cause, seconds in stalls.items())
    yield _line("waits", f"{waits} a step" if waits else "never")
    yield from _peaks(result, timeline)
    moved = {name: nbytes for name, nbytes in timeline.moved_bytes.items() if nbytes}
    yield _line("moves", f"{_sizes(moved)} a step" if moved else "nothing")


def _step(result: PlanResult, timeline: Timeline) -> Iterator[str]:
    yield f"{format_seconds(timeline.step_s)} predicted"
    share = share_of_ideal(result)
    if share is not None:
        ideal = format_seconds(ideal_s(result.program, result.machine))
        yield f"{share_text(share)} of the speed of unlimited memory ({ideal})"
    if result.bound_s is not None and result.bound_s > 0:
        above = max(0.0, timeline.step_s / result.bound_s - 1)
        yield f"at most {share_text(above)} above the best that can be ({format_seconds(result.bound_s)})"


def _peaks(result: PlanResult, timeline: Timeline) -> Iterator[str]:
    """Yield the peak of each tier; of the first with who held it."""
    capacities = {tier.name: tier.capacity_bytes for tier in result.machine.tiers}
    fastest = result.machine.tiers[0].name
    peaks = timeline.peak_bytes
    for name in [tier for tier in capacities if tier in peaks]:
        held = f": {_held(timeline)}" if name == fastest and timeline.account.kinds else ""
        yield _line("peak", f"{name} {format_bytes(peaks[name])} of {format_bytes(capacities[name])}{held}")


def _held(timeline: Timeline) -> str:
    account = timeline.account
    kinds = {kind.value: nbytes for kind, nbytes in account.kinds.items() if nbytes}
    largest: Sequence[tuple[str, int]] = account.largest[:_SHOWN_LARGEST]
    parts = [_sizes(dict(sorted(kinds.items(), key=lambda item: -item[1])))]
    if largest:
        parts.append(f"largest {_sizes(dict(largest))}")
    if account.moment:
        parts.append(f"in {account.moment}")
    return "; ".join(parts)
