"""Tables that keep hot rows on a run's device: the same bits as without, whatever interrupts."""

from __future__ import annotations

import itertools
import logging
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

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
    rows_of,
    step,
    table_config,
)
from tests.training.twins import Trial, with_device
from tierstore.errors import BackendError, CapacityError, UsageError
from tierstore.nn import EmbeddingTable
from tierstore.tables import CacheStats, RowStore
from tierstore.tables.table_lock import TableLock
from tierstore.testing.memory import DeviceBudget
from tierstore.training import Offload, offload
from tierstore.training.modules.link import Link

beside_device = pytest.mark.parametrize("layout", ["device", "three"])
DURABLE: dict[str, object] = {"durable": True}
WIDE, DEEP = "table/wide.weight/cache", "table/deep.weight/cache"


def run_of(trial: Trial) -> Offload:
    assert trial.run is not None
    return trial.run


def hot(layout: str, path: Path, kind: str = "LazyAdam", *, durable: bool = False) -> Trial:
    more = {**with_device(layout, "512KB"), "durable": durable}
    trial = begin(layout, path, kind, more, HotClicks)
    torch.manual_seed(1)
    return trial


def some_steps(trial: Trial, count: int) -> None:
    for _ in range(count):
        step(trial)


def cache_of(trial: Trial, name: str = "deep.weight") -> CacheStats:
    found = run_of(trial).stats().tables[name].cache
    assert found is not None
    return found


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


# --- refused -----------------------------------------------------------------------------------


def test_a_device_that_is_too_small_is_told_with_numbers(tmp_path: Path) -> None:
    model, optimizers = build(model_of=lambda: HotClicks(64, 6000))
    before = rows_of(model)
    message = (
        r"'wide', 'deep': cache_rows=6064 with their state take 3\.\d MiB on the device, and beside the "
        r"bundle of 'dense\..*' \(.*\) max_device_memory leaves .* of 250\.0 KiB: room for \d+ rows"
    )
    with pytest.raises(CapacityError, match=message) as caught:
        offload(model, optimizers, table_config("three", tmp_path, {"max_device_memory": 256000}))
    needed_bytes, free_bytes = caught.value.needed_bytes, caught.value.free_bytes
    assert needed_bytes is not None
    assert free_bytes is not None
    assert needed_bytes > free_bytes
    assert all(map(torch.equal, before, rows_of(model)))


def test_as_many_rows_as_it_says_there_is_room_for(tmp_path: Path) -> None:
    config = table_config("three", tmp_path, {"offload_cpu_size": "1MB"})
    with pytest.raises(CapacityError, match=r"room for (\d+) rows") as caught:
        offload(*build(model_of=lambda: HotClicks(1, 6000)), config)
    rows = int(str(caught.value).rpartition("room for ")[2].split()[0])
    assert rows > 100
    with offload(*build(model_of=lambda: HotClicks(1, rows - 1)), config) as run:
        assert DEEP in run.store


@pytest.mark.parametrize("by", ["run", "group"])
def test_an_optimizer_on_the_host_is_refused_by_name(by: str, tmp_path: Path) -> None:
    model, optimizers = build(model_of=HotClicks)
    if by == "group":
        optimizers[0].param_groups[0]["target"] = "cpu"
    more = {"optimizer_target": "cpu"} if by == "run" else {}
    said = "optimizer_target is 'cpu'" if by == "run" else "its optimizer's group has target='cpu'"
    with pytest.raises(UsageError, match=f"'wide' has cache_rows=64: it is stepped .* {said}"):
        offload(model, optimizers, table_config("three", tmp_path, more))


def test_a_table_that_is_placed_on_the_host_has_no_cache(tmp_path: Path) -> None:
    model, optimizers = build(model_of=HotClicks)
    with pytest.raises(UsageError, match="'deep' has cache_rows=160 and is placed on the host"):
        offload(model, optimizers, table_config("three", tmp_path), placement={"deep": "cpu"})


def test_two_modules_of_one_table_have_to_say_the_same(tmp_path: Path) -> None:
    model, optimizers = build(model_of=HotClicks)
    other = EmbeddingTable(ROWS, WIDTH, target="device", cache_rows=32)
    other.weight = model.deep.weight
    model.other = other
    message = "'deep' and 'other' look up one table, with cache_rows=160, policy='lfu' and cache_rows=32"
    with pytest.raises(UsageError, match=message):
        offload(model, optimizers, table_config("three", tmp_path))


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


