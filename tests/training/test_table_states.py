"""What a program keeps of a table's optimizer, and puts back: as with an embedding, or refused by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.table_models import table_config
from tierstore.nn import EmbeddingTable, Normal
from tierstore.optim import Adagrad, SparseAdam
from tierstore.training import offload

ROWS, WIDTH = 60, 4
KINDS = {"SparseAdam": (SparseAdam, torch.optim.SparseAdam), "Adagrad": (Adagrad, torch.optim.Adagrad)}
Program = Callable[[nn.Module, Any], list[object]]
kinds = pytest.mark.parametrize("kind", KINDS)
pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse invariant checks:UserWarning"
)  # PyTorch's own optimizers


def _table() -> EmbeddingTable:
    return EmbeddingTable(ROWS, WIDTH, init=Normal(0.1), seed=1)


def _steps(module: nn.Module, optimizer: Any, numbers: range) -> list[object]:  # noqa: ANN401
    losses: list[object] = []
    for number in numbers:
        loss = module(torch.tensor([number, 2, 3])).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _of_plain(kind: str, program: Program) -> tuple[list[object], Tensor]:
    plain = nn.Embedding(ROWS, WIDTH, sparse=True)
    plain.load_state_dict(_table().state_dict())
    found = program(plain, KINDS[kind][1](plain.parameters(), lr=0.1))
    return found, plain.weight.detach()


def _of_table(kind: str, program: Program, path: Path | None) -> tuple[list[object], Tensor]:
    table = _table()
    optimizer = KINDS[kind][0](table.parameters(), lr=0.1)
    run = contextlib.nullcontext() if path is None else offload(table, optimizer, table_config("host", path))
    with run:
        return program(table, optimizer), table.rows(torch.arange(ROWS))


def _kept_as_it_is(module: nn.Module, optimizer: Any) -> list[object]:  # noqa: ANN401
    _steps(module, optimizer, range(3))
    kept = optimizer.state_dict()
    losses = _steps(module, optimizer, range(3, 6))
    losses.append(float(kept["state"][0]["step"]))
    optimizer.load_state_dict(kept)
    losses += _steps(module, optimizer, range(6, 9))
    losses.append(float(kept["state"][0]["step"]))
    optimizer.load_state_dict(kept)
    return losses + _steps(module, optimizer, range(9, 11))


@kinds
@pytest.mark.parametrize("in_run", [False, True])
def test_a_state_dict_that_is_kept_is_all_of_one_moment(kind: str, in_run: bool, tmp_path: Path) -> None:
    losses, rows = _of_table(kind, _kept_as_it_is, tmp_path if in_run else None)
    expected = _of_plain(kind, _kept_as_it_is)
    assert losses == expected[0]
    assert torch.equal(rows, expected[1])
