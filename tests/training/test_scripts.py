"""What ``torch.jit`` made runs in C++ and asks no class: it gets the bytes all the same, or is refused."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.training.twins import (
    LAYOUTS,
    WIDTH,
    Block,
    Optimizer,
    Trial,
    assert_same,
    blocks,
    config_of,
    every_layout,
    with_device,
)
from tierstore.errors import UsageError
from tierstore.training import offload

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@functools.cache
def scripted() -> Callable[..., Tensor]:
    return torch.jit.script(decay)


def decay(x: Tensor, weight: Tensor) -> Tensor:
    """Read a weight in C++."""
    return torch.relu(x).sum() * 1e-3 + (weight * weight).sum()


class Mixed(nn.Module):
    """Layers of which some were traced."""

    def __init__(self) -> None:
        super().__init__()
        inputs = torch.ones(6, WIDTH)
        self.first = torch.jit.trace(nn.Sequential(Block(), Block()), inputs)
        self.then = blocks(2)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.then(self.first(x))
        return hidden


def build() -> tuple[nn.Module, Sequence[Optimizer]]:
    model = Mixed()
    return model, [torch.optim.Adam(model.parameters(), lr=1e-2)]


@every_layout
def test_traced_children_train_the_same(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(5):  # after two runs torch.jit has compiled what it saw
            loss = trial.model(torch.randn(6, WIDTH)).sum()
            loss.backward()
            trial.log(loss)
            trial.log_gradients()
            trial.optimizer.step()
            trial.optimizer.zero_grad()
            with torch.no_grad():
                trial.log(trial.model.first(torch.ones(6, WIDTH)))  # type: ignore[operator]

    assert_same(build, loop, layout, tmp_path, with_device(layout, "320KB"))


@every_layout
def test_a_scripted_function_that_is_given_a_weight_outside_its_module(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        weight = trial.model.then[0].up.weight  # type: ignore[index, union-attr]
        for _ in range(4):
            outputs = trial.model(torch.randn(6, WIDTH))
            loss = outputs.sum() + scripted()(outputs, weight=weight)
            loss.backward()
            trial.log(loss)
            trial.log_gradients()
            trial.optimizer.step()
            trial.optimizer.zero_grad()
            with torch.no_grad():
                trial.log(scripted()(weight, weight))

    assert_same(build, loop, layout, tmp_path, with_device(layout, "320KB"))


@every_layout
def test_traced_children_are_copied_as_other_modules_are(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(2):
            copied = copy.deepcopy(trial.model)
            trial.log(torch.tensor([p.requires_grad + 2 * p.is_leaf for p in copied.parameters()]))
            assert {type(p) for p in copied.parameters()} <= {Tensor, nn.Parameter}
            loss = trial.model(torch.randn(6, WIDTH)).sum()
            loss.backward()
            trial.optimizer.step()
            trial.optimizer.zero_grad()
            inputs = torch.randn(6, WIDTH)
            copied(inputs).sum().backward()
            for parameter in copied.parameters():
                trial.log(parameter)
                trial.log(parameter.grad if parameter.is_leaf else None)

    assert_same(build, loop, layout, tmp_path, with_device(layout, "320KB"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scripted_modules_are_refused_by_name_and_nothing_has_changed(layout: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(UsageError, match=r"module '1' is a script of torch.jit.*torch.jit.trace"):
        offload(model, None, config_of(layout, tmp_path))
    assert type(model[0].weight) is nn.Parameter
    model(torch.ones(2, 4)).sum().backward()


def test_a_scripted_module_that_is_ignored_is_left_alone(tmp_path: Path) -> None:
    script = torch.jit.script(nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), script)
    expected = model(torch.ones(2, 4))
    with offload(model, None, config_of("host", tmp_path), ignored=["1"]):
        assert torch.equal(model(torch.ones(2, 4)), expected)
