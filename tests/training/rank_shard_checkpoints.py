"""What other processes do with a distributed checkpoint of sharded ones: fewer of them, and one alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future as Written

from tests.training.rank_shards import CASES, Deep, Life, build, differences, offloaded, raw, train
from tierstore.errors import CapacityError
from tierstore.testing.memory import DeviceBudget
from tierstore.training import offload

CASE = replace(CASES["clipped"], tiers="disk")
ALONE: Mapping[str, object] = {"device": "cpu", "offload_cpu_size": "200KB", "offload_disk_size": "16MB"}
"""Of one process that has the whole: 530 KB with its state."""

Whole = dict[str, str]
"""Of all shards together, by name, the bytes as hexadecimal text."""


def shards_left(rank: int, processes: int, folder: Path) -> object:
    """Train in tiers, and leave a distributed checkpoint; return what it has to come to elsewhere."""
    life = build(CASE, processes)
    with offloaded(life, CASE, folder):
        train(life, CASE, 2, rank)
        writer = FileSystemWriter(folder / "saved", single_file_per_rank=False)
        save(state_of(life), storage_writer=writer)
        return whole_of(life)


def state_of(life: Life) -> dict[str, Any]:
    """Return what a distributed checkpoint has of a life."""
    model, optimizer = get_state_dict(life.model, life.optimizer)
    return {"model": model, "optimizer": optimizer}


def take_over(life: Life, path: Path) -> None:
    """Read a distributed checkpoint as the manual of PyTorch says."""
    state = state_of(life)
    load(state, checkpoint_id=path)
    set_state_dict(
        life.model, life.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def whole_of(life: Life) -> Whole:
    """Return parameters and state as a whole, by their names; all processes."""
    found = {}
    for name, parameter in life.model.named_parameters():
        found[name] = _gathered(parameter)
        for entry, value in life.optimizer.state.get(parameter, {}).items():
            found[f"{name} {entry}"] = _gathered(value)
    return found


def _gathered(value: torch.Tensor) -> str:
    return raw(value.full_tensor() if isinstance(value, DTensor) else value).hex()


def left_by(folder: Path, processes: int) -> Path:
    """Return where `shards_left` of as many processes has left its checkpoint."""
    return folder.parent / f"shards_left-{processes}" / "saved"


def shards_reread(rank: int, processes: int, folder: Path) -> object:
    """Two processes read what four have left, each twice: in tiers and without, and both go on."""
    lives = build(CASE, processes), build(CASE, processes)
    for life in lives:
        train(life, CASE, 1, rank)  # else PyTorch makes gradients of zeros, to have state to load into
    take_over(lives[0], left_by(folder, 4))
    with offloaded(lives[1], CASE, folder) as run:
        read, peak_bytes = _metered(lambda: take_over(lives[1], left_by(folder, 4)), lives[1])
        here = [each for each in lives[1].model.parameters() if type(each) is DTensor]
        run.store.check()
        for life in lives:
            train(life, CASE, 2, rank, 2)
    return {
        "read": read,
        "peak": peak_bytes,
        "here": len(here),
        "goes on": (lives[0].losses, whole_of(lives[0])) == (lives[1].losses, whole_of(lives[1])),
    }


def alone_reread(rank: int, processes: int, folder: Path) -> object:
    """One process without FSDP reads what four have left, in tiers of a third of it and without."""
    lives = _alone(), _alone()
    for life in lives:
        _train_alone(life)  # as above
    take_over(lives[0], left_by(folder, 4))
    given = {**ALONE, "offload_path": str(folder / "run")}
    with offload(lives[1].model, lives[1].optimizer, given) as run:
        writer = FileSystemWriter(folder / "saved", single_file_per_rank=False)
        with run.late_state_dicts():
            read, peak_bytes = _metered(lambda: take_over(lives[1], left_by(folder, 4)), lives[1])
            _, saved_bytes = _metered(lambda: save(state_of(lives[1]), storage_writer=writer), lives[1])
        here = [each for each in lives[1].model.parameters() if type(each) is nn.Parameter]
        run.store.check()
        for life in lives:
            _train_alone(life)
    again = _alone()
    take_over(again, folder / "saved")
    return {
        "read": read,
        "saved": whole_of(again) == read,
        "peak": max(peak_bytes, saved_bytes),
        "here": len(here),
        "goes on": (lives[0].losses, whole_of(lives[0])) == (lives[1].losses, whole_of(lives[1])),
    }


class WaitingWriter(FileSystemWriter):
    """Writes when it is let to.

    Args:
        path: of the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, single_file_per_rank=False)
        self.is_let = threading.Event()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Written[list[WriteResult]]:
        """Wait, and write."""
        assert self.is_let.wait(60)
        return super().write_data(plan, planner)


def shards_saved_aside(rank: int, processes: int, folder: Path) -> object:
    """``async_save``: what is written while training goes on is what there was when it was called."""
    group: Any = distributed.new_group()
    plain = build(CASE, processes)
    train(plain, CASE, 2, rank)
    before = whole_of(plain)
    train(plain, CASE, 2, rank, 2)
    found: dict[str, object] = {}
    for stager, tiers in (("writer", "disk"), ("default", "host"), ("default", "disk")):
        life, place = build(CASE, processes), folder / f"{stager} {tiers}"
        writer = WaitingWriter(place / "saved")
        staging: AsyncStager | None = None if stager == "writer" else DefaultStager(_PLAINLY)
        with offloaded(life, replace(CASE, tiers=tiers), place):
            train(life, CASE, 2, rank)
            try:
                saved = async_save(
                    state_of(life), storage_writer=writer, async_stager=staging, process_group=group
                )
            except CapacityError as error:
                saved = None
                found[f"refused {place.name}"] = " ".join(error.__notes__)
            train(life, CASE, 2, rank, 2)
            writer.is_let.set()
            if saved is not None:
                assert isinstance(saved, Future)
                saved.result()
        found[f"differs {place.name}"] = differences(plain, life)
        if saved is not None:
            read = build(CASE, processes)
            take_over(read, place / "saved")
            found[f"saved {place.name}"] = whole_of(read) == before
    return found


_PLAINLY = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)
"""What ``async_save`` stages with if it is given a path alone."""


# ---------------------------------------------------------------------- what they share


def _alone() -> Life:
    torch.manual_seed(1)
    model = Deep()
    return Life(model, torch.optim.Adam(model.parameters()))


def _train_alone(life: Life) -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        loss = life.model(torch.randn(4, 7, generator=generator)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(life.model.parameters(), 0.5)
        life.losses.append(float(loss.detach()))
        life.optimizer.step()
        life.optimizer.zero_grad()


def _metered(act: Callable[[], None], life: Life) -> tuple[Whole, int]:
    """Do something; return what the life is then, and the most that the program had of its own meanwhile."""
    with DeviceBudget("64MB") as meter:
        act()
        peak_bytes = meter.peak_bytes
    return whole_of(life), peak_bytes
