"""Gathers and sums in memory that processes share: of any sizes, held for any time, or not possible."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from tests.training.rank_shards import CASES, build, differences, offloaded, train
from tierstore import torch_private
from tierstore.training import offload
from tierstore.training.sharding import shared_reductions, shared_segments
from tierstore.training.sharding.found import param_groups_of, sharded_modules
from tierstore.training.sharding.shared_gathers import SharedGather
from tierstore.training.sharding.shared_reductions import SharedReduction, Stretch
from tierstore.training.sharding.shared_segments import Segment

_ROUNDS = 150
_DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.complex64)
_MOST_HELD = 7
MODELS = ("plain", "kept after forward", "prefetched by FSDP", "mixed precision, accumulated")


@dataclass
class Counted:
    """Times that processes communicate FSDP's own way, as long as ``patch`` lasts."""

    times: int = 0

    @classmethod
    def of(cls, patch: pytest.MonkeyPatch, kind: type[Any]) -> Counted:
        """Count the calls of FSDP's ``kind``."""
        found, own = cls(), kind.__call__

        def call(self: object, *given: object, **named: object) -> object:
            found.times += 1
            return own(self, *given, **named)

        patch.setattr(kind, "__call__", call)
        return found


class SomebodysGather(torch_private.fsdp_own_gather()):  # type: ignore[misc]
    """A way to gather that users have set."""


def group_of_all() -> distributed.ProcessGroup:
    """Return the group of all processes."""
    group: Any = distributed.group.WORLD
    return group  # type: ignore[no-any-return]


def _gather(way: SharedGather, numel: int, dtype: torch.dtype, value: int, *, is_async: bool) -> torch.Tensor:
    """Gather a part of each process's, filled with what tells process and round."""
    rank, processes = distributed.get_rank(), distributed.get_world_size()
    whole = way.allocate((processes * numel,), dtype=dtype, device=torch.device("cpu"))
    assert whole.shape == (processes * numel,)
    assert whole.dtype == dtype
    part = whole.narrow(0, rank * numel, numel)
    part.fill_((value + rank) % 251)
    work = way(output_tensor=whole, input_tensor=part, group=group_of_all(), async_op=is_async)
    assert (work is not None) == is_async
    if work is not None:
        work.wait()
    return whole.view(processes, numel)


def _is_whole(found: torch.Tensor, value: int) -> bool:
    expected = torch.tensor([(value + rank) % 251 for rank in range(len(found))]).to(found.dtype)
    return bool((found == expected[:, None]).all())


def gathers_of_any_sizes(rank: int, processes: int, folder: Path) -> object:
    """Gather at random; each process lets go of what was gathered at times of its own."""
    common, mine = random.Random(7), random.Random(100 + rank)
    way = SharedGather(group_of_all(), "one")
    held: list[tuple[torch.Tensor, int]] = []
    wrong = 0
    with pytest.MonkeyPatch.context() as patch:
        own = Counted.of(patch, torch_private.fsdp_own_gather())
        for turn in range(_ROUNDS):
            # Sizes grow in the end: segments that are too small by then go.
            numel, dtype = common.choice([0, 1, 3, 1000, 40_000, 4000 + 1000 * turn]), common.choice(_DTYPES)
            held.append((_gather(way, numel, dtype, turn, is_async=common.random() < 0.3), turn))
            wrong += sum(not _is_whole(*each) for each in held)
            if len(held) > _MOST_HELD or mine.random() < 0.5:
                mine.shuffle(held)
                del held[mine.randrange(len(held) + 1) :]
    return {"wrong": wrong, "own": own.times, "turns": _ROUNDS}


# ---------------------------------------------------------------------- where they cannot share


def gathers_elsewhere(rank: int, processes: int, folder: Path) -> object:
    """What each obstacle leaves of sharing: how many of 12 gathers go FSDP's own way, and what is wrong."""
    found: dict[str, object] = {}
    for name, (fault, at) in _FAULTS.items():
        with pytest.MonkeyPatch.context() as patch:
            way = SharedGather(group_of_all(), fault(patch, rank, at) or "one")
            own = Counted.of(patch, torch_private.fsdp_own_gather())
            held: list[tuple[torch.Tensor, int]] = []
            for turn in range(12):  # three are held at once at most
                held.append((_gather(way, 500, torch.float32, turn, is_async=False), turn))
                if turn % 3 == 2:
                    wrong = [value for whole, value in held if not _is_whole(whole, value)]
                    assert not wrong, wrong
                    held.clear()
            found[name] = own.times
    found["open files"] = [each for each in _open_files() if "tierstore" in each]
    return found


def _open_files() -> list[str]:
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found.append(str(each.readlink()))
    return found


def _no_such_files(patch: pytest.MonkeyPatch, rank: int, at: int) -> None:
    """The system has no files without a name."""
    patch.delattr(os, "memfd_create")


