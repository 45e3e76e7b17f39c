"""What tests of tables in a run share: a model with tables, and how its rows are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.training.twins import Block, Optimizer, Trial, assert_equal_lists, config_of, same
from tierstore.nn import EmbeddingTable, Normal
from tierstore.nn.table_entry import TableEntry
from tierstore.optim import FTRL, SGD, Adagrad, LazyAdam, SparseAdam
from tierstore.training import offload

ROWS, WIDTH = 6000, 48
SMALL_HOST: dict[str, dict[str, object]] = {
    "host": {},
    "disk": {"offload_cpu_size": "320KB"},
    "device": {"max_device_memory": "256KB"},
    "three": {"max_device_memory": "256KB", "offload_cpu_size": "320KB"},
}
"""Where there is a disk, tables of 1.1 MB and more do not fit into host memory."""


class Clicks(nn.Module):
    """A wide table, a deep one and a dense part."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = EmbeddingTable(ROWS, 1, mode="sum", init=0.0)
        self.deep = EmbeddingTable(ROWS, WIDTH, init=Normal(0.1), seed=7)
        self.dense = nn.Sequential(Block(), nn.Linear(WIDTH, 1))

    def forward(self, ids: Tensor) -> Tensor:
        """Map ``[batch, fields]`` ids to ``[batch]`` logits."""
        deep: Tensor = self.dense(self.deep(ids).mean(1))
        wide: Tensor = self.wide(ids)
        return (deep + wide).squeeze(1)


class HotClicks(Clicks):
    """The same, with hot rows of both tables on the device: fewer than are frequent."""

    def __init__(self, wide_rows: int = 64, deep_rows: int = 160, policy: str = "lfu") -> None:
        super().__init__()
        self.wide = EmbeddingTable(
            ROWS, 1, mode="sum", init=0.0, target="device", cache_rows=wide_rows, policy=policy
        )
        self.deep = EmbeddingTable(
            ROWS, WIDTH, init=Normal(0.1), seed=7, target="device", cache_rows=deep_rows, policy=policy
        )


STEPPERS: dict[str, Callable[[Sequence[nn.Parameter]], Optimizer]] = {
    "LazyAdam": lambda parameters: LazyAdam(parameters, lr=0.05, weight_decay=0.01),
    "FTRL": lambda parameters: FTRL(parameters, lr=0.05, l1=1e-3),
    "SparseAdam": lambda parameters: SparseAdam(parameters, lr=0.05),
    "Adagrad": lambda parameters: Adagrad(parameters, lr=0.05),
    "SGD": lambda parameters: SGD(parameters, lr=0.05),
}


def build(kind: str = "LazyAdam", model_of: Callable[[], Clicks] = Clicks) -> tuple[Clicks, list[Optimizer]]:
    """Return a model, an optimizer of its tables, and one of the rest."""
    torch.manual_seed(0)
    model = model_of()
    tables = STEPPERS[kind]([model.wide.weight, model.deep.weight])
    return model, [tables, torch.optim.Adam(model.dense.parameters(), lr=1e-2)]


def loss_of_clicks(model: nn.Module, spread: float = 400.0) -> Tensor:
    """Return the loss of one batch of ids of which few are frequent."""
    ids = torch.empty(16, 8).exponential_(1 / spread).long().clamp_(max=ROWS - 1)
    return nn.functional.binary_cross_entropy_with_logits(model(ids), (ids[:, 0] % 2).float())


def step(trial: Trial, spread: float = 400.0) -> None:
    """Do one step on ids of which few are frequent; log the loss."""
    loss = loss_of_clicks(trial.model, spread)
    loss.backward()
    trial.log(loss)
    for optimizer in trial.optimizers:
        optimizer.step()
        optimizer.zero_grad()


def rows_of(model: Clicks) -> list[Tensor]:
    """Return all rows of both tables."""
    return [table.rows(torch.arange(ROWS)) for table in (model.wide, model.deep)]


def states_of(trial: Trial) -> list[Tensor]:
    """Return what optimizers keep of tables, in order, as ordinary tensors."""
    found = []
    assert isinstance(trial.model, Clicks)
    for weight in (trial.model.wide.weight, trial.model.deep.weight):
        for optimizer in trial.optimizers:
            kept: Mapping[str, Any] = optimizer.state.get(weight, {})
            found += [
                each.dense() if isinstance(each, TableEntry) else torch.as_tensor(each)
                for each in kept.values()
            ]
    return found


def assert_alike(expected: Trial, found: Trial) -> None:
    """Compare what was logged, rows, states and the rest."""
    assert_equal_lists(expected.logged[len(expected.logged) - len(found.logged) :], found.logged)
    assert isinstance(expected.model, Clicks)
    assert isinstance(found.model, Clicks)
    assert_equal_lists(rows_of(expected.model), rows_of(found.model))
    assert_equal_lists(states_of(expected), states_of(found))
    for mine, other in zip(expected.model.dense.parameters(), found.model.dense.parameters(), strict=True):
        assert same(mine, other)


def table_config(layout: str, path: Path, more: Mapping[str, object] | None = None) -> dict[str, object]:
    """Return a layout's configuration, in which tables are larger than host memory where there is a disk."""
    return config_of(layout, path, {**SMALL_HOST[layout], **(more or {})})


def begin(
    layout: str,
    path: Path,
    kind: str = "LazyAdam",
    more: Mapping[str, object] | None = None,
    model_of: Callable[[], Clicks] = Clicks,
) -> Trial:
    """Return an offloaded trial."""
    trial = Trial(*build(kind, model_of))
    trial.run = offload(trial.model, trial.optimizers, table_config(layout, path, more))
    return trial


def plain(count: int, kind: str = "LazyAdam") -> Trial:
    """Return a trial that has made steps without a run."""
    trial = Trial(*build(kind))
    torch.manual_seed(1)
    for _ in range(count):
        step(trial)
    return trial
