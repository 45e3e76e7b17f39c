"""A run with tables that is suspended: rows leave host memory and come back as they were."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.training.table_models import Clicks, assert_alike, begin, loss_of_clicks, plain, rows_of, step
from tests.training.test_faults import Disk
from tests.training.twins import Trial
from tierstore.errors import BackendError, CapacityError, UsageError
from tierstore.training import Offload

TARGETS = [
    ("host", "host"), ("disk", "host"), ("disk", "disk"), ("device", "host"), ("three", "host"),
    ("three", "disk"),
]  # fmt: skip
every_target = pytest.mark.parametrize(("layout", "to"), TARGETS)
ROOM = {"offload_disk_size": "64MB"}
FRAMES = ("table/wide.weight/frames", "table/deep.weight/frames")


def run_of(trial: Trial) -> Offload:
    assert trial.run is not None
    return trial.run


def assert_away(run: Offload, to: str) -> None:
    """Make sure that no tier above has anything, and that frames are where they may be."""
    names = run.store.tier_names
    for name in names[: names.index(to)]:
        tier = run.stats().tiers[name]
        assert (tier.charged_bytes, tier.in_flight_bytes, tier.leased_bytes) == (0, 0, 0)
    assert all((key in run.store) == (to == "host") for key in FRAMES)


@every_target
def test_training_goes_on_as_if_nothing_had_happened(layout: str, to: str, tmp_path: Path) -> None:
    expected = plain(4)
    trial = begin(layout, tmp_path, more=ROOM)
    torch.manual_seed(1)
    with run_of(trial) as run:

        def away() -> None:
            before = run.stats().tables["deep.weight"]
            run.suspend(to)
            run.suspend(to)
            assert_away(run, to)
            run.resume()
            run.resume()
            after = run.stats().tables["deep.weight"]
            assert after.frames == before.frames
            assert after.pages == (0 if to == "disk" else before.pages), "no page is read to resume"
            assert after.misses == before.misses
            run.store.check()

        away()
        for _ in range(4):
            loss = loss_of_clicks(trial.model)
            if (layout, to) != ("three", "disk"):  # what the dense part was given waits in host memory
                away()  # a graph waits
            loss.backward()
            trial.log(loss)
            del loss
            for optimizer in trial.optimizers:
                away()
                optimizer.step()
                optimizer.zero_grad()
    assert_alike(expected, trial)


def test_a_run_may_go_further_down(tmp_path: Path) -> None:
    expected = plain(2)
    trial = begin("three", tmp_path, more=ROOM)
    torch.manual_seed(1)
    with run_of(trial) as run:
        step(trial)
        run.suspend()
        assert_away(run, "host")
        run.suspend("disk")
        assert_away(run, "disk")
        run.suspend("host")
        assert_away(run, "disk")
        run.resume()
        step(trial)
    assert_alike(expected, trial)


@every_target
def test_what_needs_rows_is_refused_by_name(layout: str, to: str, tmp_path: Path) -> None:
    trial = begin(layout, tmp_path / "run", more=ROOM)
    model = trial.model
    assert isinstance(model, Clicks)
    with run_of(trial) as run:
        step(trial)
        run.save(tmp_path / "saved")
        state = {name: value.clone() for name, value in model.state_dict().items()}
        ids = torch.arange(8)
        graph = model.deep(ids).sum()
        expected = rows_of(model)
        run.suspend(to)
        acts: list[Callable[[], object]] = [
            lambda: model.deep(ids),
            lambda: model(ids[None]),
            lambda: model.deep.rows(ids),
            lambda: model.deep.set_rows(ids, torch.zeros(8, 48)),
            lambda: model.deep.prefetch(ids),
            lambda: model.deep.grow(7000),
            lambda: model.deep.load(tmp_path / "exported"),
            graph.backward,
            trial.optimizers[0].step,
            lambda: run.load(tmp_path / "saved"),
            lambda: model.load_state_dict(state),
        ]
        for act in acts:
            with pytest.raises((UsageError, RuntimeError), match=r"the run is suspended.*run\.resume\(\)"):
                act()
            assert_away(run, to)
        with pytest.raises(UsageError, match=r"the table 'deep\.weight' is read: call run\.resume"):
            model.deep.rows(ids)
        run.resume()
        for found, wanted in zip(rows_of(model), expected, strict=True):
            assert torch.equal(found, wanted)
        model.deep(ids)
        del graph


@every_target
def test_what_looks_and_saves_works_meanwhile(layout: str, to: str, tmp_path: Path) -> None:
    trial = begin(layout, tmp_path / "run", more=ROOM)
    model = trial.model
    assert isinstance(model, Clicks)
    with run_of(trial) as run:
        step(trial)
        expected = rows_of(model)
        run.suspend(to)
        assert model.deep.weight.shape == (6000, 48)
        assert model.deep.stats().lookups == 1
        run.save(tmp_path / "saved")
        model.deep.export(tmp_path / "exported")
        state = model.state_dict()
        assert torch.equal(state["wide.weight"].clone(), expected[0])
        moments = trial.optimizers[0].state_dict()
        assert moments["state"][1]["exp_avg"].clone().any()
        trial.optimizers[0].load_state_dict(moments)
        assert_away(run, to)
        run.resume()
        model.deep.load(tmp_path / "exported")
        assert torch.equal(rows_of(model)[1], expected[1])
        model.deep.set_rows(torch.arange(6000), torch.zeros(6000, 48))
        run.load(tmp_path / "saved")
        assert torch.equal(rows_of(model)[1], expected[1])


@every_target
@pytest.mark.parametrize("restore", [True, False])
def test_a_suspended_run_can_be_closed(layout: str, to: str, restore: bool, tmp_path: Path) -> None:
    expected = plain(3)
    trial = begin(layout, tmp_path, more=ROOM)
    torch.manual_seed(1)
    for _ in range(2):
        step(trial)
    run_of(trial).suspend(to)
    run_of(trial).close(restore=restore)
    if restore:
        step(trial)
        assert_alike(expected, trial)


@pytest.mark.parametrize("layout", ["disk", "three"])
def test_a_suspended_run_is_made_durable(layout: str, tmp_path: Path) -> None:
    expected = plain(4)
    more = {**ROOM, "durable": True}
    first = begin(layout, tmp_path, more=more)
    torch.manual_seed(1)
    for _ in range(2):
        step(first)
    run_of(first).suspend("disk")
    run_of(first).checkpoint()
    assert_away(run_of(first), "disk")
    run_of(first).close(restore=False)
    second = begin(layout, tmp_path, more=more)
    for _ in range(2):
        step(second)
    run_of(second).close(restore=True)
    assert_alike(expected, second)


def test_what_stays_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trial = begin("disk", tmp_path, more=ROOM)
    with run_of(trial) as run:
        loss_of_clicks(trial.model).backward()
        with caplog.at_level(logging.WARNING, "tierstore"):
            run.suspend("disk")
        (said,) = [each.message for each in caplog.records if "stay where they are" in each.message]
        gradients = "the gradient of wide.weight, the gradient of deep.weight"
        assert said == f"suspended; 2 tensors stay where they are: {gradients}"


def test_dirty_rows_that_have_no_room_are_refused_before_anything_moves(tmp_path: Path) -> None:
    trial = begin("three", tmp_path, more={"offload_disk_size": "200KB", "offload_cpu_size": "512KB"})
    with run_of(trial) as run:
        step(trial, 60.0)
        # A value that crossed goes at the first sweep at which nobody refers to it: suspending is one, too.
        where = {key: run.store.where(key) for key in run.store if not key.startswith("cross/")}
        beside_bytes = sum(run.store.spec(key).nbytes for key in where if key not in FRAMES)
        dirty_bytes = sum(each.dirty_pages * 4096 for each in run.stats().tables.values())
        assert beside_bytes < 200 << 10 < beside_bytes + dirty_bytes
        with pytest.raises(CapacityError, match=r"run\.suspend\(to='disk'\) has to put .* into disk"):
            run.suspend("disk")
        assert where == {key: run.store.where(key) for key in run.store if not key.startswith("cross/")}
        step(trial, 60.0)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.mark.parametrize("layout", ["disk", "three"])
def test_a_failure_of_any_move_leaves_a_run_that_goes_on(layout: str, tmp_path: Path, disk: Disk) -> None:
    expected = plain(3)
    trial = begin(layout, tmp_path, more=ROOM)
    torch.manual_seed(1)
    with run_of(trial) as run:
        for _ in range(2):
            step(trial)
        for number in itertools.count(1):
            disk.faulty.fail_next(number)
            failures = disk.faulty.failures
            with contextlib.suppress(BackendError, CapacityError):
                run.suspend("disk")
            if disk.faulty.failures == failures:
                disk.faulty.fail_next(0)
                break
            run.resume()
            assert all(key in run.store for key in FRAMES), "a later resume gives frames back"
            run.store.check()
        assert number > 3
        assert_away(run, "disk")
        run.resume()
        step(trial)
    assert_alike(expected, trial)