def _another_file(patch: pytest.MonkeyPatch, rank: int, at: int) -> None:
    """By the name that it is given the last process opens another file."""
    real = os.open

    def opened(path: str, *how: int) -> int:
        if path.startswith("/proc/") and rank == distributed.get_world_size() - 1:
            return os.memfd_create("another")
        return real(path, *how)

    patch.setattr(os, "open", opened)


def _no_room(patch: pytest.MonkeyPatch, rank: int, at: int) -> None:
    """There is no memory for the segment with this number."""
    real, calls = os.posix_fallocate, [0]

    def allocate(*given: int) -> None:
        calls[0] += 1
        if calls[0] > at:
            raise OSError(errno.ENOSPC, "no space left on device")
        real(*given)

    patch.setattr(os, "posix_fallocate", allocate)


def _no_mapping(patch: pytest.MonkeyPatch, rank: int, at: int) -> None:
    """The last process cannot map the segment with this number."""
    real, calls = Segment, [0]

    def mapped(file: int, nbytes: int) -> Segment:
        calls[0] += 1
        if calls[0] > at and rank == distributed.get_world_size() - 1:
            raise OSError(errno.ENOMEM, "cannot allocate memory")
        return real(file, nbytes)

    patch.setattr(shared_segments, "Segment", mapped)


def _other_machine(patch: pytest.MonkeyPatch, rank: int, at: int) -> str:
    """The last process is on another machine."""
    return "other" if rank == distributed.get_world_size() - 1 else "one"


def _nothing(patch: pytest.MonkeyPatch, rank: int, at: int) -> None:
    """Nothing is wrong."""


_Fault = Callable[[pytest.MonkeyPatch, int, int], str | None]
_FAULTS: Mapping[str, tuple[_Fault, int]] = {
    "nothing": (_nothing, 0),
    "no room": (_no_room, 0),
    "no room for the third": (_no_room, 2),
    "no mapping": (_no_mapping, 0),
    "no mapping of the third": (_no_mapping, 2),
    "another machine": (_other_machine, 0),
    "no such files": (_no_such_files, 0),
    "another file": (_another_file, 0),
}


# ---------------------------------------------------------------------- sums


def sums_of_any_sizes(rank: int, processes: int, folder: Path) -> object:
    """Reduce at random as FSDP does and as gloo does: how many differ, and how many went FSDP's own way."""
    common, mine = random.Random(11), random.Random(200 + rank)
    way = SharedReduction(group_of_all(), "one")
    held: list[torch.Tensor] = []
    differ, most_bytes = [], 1 << 20
    with pytest.MonkeyPatch.context() as patch:
        own = Counted.of(patch, torch_private.fsdp_own_reduction())
        for turn in range(_ROUNDS):
            dtype = common.choice(_SUMMED)
            numel = common.choice([0, 1, 3, 7, 1000, common.randrange(1, 3000), common.randrange(1, 90_000)])
            if turn % 25 == 24:  # gloo cuts these into more segments
                numel = 2 * most_bytes // dtype.itemsize + common.randrange(1000)
            op = common.choice(_OPERATIONS if dtype.is_floating_point else _OPERATIONS[:2])
            values = torch.Generator().manual_seed(1000 * turn + rank)
            given = torch.randn(processes * numel, generator=values, dtype=torch.float64).to(dtype)
            ours, theirs = _reduced(way, given, op), given.new_empty(numel)
            distributed.reduce_scatter_tensor(theirs, given.clone(), op=op)
            if not torch.equal(ours[1], theirs):
                differ.append([turn, numel, str(dtype), str(op)])
            held.append(ours[0])
            if len(held) > 1 or mine.random() < 0.5:  # FSDP keeps one until the next
                held.clear()
    return {"differ": differ, "own": own.times, "turns": _ROUNDS}


_SUMMED = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32)
_OPERATIONS = (distributed.ReduceOp.SUM, distributed.ReduceOp.MAX, distributed.ReduceOp.AVG)