def test_a_gradient_is_suspended_with_its_table(tmp_path: Path) -> None:
    losses = []
    for trial in (Trial(*build()), hot("three", tmp_path)):
        torch.manual_seed(1)
        for number in range(3):
            for part in range(2):  # one gradient of both
                loss = loss_of_clicks(trial.model)
                loss.backward()
                trial.log(loss)
                if trial.run is not None and number + part == 1:
                    trial.run.suspend()
                    trial.run.resume()
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
        tables = run._session.tables  # type: ignore[union-attr]
        for weight in list(tables.attached()):
            tables.restore(weight)
        assert [key for key in run.store if key.startswith("table/")] == []
        some_steps(trial, 1)
        tables.take_in()
        assert DEEP in run.store
        some_steps(trial, 1)
        assert cache_of(trial).used


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


# --- what fails --------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["cpu", "device"])
def test_a_row_that_cannot_be_carried_is_lost_nowhere(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th value over the link fails, for every n of a step: the step is made again, to the same bits."""
    expected = plain(4, "SGD")
    trial = hot("three", tmp_path, "SGD")
    some_steps(trial, 2)
    carry, left = Link.carry, [0]

    def fail(self: Link, tensor: torch.Tensor, side: str) -> torch.Tensor:
        left[0] -= side == way
        if side == way and left[0] == 0:
            raise BackendError("the link failed")
        return carry(self, tensor, side)

    monkeypatch.setattr(Link, "carry", fail)
    assert isinstance(trial.model, Clicks)
    failures = 0
    for n in itertools.count(1):
        before, left[0] = torch.get_rng_state(), n
        logged = len(trial.logged)
        try:
            trial.model.deep.rows(torch.arange(ROWS))
            trial.model.deep(torch.arange(n, n + 50))
        except BackendError:
            failures += 1
            torch.set_rng_state(before)
            del trial.logged[logged:]
        else:
            break
    left[0] = 0
    assert failures > 0
    some_steps(trial, 2)
    run_of(trial).close()
    assert_alike(expected, trial)


@pytest.mark.parametrize("number", [1, 2])
def test_a_run_that_cannot_be_opened_leaves_tables_as_they_were(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizers = build(model_of=HotClicks)
    before, attach, left = rows_of(model), RowStore.attach_device, [number]

    def fail(self: RowStore, *arguments: object) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise BackendError("no device")
        attach(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(RowStore, "attach_device", fail)
    with pytest.raises(BackendError, match="no device"):
        offload(model, optimizers, table_config("three", tmp_path))
    assert all(map(torch.equal, before, rows_of(model)))
    monkeypatch.undo()
    with offload(model, optimizers, table_config("three", tmp_path)) as run:
        assert DEEP in run.store


@pytest.mark.parametrize("what", ["checkpoint", "suspend", "resume"])
def test_who_has_rows_in_hand_finds_the_bindings_free(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He may need them, for room on the link: whoever has them must not wait for rows."""
    trial = hot("three", tmp_path, durable=True)
    some_steps(trial, 1)
    model, main = trial.model, threading.current_thread()
    assert isinstance(model, Clicks)
    lock, enter = model.deep.weight.row_store.lock, TableLock.__enter__
    has_rows, wants_rows, free = threading.Event(), threading.Event(), list[bool]()

    def wanted(self: TableLock) -> None:
        if self is lock and threading.current_thread() is main:
            wants_rows.set()
        enter(self)

    with run_of(trial) as run:
        session = run._session
        assert session is not None
        if what == "resume":
            run.suspend()

        def have_rows() -> None:
            with lock:
                has_rows.set()
                wants_rows.wait()
                bindings = session.bindings._lock
                free.append(bindings.acquire(blocking=False))
                if free[-1]:
                    bindings.release()

        thread = threading.Thread(target=have_rows)
        thread.start()
        has_rows.wait()
        monkeypatch.setattr(TableLock, "__enter__", wanted)
        getattr(run, what)()
        thread.join()
    assert free == [True]


def test_checkpoints_are_made_beside_a_thread_that_looks_rows_up(tmp_path: Path) -> None:
    expected = plain(6)
    trial = hot("three", tmp_path, durable=True)
    model = trial.model
    assert isinstance(model, Clicks)
    is_over, failures = threading.Event(), list[Exception]()

    def look() -> None:
        chance = torch.Generator().manual_seed(5)
        while not is_over.is_set():
            try:
                model.deep.rows(torch.randint(0, ROWS, (64,), generator=chance))
                model.deep.prefetch(torch.randint(0, ROWS, (64,), generator=chance))
            except Exception as failure:  # noqa: BLE001 - it is told below
                failures.append(failure)
                return

    thread = threading.Thread(target=look)
    with run_of(trial) as run:
        thread.start()
        try:
            for _ in range(3):
                some_steps(trial, 2)
                run.checkpoint()
        finally:
            is_over.set()
            thread.join()
    assert failures == []
    assert_alike(expected, trial)
