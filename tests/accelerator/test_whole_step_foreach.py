"""Optimizers that run their own ``step``: on an accelerator it takes the path that plain PyTorch takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.accelerator import DEVICE
from tests.training.twins import same
from tierstore.training import offload
from tierstore.units import KIB

WIDTH, LAYERS = 64, 6
OPTIMIZERS: dict[str, dict[str, object]] = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.1},
    "Adam": {},
    "AdamW": {"amsgrad": True},
    "Adagrad": {},
    "RMSprop": {"momentum": 0.9},
    "Adadelta": {},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "Rprop": {},
    "ASGD": {},
}


class _Lists(TorchFunctionMode):
    """Notes which functions over lists are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        del types
        if func.__name__.startswith("_foreach_"):
            self.seen.add(func.__name__)
        return func(*args, **(kwargs or {}))


def _own(name: str, model: nn.Module, **options: object) -> torch.optim.Optimizer:
    """Return an optimizer of a class that nobody knows."""
    base = getattr(torch.optim, name)

    class Own(base):  # type: ignore[misc, valid-type]
        def step(self, closure: Callable[[], float] | None = None) -> object:
            return super().step(closure)

    made: torch.optim.Optimizer = Own(model.parameters(), lr=0.01, **options)
    return made


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(DEVICE)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    inputs = torch.ones(3, WIDTH, device=DEVICE)
    lists = _Lists()
    for _ in range(3):
        model(inputs).square().mean().backward()
        with lists:
            optimizer.step()
        optimizer.zero_grad()
    return lists.seen


def _config(path: Path, limit_bytes: int) -> dict[str, object]:
    return {
        "device": "openreg",
        "max_device_memory": torch.accelerator.memory_allocated() + limit_bytes,
        "offload_cpu_size": "16MB",
        "offload_disk_size": 0,
        "offload_path": str(path),
    }


def _values(model: nn.Module) -> list[Tensor]:
    return [each.detach().cpu() for each in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"foreach": False}], ids=["by default", "one by one"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_subclass_s_own_step_takes_the_path_that_it_takes_in_plain_pytorch(
    name: str, options: dict[str, object], tmp_path: Path
) -> None:
    plain, ours = _model(), _model()
    expected = _train(plain, _own(name, plain, **OPTIMIZERS[name], **options))
    optimizer = _own(name, ours, **OPTIMIZERS[name], **options)
    with offload(ours, optimizer, _config(tmp_path, 512 * KIB)):
        assert _train(ours, optimizer) == expected
    assert bool(expected) is (not options)
    assert all(map(same, _values(plain), _values(ours)))