def _reduced(
    way: SharedReduction,
    given: torch.Tensor,
    op: Any,  # noqa: ANN401 - no class of PyTorch's
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what was reduced, and this process's part of the outcome, as FSDP asks for them."""
    cpu = torch.device("cpu")
    whole = way.allocate(given.shape, dtype=given.dtype, device=cpu)
    whole.copy_(given)
    part = way.allocate((len(given) // distributed.get_world_size(),), dtype=given.dtype, device=cpu)
    if (work := way(part, whole, group_of_all(), op)) is not None:
        work.wait()
    assert torch.equal(whole, given)
    return whole, part


def sums_in_another_order(rank: int, processes: int, folder: Path) -> object:
    """One process finds that gloo adds in another order: which ways a run has then."""
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for each in (*model, model):
        fully_shard(each)
    config = {"device": "cpu", "offload_cpu_size": "4MB", "offload_path": str(folder)}
    real = shared_reductions.stretches

    def another(numel: int, itemsize: int, rank_of: int, count: int) -> Iterator[Stretch]:
        for each in real(numel, itemsize, rank_of, count):
            yield Stretch(each.start, each.stop, each.order[::-1] if rank == 1 else each.order)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_reductions, "stretches", another)
        with offload(model, None, config):
            return sorted({type(each).__name__ for each in _ways(model)})


# ---------------------------------------------------------------------- of models


def gathers_of_models(rank: int, processes: int, folder: Path) -> object:
    """Which models' shards are gathered so, and that it ends with the run."""
    found: dict[str, object] = {}
    for name in MODELS:
        case = CASES[name]
        plain, ours = build(case, processes), build(case, processes)
        (place := folder / name.replace(" ", "-")).mkdir(exist_ok=True)
        with offloaded(ours, case, place):
            ways = set(_ways(ours.model))
            for each in (plain, ours):
                train(each, case, 3, rank)
            segments = [len(way._segments) for way in ways]
        found[name] = [
            differences(plain, ours),
            sorted(type(each).__name__ for each in ways),
            segments,
            {type(each).__name__ for each in _ways(ours.model)}
            == {"DefaultAllGather", "DefaultReduceScatter"},
        ]
    found["by hand"] = _gathered_by_hand(rank, processes, folder)
    return found


def _ways(model: Any) -> list[Any]:  # noqa: ANN401 - FSDP's class
    """Return the ways in which FSDP gathers and reduces for each of its groups."""
    return [
        way
        for _, module in sharded_modules(model)
        for group in param_groups_of(module._get_fsdp_state())
        for way in (group._all_gather_comm, group._reduce_scatter_comm)
    ]


def _gathered_by_hand(rank: int, processes: int, folder: Path) -> object:
    """More layers are gathered at once than there are segments, and one module has a way of its own."""
    case = CASES["plain"]
    plain, ours = build(case, processes), build(case, processes)
    ours.model.set_custom_all_gather(SomebodysGather())
    (place := folder / "by-hand").mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, offloaded(ours, case, place):
        theirs = Counted.of(patch, SomebodysGather)
        for life in (plain, ours):
            handles = [each.unshard(async_op=True) for each in life.model.layers]
            for handle in handles:
                if handle is not None:
                    handle.wait()
            train(life, case, 2, rank)
        kinds = [type(each).__name__ for each in _ways(ours.model)]
    after = [type(each).__name__ for each in _ways(ours.model)]
    name = SomebodysGather.__name__
    return [differences(plain, ours), kinds.count(name), after.count(name), theirs.times > 0]


def gathers_wait_for_nobody(rank: int, processes: int, folder: Path) -> object:
    """One process gathers ahead before it tells the other one what to do: both go on."""
    case = CASES["plain"]
    plain, ours = build(case, processes), build(case, processes)
    (place := folder / "ahead").mkdir(exist_ok=True)
    with offloaded(ours, case, place):
        for _ in range(2):  # with no segment yet, and with some
            for life in (plain, ours):
                layers = life.model.layers
                if rank == 0:
                    handles = [each.unshard(async_op=True) for each in layers]
                    distributed.send(torch.ones(1), 1)
                else:
                    distributed.recv(torch.ones(1), 0)
                    handles = [each.unshard(async_op=True) for each in layers]
                for handle in handles:
                    handle.wait()
                train(life, case, 2, rank)
    return differences(plain, ours)


def gathers_amid(rank: int, processes: int, folder: Path) -> object:
    """Another default device, warnings that are errors, and settings of FSDP's for its own gathers."""
    case = CASES["plain"]
    plain, ours = build(case, processes), build(case, processes)
    (place := folder / "amid").mkdir(exist_ok=True)
    with offloaded(ours, case, place), warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        for life in (plain, ours):
            train(life, case, 1, rank)
            with torch.device("meta"):
                life.losses.append(float(life.model(torch.ones(2, 7, device="cpu")).sum()))
            life.model.set_allocate_memory_from_process_group_for_comm(False)
            train(life, case, 1, rank, 1)
        kinds = sorted({type(each).__name__ for each in _ways(ours.model)})
    return [differences(plain, ours), kinds]


def gathers_alone(rank: int, processes: int, folder: Path) -> object:
    """A run that is none of the others', and one whose groups are others after forward, share nothing."""
    found = []
    for alone, reshards in ((True, True), (False, 2)):
        model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        for each in (*model, model):
            fully_shard(each, reshard_after_forward=reshards)
        (place := folder / f"{rank}-{alone}").mkdir(exist_ok=True)
        config = {"device": "cpu", "offload_cpu_size": "4MB", "offload_path": str(place)}
        with offload(model, None, config, alone=alone):
            found.append(sorted({type(each).__name__ for each in _ways(model)}))
    return found
