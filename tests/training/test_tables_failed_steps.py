"""A step of several tables and dense parameters that fails anywhere: made again, it has one step's bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.table_models import STEPPERS
from tests.training.test_faults import Disk
from tests.training.twins import Optimizer, config_of, same
from tierstore.errors import BackendError, CapacityError, TierStoreError, UsageError
from tierstore.nn import EmbeddingTable, Normal
from tierstore.nn.table_weight import TableWeight
from tierstore.optim.row_optimizer import RowOptimizer
from tierstore.training import Offload, offload

ROWS, WIDTH = 3000, 32
SMALL: dict[str, object] = {
    "offload_cpu_size": "128KB",
    "offload_disk_size": "64MB",
    "placement": {"tables": {f"tables.{number}.weight": {"frames": "24KB"} for number in range(3)}},
}
"""Neither the rows of a batch nor what dense parameters need with their state fits."""


class Three(nn.Module):
    """Three tables and a dense part of several bundles."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            EmbeddingTable(ROWS, WIDTH, init=Normal(0.1), seed=seed) for seed in range(3)
        )
        self.dense = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 1))

    def forward(self, ids: Tensor) -> Tensor:
        """Map ``[batch]`` ids."""
        made: Tensor = self.dense(sum(table(ids + 7 * n) for n, table in enumerate(self.tables)))
        return made


def build(kind: str) -> tuple[Three, Optimizer]:
    torch.manual_seed(0)
    model = Three()
    return model, STEPPERS[kind](list(model.parameters()))


def backward(model: Three, number: int) -> None:
    ids = torch.randint(0, ROWS - 20, (120,), generator=torch.Generator().manual_seed(number))
    model(ids).square().mean().backward()


def results(model: Three, optimizer: Optimizer) -> list[Tensor]:
    every = torch.arange(ROWS)
    found = [table.rows(every) for table in model.tables]  # type: ignore[operator]
    found += [each.detach().clone() for each in model.dense.parameters()]
    for parameter in model.parameters():
        for value in optimizer.state[parameter].values():
            found.append(torch.as_tensor(value).clone())
    return found


def expected(kind: str, steps: int) -> list[Tensor]:
    model, optimizer = build(kind)
    for number in range(steps):
        backward(model, number)
        optimizer.step()
        optimizer.zero_grad()
    return results(model, optimizer)


def assert_equal(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    assert len(found) == len(wanted)
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert same(one, other), number


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def _step_with_faults(run: Offload, optimizer: Optimizer, disk: Disk, fault: int) -> int:
    """Let an operation of the disk fail while a step is made, and make it again; count failures."""
    failures = disk.faulty.failures
    disk.faulty.fail_next(fault)
    try:
        optimizer.step()
    except (BackendError, CapacityError):
        disk.faulty.heal()
        run.store.check()
        optimizer.step()
    disk.faulty.heal()
    return disk.faulty.failures - failures


@pytest.mark.parametrize("kind", ["LazyAdam", "Adagrad"])
def test_a_step_that_fails_anywhere_can_be_made_again(kind: str, tmp_path: Path, disk: Disk) -> None:
    model, optimizer = build(kind)
    with offload(model, optimizer, config_of("disk", tmp_path, SMALL)) as run:
        failed, number = 0, 0
        for fault in (1, 2, 3, 5, 7, 9, 12, 17, 24):
            backward(model, number)
            failed += _step_with_faults(run, optimizer, disk, fault)
            optimizer.zero_grad()
            number += 1
        assert failed > 6
        run.store.check()
        assert_equal(results(model, optimizer), expected(kind, number))


def test_a_full_disk_half_way_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build("LazyAdam")
    step_of = RowOptimizer._step_table
    calls: list[int] = []

    def fail_at_second(self: RowOptimizer, *args: Any) -> None:  # noqa: ANN401
        calls.append(1)
        if len(calls) == 2:
            raise CapacityError("the disk is full")
        step_of(self, *args)

    with offload(model, optimizer, config_of("disk", tmp_path, {**SMALL, "durable": True})) as run:
        backward(model, 0)
        monkeypatch.setattr(type(optimizer), "_step_table", fail_at_second)
        with pytest.raises(CapacityError, match="the disk is full"):
            optimizer.step()
        with pytest.raises(UsageError, match="failed in its midst: some of its parameters are stepped"):
            run.checkpoint()
        optimizer.step()
        assert len(calls) == 4, "the first table is stepped once, the second is tried twice"
        run.checkpoint()
        assert_equal(results(model, optimizer), expected("LazyAdam", 1))


@pytest.mark.parametrize("kind", STEPPERS)
@pytest.mark.parametrize("fails", range(3))
def test_without_a_run_too(kind: str, fails: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build(kind)
    name = "_step_table" if hasattr(optimizer, "_step_table") else "step_table"
    step_of: Callable[..., None] = getattr(type(optimizer), name)
    calls: list[int] = []

    def fail_once(self: object, *args: object) -> None:
        calls.append(1)
        if len(calls) == fails + 1:
            raise TierStoreError("no")
        step_of(self, *args)

    for number in range(2):
        calls.clear()
        backward(model, number)
        with monkeypatch.context() as patch:
            patch.setattr(type(optimizer), name, fail_once)
            with pytest.raises(TierStoreError):
                optimizer.step()
            optimizer.step()
        optimizer.zero_grad()
    assert_equal(results(model, optimizer), expected(kind, 2))


def test_another_gradient_is_another_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that was given up is not gone on with: the next one steps all tables."""
    model, optimizer = build("SparseAdam")
    weights = [each for each in model.parameters() if isinstance(each, TableWeight)]
    step_of = RowOptimizer._step_table
    backward(model, 0)

    def fail_at_third(self: RowOptimizer, weight: TableWeight, *args: Any) -> None:  # noqa: ANN401
        if weight is weights[2]:
            raise TierStoreError("no")
        step_of(self, weight, *args)

    with monkeypatch.context() as patch:
        patch.setattr(type(optimizer), "_step_table", fail_at_third)
        with pytest.raises(TierStoreError):
            optimizer.step()
    optimizer.zero_grad()
    backward(model, 1)
    optimizer.step()
    assert [optimizer.state[each]["step"] for each in weights] == [2, 2, 1]
    backward(model, 2)
    optimizer.step()
    optimizer.step()  # with the same gradient: somebody means it
    assert [optimizer.state[each]["step"] for each in weights] == [4, 4, 3]
