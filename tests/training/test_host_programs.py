"""Programs that write where nobody counts, or to what they are given, and derivatives that go along."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad, vmap

from tests.training.twins import config_of
from tierstore.errors import UsageError
from tierstore.training import offload

WIDTH = 8


class Written(nn.Module):
    """Writes, uncounted, to a value that two modules on the host are given."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.one = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Transform."""
        h = self.first(x)
        y = self.one(h)
        h.data.mul_(2)
        made: Tensor = y + self.other(h)
        return made


class Appends(nn.Module):
    """Adds to a list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, losses: list[Any]) -> Tensor:
        """Transform, and note a loss."""
        y: Tensor = self.linear(x)
        losses.append(float(y.detach().sum()))
        return y


class Noting(nn.Module):
    """Hands a list to a module on the host, with or without a tensor in it."""

    def __init__(self, first: Callable[[Tensor], list[Any]]) -> None:
        super().__init__()
        self.host = Appends()
        self.head = nn.Linear(WIDTH, 1)
        self.first = first
        self.noted: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        """Transform."""
        self.noted = self.first(x)
        made: Tensor = self.head(self.host(x, self.noted))
        return made


def outputs(model: nn.Module, path: Path, passes: int = 3) -> tuple[list[Tensor], list[Tensor]]:
    """Return what the model gives without a run, and in one."""
    x = torch.ones(2, WIDTH)
    patterns = {"one|other|host": "cpu"}
    with torch.no_grad():
        expected = [model(x).clone() for _ in range(passes)]
        with offload(model, None, config_of("device", path), placement=patterns):
            return expected, [model(x).clone() for _ in range(passes)]


def test_a_value_that_is_written_to_uncounted_is_brought_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected, found = outputs(Written(), tmp_path)
    assert all(map(torch.equal, expected, found))


def test_a_module_on_the_host_adds_to_the_list_that_it_was_given(tmp_path: Path) -> None:
    model = Noting(lambda x: [])
    outputs(model, tmp_path)
    assert len(model.noted) == 1


def test_what_a_module_on_the_host_adds_to_a_list_of_values_that_cross_is_refused(tmp_path: Path) -> None:
    model = Noting(lambda x: [model.head.bias * x.sum()])
    with pytest.raises(UsageError, match=r"an? Appends computes on 'cpu' and writes to a list"):
        outputs(model, tmp_path)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch's own, of forward_ad
def test_tangents_cross_with_their_values(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def tangents() -> Tensor:
        x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
        with torch.no_grad(), forward_ad.dual_level():
            made = model(forward_ad.make_dual(x, torch.ones_like(x)))
            found = forward_ad.unpack_dual(made).tangent
            assert found is not None
            copied: Tensor = found.clone()
            return copied

    expected = tangents()
    with offload(model, None, config_of("device", tmp_path), placement={"1": "cpu"}):
        assert torch.equal(tangents(), expected)


def test_transforms_go_through_modules_on_the_host(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)

    def both() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            mapped: Tensor = vmap(model)(x)
        derived: Tensor = grad(lambda z: model(z).sum())(x)
        return mapped, derived.detach()

    expected = both()
    gc.collect()  # transforms are circles
    with offload(model, None, config_of("device", tmp_path), placement={"1": "cpu"}):
        found = both()
    assert all(map(torch.equal, expected, found))
