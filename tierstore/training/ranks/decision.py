"""Which checkpoint all processes go on from: decided by each of them alone, from what all of them hold.

A directory holds the last checkpoint that its process has made, and the one before until all processes have
made the last.  So at any moment there is one that all of them have:

1. A process makes a checkpoint durable beside the former one, and says so.
2. Only when all have said so does any of them let the former one go, and note that it is agreed.
3. Who is killed before, between or after these finds the last checkpoint that all have made: the newest that
   all hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierstore.errors import UsageError
from tierstore.training.ranks.introductions import ranks_in_words


@dataclass(frozen=True, slots=True, order=True)
class Stamp:
    """Which checkpoint it is.

    Attributes:
        number: how many were made until this one, in all runs.
        token: tells attempts apart that have one number.
        world_size: how many processes made it.
    """

    number: int
    token: str
    world_size: int


@dataclass(frozen=True, slots=True)
class HeldCheckpoints:
    """What one directory holds.

    Attributes:
        stamps: of its checkpoints.
        agreed: the number of the last one that it knows all have made; 0: none.
        fault: why it cannot be gone on from; "": it can.
    """

    stamps: tuple[Stamp, ...] = ()
    agreed: int = 0
    fault: str = ""


def decide(held: Sequence[HeldCheckpoints]) -> Stamp | None:
    """Return the checkpoint that all processes go on from; ``None``: training begins.

    Args:
        held: by each process, by rank.

    Raises:
        UsageError: a directory cannot be gone on from, was made by another number of processes, or there
            is no checkpoint that all have though there was one.
    """
    faults = [f"rank {rank}: {each.fault}" for rank, each in enumerate(held) if each.fault]
    if faults:
        raise UsageError("training cannot be resumed:\n  " + "\n  ".join(faults))
    sizes = sorted({stamp.world_size for each in held for stamp in each.stamps} - {len(held)})
    if sizes:
        raise UsageError(
            f"the checkpoints in offload_path were made by {sizes[0]} processes, and these are {len(held)}. "
            f"Start {sizes[0]}, or begin anew with resume=False. To go on with another number, start "
            f"{sizes[0]} once more, write the state with run.save(...), and read it with run.load(...)."
        )
    common = set.intersection(*(set(each.stamps) for each in held))
    if common:
        return max(common)
    if any(_was_agreed(each) for each in held):
        there = "; ".join(f"rank {rank}: {_in_words(each)}" for rank, each in enumerate(held))
        without = [rank for rank, each in enumerate(held) if not each.stamps]
        hint = f" ({ranks_in_words(without)} may have been on another machine)" if without else ""
        raise UsageError(
            f"there is no checkpoint that all {len(held)} processes have: {there}{hint}. Bring back the "
            "directories that belong together, or begin anew with resume=False."
        )
    return None


def _was_agreed(held: HeldCheckpoints) -> bool:
    """Whether all processes have had a checkpoint: the first one is agreed when any of them says so."""
    return held.agreed > 0 or any(stamp.number > 1 for stamp in held.stamps)


def _in_words(held: HeldCheckpoints) -> str:
    if not held.stamps:
        return "none"
    return " and ".join(f"number {stamp.number} ({stamp.token[:8]})" for stamp in sorted(held.stamps))
