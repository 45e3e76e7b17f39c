"""Steps of the 100.7 M-parameter model by every peer, in turns: time, memory, bytes, losses.

Answers two questions of ``tierstore``: how long a step takes against DeepSpeed's ZeRO-3 on disk with no
more memory, and how many bytes a step writes against the least possible.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.measure import Spread, ratios
from bench.peers.result import Result
from bench.peers.trainees import DEEPSPEED, OURS, PEERS, PLAIN
from bench.peers.usage import Usage
from bench.peers.workers import Company
from bench.record import Better, Figure
from bench.workload import Workload

MIB = 1024**2
FULL_HOST_BYTES = 608 * MIB
"""The host quota at full scale: with it the process stays below DeepSpeed's, which is checked."""

_ACROSS_LIBRARIES = 1e-3  # how far losses of another library's Adam may be off, relative
_STATES_WRITTEN = 3  # of each parameter: itself and two moments
_GRADIENTS = 1


@dataclass(frozen=True)
class TrainingSettings:
    """How the question is asked.

    Attributes:
        scratch: a directory on the disk to measure.
        peers: names, in the order of the first round.
        against: the peer that ratios in the table are against, if it is there.
        steps: of each turn.
        dim: the width of the model.
        host_bytes: tierstore's host quota; ``None``: `FULL_HOST_BYTES`, in proportion.
    """

    scratch: Path
    peers: Sequence[str] = tuple(PEERS)
    against: str = DEEPSPEED[0]
    repeats: int = 3
    warmups: int = 1
    steps: int = 10
    dim: int = 1024
    host_bytes: int | None = None

    @property
    def workload(self) -> Workload:
        """The model."""
        return Workload(self.dim)

    @property
    def quota_bytes(self) -> int:
        """The host quota in effect."""
        return int(FULL_HOST_BYTES * self.workload.share) if self.host_bytes is None else self.host_bytes


@dataclass(frozen=True)
class Trained:
    """What one peer took, lists in the order of rounds.

    Attributes:
        steps: of each round.
        taken: what each round took.
        idle_bytes: resident before the model was made: Python and its libraries.
        peak_bytes: the most that was ever resident.
        steps_peak_bytes: the most in the steps alone.
        losses: of all steps, those that do not count included.
    """

    steps: int
    taken: Sequence[Usage]
    idle_bytes: int
    peak_bytes: int
    steps_peak_bytes: int
    losses: Sequence[float]

    def seconds(self) -> list[float]:
        """Return the seconds of a step."""
        return [each.seconds / self.steps for each in self.taken]

    def read_bytes(self) -> float:
        """Return the bytes that a step reads from the drive."""
        return statistics.median(each.read_bytes / self.steps for each in self.taken)

    def written_bytes(self) -> float:
        """Return the bytes that a step writes to the drive."""
        return statistics.median(each.written_bytes / self.steps for each in self.taken)


def compare(settings: TrainingSettings) -> Result:
    """Let all peers train in turns.

    Raises:
        Absent, PeerFailed: of tierstore itself; the others are left out.
        AssertionError: the losses differ.
    """
    workload = settings.workload
    needed = [name for name in settings.peers if name == OURS]
    job = {"dim": workload.dim, "path": str(settings.scratch), "host_bytes": settings.quota_bytes}
    with Company("training", settings.peers, settings.scratch / "logs", needed) as company:
        ready = company.ask_all("prepare", job)
        answers = company.rounds(
            "turn", {"steps": settings.steps}, repeats=settings.repeats, warmups=settings.warmups
        )
        ends = company.ask_all("finish")
        left_out = company.left_out
    found = {name: _trained(ready[name], of, ends[name]) for name, of in answers.items() if name in ends}
    agreement = compare_losses({name: trained.losses for name, trained in found.items()})
    return Result(
        name="training",
        what=(
            f"steps of {workload}, batch 16, Adam in float32, {settings.repeats} rounds of {settings.steps} "
            f"steps in turns; tierstore keeps {settings.quota_bytes / MIB:.0f} MiB in host memory"
        ),
        tables={"a step": table(found, settings.against), "losses": agreement},
        figures=figures(found, workload, settings.quota_bytes),
        left_out=left_out,
        jobs=[_job(name, trained) for name, trained in found.items()],
        notes=[
            "peak memory: resident, of the whole process from its start, and of the steps alone",
            "page cache: neither tierstore nor DeepSpeed uses it; both go past it (O_DIRECT)",
        ],
    )


