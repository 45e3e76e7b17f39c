"""Optimizers whose parameters were resized or cast after they had stepped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.training.twins import same
from tierstore.errors import UsageError
from tierstore.training import offload

_CONFIG = {"device": "cpu", "offload_cpu_size": "1MB", "offload_disk_size": 0}
_RAISES: tuple[tuple[type[torch.optim.Optimizer], dict[str, Any]], ...] = (
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.Adagrad, {"fused": True}),
)
_MIXES: tuple[tuple[type[torch.optim.Optimizer], dict[str, Any]], ...] = (
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.RMSprop, {}),
    (torch.optim.Adafactor, {}),
)


def _stepped(kind: type[Any], options: dict[str, Any]) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = kind(model.parameters(), lr=1e-2, **options)
    _step(model, optimizer)
    return model, optimizer


def _step(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8, dtype=model.weight.dtype)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(("kind", "options"), _RAISES)
def test_a_step_that_could_not_be_made_after_a_cast_is_refused_by_the_parameters_name(
    kind: type[Any], options: dict[str, Any]
) -> None:
    model, optimizer = _stepped(kind, options)
    model.double()
    with pytest.raises(UsageError, match=r"'weight', which is of \(8, 8\) in torch.float64 by now"):
        offload(model, optimizer, _CONFIG)


@pytest.mark.parametrize(("kind", "options"), [*_RAISES, *_MIXES[:2]])
def test_one_whose_parameter_was_resized_is_refused_by_its_name(
    kind: type[Any], options: dict[str, Any]
) -> None:
    model, optimizer = _stepped(kind, options)
    model.bias.data = torch.zeros(12)
    with pytest.raises(UsageError, match=r"of \(8,\) in torch.float32 for the parameter 'bias'"):
        offload(model, optimizer, _CONFIG)


@pytest.mark.parametrize(("kind", "options"), _MIXES[:2])
def test_one_that_steps_with_state_of_another_type_has_the_same_bits(
    kind: type[Any], options: dict[str, Any]
) -> None:
    def stepped(config: dict[str, Any]) -> nn.Linear:
        model, optimizer = _stepped(kind, options)
        model.double()
        with offload(model, optimizer, config):
            _step(model, optimizer)
        return model

    plain, ours = stepped({"memory_offload": "OFF"}), stepped(_CONFIG)
    assert all(same(one, other) for one, other in zip(plain.parameters(), ours.parameters(), strict=True))


def test_state_of_another_form_is_no_mistake_of_an_optimizer_that_has_such() -> None:
    model, optimizer = _stepped(*_MIXES[2])
    with offload(model, optimizer, _CONFIG):
        _step(model, optimizer)
