"""What a program keeps of a table's optimizer, and puts back: as with an embedding, or refused by name."""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.table_models import table_config
from tierstore.errors import UsageError
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


def _replaced(module: nn.Module, optimizer: Any, kept: Callable[[Any], Any]) -> list[object]:  # noqa: ANN401
    """Try another rate with a second state, and go back to the first."""
    losses = _steps(module, optimizer, range(3))
    first = kept(optimizer.state_dict())
    optimizer.state = defaultdict(dict)
    losses += _steps(module, optimizer, range(3, 6))
    optimizer.load_state_dict(first)
    return losses + _steps(module, optimizer, range(6, 8))


def _put_back(module: nn.Module, optimizer: Any, kept: Callable[[Any], Any]) -> list[object]:  # noqa: ANN401
    losses = _steps(module, optimizer, range(3))
    (parameter,) = module.parameters()
    first = {name: kept(value) for name, value in optimizer.state[parameter].items()}
    optimizer.state[parameter] = {}
    losses += _steps(module, optimizer, range(3, 6))
    optimizer.state[parameter] = first
    return losses + _steps(module, optimizer, range(6, 8))


def _loaded_over(module: nn.Module, optimizer: Any, kept: Callable[[Any], Any]) -> list[object]:  # noqa: ANN401
    losses = _steps(module, optimizer, range(2))
    early = copy.deepcopy(optimizer.state_dict())
    losses += _steps(module, optimizer, range(2, 4))
    first = kept(optimizer.state_dict())
    optimizer.load_state_dict(early)
    losses += _steps(module, optimizer, range(4, 6))
    optimizer.load_state_dict(first)
    return losses + _steps(module, optimizer, range(6, 8))


BACK = {"replaced": _replaced, "put back": _put_back, "loaded over": _loaded_over}


@kinds
@pytest.mark.parametrize("in_run", [False, True])
@pytest.mark.parametrize("way", BACK)
def test_former_state_is_put_back_from_a_copy(kind: str, way: str, in_run: bool, tmp_path: Path) -> None:
    def program(module: nn.Module, optimizer: Any) -> list[object]:  # noqa: ANN401
        return BACK[way](module, optimizer, copy.deepcopy)

    losses, rows = _of_table(kind, program, tmp_path if in_run else None)
    expected = _of_plain(kind, program)
    assert losses == expected[0]
    assert torch.equal(rows, expected[1])


@kinds
@pytest.mark.parametrize("in_run", [False, True])
@pytest.mark.parametrize("way", BACK)
def test_former_state_that_is_gone_is_never_that_of_today(
    kind: str, way: str, in_run: bool, tmp_path: Path
) -> None:
    def program(module: nn.Module, optimizer: Any) -> list[object]:  # noqa: ANN401
        return BACK[way](module, optimizer, lambda kept: kept)

    with pytest.raises(UsageError, match=r"the state '(exp_avg|sum)' .* is gone: .* Keep a copy"):
        _of_table(kind, program, tmp_path if in_run else None)


@pytest.mark.parametrize("read", [lambda kept: kept.sum(), copy.deepcopy, lambda kept: kept.data_ptr()])
def test_an_entry_of_a_former_state_cannot_be_read(read: Callable[[Tensor], object]) -> None:
    table = _table()
    optimizer = SparseAdam(table.parameters())
    _steps(table, optimizer, range(2))
    kept = optimizer.state_dict()["state"][0]["exp_avg"]
    looked = kept.detach()
    optimizer.state.clear()
    _steps(table, optimizer, range(1))
    for entry in (kept, looked, kept.to(torch.float32)):
        with pytest.raises(UsageError, match="is gone"):
            read(entry)
    assert read(optimizer.state_dict()["state"][0]["exp_avg"]) is not None


def test_a_step_with_former_state_of_one_table_has_changed_no_other() -> None:
    first, second = _table(), _table()
    optimizer = SparseAdam([*first.parameters(), *second.parameters()])
    both = nn.ModuleList([first, second])
    for table in both:
        table(torch.tensor([1])).sum().backward()
    optimizer.step()
    kept = optimizer.state[second.weight]
    optimizer.state[second.weight] = {}
    optimizer.step()
    optimizer.state[second.weight] = kept
    before = first.rows(torch.arange(ROWS))
    with pytest.raises(UsageError, match="is gone"):
        optimizer.step()
    assert torch.equal(first.rows(torch.arange(ROWS)), before)
