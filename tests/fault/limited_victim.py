"""Trains, may have no more memory from then on, and leaves a run whose state is several times what is left.

``python -m tests.fault.limited_victim FOLDER [CGROUP]``: says in ``FOLDER/outcome.json`` what came of it.  It
limits its addresses, or, as containers do, the memory of the cgroup, which it goes into.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tierstore.errors import StoreClosed
from tierstore.training import Offload, offload

LIMIT_BYTES = 40 * 1024**2  # above what the process has when it has trained
WIDTH = 1000
LAYERS = 12  # of 4 MB; with Adam's state three times that: 3.6 times what is left


def main(folder: Path, cgroup: Path | None) -> None:
    """Train, try to bring everything back, leave the run as it wants by itself, and tell what came of it."""
    if cgroup is not None:
        (cgroup / "cgroup.procs").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    said: list[str] = []
    logging.getLogger("tierstore").addHandler(_Keep(said))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    config: dict[str, Any] = {
        "device": "cpu",
        "offload_cpu_size": "24MB",
        "offload_disk_size": "512MB",
        "offload_path": str(folder / "files"),
        "host_mem_block_size": "8MB",
        "durable": True,
    }
    run = offload(model, optimizer, config, weights=folder / "weights.safetensors")
    outcome: dict[str, object] = {"steps": [_step(model, optimizer) for _ in range(2)]}
    run.checkpoint()
    if cgroup is None:
        _limit()  # not before: stacks of threads count as well
        outcome |= _try_to_restore(run, model, optimizer, folder)
    else:
        _limit_memory(cgroup)
    outcome |= _leave(run, model)
    outcome["said"] = said
    (folder / "outcome.json").write_text(json.dumps(outcome))


class _Keep(logging.Handler):
    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())


def _limit() -> None:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    mapped = re.search(r"VmData:\s+(\d+) kB", status)
    assert mapped is not None
    bound_bytes = int(mapped[1]) * 1024 + LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (bound_bytes, resource.RLIM_INFINITY))


def _limit_memory(cgroup: Path) -> None:
    is_first_version = (cgroup / "memory.limit_in_bytes").exists()
    used, limit = ("usage_in_bytes", "limit_in_bytes") if is_first_version else ("current", "max")
    used_bytes = int((cgroup / f"memory.{used}").read_text())
    (cgroup / f"memory.{limit}").write_text(str(used_bytes + LIMIT_BYTES))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(torch.linspace(-1, 1, WIDTH).view(1, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def _try_to_restore(
    run: Offload, model: nn.Sequential, optimizer: torch.optim.Optimizer, folder: Path
) -> dict[str, object]:
    found: dict[str, object] = {}
    try:
        run.close(restore=True)
    except MemoryError as error:
        found["failed"] = f"{type(error).__name__}: {error}"
    found["after"] = _step(model, optimizer)
    run.save(folder / "saved")
    return found


def _leave(run: Offload, model: nn.Sequential) -> dict[str, object]:
    found: dict[str, object] = {}
    run.close()
    weight = model[0].weight
    try:
        weight.sum()  # type: ignore[operator]
    except StoreClosed as error:
        found["placeholder"] = str(error)
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
