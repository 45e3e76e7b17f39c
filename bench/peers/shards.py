"""Steps of the 100.7 M-parameter model sharded over two ranks, on disk, by every peer in turns.

How long a step of FSDP2 with tierstore takes against DeepSpeed's ZeRO-3 with parameters and optimizer on
disk, with no more memory.
"""

from __future__ import annotations

import math
from pathlib import Path

from bench.peers.result import Result
from bench.peers.shard_peers import PEERS, RANKS
from bench.peers.trainees import DEEPSPEED, OURS
from bench.peers.training import compare_losses, job_of, step_figures, table, trained_of
from bench.peers.turns import MIB, ModelSettings, take_turns
from bench.record import Better, Figure

FULL_HOST_BYTES = 512 * MIB
"""The host quota of both ranks together at full scale; that memory is no more than DeepSpeed's is checked."""

STEP = Figure(
    "shards-deepspeed",
    f"step of the model on disk, sharded over {RANKS} ranks of one thread (gloo), FSDP2 with tierstore, no "
    "more peak resident memory of both ranks, against each DeepSpeed ZeRO-3 on disk",
    math.inf,
    "x its time",
    0.7,
    0.5,
    Better.LOWER,
)
"""What is not measured yet."""


def usual(scratch: Path) -> ModelSettings:
    """Return how the question is asked if nobody says otherwise; a unit is a step."""
    return ModelSettings(
        scratch=scratch,
        peers=tuple(PEERS),
        against=DEEPSPEED[0],
        repeats=5,
        units=5,
        full_host_bytes=FULL_HOST_BYTES,
    )


def compare(settings: ModelSettings) -> Result:
    """Let all peers train in turns.

    Raises:
        Absent, PeerFailed: of tierstore itself; the others are left out.
        AssertionError: the losses differ.
    """
    heard, left_out = take_turns("shards", "steps", settings, [OURS])
    found = {name: trained_of(each) for name, each in heard.items()}
    agreement = compare_losses({name: trained.losses for name, trained in found.items()})
    return Result(
        name="shards",
        what=(
            f"steps of {settings.workload}, sharded over {RANKS} ranks of one thread (gloo), batch 16 each, "
            f"Adam in float32, {settings.repeats} rounds of {settings.units} steps in turns; tierstore keeps "
            f"{settings.quota_bytes / MIB:.0f} MiB of both ranks in host memory"
        ),
        tables={"a step": table(found, settings.against), "losses of both ranks": agreement},
        figures=step_figures(found, STEP) if OURS in found else [],
        left_out=left_out,
        jobs=[job_of(name, trained) for name, trained in found.items()],
        notes=[
            "plain: FSDP2 with everything in memory; tierstore: the same model and loop, offloaded",
            "memory, bytes and processor seconds: of both ranks together; seconds: of the slower one",
            "page cache: neither tierstore nor DeepSpeed uses it; both go past it (O_DIRECT)",
        ],
    )
