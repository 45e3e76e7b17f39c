"""What processes that train together do in tests, each in a function that every one of them calls."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import distributed, nn

from tests.training.rank_lives import as_torchrun
from tierstore.errors import BackendError, TierStoreError
from tierstore.training import Offload, offload
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


def directories_of_all(folder: Path) -> list[str]:
    """Return what a folder holds while all have their runs open: one that ends removes its own."""
    distributed.barrier()
    names = sorted(each.name for each in folder.iterdir())
    distributed.barrier()
    return names


def shares(rank: int, processes: int, folder: Path) -> object:
    """Each has its share of the quotas, and a directory of its own; told by torchrun, or counted."""
    found: dict[str, object] = {}
    for name, environment in (("told", as_torchrun(rank, processes)), ("counted", {})):
        os.environ.update(environment)
        with offload(model(), None, {**WHOLE, "offload_path": str(folder / name)}) as run:
            tiers = run.store.stats().tiers
            found[name] = {tier: stats.capacity_bytes for tier, stats in tiers.items()}
            found[f"{name} directories"] = directories_of_all(folder / name)
        for key in environment:
            del os.environ[key]
    one = {**WHOLE, "device": "emulated", "max_device_memory": "1MB", "offload_path": str(folder / "one")}
    with offload(model(), None, one) as run:
        found["device"] = {"device": run.store.config.tiers[0].capacity_bytes}
    own = {**WHOLE, "offload_path": str(folder / "own" / f"rank-{rank}")}
    with offload(model(), None, own):
        found["own directories"] = directories_of_all(folder / "own")
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
    """One ends instead of coming, but only once the other one has connected to it, which says so then."""
    if rank:
        distributed.recv(torch.empty(1), 0)
    else:
        distributed.send(torch.ones(1), 1)
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


# ---------------------------------------------------------------------- checkpoints

DURABLE = {**WHOLE, "durable": True}


def begun(config: Mapping[str, object], **more: object) -> tuple[nn.Module, Offload]:
    """Offload something small with an optimizer that has state."""
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    return made, offload(made, optimizer, config, **more)  # type: ignore[arg-type]


def add_one(made: nn.Module) -> None:
    """Change every parameter."""
    with torch.no_grad():
        for each in made.parameters():
            each.add_(1)


def total(made: nn.Module) -> float:
    """Return what tells one state from another."""
    return float(sum(each.detach().double().sum() for each in made.parameters()))


def one_cannot(rank: int, processes: int, folder: Path) -> object:
    """A process that cannot make a checkpoint keeps the others from it; the former one stays."""
    config = {**DURABLE, "offload_path": str(folder / "files")}
    made, run = begun(config)
    run.checkpoint({"at": 0})
    found: dict[str, object] = {"before": total(made)}
    held = None
    for name, extra in (("wrong extra", {"at": object()}), ("in use", {"at": 1})):
        add_one(made)
        if rank == 1 and name == "in use":
            held = made[0].weight.detach()  # type: ignore[index]
        try:
            run.checkpoint(extra if rank == 1 else {"at": 1})
            found[name] = "made"
        except TierStoreError as error:
            found[name] = f"{type(error).__name__}: {error}"
    held = None
    flush, run.store.flush = run.store.flush, _broken if rank == 1 else run.store.flush  # type: ignore[method-assign]
    try:
        run.checkpoint({"at": 2})
    except TierStoreError as error:
        found["broken"] = f"{type(error).__name__}: {error}"
    run.store.flush = flush  # type: ignore[method-assign]
    assert held is None
    run.close(restore=False)
    made, run = begun(config)
    found["after"] = total(made)
    found["resumed"] = None if run.resumed is None else (run.resumed.checkpoints, run.resumed.extra["at"])
    run.checkpoint({"at": 3})
    add_one(made)
    run.checkpoint({"at": 4})
    keys = sorted(key for key in run.store if key.startswith("training/"))
    run.close(restore=False)
    _, run = begun(config)
    found["last"] = None if run.resumed is None else (run.resumed.checkpoints, run.resumed.extra["at"])
    found["keys"] = [keys, sorted(key for key in run.store if key.startswith("training/"))]
    run.close()
    return found


def _broken(*_: object, **__: object) -> None:
    raise BackendError("the disk is gone")


def checkpoints_for_two(rank: int, processes: int, folder: Path) -> object:
    """Two checkpoints, for another number of processes to find."""
    made, run = begun({**DURABLE, "offload_path": str(folder.parent / "left")})
    run.checkpoint({"at": 1})
    add_one(made)
    run.checkpoint({"at": 2})
    found = total(made)
    run.close(restore=False)
    return found


def others_than_before(rank: int, processes: int, folder: Path) -> object:
    """Other processes than those that made the checkpoints: said by all."""
    left = folder.parent / "left"
    found: dict[str, object] = {"size": refused({**DURABLE, "offload_path": str(left)})}
    if processes == 2:
        distributed.barrier()
        if rank == 0:
            (left / "rank-1").rename(left / "away")
        distributed.barrier()
        found["lost"] = refused({**DURABLE, "offload_path": str(left)})
        distributed.barrier()
        if rank == 0:
            shutil.rmtree(left / "rank-1", ignore_errors=True)
            (left / "rank-0").rename(left / "rank-1")
            (left / "away").rename(left / "rank-0")
        distributed.barrier()
        found["swapped"] = refused({**DURABLE, "offload_path": str(left)})
        _, run = begun({**DURABLE, "offload_path": str(left)}, resume=False)
        found["anew"] = run.resumed is None
        run.checkpoint({"at": 3})
        run.close(restore=False)
        _, run = begun({**DURABLE, "offload_path": str(left)})
        found["after"] = None if run.resumed is None else run.resumed.extra["at"]
        run.close()
    return found


def one_of_two(rank: int, processes: int, folder: Path) -> object:
    """One process does not begin anew beside what two have left, and goes on in the directory of one."""
    left = folder.parent / "left"
    found: dict[str, object] = {"beside": refused({**DURABLE, "offload_path": str(left)})}
    made, run = begun({**DURABLE, "offload_path": str(left / "rank-0")})
    found["within"] = None if run.resumed is None else run.resumed.extra["at"]
    found["total"] = total(made)
    run.close()
    return found


def group_beside(rank: int, processes: int, folder: Path) -> object:
    """Where the default group does no gloo on the CPU, a group beside it does, as long as the run lasts."""
    ask = distributed.get_backend_config
    distributed.get_backend_config = lambda group=None: "cuda:nccl"
    try:
        _, run = begun({**DURABLE, "offload_path": str(folder / "files")})
        own = run._ranks.meeting._own if run._ranks is not None and run._ranks.meeting is not None else None
        run.checkpoint({"at": 1})
        run.close()
        run.close()
        assert own is not None
        try:
            distributed.get_rank(own)
        except ValueError:
            return "ended"
    finally:
        distributed.get_backend_config = ask
    return "goes on"
