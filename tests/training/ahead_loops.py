"""What tests of steps ahead share: a step without a look at gradients, and a count of what was taken over."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

import tierstore as ts
from tests.training.twins import Trial, batch, loss_of


class Taken:
    """How many keys took new values over that were made ahead."""

    def __init__(self) -> None:
        self.keys = 0

    def since(self) -> int:
        """Return how many did since this was last asked."""
        keys, self.keys = self.keys, 0
        return keys


@pytest.fixture(name="taken")
def count_taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    return count_on(monkeypatch)


def count_on(patch: pytest.MonkeyPatch) -> Taken:
    """Count from now on, until the patch is undone."""
    counted = Taken()
    rename = ts.Store.rename

    def count(store: ts.Store, names: Mapping[str, str], *, replace: bool = False) -> None:
        rename(store, names, replace=replace)
        counted.keys += len(names)

    patch.setattr(ts.Store, "rename", count)
    return counted


def quiet_step(trial: Trial, between: Callable[[], object] | None = None) -> None:
    """Do a step without a look at gradients, and something between backward and ``step``."""
    loss = loss_of(trial.model, *batch())
    loss.backward()
    trial.log(loss)
    if between is not None:
        between()
    for optimizer in trial.optimizers:
        optimizer.step()
        optimizer.zero_grad()
