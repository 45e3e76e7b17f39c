"""Steps of the 100.7 M-parameter model by every peer, in turns: time, memory, bytes, losses.

Answers two questions of ``tierstore``: how long a step takes against DeepSpeed's ZeRO-3 on disk with no
more memory, and how many bytes a step writes against the least possible.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.measure import ratios
from bench.peers.result import Result
from bench.peers.trainees import DEEPSPEED, OURS, PEERS, PLAIN
from bench.peers.turns import MIB, Heard, ModelSettings, Turns, head, row, take_turns
from bench.record import Better, Figure
from bench.workload import STATES_WRITTEN, Workload, least_written_bytes

FULL_HOST_BYTES = 704 * MIB
"""The host quota at full scale: with it the process stays below DeepSpeed's, which is checked."""

_ACROSS_LIBRARIES = 1e-3  # how far losses of another library's Adam may be off, relative

STEP = Figure(
    "peers-step",
    "step of the model on disk, no more peak resident memory, against each DeepSpeed ZeRO-3 on disk",
    math.inf,
    "x its time",
    0.6,
    0.4,
    Better.LOWER,
)
"""What is not measured yet."""


def usual(scratch: Path) -> ModelSettings:
    """Return how the question is asked if nobody says otherwise; a unit is a step."""
    return ModelSettings(
        scratch=scratch,
        peers=tuple(PEERS),
        against=DEEPSPEED[0],
        repeats=3,
        units=10,
        full_host_bytes=FULL_HOST_BYTES,
    )


@dataclass(frozen=True)
class Trained:
    """What one peer took.

    Attributes:
        turns: its steps.
        peak_bytes: the most that was ever resident, before the first step too.
        losses: of all steps, those that do not count included.
    """

    turns: Turns
    peak_bytes: int
    losses: Sequence[float]


def compare(settings: ModelSettings) -> Result:
    """Let all peers train in turns.

    Raises:
        Absent, PeerFailed: of tierstore itself; the others are left out.
        AssertionError: the losses differ.
    """
    workload = settings.workload
    heard, left_out = take_turns("training", "steps", settings, [OURS])
    found = {name: trained_of(each) for name, each in heard.items()}
    agreement = compare_losses({name: trained.losses for name, trained in found.items()})
    return Result(
        name="training",
        what=(
            f"steps of {workload}, batch 16, Adam in float32, {settings.repeats} rounds of {settings.units} "
            f"steps in turns; tierstore keeps {settings.quota_bytes / MIB:.0f} MiB in host memory"
        ),
        tables={"a step": table(found, settings.against), "losses": agreement},
        figures=figures(found, workload, settings.quota_bytes),
        left_out=left_out,
        jobs=[job_of(name, trained) for name, trained in found.items()],
        notes=[
            "peak memory: resident, of the whole process from its start, and of the steps alone",
            "page cache: neither tierstore nor DeepSpeed uses it; both go past it (O_DIRECT)",
        ],
    )


def trained_of(heard: Heard) -> Trained:
    """Read what one peer said."""
    losses = heard.end["losses"]
    assert isinstance(losses, list)
    peak_bytes = max(heard.turns.peak_bytes, int(str(heard.ready["peak_bytes"])))
    return Trained(heard.turns, peak_bytes, losses)


# ---------------------------------------------------------------------- losses


def compare_losses(losses: Mapping[str, Sequence[float]]) -> list[list[str]]:
    """Compare step by step with plain PyTorch, or with the first where it did not take part.

    Raises:
        AssertionError: tierstore's differ from plain PyTorch's in a bit, or another's by more than a
            thousandth; or one trained fewer steps.
    """
    reference = PLAIN if PLAIN in losses else next(iter(losses))
    rows = [["peer", "steps", "last loss", f"largest difference from {reference}"]]
    for name, own in losses.items():
        pairs = list(zip(own, losses[reference], strict=False))
        differences = [abs(a - b) / abs(b) for a, b in pairs]
        allowed = 0.0 if {name, reference} <= {OURS, PLAIN} else _ACROSS_LIBRARIES
        # Not a number is not within anything.
        if len(own) != len(losses[reference]) or not all(each <= allowed for each in differences):
            raise AssertionError(f"losses of {name} and {reference} differ: {pairs}")
        worst = max(differences)
        shown = "none, bit for bit" if worst == 0 else f"{worst:.1e} of it"
        rows.append([name, str(len(own)), f"{own[-1]:.6f}", shown])
    return rows


