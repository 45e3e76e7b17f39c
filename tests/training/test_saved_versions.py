"""Weights that are written to between forward and backward: it is refused where plain PyTorch refuses it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.training.twins import config_of, same, with_device
from tierstore.training import offload

WIDTH = 16


def _point_data(one: nn.Linear, other: nn.Linear) -> None:
    other.weight.data = one.weight.data


def _set(one: nn.Linear, other: nn.Linear) -> None:
    with torch.no_grad():
        other.weight.set_(one.weight)  # type: ignore[call-overload]


def _make_of_alias(one: nn.Linear, other: nn.Linear) -> None:
    other.weight = nn.Parameter(one.weight.detach())


def _make_transposed(one: nn.Linear, other: nn.Linear) -> None:
    other.weight = nn.Parameter(one.weight.data.t())


def _tie(one: nn.Linear, other: nn.Linear) -> None:
    other.weight = one.weight


SHARED: dict[str, Callable[[nn.Linear, nn.Linear], None]] = {
    "pointed": _point_data,
    "set": _set,
    "made of an alias": _make_of_alias,
    "transposed": _make_transposed,
    "tied": _tie,
    "apart": lambda _one, _other: None,
}


def _in_place(weight: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(0.5)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": _in_place,
    "detached": lambda w: w.detach().mul_(0.5),
    "data": lambda w: w.data.mul_(0.5),
    "foreach": lambda w: torch._foreach_mul_([w.detach()], 0.5),
    "view": lambda w: w.detach()[1:3].zero_(),
    "nothing": lambda _: None,
}


class _Multiplying(nn.Linear):
    """Multiplies with its weight, an alias of it, or one that has a version counter of its own."""

    kind = "itself"

    def forward(self, inputs: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if self.kind == "alias":
            weight = weight.detach()
        elif self.kind == "data written to":
            weight = weight.data
            weight.mul_(1.0)  # one version further, as the weight itself is
        return functional.linear(inputs, weight, self.bias)


def _outcome(model: nn.Sequential, number: int, write: Callable[[Tensor], object]) -> list[Tensor] | str:
    inputs = torch.ones(3, WIDTH)
    model.zero_grad()
    loss = model(model(inputs).tanh()).square().sum()
    written = model[number]
    assert isinstance(written, nn.Linear)
    write(written.weight)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error).split(":")[0]
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("kind", ["itself", "alias", "data written to"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("shared", SHARED)
def test_a_write_after_the_forward_is_refused_where_plain_pytorch_refuses_it(
    shared: str, write: str, kind: str, tmp_path: Path
) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        layers = [_Multiplying(WIDTH, WIDTH) for _ in range(3)]
        for layer in layers:
            layer.kind = kind
        SHARED[shared](layers[0], layers[1])
        models.append(nn.Sequential(*layers))
    plain, ours = models
    for model in models:
        with torch.no_grad():
            for number in (0, 2):
                model[number].weight.mul_(1.0)  # type: ignore[operator]
    with offload(ours, None, config_of("disk", tmp_path, with_device("disk", "512KB"))):
        for number in (0, 1, 2):
            expected = _outcome(plain, number, WRITES[write])
            found = _outcome(ours, number, WRITES[write])
            if isinstance(expected, str) or isinstance(found, str):
                assert found == expected
            else:
                assert all(map(same, expected, found))
