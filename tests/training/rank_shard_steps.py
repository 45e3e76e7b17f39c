"""Steps of shards made during backward: whatever comes between backward and step, nobody can tell."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from tests.sampling import tried
from tests.training.ahead_loops import count_on, quiet_step
from tests.training.rank_shards import Life, differences, raw
from tests.training.test_ahead import BETWEEN, KINDS, Between, aliases
from tests.training.twins import Trial, blocks, config_of
from tierstore.training import offload
from tierstore.training.optimizers import steps_by_bundle
from tierstore.training.optimizers.step_units import one_by_one_of


def shard_steps_on_local_tensors(rank: int, processes: int, folder: Path) -> object:
    """How many bundles were stepped on local tensors, and how many as they are, by where a gradient lies."""
    found: dict[str, list[int]] = {}
    for name, act in (("alike", nothing), ("elsewhere", assign_gradients_that_lie_elsewhere)):
        trial = _built("adam")
        (place := folder / name).mkdir(exist_ok=True)
        with (
            pytest.MonkeyPatch.context() as patch,
            offload(trial.model, trial.optimizers, config_of("host", place)),
        ):
            counts = [_counted(patch, each) for each in ("only_local", "only")]
            _trained(trial, act, rank)
        found[name] = [len(each) for each in counts]
    return found


def _counted(patch: pytest.MonkeyPatch, name: str) -> list[object]:
    """Count the calls of one way to show an optimizer a bundle."""
    calls: list[object] = []
    act = getattr(steps_by_bundle, name)

    def counted(*given: object) -> object:
        calls.append(given)
        return act(*given)

    patch.setattr(steps_by_bundle, name, counted)
    return calls


def assign_gradients_that_lie_elsewhere(trial: Trial, turn: int) -> None:
    """Let each process have the whole of one gradient, which is added to a part."""
    del turn
    parameter = next(iter(trial.model.parameters()))
    assert isinstance(parameter, DTensor)
    whole = torch.full(parameter.shape, 0.25)
    parameter.grad = distribute_tensor(whole, parameter.device_mesh, [Replicate()])


def replace_state_by_what_lies_elsewhere(trial: Trial, turn: int) -> None:
    """Let each process have the whole of one moment."""
    del turn
    parameter = next(iter(trial.model.parameters()))
    assert isinstance(parameter, DTensor)
    whole = torch.full(parameter.shape, 0.5)
    moment = distribute_tensor(whole, parameter.device_mesh, [Replicate()])
    trial.optimizer.state[parameter]["exp_avg"] = moment


ACTS = [*BETWEEN, assign_gradients_that_lie_elsewhere, replace_state_by_what_lies_elsewhere]
TRIED_ACTS = tried(ACTS, always=1, of=24, name=lambda between: between.__name__)
BY_ELEMENT = [
    kind for kind in KINDS if not kind.startswith(("adafactor", "asgd", "rprop", "ftrl", "lazy", "our"))
]
"""What may step shards at all."""

TRIED_KINDS = tried(BY_ELEMENT, always=1, of=12)
_ROOM: Mapping[str, Mapping[str, object]] = {"disk": {}, "three": {"max_device_memory": "400KB"}}


def shard_steps_between(rank: int, processes: int, folder: Path) -> object:
    """Everything that may come between backward and step."""
    return {
        f"{act.__name__}, {layout}": _compared("adam", act, layout, rank, folder / f"{act.__name__}-{layout}")
        for act in TRIED_ACTS
        for layout in _ROOM
    }


def shard_steps_of_kinds(rank: int, processes: int, folder: Path) -> object:
    """Every optimizer that may step shards."""
    return {kind: _compared(kind, nothing, "disk", rank, folder / kind) for kind in TRIED_KINDS}


def shard_steps_in_lists(rank: int, processes: int, folder: Path) -> object:
    """Whether what stands for shards is stepped one by one, as they are, by what groups say of lists."""
    found: dict[str, bool] = {}
    for name in ("", "foreach", "fused"):
        optimizer = torch.optim.Adam(_sharded().parameters(), foreach=name == "foreach" or None)
        optimizer.param_groups[0]["fused"] = name == "fused" or None
        found[name] = one_by_one_of(optimizer, lambda _: True) == {id(optimizer.param_groups[0])}
    return found


def nothing(trial: Trial, turn: int) -> None:
    """Come between backward and step with nothing."""
    del trial, turn


def _compared(kind: str, act: Between, layout: str, rank: int, folder: Path) -> Mapping[str, object]:
    """Train with and without tiers; return what differs, and how many keys took over what was made ahead."""
    plain, ours = _built(kind), _built(kind)
    expected = _trained(plain, act, rank)
    folder.mkdir(exist_ok=True)
    with (
        pytest.MonkeyPatch.context() as patch,
        offload(ours.model, ours.optimizers, config_of(layout, folder, _ROOM[layout])),
    ):
        taken = count_on(patch)
        logged = _trained(ours, act, rank)
    differs = differences(Life(plain.model, plain.optimizer), Life(ours.model, ours.optimizer))
    aliases.clear()
    return {"differs": differs + ["what was logged"] * (logged != expected), "taken": taken.keys}


def _sharded() -> nn.Module:
    torch.manual_seed(0)
    model: Any = blocks()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for part in (*model[:-1], model):
        fully_shard(part, mesh=mesh)
    return model  # type: ignore[no-any-return]


def _built(kind: str) -> Trial:
    model = _sharded()
    known: Mapping[str, Any] = {
        **KINDS,
        "adam": lambda module: torch.optim.Adam(module.parameters(), lr=1e-2),
    }
    return Trial(model, [known[kind](model)])


def _trained(trial: Trial, act: Between, rank: int) -> list[bytes | None]:
    """Train, with something in between in every other step from the fourth on; return what was logged."""
    torch.manual_seed(1 + rank)
    for turn in range(8):
        acts = turn >= 3 and turn % 2 == 1
        quiet_step(trial, functools.partial(act, trial, turn) if acts else None)
    return [None if each is None else raw(each) for each in trial.logged]
