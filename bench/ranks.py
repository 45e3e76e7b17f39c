"""Processes of one group (gloo) on this machine: each is a module of the benchmarks, run as a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed

from bench.command import UnmeasurableError


def found_by_ranks(
    script: str, folder: Path, processes: int, words: Sequence[str], threads: int = 1
) -> list[Any]:
    """Start the processes, ``SCRIPT FOLDER RANK PROCESSES WORDS...``; return what each has left, by rank.

    Args:
        script: the path of the module.
        folder: which is made; each process leaves its ``RANK.json`` there.
        processes: how many.
        words: what they are given beside.
        threads: of each.

    Raises:
        UnmeasurableError: there can be no processes.
        RuntimeError: one of them failed.
    """
    if not distributed.is_available():
        raise UnmeasurableError("PyTorch was built without torch.distributed")
    folder = folder.absolute()
    folder.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, script, str(folder), str(rank), str(processes), *words],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        for rank in range(processes)
    ]
    ends = [each.wait() for each in started]
    if any(ends):
        raise RuntimeError(f"the processes ended with {ends}")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


def join_group(folder: Path, rank: int, processes: int) -> None:
    """Be one of the processes from now on."""
    store = vars(distributed)["FileStore"](str(folder / "group"), processes)
    timeout = timedelta(minutes=10)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=processes, timeout=timeout)


def leave_group(folder: Path, rank: int, found: object) -> None:
    """Leave what this process has found, and end when all have."""
    (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()
