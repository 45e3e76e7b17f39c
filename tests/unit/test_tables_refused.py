"""What a table does not take: each with what is said of it, and nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tierstore.errors import ConfigError, UsageError
from tierstore.nn import EmbeddingTable, Normal, Uniform
from tierstore.nn.table_entry import TableEntry

ROWS, WIDTH = 50, 4


def _table(**options: Any) -> EmbeddingTable:  # noqa: ANN401
    return EmbeddingTable(ROWS, WIDTH, **{"seed": 0, **options})


def _all(table: EmbeddingTable) -> Tensor:
    return table.rows(torch.arange(table.num_embeddings))


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"num_embeddings": 0}, ConfigError, "num_embeddings=0: it has to be at least 1"),
    ({"num_embeddings": 2.0}, TypeError, "num_embeddings=2.0: it has to be an int"),
    ({"embedding_dim": -1}, ConfigError, "embedding_dim=-1"),
    ({"embedding_dim": True}, TypeError, "embedding_dim=True"),
    (
        {"num_embeddings": 2**60},
        ConfigError,
        "bytes of torch.float32 are more than a tensor can be said to have",
    ),
    ({"target": "gpu"}, ConfigError, "target='gpu': it has to be 'cpu' or 'device'"),
    ({"target": 1}, TypeError, "target=1: it has to be 'cpu' or 'device'"),
    ({"cache_rows": -1}, ConfigError, "cache_rows=-1: it has to be at least 0"),
    ({"cache_rows": 5}, ConfigError, "cache_rows=5: rows are kept on the device only with target='device'"),
    ({"max_norm": 0.0}, ConfigError, "max_norm=0.0: it has to be a number above 0"),
    ({"max_norm": float("nan")}, ConfigError, "max_norm=nan"),
    ({"max_norm": "1"}, TypeError, "max_norm='1'"),
    ({"mode": "max"}, ConfigError, "mode='max': it has to be 'sum' or 'mean' or None"),
    ({"sparse": False}, ConfigError, "sparse=False: a table with target='cpu' has sparse gradients"),
    ({"sparse": 1}, TypeError, "sparse=1"),
    ({"dtype": torch.int64}, ConfigError, "dtype=torch.int64: it has to be one of torch.float32"),
    ({"seed": -1}, ConfigError, "seed=-1: it has to be from 0 to 18446744073709551615"),
    ({"seed": 2**64}, ConfigError, "seed=18446744073709551616"),
    ({"out_of_range": "clip"}, ConfigError, "out_of_range='clip': it has to be 'error' or 'zeros'"),
    ({"policy": "fifo"}, ConfigError, "policy='fifo': it has to be 'lfu' or 'lru'"),
    ({"init": "ones"}, ConfigError, "init='ones': the only text that it takes is 'zeros'"),
    ({"init": True}, TypeError, "init=True"),
    ({"init": [1.0]}, TypeError, r"init=\[1.0\]"),
]


@pytest.mark.parametrize(("options", "kind", "message"), WRONG)
def test_arguments_that_are_wrong_are_refused_by_name(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {"num_embeddings": ROWS, "embedding_dim": WIDTH} | options
    with pytest.raises(kind, match=message):
        EmbeddingTable(**arguments)


@pytest.mark.parametrize("make", [lambda: Normal(-1.0), lambda: Uniform(1.0, 0.0)])
def test_distributions_that_are_none_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match="has to be at least"):
        make()


@pytest.mark.parametrize("rows", [torch.ones(2, WIDTH), torch.ones(1, WIDTH).double(), [1.0]])
def test_a_function_that_returns_something_else_than_rows_is_refused(rows: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match=r"init returned .*; rows are torch.float32 \[\d+, 4\]"):
        _table(init=lambda ids: rows).rows(torch.tensor([1]))


LOOKUPS: list[tuple[str | None, tuple[Any, ...], type[Exception], str]] = [
    (
        None,
        (torch.tensor([1, -1, ROWS]),),
        IndexError,
        r"2 of 3 ids are out of range, the first is -1 at \[1\]",
    ),
    (
        None,
        (torch.tensor([[0, 1], [2, ROWS]]),),
        IndexError,
        r"rows 0 to 49: 1 of 4 .* first is 50 at \[1, 1\]",
    ),
    (None, (torch.tensor([1.0]),), TypeError, "ids are of torch.float32: they have to be of int64 or int32"),
    (None, (torch.tensor([True]),), TypeError, "ids are of torch.bool"),
    (None, ([1, 2],), TypeError, r"ids are \[1, 2\]: they have to be a tensor"),
    (None, (torch.tensor([1]), torch.tensor([0])), ConfigError, "offsets are for mode='sum' and mode='mean'"),
    ("sum", (torch.tensor([1]),), ConfigError, r"ids of shape \[1\] without offsets: bags are 2-D, or 1-D"),
    ("sum", (torch.tensor([[1]]), torch.tensor([0])), ConfigError, r"ids of shape \[1, 1\] with offsets"),
    ("sum", (torch.tensor([1]), torch.tensor([1])), ConfigError, "offsets begin at 1, not at 0"),
    ("sum", (torch.tensor([1, 2]), torch.tensor([0, 2, 1])), ConfigError, "offsets descend from 2 to 1 at 2"),
    (
        "sum",
        (torch.tensor([1, 2]), torch.tensor([0, 3])),
        ConfigError,
        "offsets reach 3, and there are 2 ids",
    ),
    ("sum", (torch.tensor([1]), torch.tensor([], dtype=torch.int64)), ConfigError, "no offsets, and 1 ids"),
    ("sum", (torch.tensor([1]), torch.tensor([[0]])), ConfigError, "offsets have 2 dimensions"),
    ("sum", (torch.tensor([1]), torch.tensor([0.0])), TypeError, "offsets are of torch.float32"),
    (
        "mean",
        (torch.tensor([[1]]), None, torch.ones(1, 1)),
        ConfigError,
        "per_sample_weights are for mode='sum'",
    ),
    (
        "sum",
        (torch.tensor([[1]]), None, torch.ones(1)),
        ConfigError,
        r"are torch.float32 \[1\]; they have to be",
    ),
    ("sum", (torch.tensor([[1]]), None, torch.ones(1, 1).double()), ConfigError, "are torch.float64"),
]


@pytest.mark.parametrize(("mode", "arguments", "kind", "message"), LOOKUPS)
def test_batches_that_are_wrong_are_refused_by_name(
    mode: str | None, arguments: tuple[Any, ...], kind: type[Exception], message: str
) -> None:
    table = _table(mode=mode)
    with pytest.raises(kind, match=message):
        table(*arguments)
    assert table.stats().lookups == 0


def test_rows_that_cannot_be_set_change_nothing() -> None:
    table = _table()
    before = _all(table)
    with pytest.raises(IndexError, match="the first is 50"):
        table.set_rows(torch.tensor([1, ROWS]), torch.ones(2, WIDTH))
    with pytest.raises(ConfigError, match=r"ids of shape \[2\] with values of \[1, 4\]"):
        table.set_rows(torch.tensor([1, 2]), torch.ones(1, WIDTH))
    with pytest.raises(IndexError, match="the first is -1"):
        table.rows(torch.tensor([-1]))
    assert torch.equal(_all(table), before)
    assert _table(out_of_range="zeros").rows(torch.tensor([[-1]])).tolist() == [[[0.0] * WIDTH]]


def test_an_averaged_model_is_refused_where_it_is_made() -> None:
    with pytest.raises(UsageError, match=r"AveragedModel would read and write all rows of the table"):
        torch.optim.swa_utils.AveragedModel(torch.nn.Sequential(_table()))


def test_a_table_that_grows_between_forward_and_backward_has_one_gradient() -> None:
    table = _table()
    found = table(torch.tensor([1])).sum()
    table.grow(60)
    found.backward()
    with pytest.raises(UsageError, match=r"has grown between .* gradient of 60 rows .* to one of 50"):
        table(torch.tensor([1])).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.shape == (50, WIDTH)
    table.weight.grad = None
    table(torch.tensor([1])).sum().backward()


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_a_lookup_is_not_traced() -> None:
    with pytest.raises(UsageError, match=r"torch.jit.trace cannot go through a lookup"):
        torch.jit.trace(_table(), torch.tensor([1]))


def test_a_weight_that_was_replaced_is_refused() -> None:
    table = _table()
    with pytest.raises(UsageError, match="weight was replaced"):
        torch.func.functional_call(table, {"weight": torch.ones(ROWS, WIDTH)}, torch.tensor([1]))


def test_an_entry_of_another_shape_is_not_copied() -> None:
    with pytest.raises(UsageError, match=r"copy_: values of shape \[50, 3\]"), torch.no_grad():
        _table().weight.copy_(TableEntry.of(EmbeddingTable(ROWS, 3).weight))
