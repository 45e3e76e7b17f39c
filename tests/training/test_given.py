"""What `offload` is given in the wrong place is named before anything begins."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.training.twins import WIDTH, build_blocks, config_of
from tierstore.config import OffloadConfig
from tierstore.errors import UsageError
from tierstore.training import offload

CONFIG = {"offload_cpu_size": "64MB"}


class Wrapped:
    """Holds an optimizer, and is none."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


class Shown(torch.optim.Optimizer):
    """Shows another's groups and state as its own, as `accelerate` does; it is never made as an optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.steps = 0

    state = property(lambda self: self.inner.state)
    param_groups = property(lambda self: self.inner.param_groups)
    defaults = property(lambda self: self.inner.defaults)

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.steps += 1
        self.inner.step(closure)  # type: ignore[call-overload]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class Beside(Shown):
    """Has state of its own beside that, as Lookahead's slow weights."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.own: dict[Any, Any] = {}

    state = property(lambda self: self.own)


class Unmade(torch.optim.Optimizer):
    """Was never made as an optimizer, and holds none."""

    def __init__(self, model: nn.Module) -> None:
        self.param_groups = [{"params": list(model.parameters())}]


class OfProcesses(torch.optim.SGD):
    """Stands for those of ``torch.distributed.optim``."""

    __module__ = "torch.distributed.optim.some"


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


WRONG: dict[str, tuple[Callable[[nn.Module], tuple[Any, ...]], str]] = {
    "a mapping second": (lambda m: (m, CONFIG), r"the optimizer, not the configuration \(dict\)"),
    "a path second": (lambda m: (m, "run.yaml"), r"the optimizer, not the configuration \(str\)"),
    "a configuration second": (
        lambda m: (m, OffloadConfig(offload_cpu_size="64MB")),
        r"configuration \(OffloadConfig\)",
    ),
    "a class": (lambda m: (m, torch.optim.SGD), r"SGD is a class\. Pass an optimizer: SGD\(model\.param"),
    "one class of several": (lambda m: (m, [sgd(m), torch.optim.Adam]), "Adam is a class"),
    "another class": (lambda m: (m, Wrapped), "the class Wrapped is no torch.optim.Optimizer"),
    "a wrapper": (lambda m: (m, Wrapped(sgd(m))), r"Wrapped is no .* Pass the SGD in its `\.optimizer`"),
    "a scheduler": (
        lambda m: (m, torch.optim.lr_scheduler.StepLR(sgd(m), 1)),
        r"StepLR is no .* Pass the SGD in its",
    ),
    "a wrapper with state": (
        lambda m: (m, Beside(sgd(m))),
        r"Beside has state or groups beside those of the SGD in its `\.inner`.*Pass that SGD",
    ),
    "a wrapper in a wrapper": (lambda m: (m, Shown(Beside(sgd(m)))), r"Beside has state or groups beside"),
    "a half-made optimizer": (
        lambda m: (m, Unmade(m)),
        r"Unmade has not called the __init__ of torch\.optim",
    ),
    "an optimizer of several processes": (
        lambda m: (m, OfProcesses(m.parameters(), lr=0.1)),
        "OfProcesses steps or averages parameters of several processes .*DistributedDataParallel",
    ),
    "a wrapper of one of those": (
        lambda m: (m, Shown(OfProcesses(m.parameters(), lr=0.1))),
        "OfProcesses steps or averages",
    ),
    "parameters": (lambda m: (m, m.parameters()), "generator is no torch.optim.Optimizer"),
    "no model": (lambda _: ("model",), r"first argument is the model, .*: str is none"),
    "a class of models": (lambda _: (nn.Linear,), "the class Linear is none"),
    "a list of a model and something else": (lambda m: ([m, "model"],), "list is none"),
    "no models": (lambda _: ((),), "tuple is none"),
}


@pytest.mark.parametrize("state", ["ON", "OFF"])
@pytest.mark.parametrize("name", WRONG)
def test_what_is_in_the_wrong_place_is_named(name: str, state: str) -> None:
    model, _ = build_blocks()
    given, message = WRONG[name]
    args = given(model)
    begin: Callable[..., object] = offload
    with pytest.raises(UsageError, match=message):
        begin(*args[:2], config=CONFIG | {"memory_offload": state})
    assert all(type(each) is nn.Parameter for each in model.parameters())


def test_an_optimizer_of_another_model_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizers = build_blocks()
    other = nn.Linear(3, 3)
    with (
        caplog.at_level(logging.WARNING, "tierstore"),
        offload(model, [*optimizers, sgd(other)], config_of("disk", tmp_path)),
    ):
        told = [each for each in caplog.messages if "trains no parameter" in each]
    assert told == [
        "SGD trains no parameter of the Sequential that is offloaded: its state stays where it is"
    ]


def test_one_that_trains_both_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = build_blocks()
    both = torch.optim.SGD([*model.parameters(), *nn.Linear(3, 3).parameters()], lr=0.1)
    with caplog.at_level(logging.WARNING, "tierstore"), offload(model, both, config_of("disk", tmp_path)):
        assert not [each for each in caplog.messages if "trains no parameter" in each]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_wrapper_that_only_shows_another_is_that_one(tmp_path: Path, depth: int) -> None:
    def trained(where: str | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, _ = build_blocks()
        wrapped: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(depth):
            wrapped = Shown(wrapped)
        with contextlib.ExitStack() as run:
            if where is not None:
                both = [wrapped, cast("Shown", wrapped).inner]
                run.enter_context(offload(model, both if depth == 1 else wrapped, config_of(where, tmp_path)))
            for number in range(3):
                model(torch.full((2, WIDTH), float(number))).sum().backward()
                wrapped.step()
                wrapped.zero_grad()
        return [*model.parameters(), *(each["exp_avg_sq"] for each in wrapped.state.values())]

    plain, offloaded = trained(None), trained("disk")
    assert len(plain) == len(offloaded)
    assert all(torch.equal(one, other) for one, other in zip(plain, offloaded, strict=True))
