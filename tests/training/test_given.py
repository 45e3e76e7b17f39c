"""What `offload` is given in the wrong place is named before anything begins."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.training.twins import build_blocks, config_of
from tierstore.config import OffloadConfig
from tierstore.errors import UsageError
from tierstore.training import offload

CONFIG = {"offload_cpu_size": "64MB"}


class Wrapped:
    """Holds an optimizer, and is none."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


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
    "parameters": (lambda m: (m, m.parameters()), "generator is no torch.optim.Optimizer"),
    "no model": (lambda _: ("model",), r"first argument is the model, .*: str is none"),
    "a class of models": (lambda _: (nn.Linear,), "the class Linear is none"),
    "a list of models": (lambda m: ([m],), "list is none"),
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
