"""Tables that keep hot rows on a run's device: the same bits as without, whatever interrupts."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.training.hot_tables import DEEP, DURABLE, WIDE, beside_device, cache_of, hot, run_of, some_steps
from tests.training.table_models import (
    ROWS,
    STEPPERS,
    WIDTH,
    Clicks,
    HotClicks,
    assert_alike,
    begin,
    build,
    loss_of_clicks,
    plain,
    table_config,
)
from tests.training.twins import Trial, with_device
from tierstore.data import lookahead
from tierstore.errors import BackendError, StoreClosed, UsageError
from tierstore.nn import EmbeddingTable
from tierstore.tables import RowStore
from tierstore.testing.memory import DeviceBudget
from tierstore.training import offload

# --- the same bits -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "kind"), [("device", "LazyAdam"), ("host", "SGD"), *(("three", kind) for kind in STEPPERS)]
)
def test_hot_rows_on_the_device_have_the_bits_of_none(layout: str, kind: str, tmp_path: Path) -> None:
    expected = plain(4, kind)
    trial = hot(layout, tmp_path, kind)
    some_steps(trial, 4)
    run_of(trial).store.check()
    if layout != "host":
        cache = cache_of(trial)
        assert cache.hits
        assert cache.evictions, "the cache is to be smaller than what is looked up"
        assert cache.rows_to_host
    run_of(trial).close()
    assert_alike(expected, trial)


@pytest.mark.parametrize(("layout", "rows"), [("three", 1), ("device", 40), ("three", ROWS)])
def test_however_few_or_many_there_is_room_for(layout: str, rows: int, tmp_path: Path) -> None:
    expected = plain(3)
    more = {"max_device_memory": "8MB", "offload_cpu_size": "8MB"}
    trial = begin(layout, tmp_path, more=more, model_of=lambda: HotClicks(rows, rows, "lru"))
    torch.manual_seed(1)
    some_steps(trial, 3)
    cache = cache_of(trial)
    assert cache.slots == rows
    assert bool(cache.bypassed) == (rows < ROWS)
    run_of(trial).close()
    assert_alike(expected, trial)


def test_nothing_is_computed_with_tensors_of_both_sides(tmp_path: Path) -> None:
    expected = plain(3)
    trial = hot("three", tmp_path)
    with DeviceBudget("256KB", mixing="raise"):
        some_steps(trial, 3)
    run_of(trial).close()
    assert_alike(expected, trial)


class _Batches(nn.Module):
    """A table alone, whose batches are given."""

    def __init__(self, cache_rows: int) -> None:
        super().__init__()
        self.table = EmbeddingTable(ROWS, WIDTH, seed=3, target="device", cache_rows=cache_rows)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.table(ids).square().sum()
        return loss


def test_rows_that_were_prefetched_are_hits(tmp_path: Path) -> None:
    chance = torch.Generator().manual_seed(2)
    batches = [torch.randint(0, ROWS, (30,), generator=chance) for _ in range(6)]
    twins = []
    for cache_rows in (0, 90):
        model = _Batches(cache_rows)
        optimizer = STEPPERS["SparseAdam"](list(model.parameters()))
        with offload(model, optimizer, table_config("device", tmp_path)) as run:
            found = []
            for _ in range(2):
                for ids in lookahead(batches, model.table, depth=2):
                    model(ids).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                found.append(run.stats().tables["table.weight"].cache)
        if cache_rows:
            first, second = found
            assert first is not None
            assert second is not None
            assert second.prefetched - first.prefetched >= 4 * 30, "rows are in host memory by now"
            assert second.misses - first.misses <= 30, "but for the first batch all were brought before"
        twins.append(model.table.rows(torch.arange(ROWS)))
    assert torch.equal(*twins)


# --- where they lie ----------------------------------------------------------------------------


@beside_device
def test_a_cache_is_a_key_of_the_device_and_charged_there(
    layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tierstore")
    trial = hot(layout, tmp_path)
    with run_of(trial) as run:
        assert "table 'deep.weight': up to 160 of 6000 rows are kept on the device" in caplog.text
        some_steps(trial, 3)
        device = run.store.tier_names[0]
        for key, rows, width in ((WIDE, 64, 1), (DEEP, 160, WIDTH)):
            assert run.store.where(key) == (device,)
            assert run.store.spec(key).nbytes == rows * 3 * width * 4  # with two moments
        assert cache_of(trial).slots == 160
        assert run.stats().tiers[device].charged_bytes >= 160 * 3 * WIDTH * 4


@beside_device
def test_rows_travel_over_the_link_and_are_counted_there(layout: str, tmp_path: Path) -> None:
    trial = hot(layout, tmp_path)
    with run_of(trial) as run:
        some_steps(trial, 4)
        caches = [each.cache for each in run.stats().tables.values()]
        assert None not in caches
        up, down = (run.stats().traffic[way].nbytes for way in (("host", "device"), ("device", "host")))
        assert up >= sum(each.bytes_to_device for each in caches if each) > 0
        assert down >= sum(each.bytes_to_host for each in caches if each) > 0


def test_without_a_device_all_rows_are_in_host_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tierstore")
    trial = hot("disk", tmp_path)
    with run_of(trial) as run:
        assert "cache_rows=160 of 'deep': there is no device in this run" in caplog.text
        assert [each.cache for each in run.stats().tables.values()] == [None, None]
        assert DEEP not in run.store


# --- the life of a run -------------------------------------------------------------------------


def test_training_goes_on_from_a_checkpoint_with_a_cold_cache(tmp_path: Path) -> None:
    expected = plain(9)
    first = hot("three", tmp_path, durable=True)
    some_steps(first, 3)
    run_of(first).checkpoint()
    some_steps(first, 2)
    assert cache_of(first).dirty
    run_of(first).checkpoint()
    assert not cache_of(first).dirty, "rows are written back, and stay"
    assert cache_of(first).used
    some_steps(first, 3)  # lost
    run_of(first).close(restore=False)
    second = begin("three", tmp_path, more={**with_device("three", "512KB"), **DURABLE}, model_of=HotClicks)
    assert run_of(second).resumed is not None
    assert cache_of(second).used == 0
    some_steps(second, 4)
    run_of(second).close(restore=True)
    assert_alike(expected, second)


@pytest.mark.parametrize("model_of", [Clicks, lambda: HotClicks(8, 16, "lru")], ids=["none", "another"])
def test_a_checkpoint_does_not_ask_which_cache_there_was(model_of: type[Clicks], tmp_path: Path) -> None:
    expected = plain(5)
    first = hot("three", tmp_path, durable=True)
    some_steps(first, 3)
    run_of(first).checkpoint()
    run_of(first).close(restore=False)
    second = begin("three", tmp_path, more={**with_device("three", "512KB"), **DURABLE}, model_of=model_of)
    some_steps(second, 2)
    run_of(second).close(restore=True)
    assert_alike(expected, second)


@beside_device
def test_a_suspended_run_has_no_row_on_the_device(layout: str, tmp_path: Path) -> None:
    expected = plain(6)
    trial = hot(layout, tmp_path)
    some_steps(trial, 3)
    with run_of(trial) as run:
        run.suspend()
        assert run.stats().tiers[run.store.tier_names[0]].charged_bytes == 0
        assert DEEP not in run.store
        assert run.stats().tables["deep.weight"].cache is None
        run.save(tmp_path / "saved")
        run.resume()
        assert DEEP in run.store
        some_steps(trial, 3)
        assert cache_of(trial).hits
    assert_alike(expected, trial)


def coalesced(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient.coalesce()


def test_a_gradient_is_suspended_with_its_table(tmp_path: Path) -> None:
    losses = []
    for trial in (Trial(*build()), hot("three", tmp_path)):
        torch.manual_seed(1)
        for number in range(3):
            for _ in range(2):  # one gradient of both
                loss = loss_of_clicks(trial.model)
                loss.backward()
                trial.log(loss)
                assert isinstance(trial.model, Clicks)
                if number == 1:
                    trial.model.deep.weight.grad = coalesced(trial.model.deep.weight.grad)
                if trial.run is not None:
                    trial.run.suspend()
                    trial.run.resume()
                assert trial.model.deep.weight.grad is not None
                assert trial.model.deep.weight.grad.is_coalesced() == (number == 1)
            for optimizer in trial.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        if trial.run is not None:
            trial.run.close()
        losses.append(trial)
    assert_alike(*losses)


@pytest.mark.parametrize("layout", ["three"])
def test_a_suspension_that_fails_leaves_rows_on_the_device(layout: str, tmp_path: Path) -> None:
    expected = plain(6)
    trial = hot(layout, tmp_path)
    some_steps(trial, 3)
    with run_of(trial) as run:
        assert isinstance(trial.model, Clicks)
        reference = next(trial.model.dense.parameters()).detach()
        with pytest.raises(UsageError, match="are in use"):
            run.suspend()
        assert DEEP in run.store
        del reference
        some_steps(trial, 3)
        assert cache_of(trial).hits
    assert_alike(expected, trial)


@beside_device
def test_a_table_that_is_brought_back_leaves_nothing_on_the_device(layout: str, tmp_path: Path) -> None:
    trial = hot(layout, tmp_path)
    some_steps(trial, 3)
    with run_of(trial) as run:
        session = run._session
        assert session is not None
        tables = session.tables
        for weight in list(tables.attached()):
            tables.restore(weight)
        assert [key for key in run.store if key.startswith("table/")] == []
        some_steps(trial, 1)
        tables.take_in(session.bindings.leasing)
        assert DEEP in run.store
        some_steps(trial, 1)
        assert cache_of(trial).used


def test_a_run_that_cannot_be_resumed_is_suspended_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(4)
    trial = hot("three", tmp_path)
    some_steps(trial, 2)
    with run_of(trial) as run:
        run.suspend()
        monkeypatch.setattr(RowStore, "attach_device", _fail_to_attach)
        with pytest.raises(BackendError, match="no device"):
            run.resume()
        assert [key for key in run.store if key.endswith("/cache")] == []
        assert run.stats().tiers[run.store.tier_names[0]].charged_bytes == 0
        monkeypatch.undo()
        run.resume()
        some_steps(trial, 2)
    assert_alike(expected, trial)


def _fail_to_attach(self: RowStore, *_: object) -> None:
    del self
    raise BackendError("no device")


@beside_device
def test_a_released_table_leaves_nothing_on_the_device(layout: str, tmp_path: Path) -> None:
    trial = hot(layout, tmp_path)
    some_steps(trial, 1)
    with run_of(trial) as run:
        tables = run._session.tables  # type: ignore[union-attr]
        for weight in list(tables.attached()):
            tables.release(weight, "it was let go")
        assert [key for key in run.store if key.endswith("/cache")] == []
        assert isinstance(trial.model, Clicks)
        with pytest.raises(StoreClosed, match="it was let go"):
            trial.model.deep(torch.arange(3))


@pytest.mark.parametrize("layout", ["three"])
def test_a_saved_run_is_loaded_into_a_cache(layout: str, tmp_path: Path) -> None:
    expected = plain(5)
    first = hot(layout, tmp_path / "first")
    some_steps(first, 3)
    with run_of(first) as run:
        run.save(tmp_path / "saved")
    state = torch.get_rng_state()
    second = hot(layout, tmp_path / "second")
    some_steps(second, 1)  # what there is, is written over
    torch.set_rng_state(state)
    second.logged.clear()
    with run_of(second) as run:
        run.load(tmp_path / "saved")
        some_steps(second, 2)
    assert_alike(expected, second)


@pytest.mark.parametrize("layout", ["three"])
def test_weights_are_read_into_a_table_with_a_cache(layout: str, tmp_path: Path) -> None:
    source, _ = build()
    torch.manual_seed(1)
    values = {name: torch.empty_like(each) for name, each in source.state_dict().items()}
    for each in values.values():
        each.uniform_(-1, 1)
    save_file(values, tmp_path / "weights.safetensors")
    model, optimizers = build(model_of=HotClicks)
    with offload(model, optimizers, table_config(layout, tmp_path), weights=tmp_path / "weights.safetensors"):
        assert torch.equal(model.deep.rows(torch.arange(ROWS)), values["deep.weight"])
        assert torch.equal(model.state_dict()["deep.weight"], values["deep.weight"])
