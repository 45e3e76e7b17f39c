"""Passes through a model on disk by every peer, in turns: time, memory, bytes, outputs.

Answers one question of ``tierstore``: how much faster than Accelerate's ``disk_offload``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.measure import ratios
from bench.peers.inferrers import ACCELERATE, COLD, OURS, PEERS, READ, WARM
from bench.peers.result import Result
from bench.peers.turns import MIB, ModelSettings, Turns, head, row, take_turns
from bench.record import Better, Figure

FULL_HOST_BYTES = 92 * MIB
"""The host quota at full scale: with it the process takes less than Accelerate's, its page cache apart."""

BAR = 4.0
"""How many times as fast as Accelerate with a cold page cache."""


def usual(scratch: Path) -> ModelSettings:
    """Return how the question is asked if nobody says otherwise; a unit is a pass."""
    return ModelSettings(
        scratch=scratch,
        peers=tuple(PEERS),
        against=f"{ACCELERATE}-{COLD}",
        repeats=5,
        units=5,
        full_host_bytes=FULL_HOST_BYTES,
    )


@dataclass(frozen=True)
class Inferred:
    """What one peer took, and a digest of what it computed."""

    turns: Turns
    digest: str


def compare(settings: ModelSettings) -> Result:
    """Let all peers compute in turns.

    Raises:
        Absent, PeerFailed: of tierstore itself; the others are left out.
        AssertionError: the outputs differ.
    """
    workload = settings.workload
    heard, left_out = take_turns("inference", "passes", settings, [OURS])
    found = {name: Inferred(each.turns, str(each.end["digest"])) for name, each in heard.items()}
    compare_outputs({name: inferred.digest for name, inferred in found.items() if name != READ})
    return Result(
        name="inference",
        what=(
            f"passes through {workload} on disk ({workload.parameter_bytes / MIB:.0f} MiB), batch 16, "
            f"{settings.repeats} rounds of {settings.units} passes in turns; tierstore keeps "
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
            f"{READ}: the limit of the disk, plain threads that read as many bytes as the model has",
        ],
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
    ours = found[OURS].turns
    speed = ratios(cold.turns.seconds(), ours.seconds())
    details = {
        "times as fast, cold": str(speed),
        "peak memory, tierstore and Accelerate": (
            f"{ours.peak_bytes / MIB:.0f} and {cold.turns.peak_bytes / MIB:.0f} MiB, its page cache apart"
        ),
    }
    if warm is not None:
        details["times as fast as it is with the whole model in the page cache"] = str(
            ratios(warm.turns.seconds(), ours.seconds())
        )
    limit = found.get(READ)
    aim = BAR
    if limit is not None:
        # As fast as the disk reads all of the model: what the quota keeps need not be read.
        aim = max(BAR, ratios(cold.turns.seconds(), limit.turns.seconds()).median)
        details["of the time that reading alone takes"] = str(ratios(ours.seconds(), limit.turns.seconds()))
    what = "a pass through a model on disk against Accelerate's disk_offload with a cold page cache"
    return [Figure("peers-inference", what, speed.median, "x as fast", BAR, aim, Better.HIGHER, details)]


def table(found: Mapping[str, Inferred], against: str) -> list[list[str]]:
    """Return a line for each peer: medians with their range."""
    rows = [[*head("pass", against), "peak MiB", "before the model MiB"]]
    base = found[against].turns if against in found else None
    for name, inferred in found.items():
        turns = inferred.turns
        sizes = (turns.peak_bytes, turns.idle_bytes)
        rows.append([*row(name, turns, base), *(f"{nbytes / MIB:.0f}" for nbytes in sizes)])
    return rows


def _job(name: str, inferred: Inferred) -> dict[str, object]:
    turns = inferred.turns
    return {
        "jobname": name,
        "seconds_a_pass": turns.seconds(),
        "rounds": [each.to_mapping() for each in turns.taken],
        "peak_bytes": turns.peak_bytes,
        "idle_bytes": turns.idle_bytes,
    }
