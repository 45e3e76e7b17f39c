"""Passes through a model on disk by every peer, in turns: time, memory, bytes, outputs.

Answers one question of ``tierstore``: how much faster than Accelerate's ``disk_offload``.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.measure import Spread, ratios
from bench.peers.inferrers import ACCELERATE, COLD, OURS, PEERS, WARM
from bench.peers.result import Result
from bench.peers.usage import Usage
from bench.peers.workers import Company
from bench.record import Better, Figure
from bench.workload import Workload

MIB = 1024**2
FULL_HOST_BYTES = 50 * MIB
"""The host quota at full scale, three of its 24 weights: the process takes no more than Accelerate's."""


@dataclass(frozen=True)
class InferenceSettings:
    """How the question is asked.

    Attributes:
        scratch: a directory on the disk to measure.
        peers: names, in the order of the first round.
        against: the peer that ratios in the table are against, if it is there.
        passes: of each turn.
        dim: the width of the model.
        host_bytes: tierstore's host quota; ``None``: `FULL_HOST_BYTES`, in proportion.
    """

    scratch: Path
    peers: Sequence[str] = tuple(PEERS)
    against: str = f"{ACCELERATE}-{COLD}"
    repeats: int = 5
    warmups: int = 1
    passes: int = 5
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
class Inferred:
    """What one peer took, lists in the order of rounds."""

    passes: int
    taken: Sequence[Usage]
    idle_bytes: int
    peak_bytes: int
    digest: str

    def seconds(self) -> list[float]:
        """Return the seconds of a pass."""
        return [each.seconds / self.passes for each in self.taken]


def compare(settings: InferenceSettings) -> Result:
    """Let all peers compute in turns.

    Raises:
        Absent, PeerFailed: of tierstore itself; the others are left out.
        AssertionError: the outputs differ.
    """
    workload = settings.workload
    needed = [name for name in settings.peers if name == OURS]
    job = {"dim": workload.dim, "path": str(settings.scratch), "host_bytes": settings.quota_bytes}
    with Company("inference", settings.peers, settings.scratch / "logs", needed) as company:
        ready = company.ask_all("prepare", job)
        answers = company.rounds(
            "turn", {"passes": settings.passes}, repeats=settings.repeats, warmups=settings.warmups
        )
        ends = company.ask_all("finish")
        left_out = company.left_out
    found = {name: _inferred(ready[name], of, ends[name]) for name, of in answers.items() if name in ends}
    compare_outputs({name: inferred.digest for name, inferred in found.items()})
    return Result(
        name="inference",
        what=(
            f"passes through {workload} on disk ({workload.parameter_bytes / MIB:.0f} MiB), batch 16, "
            f"{settings.repeats} rounds of {settings.passes} passes in turns; tierstore keeps "
            f"{settings.quota_bytes / MIB:.0f} MiB in host memory"
        ),
        tables={"a pass": table(found, settings.against)},
        figures=figures(found),
        left_out=left_out,
        jobs=[_job(name, inferred) for name, inferred in found.items()],
        notes=[
            "outputs: equal, bit for bit",
            f"{ACCELERATE} reads through the page cache, whose pages no peak counts",
            f"{COLD}: they are dropped before each pass; {WARM}: the whole model stays in them",
            "tierstore reads past the page cache",
        ],
    )


def _inferred(
    ready: Mapping[str, object], answers: Sequence[Mapping[str, object]], end: Mapping[str, object]
) -> Inferred:
    return Inferred(
        passes=int(str(answers[0]["passes"])),
        taken=[Usage.from_mapping(answer["usage"]) for answer in answers],  # type: ignore[arg-type]  # as was sent
        idle_bytes=int(str(ready["idle_bytes"])),
        peak_bytes=max(int(str(answer["peak_bytes"])) for answer in answers),
        digest=str(end["digest"]),
    )


def compare_outputs(digests: Mapping[str, str]) -> None:
    """Compare the outputs of all passes.

    Raises:
        AssertionError: they differ in a bit.
    """
    if len(set(digests.values())) > 1:
        raise AssertionError(f"the outputs differ: {dict(digests)}")


def figures(found: Mapping[str, Inferred]) -> list[Figure]:
    """Hold a pass against that of Accelerate, whose bytes come from the drive as ours do."""
    cold, warm = (found.get(f"{ACCELERATE}-{state}") for state in (COLD, WARM))
    if OURS not in found or cold is None:
        return []
    ours = found[OURS]
    speed = ratios(cold.seconds(), ours.seconds())
    details = {
        "times as fast, cold": str(speed),
        "peak memory, tierstore and Accelerate": (
            f"{ours.peak_bytes / MIB:.0f} and {cold.peak_bytes / MIB:.0f} MiB, its page cache apart"
        ),
    }
    if warm is not None:
        details["times as fast as it is with the whole model in the page cache"] = str(
            ratios(warm.seconds(), ours.seconds())
        )
    what = "a pass through a model on disk against Accelerate's disk_offload with a cold page cache"
    return [Figure("peers-inference", what, speed.median, "x as fast", 2.0, 4.0, Better.HIGHER, details)]


def table(found: Mapping[str, Inferred], against: str) -> list[list[str]]:
    """Return a line for each peer: medians with their range."""
    head = ["peer", "s a pass", f"x {against}", "CPU s a pass", "read MiB a pass"]
    rows = [[*head, "peak MiB", "before the model MiB"]]
    base = found.get(against)
    for name, inferred in found.items():
        cpu = statistics.median(each.cpu_seconds / inferred.passes for each in inferred.taken)
        read = statistics.median(each.read_bytes / inferred.passes for each in inferred.taken)
        rows.append(
            [
                name,
                str(Spread.of(inferred.seconds())),
                f"{ratios(inferred.seconds(), base.seconds()).median:.2f}" if base else "-",
                f"{cpu:.2f}",
                f"{read / MIB:.0f}",
                f"{inferred.peak_bytes / MIB:.0f}",
                f"{inferred.idle_bytes / MIB:.0f}",
            ]
        )
    return rows


def _job(name: str, inferred: Inferred) -> dict[str, object]:
    return {
        "jobname": name,
        "seconds_a_pass": inferred.seconds(),
        "rounds": [each.to_mapping() for each in inferred.taken],
        "peak_bytes": inferred.peak_bytes,
        "idle_bytes": inferred.idle_bytes,
    }