def _trained(
    ready: Mapping[str, object], answers: Sequence[Mapping[str, object]], end: Mapping[str, object]
) -> Trained:
    steps_peak_bytes = max(int(str(answer["peak_bytes"])) for answer in answers)
    losses = end["losses"]
    assert isinstance(losses, list)
    return Trained(
        steps=int(str(answers[0]["steps"])),
        taken=[Usage.from_mapping(answer["usage"]) for answer in answers],  # type: ignore[arg-type]  # as was sent
        idle_bytes=int(str(ready["idle_bytes"])),
        peak_bytes=max(steps_peak_bytes, int(str(ready["peak_bytes"]))),
        steps_peak_bytes=steps_peak_bytes,
        losses=losses,
    )


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


def least_written_bytes(parameter_bytes: int, quota_bytes: int) -> int:
    """Return the fewest bytes that a step can write, whatever its order.

    When backward has ended and ``step`` has not begun, every parameter and both its moments have to
    exist, and every gradient, as ``p.grad`` can be read until it is zeroed.  What host memory does not
    hold then is on disk, and was written since the step before: Adam gives parameters and moments new
    values in every step, and backward gives gradients.
    """
    return max(0, (_STATES_WRITTEN + _GRADIENTS) * parameter_bytes - quota_bytes)


def least_without_gradients_bytes(parameter_bytes: int, quota_bytes: int) -> int:
    """Return the fewest bytes that a step could write if gradients could go as they come.

    No loop of PyTorch's allows that; it is a lower bound all the same, and the one that was used first.
    """
    return max(0, _STATES_WRITTEN * parameter_bytes - quota_bytes)


def figures(found: Mapping[str, Trained], workload: Workload, quota_bytes: int) -> list[Figure]:
    """Return what can be said with the peers that took part."""
    if OURS not in found:
        return []
    return [*_step(found), *_written(found[OURS], workload, quota_bytes)]


def _step(found: Mapping[str, Trained]) -> list[Figure]:
    """Hold a step against that of each DeepSpeed that has at least our memory; the slowest ratio counts."""
    ours, reached, details = found[OURS], [], {}
    for name in filter(found.__contains__, DEEPSPEED):
        peer = found[name]
        times = ratios(ours.seconds(), peer.seconds())
        is_fair = ours.peak_bytes <= peer.peak_bytes
        reached.append(times.median if is_fair else math.inf)
        details[f"times the step of {name}"] = str(times)
        details[f"peak memory, tierstore and {name}"] = (
            f"{ours.peak_bytes / MIB:.0f} and {peer.peak_bytes / MIB:.0f} MiB"
            + ("" if is_fair else ": MORE, so this does not count; choose a smaller --host-quota")
        )
    if not reached:
        return []
    what = "step of the model on disk, no more peak resident memory, against each DeepSpeed ZeRO-3 on disk"
    return [Figure("peers-step", what, max(reached), "x its time", 0.6, 0.4, Better.LOWER, details)]


def _written(ours: Trained, workload: Workload, quota_bytes: int) -> list[Figure]:
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


def _without_gradients(ours: Trained, workload: Workload, quota_bytes: int) -> dict[str, str]:
    least_bytes = least_without_gradients_bytes(workload.parameter_bytes, quota_bytes)
    if least_bytes == 0:
        return {}
    times = ours.written_bytes() / least_bytes
    return {"if gradients did not count": f"{times:.2f} x {least_bytes / MIB:.1f} MiB"}


def table(found: Mapping[str, Trained], against: str) -> list[list[str]]:
    """Return a line for each peer: medians with their range."""
    head = ["peer", "s a step", f"x {against}", "CPU s a step", "read MiB a step", "written MiB a step"]
    rows = [[*head, "peak MiB", "peak of steps MiB", "before the model MiB"]]
    base = found.get(against)
    for name, trained in found.items():
        cpu = statistics.median(each.cpu_seconds / trained.steps for each in trained.taken)
        rows.append(
            [
                name,
                str(Spread.of(trained.seconds())),
                f"{ratios(trained.seconds(), base.seconds()).median:.2f}" if base else "-",
                f"{cpu:.2f}",
                f"{trained.read_bytes() / MIB:.0f}",
                f"{trained.written_bytes() / MIB:.0f}",
                f"{trained.peak_bytes / MIB:.0f}",
                f"{trained.steps_peak_bytes / MIB:.0f}",
                f"{trained.idle_bytes / MIB:.0f}",
            ]
        )
    return rows


def _job(name: str, trained: Trained) -> dict[str, object]:
    return {
        "jobname": name,
        "seconds_a_step": trained.seconds(),
        "rounds": [each.to_mapping() for each in trained.taken],
        "peak_bytes": trained.peak_bytes,
        "steps_peak_bytes": trained.steps_peak_bytes,
        "idle_bytes": trained.idle_bytes,
        "losses": list(trained.losses),
    }
