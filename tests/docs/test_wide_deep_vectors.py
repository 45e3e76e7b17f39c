"""The Wide&Deep example against what the original system computed: losses and parameters."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wide_deep import Groups, WideDeep, WideDeepShape, groups_of, losses_of, plain_table
from wide_deep_steps import SENSITIVITY, Batch, optimizers_of, train_step

DOCUMENT: Mapping[str, Any] = json.loads(
    (Path(__file__).parents[1] / "vectors" / "wide_deep.json").read_text(encoding="utf-8")
)
SIZES, USED = DOCUMENT["sizes"], DOCUMENT["rows_used"]
CONFIGS = [pytest.param(each, id=each["name"]) for each in DOCUMENT["configs"]]


def _assert_close(found: object, expected: object) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def _tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _parameters(model: WideDeep) -> dict[str, Tensor]:
    """Name the parameters as the vectors do."""
    linears = [module for module in model.deep_layers if isinstance(module, nn.Linear)]
    named = {f"w{number}": linear.weight for number, linear in enumerate(linears)}
    named |= {f"b{number}": linear.bias for number, linear in enumerate(linears)}
    (wide,), (deep,) = model.wide_table.parameters(), model.deep_table.parameters()
    return named | {"wide_bias": model.wide_bias, "wide_table": wide, "deep_table": deep}


def _as_there(name: str, parameter: Tensor) -> Tensor:
    """Return the values as they lie in the vectors, where matrices of layers are the other way round."""
    values = parameter.detach()
    return values.t() if name in ("w0", "w1", "w2") else values


def _model(config: Mapping[str, Any]) -> WideDeep:
    inputs, *hidden, _ = SIZES["layers"]
    shape = WideDeepShape(SIZES["vocabulary"], SIZES["fields"], SIZES["dimension"], tuple(hidden))
    assert shape.layers[0] == inputs
    model = WideDeep(shape, functools.partial(plain_table, is_sparse=config["sparse"]))
    for name, parameter in _parameters(model).items():
        _as_there(name, parameter).copy_(_tensor(DOCUMENT["initial"][name]))
    return model


def _batches() -> list[Batch]:
    return [
        Batch(torch.tensor(each["ids"]), _tensor(each["weights"]), _tensor(each["labels"]).flatten())
        for each in DOCUMENT["batches"]
    ]


def _groups(model: WideDeep, config: Mapping[str, Any]) -> Groups:
    return groups_of(model, is_bias_wide="net.wide_b" in config["groups"]["ftrl"])


def _assert_is(model: WideDeep, expected: Mapping[str, Any]) -> None:
    parameters = _parameters(model)
    for name, values in expected.items():
        found = _as_there(name, parameters[name])
        if name.endswith("_table"):
            found = found[USED]
        _assert_close(found, _tensor(values))


@pytest.mark.parametrize("config", CONFIGS)
def test_losses_and_parameters_are_the_original_s(config: Mapping[str, Any]) -> None:
    model = _model(config)
    groups = _groups(model, config)
    assert [len(groups.wide), len(groups.deep)] == [len(config["groups"][name]) for name in ("ftrl", "adam")]
    optimizers = optimizers_of(groups, config["deep_optimizer"]["learning_rate"])
    for number, (batch, expected) in enumerate(zip(_batches(), config["losses"], strict=True), start=1):
        losses = train_step(model, optimizers, batch, config["l2"] or 0.0)
        _assert_close(losses.wide.item(), expected["wide"])
        _assert_close(losses.deep.item(), expected["deep"])
        _assert_is(model, config.get(f"after_step_{number}", {}))
    _check_rows_in_no_batch(model, config)


def _check_rows_in_no_batch(model: WideDeep, config: Mapping[str, Any]) -> None:
    parameters = _parameters(model)
    unseen = sorted(set(range(SIZES["vocabulary"])) - set(USED))
    for name, is_unchanged in config["rows_in_no_batch_unchanged"].items():
        same = torch.equal(parameters[name].detach()[unseen], _tensor(DOCUMENT["initial"][name])[unseen])
        assert same is is_unchanged, name
    if others := config.get("rows_in_no_batch_after_step_3"):
        for name in ("wide_table", "deep_table"):
            found = parameters[name].detach()[others["rows"]]
            _assert_close(found, _tensor(others[name]))


@pytest.mark.parametrize("config", CONFIGS)
def test_one_pass_gives_the_gradients_of_two_to_the_last_bit(config: Mapping[str, Any]) -> None:
    model, l2 = _model(config), config["l2"] or 0.0
    groups = _groups(model, config)
    for batch in _batches():
        losses = losses_of(model, model(batch.ids, batch.weights), batch.labels, l2)
        scale = torch.tensor(SENSITIVITY)
        two = [
            *torch.autograd.grad(losses.wide, groups.wide, scale, retain_graph=True),
            *torch.autograd.grad(losses.deep, groups.deep, scale, retain_graph=True),
        ]
        model.zero_grad()
        losses.deep.backward(scale)
        for parameter, gradient in zip([*groups.wide, *groups.deep], two, strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad.to_dense(), gradient.to_dense())