# ---------------------------------------------------------------------- what it comes to


def least_without_gradients_bytes(parameter_bytes: int, quota_bytes: int) -> int:
    """Return the fewest bytes that a step could write if gradients could go as they come.

    No loop of PyTorch's allows that; it is a lower bound all the same, and the one that was used first.
    """
    return max(0, STATES_WRITTEN * parameter_bytes - quota_bytes)


def figures(found: Mapping[str, Trained], workload: Workload, quota_bytes: int) -> list[Figure]:
    """Return what can be said with the peers that took part."""
    if OURS not in found:
        return []
    return [*step_figures(found, STEP), *_written(found[OURS].turns, workload, quota_bytes)]


def step_figures(found: Mapping[str, Trained], unmeasured: Figure) -> list[Figure]:
    """Hold a step against that of each DeepSpeed that has at least our memory; the slowest ratio counts.

    Args:
        found: what each peer took.
        unmeasured: what it is a figure of, with its bar and aim.
    """
    ours, reached, details = found[OURS], [], {}
    for name in filter(found.__contains__, DEEPSPEED):
        peer = found[name]
        times = ratios(ours.turns.seconds(), peer.turns.seconds())
        is_fair = ours.peak_bytes <= peer.peak_bytes
        reached.append(times.median if is_fair else math.inf)
        details[f"times the step of {name}"] = str(times)
        details[f"peak memory, tierstore and {name}"] = (
            f"{ours.peak_bytes / MIB:.0f} and {peer.peak_bytes / MIB:.0f} MiB"
            + ("" if is_fair else ": MORE, so this does not count; choose a smaller --host-quota")
        )
    if not reached:
        return []
    return [replace(unmeasured, reached=max(reached), details=details)]


def _written(ours: Turns, workload: Workload, quota_bytes: int) -> list[Figure]:
    least_bytes = least_written_bytes(workload.parameter_bytes, quota_bytes)
    if least_bytes == 0:
        return []
    details = {
        "written a step": f"{ours.written_bytes() / MIB:.1f} MiB at the drive",
        "least": f"{least_bytes / MIB:.1f} MiB: 4 x {workload.parameter_bytes / MIB:.1f} of parameters, "
        f"moments and gradients - {quota_bytes / MIB:.1f} of quota",
        **_without_gradients(ours, workload, quota_bytes),
        "read a step": f"{ours.read_bytes() / MIB:.1f} MiB",
    }
    what = "bytes that a step writes, against what exists at the end of backward and exceeds the host quota"
    reached = ours.written_bytes() / least_bytes
    return [Figure("peers-bytes-written", what, reached, "x the least", 1.05, 1.0, Better.LOWER, details)]


def _without_gradients(ours: Turns, workload: Workload, quota_bytes: int) -> dict[str, str]:
    least_bytes = least_without_gradients_bytes(workload.parameter_bytes, quota_bytes)
    if least_bytes == 0:
        return {}
    times = ours.written_bytes() / least_bytes
    return {"if gradients did not count": f"{times:.2f} x {least_bytes / MIB:.1f} MiB"}


def table(found: Mapping[str, Trained], against: str) -> list[list[str]]:
    """Return a line for each peer: medians with their range."""
    written = "written MiB a step"
    rows = [[*head("step", against), written, "peak MiB", "peak of steps MiB", "before the model MiB"]]
    base = found[against].turns if against in found else None
    for name, trained in found.items():
        turns = trained.turns
        sizes = (turns.written_bytes(), trained.peak_bytes, turns.peak_bytes, turns.idle_bytes)
        rows.append([*row(name, turns, base), *(f"{nbytes / MIB:.0f}" for nbytes in sizes)])
    return rows


def job_of(name: str, trained: Trained) -> dict[str, object]:
    """Return what one peer took, for the record."""
    turns = trained.turns
    return {
        "jobname": name,
        "seconds_a_step": turns.seconds(),
        "rounds": [each.to_mapping() for each in turns.taken],
        "peak_bytes": trained.peak_bytes,
        "steps_peak_bytes": turns.peak_bytes,
        "idle_bytes": turns.idle_bytes,
        "losses": list(trained.losses),
    }
