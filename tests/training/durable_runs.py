"""What tests of durable training share: a model with all that a checkpoint keeps, begun and gone on with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.training.twins import (
    WIDTH,
    Block,
    Optimizer,
    Trial,
    assert_equal_lists,
    assert_equal_models,
    assert_equal_states,
    config_of,
    step,
)
from tierstore.training import Offload, offload

DURABLE = {"durable": True}
with_disk = pytest.mark.parametrize("layout", ["disk", "three"])


def layers() -> nn.Sequential:
    """Return a model with buffers and dropout."""
    return nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), Block(), nn.Linear(WIDTH, 5))


def build(seed: int = 0) -> tuple[nn.Sequential, Sequence[Optimizer]]:
    """Return that model and two optimizers of different kinds."""
    torch.manual_seed(seed)
    model = layers()
    first = torch.optim.AdamW(model[:2].parameters(), lr=torch.tensor(1e-2), betas=(0.8, 0.95))
    second = torch.optim.SGD(model[2:].parameters(), lr=0.1, momentum=0.9)
    return model, [first, second]


def begin(
    layout: str, path: Path, seed: int = 0, more: Mapping[str, object] | None = None, *, resume: bool = True
) -> tuple[Trial, Offload]:
    trial = Trial(*build(seed))
    config = config_of(layout, path, {**DURABLE, **(more or {})})
    run = offload(trial.model, trial.optimizers, config, resume=resume)
    trial.run = run
    return trial, run


def some_steps(trial: Trial, count: int) -> None:
    for _ in range(count):
        step(trial)


def uninterrupted(*counts: int) -> Trial:
    trial = Trial(*build())
    torch.manual_seed(1)
    some_steps(trial, sum(counts))
    return trial


def assert_ends_alike(expected: Trial, found: Trial, run: Offload) -> None:
    """Compare what was logged since the checkpoint, and what is left when the run ends."""
    run.store.check()
    run.close()
    assert_equal_lists(expected.logged[len(expected.logged) - len(found.logged) :], found.logged)
    assert_equal_models(expected.model, found.model)
    for mine, other in zip(expected.optimizers, found.optimizers, strict=True):
        assert_equal_states(mine, other)


def written_to_disk(run: Offload) -> int:
    return sum(moved.nbytes for (_, target), moved in run.stats().traffic.items() if target == "disk")


def state_bytes(run: Offload) -> int:
    keys = [key for key in run.store if key.startswith(("param/", "state/"))]
    return sum(run.store.spec(key).nbytes for key in keys)
