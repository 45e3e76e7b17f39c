"""What processes that train together do in tests, each in a function that every one of them calls."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import distributed, nn

from tests.training.rank_lives import as_torchrun
from tierstore.errors import TierStoreError
from tierstore.training import offload
from tierstore.units import parse_bytes

WHOLE = {"device": "cpu", "offload_cpu_size": "8MB", "offload_disk_size": "32MB"}
MODULE = "tierstore.training.ranks"


def model() -> nn.Module:
    """Return something small to train."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def refused(config: Mapping[str, object], **more: object) -> str:
    """Return what an error says that `offload` raises."""
    made = model()
    values = [each.detach().clone() for each in made.parameters()]
    try:
        offload(made, None, config, **more).close()  # type: ignore[arg-type]
    except TierStoreError as error:
        assert all(map(torch.equal, made.parameters(), values))
        return f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', ()))}"
    return "opened"


def shares(rank: int, processes: int, folder: Path) -> object:
    """Each has its share of the quotas, and a directory of its own; told by torchrun, or counted."""
    found: dict[str, object] = {}
    for name, environment in (("told", as_torchrun(rank, processes)), ("counted", {})):
        os.environ.update(environment)
        with offload(model(), None, {**WHOLE, "offload_path": str(folder / name)}) as run:
            tiers = run.store.stats().tiers
            found[name] = {tier: stats.capacity_bytes for tier, stats in tiers.items()}
            distributed.barrier()
            found[f"{name} directories"] = sorted(each.name for each in (folder / name).iterdir())
        for key in environment:
            del os.environ[key]
    one = {**WHOLE, "device": "emulated", "max_device_memory": "1MB", "offload_path": str(folder / "one")}
    with offload(model(), None, one) as run:
        found["device"] = {"device": run.store.config.tiers[0].capacity_bytes}
    own = {**WHOLE, "offload_path": str(folder / "own" / f"rank-{rank}")}
    with offload(model(), None, own):
        distributed.barrier()
        found["own directories"] = sorted(each.name for each in (folder / "own").iterdir())
    with offload(model(), None, {**WHOLE, "offload_path": str(folder / f"alone-{rank}")}, alone=True) as run:
        found["alone"] = run.store.stats().tiers["host"].capacity_bytes
    free = {
        key: value for key, value in WHOLE.items() if key not in ("offload_cpu_size", "offload_disk_size")
    }
    with offload(model(), None, {**free, "offload_path": str(folder / "free")}) as run:
        found["free"] = {tier: stats.capacity_bytes for tier, stats in run.store.stats().tiers.items()}
    return found


def faults(rank: int, processes: int, folder: Path) -> object:
    """What is wrong of them together is raised by all, in the same words, and nothing has changed."""
    path = {"offload_path": str(folder)}
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 2
    found = {
        "quotas": refused({**WHOLE, **path, "offload_cpu_size": f"{8 + rank}MB"}),
        "device": refused(
            {**WHOLE, **path, "device": "emulated", "max_device_memory": f"{1 + rank}MB"},
        ),
        "settings": refused({**WHOLE, **path, "checksum": rank == 0, "eviction": ["lru", "next-use"][rank]}),
        "resume": refused({**WHOLE, **path}, resume=rank == 0),
        "ignored": refused({**WHOLE, **path}, ignored=[["0"], ["2"]][rank]),
        "another's directory": refused({**WHOLE, "offload_path": str(folder / "rank-0")}),
        "nothing": refused({**WHOLE, **path, "offload_cpu_size": 1}),
        "more than there is": refused({**WHOLE, **path, "offload_cpu_size": total}),
        "too small": refused({**WHOLE, **path, "offload_cpu_size": "4KB", "offload_disk_size": 0}),
    }
    assert not [each for each in folder.iterdir() if each.name.startswith("rank") and any(each.glob("*.bin"))]
    with offload(model(), None, {**WHOLE, **path}) as run:  # they still meet
        run.store.check()
    return found


def before_the_group(rank: int, processes: int, folder: Path) -> object:
    """Without a process group torchrun's variables count; checkpoints need the group."""
    distributed.destroy_process_group()
    os.environ.update(as_torchrun(rank, processes))
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tierstore").addHandler(handler)
    path = {"offload_path": str(folder / "files")}
    with offload(model(), None, {**WHOLE, **path}) as run:
        host = run.store.stats().tiers["host"].capacity_bytes
    durable = refused({**WHOLE, **path, "durable": True})
    os.environ["RANK"] = "two"
    wrong = refused({**WHOLE, **path})
    os.environ.update(as_torchrun(rank, 1))
    with offload(model(), None, {**WHOLE, "offload_path": str(folder / f"single-{rank}")}) as run:
        single = run.store.stats().tiers["host"].capacity_bytes
    from tests.training.rank_lives import begin_group

    begin_group(rank, processes, folder / "again")
    return {"host": host, "durable": durable, "wrong": wrong, "single": single, "messages": messages}


def one_that_does_not_come(rank: int, processes: int, folder: Path) -> object:
    """One ends instead of coming; the others say so."""
    if rank == 0:
        (folder / "said").write_text(refused({**WHOLE, "offload_path": str(folder)}))
    os._exit(0)


def nothing_with_one(rank: int, processes: int, folder: Path) -> object:
    """With one process nothing of it is imported, and the directory is the one that was given."""
    with offload(model(), None, {**WHOLE, "offload_path": str(folder / "files")}) as run:
        run.store.stats()
        files = [each.name for each in (folder / "files").iterdir()]
    host = parse_bytes(WHOLE["offload_cpu_size"])
    return {
        "imported": [name for name in sys.modules if name.startswith(MODULE)],
        "files": files,
        "host": host,
    }
