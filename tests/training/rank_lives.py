"""Processes that train together, forked from one that has imported everything and started no thread.

``python -m tests.training.rank_lives FOLDER SCENARIO...`` leads each scenario, a function of
`tests.training.rank_scenarios`, ``rank_replicas``, ``rank_tables``, ``rank_table_rules``,
``rank_beginnings``, ``rank_gradients``, ``rank_collectives``, ``rank_shards``, ``rank_shard_checkpoints``,
``rank_shard_activations``, ``rank_shard_gathers``, ``rank_shard_machines``, ``rank_shard_steps``,
``rank_shard_values``, ``rank_parts`` or ``rank_endings``, in as many processes as its name says
(``name:PROCESSES``, 2 without), and writes what each process found, or how it failed, to
``FOLDER/NAME-PROCESSES.json``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from tests.imported_ahead import import_ahead

Scenario = Callable[[int, int, Path], object]
"""Given the rank, how many there are and a folder that all share; what it returns becomes JSON."""

TIMEOUT = timedelta(seconds=60)


def begin_group(rank: int, processes: int, store: Path) -> None:
    """Initialise the default process group, over the loopback."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    made = distributed.FileStore(str(store), processes)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=made, rank=rank, world_size=processes, timeout=TIMEOUT)


def as_torchrun(rank: int, processes: int) -> Mapping[str, str]:
    """Return the variables that torchrun gives the processes of one machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }


def lead(
    work: Callable[[int], object], processes: int, out: Path, *, ends_others: bool = True
) -> list[object]:
    """Do something in forked processes; return what each returned, or how it ended, by rank.

    Args:
        work: what each does, given its rank.
        processes: how many.
        out: what the files that they write to are called.
        ends_others: whether the first that fails ends the others, as torchrun does; if not, they are to
            notice it themselves.
    """
    children = [_fork(work, rank, out) for rank in range(processes)]
    ends: dict[int, int] = {}
    while len(ends) < processes:
        child, status = os.wait()
        ends[children.index(child)] = code = os.waitstatus_to_exitcode(status)
        if code and ends_others:
            for other in (each for rank, each in enumerate(children) if rank not in ends):
                os.kill(other, signal.SIGTERM)
    return [
        json.loads(_part(out, rank).read_text()) if _part(out, rank).exists() else f"ended with {ends[rank]}"
        for rank in range(processes)
    ]


def _part(out: Path, rank: int) -> Path:
    return out.with_suffix(f".{rank}")


def _fork(work: Callable[[int], object], rank: int, out: Path) -> int:
    _part(out, rank).unlink(missing_ok=True)
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        torch.set_num_threads(1)  # anew: the child's threads would ask for a pool that is its parent's
        _part(out, rank).write_text(json.dumps(work(rank)))
        status = 0
    finally:
        if status:
            traceback.print_exc()
            _part(out, rank).write_text(json.dumps(f"failed: {traceback.format_exc()}"))
        os._exit(status)


def main(folder: Path, names: list[str]) -> None:
    """Lead every scenario."""
    from tests.training import (
        rank_beginnings,
        rank_collectives,
        rank_endings,
        rank_gradients,
        rank_parts,
        rank_replicas,
        rank_scenarios,
        rank_shard_activations,
        rank_shard_checkpoints,
        rank_shard_gathers,
        rank_shard_machines,
        rank_shard_steps,
        rank_shard_values,
        rank_shards,
        rank_table_rules,
        rank_tables,
    )

    import_ahead()
    for name in names:
        which, _, count = name.partition(":")
        processes = int(count or 2)
        rooms = (
            rank_scenarios,
            rank_replicas,
            rank_tables,
            rank_table_rules,
            rank_beginnings,
            rank_endings,
            rank_gradients,
            rank_collectives,
            rank_shards,
            rank_parts,
            rank_shard_activations,
            rank_shard_checkpoints,
            rank_shard_gathers,
            rank_shard_values,
            rank_shard_machines,
            rank_shard_steps,
        )
        scenario: Scenario = next(getattr(each, which) for each in rooms if which in vars(each))
        place = folder / f"{which}-{processes}"
        place.mkdir()

        def work(
            rank: int, scenario: Scenario = scenario, processes: int = processes, place: Path = place
        ) -> object:
            begin_group(rank, processes, place / "group")
            found = scenario(rank, processes, place)
            distributed.barrier()
            distributed.destroy_process_group()
            return found

        found = lead(work, processes, folder / f"{which}-{processes}.out")
        (folder / f"{which}-{processes}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
