"""Workers that read data live beside an open run: forked or spawned, with pinned memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.integrations.loaded_data import ByTheModel, Numbers
from tests.training.twins import LAYOUTS, Trial, adam, assert_same, blocks, build_blocks, config_of, loss_of
from tierstore.training import offload

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*argument is set as true but no accelerator"),
    pytest.mark.filterwarnings("ignore:.*The argument 'device' of Tensor.pin_memory"),
    pytest.mark.filterwarnings("ignore:.*The argument 'device' of Tensor.is_pinned"),
]

Load = Callable[[], DataLoader[Any]]


def trained_with(load: Load) -> Callable[[Trial], None]:
    """Return a loop of two epochs over what workers read."""

    def loop(trial: Trial) -> None:
        loader = load()
        for _ in range(2):
            for batch in loader:
                inputs, classes = batch.values() if isinstance(batch, dict) else batch
                loss = loss_of(trial.model, inputs, classes)
                loss.backward()
                trial.optimizer.step()
                trial.optimizer.zero_grad()
                trial.log(loss)

    return loop


@pytest.mark.parametrize(
    ("start", "is_persistent", "layout"),
    [("fork", True, "three"), ("fork", False, "three"), ("fork", False, "device"), ("spawn", True, "three")],
)
def test_what_workers_read_trains_as_without_a_run(
    start: str, is_persistent: bool, layout: str, tmp_path: Path
) -> None:
    def load() -> DataLoader[Any]:
        return DataLoader(
            Numbers(), batch_size=6, num_workers=2 if start == "fork" else 1,
            multiprocessing_context=start, pin_memory=True,
            persistent_workers=is_persistent, shuffle=True, generator=torch.Generator().manual_seed(2),
        )  # fmt: skip

    assert_same(build_blocks, trained_with(load), layout, tmp_path)


@pytest.mark.parametrize("workers", [0, 2])
def test_data_of_datasets_trains_as_without_a_run(workers: int, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    items = [Numbers()[number] for number in range(len(Numbers()))]
    table = datasets.Dataset.from_dict(
        {"inputs": [each.tolist() for each, _ in items], "label": [int(label) for _, label in items]}
    ).with_format("torch")

    def load() -> DataLoader[Any]:
        return DataLoader(table, batch_size=6, num_workers=workers)

    assert_same(build_blocks, trained_with(load), "three" if "three" in LAYOUTS else "device", tmp_path)


def test_a_worker_that_fails_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    model = blocks()
    trial = Trial(model, adam(model))
    with offload(model, trial.optimizers, config_of("three", tmp_path)) as run:
        with pytest.raises(OSError, match="item 13 cannot be read"):
            trained_with(lambda: DataLoader(Numbers(fails_at=13), batch_size=6, num_workers=2))(trial)
        run.store.check()
        trained_with(lambda: DataLoader(Numbers(), batch_size=6, num_workers=2))(trial)
    assert len(trial.logged) == 2 + 8


def test_a_worker_that_uses_the_model_is_told_that_it_is_its_parent_s(tmp_path: Path) -> None:
    model = blocks()
    with offload(model, None, config_of("three", tmp_path)):
        loader = DataLoader(
            ByTheModel(model), batch_size=6, num_workers=1, multiprocessing_context="fork", timeout=60
        )
        with pytest.raises(Exception, match=r"fork"):
            next(iter(loader))
        inputs, classes = next(iter(DataLoader(Numbers(), batch_size=6)))
        assert loss_of(model, inputs, classes).isfinite()
