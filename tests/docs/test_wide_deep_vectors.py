"""The Wide&Deep example against what the original system computed: losses and parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tierstore.nn import EmbeddingTable
from wide_deep import (
    Groups,
    PlainTables,
    Tables,
    TieredTables,
    WideDeep,
    WideDeepShape,
    groups_of,
    losses_of,
)
from wide_deep_steps import SENSITIVITY, Batch, optimizers_of, train_step

DOCUMENT: Mapping[str, Any] = json.loads(
    (Path(__file__).parents[1] / "vectors" / "wide_deep.json").read_text(encoding="utf-8")
)
SIZES, USED = DOCUMENT["sizes"], DOCUMENT["rows_used"]
TABLES = ("wide_table", "deep_table")
CASES = [
    pytest.param(config, tables, id=f"{config['name']}, {type(tables).__name__}")
    for config in DOCUMENT["configs"]
    for tables in ([TieredTables()] if config["sparse"] else []) + [PlainTables(is_sparse=config["sparse"])]
]


def _assert_close(found: object, expected: object) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def _tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _layers(model: WideDeep) -> dict[str, Tensor]:
    """Name what is in no table as the vectors do; matrices lie the other way round there."""
    linears = [module for module in model.deep_layers if isinstance(module, nn.Linear)]
    named = {f"w{number}": linear.weight.detach().t() for number, linear in enumerate(linears)}
    named |= {f"b{number}": linear.bias.detach() for number, linear in enumerate(linears)}
    return named | {"wide_bias": model.wide_bias.detach()}


def _rows(table: nn.Module, ids: Sequence[int]) -> Tensor:
    if isinstance(table, EmbeddingTable):
        return table.rows(torch.tensor(ids))
    (weight,) = table.parameters()
    return weight.detach()[ids]


def _set_rows(table: nn.Module, rows: Tensor) -> None:
    if isinstance(table, EmbeddingTable):
        table.set_rows(torch.arange(len(rows)), rows)
    else:
        (weight,) = table.parameters()
        weight.detach().copy_(rows)


def _model(config: Mapping[str, Any], tables: Tables) -> WideDeep:
    inputs, *hidden, _ = SIZES["layers"]
    shape = WideDeepShape(SIZES["vocabulary"], SIZES["fields"], SIZES["dimension"], tuple(hidden))
    assert shape.layers[0] == inputs
    model = WideDeep(shape, tables)
    for name, values in _layers(model).items():
        values.copy_(_tensor(DOCUMENT["initial"][name]))
    for name in TABLES:
        _set_rows(model.get_submodule(name), _tensor(DOCUMENT["initial"][name]))
    return model


def _batches() -> list[Batch]:
    return [
        Batch(torch.tensor(each["ids"]), _tensor(each["weights"]), _tensor(each["labels"]).flatten())
        for each in DOCUMENT["batches"]
    ]


def _groups(model: WideDeep, config: Mapping[str, Any]) -> Groups:
    return groups_of(model, is_bias_wide="net.wide_b" in config["groups"]["ftrl"])


def _assert_is(model: WideDeep, expected: Mapping[str, Any]) -> None:
    layers = _layers(model)
    for name, values in expected.items():
        is_table = name in TABLES
        found = _rows(model.get_submodule(name), USED) if is_table else layers[name]
        _assert_close(found, _tensor(values))


@pytest.mark.parametrize(("config", "tables"), CASES)
def test_losses_and_parameters_are_the_original_s(config: Mapping[str, Any], tables: Tables) -> None:
    model = _model(config, tables)
    groups = _groups(model, config)
    assert [len(groups.wide), len(groups.deep)] == [len(config["groups"][name]) for name in ("ftrl", "adam")]
    optimizers = optimizers_of(groups, deep_rate=config["deep_optimizer"]["learning_rate"])
    for number, (batch, expected) in enumerate(zip(_batches(), config["losses"], strict=True), start=1):
        losses = train_step(model, optimizers, batch, config["l2"] or 0.0)
        _assert_close(losses.wide.item(), expected["wide"])
        _assert_close(losses.deep.item(), expected["deep"])
        _assert_is(model, config.get(f"after_step_{number}", {}))
    _check_rows_in_no_batch(model, config)


def _check_rows_in_no_batch(model: WideDeep, config: Mapping[str, Any]) -> None:
    unseen = sorted(set(range(SIZES["vocabulary"])) - set(USED))
    for name, is_unchanged in config["rows_in_no_batch_unchanged"].items():
        found = _rows(model.get_submodule(name), unseen)
        assert torch.equal(found, _tensor(DOCUMENT["initial"][name])[unseen]) is is_unchanged, name
    if others := config.get("rows_in_no_batch_after_step_3"):
        for name in TABLES:
            _assert_close(_rows(model.get_submodule(name), others["rows"]), _tensor(others[name]))


@pytest.mark.parametrize(("config", "tables"), CASES)
def test_one_pass_gives_the_gradients_of_two_to_the_last_bit(
    config: Mapping[str, Any], tables: Tables
) -> None:
    model, l2 = _model(config, tables), config["l2"] or 0.0
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
