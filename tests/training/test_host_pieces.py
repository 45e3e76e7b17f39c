"""Host memory in pieces: what `offload` lets open trains, and what is too little is refused before."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tierstore.errors import CapacityError
from tierstore.training import Offload, offload
from tierstore.training.faults import guard
from tierstore.units import KIB, MIB, align_up

_PAGE_BYTES = 4 * KIB
_IN_HOST: dict[str, object] = {"device": "cpu", "offload_disk_size": "64MB"}
_OPTIMIZER_IN_HOST: dict[str, object] = {
    "device": "emulated",
    "max_device_memory": "4MB",
    "offload_disk_size": "64MB",
    "auto_offload": False,
    "offload_param": "disk",
    "optimizer_target": "cpu",
}
layouts = pytest.mark.parametrize(
    "layout", [_IN_HOST, _OPTIMIZER_IN_HOST], ids=["in host", "optimizer in host"]
)
seeds = pytest.mark.parametrize("seed", range(5))


def _build(chance: random.Random) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    widths = [chance.choice((7, 16, 24, 33, 48, 64, 96, 130, 161)) for _ in range(chance.randint(4, 9))]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.LayerNorm(after)]
    model = nn.Sequential(*layers)
    kind = chance.choice((torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad))
    return model, kind(model.parameters(), lr=0.01)


@dataclass(frozen=True)
class _Trial:
    model: nn.Sequential
    optimizer: torch.optim.Optimizer
    run: Offload


def _open(seed: int, nbytes: int, layout: dict[str, object], path: Path) -> _Trial:
    torch.manual_seed(seed)
    model, optimizer = _build(random.Random(seed))
    config = {**layout, "offload_cpu_size": nbytes, "offload_path": str(path / str(nbytes))}
    return _Trial(model, optimizer, offload(model, optimizer, config))


def _train(seed: int, trial: _Trial) -> list[Tensor]:
    torch.manual_seed(seed)
    model, optimizer = trial.model, trial.optimizer
    first = model[0]
    assert isinstance(first, nn.Linear)
    losses: list[Tensor] = []
    for turn in range(4):
        for _ in range(1 + turn % 2):
            loss = model(torch.randn(4, first.in_features)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _least_bytes(seed: int, layout: dict[str, object], path: Path) -> int:
    """Return what `offload` says is needed at least."""
    with pytest.raises(CapacityError) as refusal:
        _open(seed, 8 * KIB, layout, path)
    assert refusal.value.needed_bytes is not None
    return refusal.value.needed_bytes


@layouts
@seeds
def test_what_is_let_open_trains_and_a_sector_less_is_refused(
    seed: int, layout: dict[str, object], tmp_path: Path
) -> None:
    least_bytes = _least_bytes(seed, layout, tmp_path)
    with pytest.raises(CapacityError, match="cannot be trained in host memory"):
        _open(seed, least_bytes - 512, layout, tmp_path)
    trial = _open(seed, least_bytes, layout, tmp_path)
    with trial.run:
        losses = _train(seed, trial)
    trial = _open(seed, 64 * MIB, layout, tmp_path)
    with trial.run:
        expected = _train(seed, trial)
    assert all(map(torch.equal, losses, expected))


@seeds
def test_aliases_that_are_kept_cost_their_pages_and_two_more(seed: int, tmp_path: Path) -> None:
    """What is leased cannot be moved: one alias of every other layer, made where it happens to lie."""
    least_bytes = _least_bytes(seed, _IN_HOST, tmp_path)
    model, _ = _build(random.Random(seed))
    kept_bytes = 0
    for norm in list(model)[1::2]:
        kept_bytes += sum(align_up(p.nbytes, _PAGE_BYTES) for p in norm.parameters()) + 2 * _PAGE_BYTES
    trial = _open(seed, least_bytes + kept_bytes, _IN_HOST, tmp_path)
    with trial.run as run:
        _train(seed, trial)
        weights = [norm.get_parameter("weight") for norm in list(trial.model)[1::2]]
        aliases = [weight.detach() for weight in weights]
        _train(seed, trial)
        assert all(run.store.where(_key_of(weight))[0] == "host" for weight in weights)
        del aliases


def _key_of(parameter: Tensor) -> str:
    guarded_tensor = guard.guarded_tensor_of(parameter)
    assert guarded_tensor is not None
    return guarded_tensor.binding.key
