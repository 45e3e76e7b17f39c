"""Modules on the host that are given, and return, objects of dataclasses: the tensors in them cross."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.twins import assert_equal_models, config_of
from tierstore.errors import UsageError
from tierstore.testing.memory import DeviceBudget
from tierstore.training import offload

WIDTH = 8


@dataclass
class Found:
    """What a module returns."""

    values: Tensor
    more: list[Tensor] = field(default_factory=list)
    inner: Found | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a module is given."""

    values: Tensor
    scale: float


class OnHost(nn.Module):
    """Is given one and returns another, in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.writes = False

    def forward(self, asked: Asked, idle: Found) -> tuple[Found, Found]:
        """Transform."""
        y = self.line(asked.values) * asked.scale
        if self.writes:
            idle.name = "written"
        return Found(y, [y, y.detach()], Found(y.sum(), name="inner"), "outer"), idle


class Net(nn.Module):
    """Has it in its midst."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = OnHost()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Transform."""
        x = self.first(x)
        idle = Found(x)
        found, same = self.inner(Asked(x, 0.5), idle)
        assert found.name == "outer"
        assert found.inner is not None
        assert found.inner.name == "inner"
        assert found.more[0] is found.values, "one tensor is brought once"
        assert torch.equal(same.values, x)
        made: Tensor = self.last(found.values + found.more[1] + same.values) + found.inner.values
        return made


def trained(path: Path | None) -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        for _ in range(3):
            model(torch.randn(4, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    if path is None:
        loop()
        return model
    with (
        offload(model, optimizer, config_of("device", path), placement={"inner": "cpu"}) as run,
        DeviceBudget("1GiB", mixing="raise"),
    ):
        loop()
        traffic = run.store.stats().traffic
        assert traffic["device", "host"].nbytes
    return model


def test_tensors_in_them_cross_once_and_bits_are_those_of_plain_pytorch(tmp_path: Path) -> None:
    assert_equal_models(trained(None), trained(tmp_path))


def test_what_needs_no_crossing_is_the_same_object(tmp_path: Path) -> None:
    class Passing(nn.Module):
        def forward(self, given: Found) -> Any:  # noqa: ANN401
            seen.append(given)
            return given

    seen: list[Found] = []
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Passing())
    with offload(model, None, config_of("device", tmp_path), placement={"1": "cpu"}):
        given = Found(None, [], None, "nothing")  # type: ignore[arg-type]
        assert model[1](given) is given
        assert seen == [given]


def test_one_that_refers_to_itself_is_looked_into_once(tmp_path: Path) -> None:
    class Taking(nn.Module):
        def forward(self, given: Found) -> Tensor:
            assert given.inner is not None
            return given.values + 1

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Taking())
    with offload(model, None, config_of("device", tmp_path), placement={"1": "cpu"}):
        given = Found(model[0](torch.ones(2, WIDTH)))
        given.inner = given
        assert torch.equal(model[1](given), given.values + 1)


def test_who_writes_to_one_that_was_made_for_it_is_told(tmp_path: Path) -> None:
    model = Net()
    model.inner.writes = True
    with (
        offload(model, None, config_of("device", tmp_path), placement={"inner": "cpu"}),
        pytest.raises(UsageError, match=r"OnHost computes on 'cpu' and writes to a Found that it was given"),
    ):
        model(torch.randn(4, WIDTH))
