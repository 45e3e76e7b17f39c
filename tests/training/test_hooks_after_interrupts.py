"""Hooks on saved tensors, of users and ours, after a forward that an interrupt has ended."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tests.training.swap_models import config, whole_layers
from tests.training.twins import Trial, assert_same, batch, build_blocks, every_layout, loss_of, step
from tierstore.training import recompute, swap
from tierstore.training.saved import top_hooks


@every_layout
@pytest.mark.parametrize("is_around", [True, False], ids=["around", "after"])
def test_hooks_beside_a_forward_that_was_interrupted(is_around: bool, layout: str, tmp_path: Path) -> None:
    """PyTorch ends no hooks of modules then; ours go, and nobody else's."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def loop(trial: Trial) -> None:
        seen: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            seen.append(tensor.numel())
            return tensor

        hooks = functools.partial(saved_tensors_hooks, pack, lambda tensor: tensor)
        for _ in range(2):
            handle = trial.model[1].up.register_forward_hook(interrupt)  # type: ignore[index]
            with contextlib.suppress(KeyboardInterrupt), hooks() if is_around else contextlib.nullcontext():
                trial.model(batch()[0])
            handle.remove()
            seen.clear()
            with hooks():
                loss = loss_of(trial.model, *batch())
            trial.log(torch.tensor(seen))
            loss_of(trial.model, *batch())
            trial.log(torch.tensor(seen))
            loss.backward()
            trial.optimizer.step()
            trial.optimizer.zero_grad()
            step(trial)
        assert top_hooks() is None

    assert_same(build_blocks, loop, layout, tmp_path)


def _swap(model: nn.Module, path: Path) -> Any:  # noqa: ANN401 - one run or another
    return swap(model, config(path, whole_layers(1)))


def _select(model: nn.Module, path: Path) -> Any:  # noqa: ANN401 - one run or another
    del path
    return recompute(model, {"select_recompute": [r"aten\.tanh"]})


class Layer(nn.Module):
    """A layer that an interrupt may end in its midst."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.is_interrupted = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.inner(x))
        if self.is_interrupted:
            raise KeyboardInterrupt
        return y * y


@pytest.mark.parametrize("is_around", [True, False], ids=["around", "after"])
@pytest.mark.parametrize("begin", [_swap, _select])
def test_hooks_beside_a_swap_or_recomputation_that_was_interrupted(
    begin: Callable[[nn.Module, Path], Any], is_around: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.Sequential(*(Layer() for _ in range(4)))})
    layers = model["layers"]
    third: Any = layers.get_submodule("2")
    x = torch.randn(3, 16)
    seen: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.numel())
        return tensor

    hooks = functools.partial(saved_tensors_hooks, pack, lambda tensor: tensor)

    def slopes() -> list[Tensor]:
        return list(torch.autograd.grad(layers(x).square().sum(), list(model.parameters())))

    expected = slopes()
    with begin(model, tmp_path):
        for _ in range(2):
            third.is_interrupted = True
            with contextlib.suppress(KeyboardInterrupt), hooks() if is_around else contextlib.nullcontext():
                layers(x)
            third.is_interrupted = False
            seen.clear()
            with hooks():
                (layers(x) * 2).exp()
            assert seen, "what nobody recomputes or swaps is the user's"
            count = len(seen)
            assert all(map(torch.equal, slopes(), expected))
            assert len(seen) == count
    assert top_hooks() is None
