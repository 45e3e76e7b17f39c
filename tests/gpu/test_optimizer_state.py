"""Where an optimizer's state is, in a run and after it; on a CPU all of that is one place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.gpu.accelerators import ACCELERATOR
from tierstore.training import offload, register_optimizer

pytestmark = pytest.mark.gpu

_DIM = 64
_HOST = torch.device("cpu")


class _InHostMemory(torch.optim.Optimizer):
    """Momentum that is kept and added up in host memory, wherever parameters are."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step each parameter by itself."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros(parameter.shape, device=_HOST)
                state["momentum"].mul_(0.9).add_(parameter.grad.cpu())
                parameter.sub_(state["momentum"].to(parameter.device), alpha=group["lr"])


class _InHostMemoryByBundle(_InHostMemory):
    """The same, stepped a bundle at a time."""


register_optimizer(_InHostMemoryByBundle)


def _adam(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _model(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(_DIM, _DIM) for _ in range(6))).to(device)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    model(torch.randn(4, _DIM, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _config(path: Path, **more: object) -> dict[str, Any]:
    return {
        "device": ACCELERATOR.type,
        "max_device_memory": torch.accelerator.memory_allocated() + (256 << 10),
        "offload_cpu_size": "8MB",
        "offload_disk_size": 0,
        "offload_path": str(path),
        **more,
    }


def _devices(optimizer: torch.optim.Optimizer) -> set[str]:
    values = (value for entries in optimizer.state.values() for value in entries.values())
    return {value.device.type for value in values if value.dim() > 0}


@pytest.mark.parametrize("kind", [_InHostMemory, _InHostMemoryByBundle])
@pytest.mark.parametrize("is_begun", [False, True])
def test_state_that_an_optimizer_keeps_in_host_memory_stays_there(
    kind: type[_InHostMemory], is_begun: bool, tmp_path: Path
) -> None:
    models = _model(ACCELERATOR), _model(ACCELERATOR)
    optimizers = [kind(model.parameters()) for model in models]
    if is_begun:
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(1)
            _step(model, optimizer, ACCELERATOR)
    torch.manual_seed(2)
    for _ in range(3):
        _step(models[0], optimizers[0], ACCELERATOR)
    torch.manual_seed(2)
    with offload(models[1], optimizers[1], _config(tmp_path)):
        for _ in range(3):
            _step(models[1], optimizers[1], ACCELERATOR)
            assert _devices(optimizers[1]) == {"cpu"}
    for plain, ours in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(plain, ours)
        assert torch.equal(optimizers[0].state[plain]["momentum"], optimizers[1].state[ours]["momentum"])
    assert _devices(optimizers[1]) == {"cpu"}


@pytest.mark.parametrize("built_on", [_HOST, ACCELERATOR], ids=["host", "device"])
@pytest.mark.parametrize("target", ["cpu", "device"])
@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize("is_loaded", [False, True])
def test_state_goes_where_its_parameter_goes(
    built_on: torch.device, target: str, is_begun: bool, is_loaded: bool, tmp_path: Path
) -> None:
    model = _model(built_on)
    optimizer = _adam(model.parameters())
    if is_begun:
        _step(model, optimizer, built_on)
    with offload(model, optimizer, _config(tmp_path, optimizer_target=target)):
        _step(model, optimizer, ACCELERATOR)
        if is_loaded:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            _step(model, optimizer, ACCELERATOR)
    assert {parameter.device.type for parameter in model.parameters()} == {built_on.type}
    assert _devices(optimizer) == {built_on.type}
    _step(model, optimizer, built_on)  # and goes on without us
