"""What tests of tables with hot rows on a run's device share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training.table_models import HotClicks, begin, step
from tests.training.twins import Trial, with_device
from tierstore.tables import CacheStats
from tierstore.training import Offload

beside_device = pytest.mark.parametrize("layout", ["device", "three"])
DURABLE: dict[str, object] = {"durable": True}
WIDE, DEEP = "table/wide.weight/cache", "table/deep.weight/cache"


def run_of(trial: Trial) -> Offload:
    """Return its run."""
    assert trial.run is not None
    return trial.run


def hot(layout: str, path: Path, kind: str = "LazyAdam", *, durable: bool = False) -> Trial:
    """Return an offloaded trial whose tables have hot rows on the device, about to begin."""
    more = {**with_device(layout, "512KB"), "durable": durable}
    trial = begin(layout, path, kind, more, HotClicks)
    torch.manual_seed(1)
    return trial


def some_steps(trial: Trial, count: int) -> None:
    """Train."""
    for _ in range(count):
        step(trial)


def cache_of(trial: Trial, name: str = "deep.weight") -> CacheStats:
    """Return what became of a table's hot rows."""
    found = run_of(trial).stats().tables[name].cache
    assert found is not None
    return found
