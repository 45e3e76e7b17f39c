"""Tables in a run that several threads and signal handlers use, and programs of other kinds."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import Tensor, nn

from tests.sampling import IS_CI
from tests.training.table_models import Clicks, assert_alike, begin, plain, step, table_config
from tests.training.twins import Trial, config_of
from tierstore.nn import EmbeddingTable
from tierstore.optim import LazyAdam, SparseAdam
from tierstore.training import offload


def test_threads_that_look_rows_up_find_them(tmp_path: Path) -> None:
    trial = begin("disk", tmp_path)
    model = trial.model
    assert isinstance(model, Clicks)
    expected = model.deep.rows(torch.arange(6000))
    wrong: list[int] = []

    def look(seed: int) -> None:
        chance = torch.Generator().manual_seed(seed)
        for turn in range(100):
            ids = torch.randint(0, 6000, (64,), generator=chance)
            if not torch.equal(model.deep.rows(ids), expected[ids]):
                wrong.append(turn)

    assert trial.run is not None
    with trial.run:
        threads = [threading.Thread(target=look, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_training_beside_a_thread_that_looks_rows_up_has_the_same_bits(tmp_path: Path) -> None:
    expected = plain(20)
    trial = begin("disk", tmp_path)
    model = trial.model
    assert isinstance(model, Clicks)
    is_over = threading.Event()
    failures: list[Exception] = []

    def look() -> None:
        chance = torch.Generator().manual_seed(5)
        while not is_over.is_set():
            try:
                model.deep.rows(torch.randint(0, 6000, (64,), generator=chance))
                model.deep.prefetch(torch.randint(0, 6000, (64,), generator=chance))
            except Exception as failure:  # noqa: BLE001 - it is told below
                failures.append(failure)
                return

    thread = threading.Thread(target=look)
    torch.manual_seed(1)
    assert trial.run is not None
    with trial.run:
        thread.start()
        try:
            for _ in range(20):
                step(trial)
        finally:
            is_over.set()
            thread.join()
    assert failures == []
    assert_alike(expected, trial)


@pytest.mark.parametrize("in_run", [False, True], ids=["alone", "in a run"])
def test_a_handler_that_looks_rows_up_parts_nothing(in_run: bool, tmp_path: Path) -> None:
    steps = 6 if IS_CI else 20
    expected = plain(steps)
    torch.manual_seed(0)
    trial = begin("disk", tmp_path) if in_run else plain(0)
    model = trial.model
    assert isinstance(model, Clicks)
    chance = torch.Generator().manual_seed(3)
    handled: list[Tensor] = []

    def handle(number: int, frame: FrameType | None) -> None:
        del number, frame
        handled.append(model.deep.rows(torch.randint(0, 6000, (40,), generator=chance)))

    before = signal.signal(signal.SIGALRM, handle)
    torch.manual_seed(1)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        for _ in range(steps):
            step(trial)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if trial.run is not None:
            trial.run.close()
    assert_alike(expected, trial)


@pytest.mark.parametrize("layout", ["disk", "three"])
def test_a_released_model_with_tables_goes_on_from_its_checkpoint(layout: str, tmp_path: Path) -> None:
    expected = plain(4)
    trial = begin(layout, tmp_path, more={"durable": True})
    torch.manual_seed(1)
    step(trial)
    step(trial)
    assert trial.run is not None
    trial.run.checkpoint()
    trial.run.close(restore=False)
    config = table_config(layout, tmp_path, {"durable": True})
    with offload(trial.model, list(trial.optimizers), config):
        step(trial)
        step(trial)
    assert_alike(expected, trial)


class Towers(nn.Module):
    """Two towers that look up the rows of one table, under two names."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingTable(3000, 16)
        self.user = nn.ModuleDict({"table": table, "head": nn.Linear(16, 4)})
        self.item = nn.ModuleDict({"table": table, "head": nn.Linear(16, 4)})

    def forward(self, ids: Tensor) -> Tensor:
        """Return one number for all ids."""
        user, item = (tower["head"](tower["table"](ids)) for tower in (self.user, self.item))
        made: Tensor = (user * item).sum()
        return made


def towers(layout: str | None, path: Path) -> list[Tensor]:
    torch.manual_seed(0)
    model = Towers()
    trial = Trial(model, [LazyAdam(model.parameters(), lr=0.05)])
    run = None if layout is None else offload(model, list(trial.optimizers), config_of(layout, path))
    for turn in range(3):
        loss = model(torch.arange(turn, turn + 5))
        loss.backward()
        trial.log(loss)
        trial.optimizer.step()
        trial.optimizer.zero_grad()
    if run is not None:
        run.close()
    return [each for each in trial.logged if each is not None]


@pytest.mark.parametrize("layout", ["host", "device"])
def test_a_table_of_two_towers_is_one_table(layout: str, tmp_path: Path) -> None:
    assert all(map(torch.equal, towers(None, tmp_path), towers(layout, tmp_path)))


def test_a_gradient_that_was_zeroed_in_place_can_be_added_to() -> None:
    tables = nn.Embedding(50, 4, sparse=True), EmbeddingTable(50, 4)
    tables[1].set_rows(torch.arange(50), tables[0].weight)
    steps = torch.optim.SparseAdam(tables[0].parameters()), SparseAdam(tables[1].parameters())
    for table, optimizer in zip(tables, steps, strict=True):
        for turn in range(3):
            table(torch.tensor([turn, turn + 1])).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()
    assert torch.equal(tables[1].rows(torch.arange(50)), tables[0].weight)
