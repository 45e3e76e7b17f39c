"""Hot rows on a run's device: what is refused, and what fails half way."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.training.hot_tables import DEEP, hot, run_of, some_steps
from tests.training.table_models import (
    ROWS,
    WIDTH,
    Clicks,
    HotClicks,
    assert_alike,
    build,
    plain,
    rows_of,
    table_config,
)
from tierstore.errors import BackendError, CapacityError, UsageError
from tierstore.nn import EmbeddingTable
from tierstore.tables import RowStore
from tierstore.tables.table_lock import TableLock
from tierstore.training import offload
from tierstore.training.modules.link import Link

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


class _Around(nn.Module):
    """A frozen layer within one that holds another, and a table with a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.table = EmbeddingTable(1000, 64, target="device", cache_rows=256)
        self.around = nn.Parameter(torch.zeros(256, 64), requires_grad=False)  # 64 KiB
        self.within = nn.Linear(64, 256, bias=False).requires_grad_(requires_grad=False)  # likewise

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.within(self.table(ids)) @ self.around
        return found


@pytest.mark.parametrize(("room", "fits"), [("256KB", True), ("160KB", False)])
def test_what_a_forward_needs_has_to_fit_beside_a_cache(room: str, fits: bool, tmp_path: Path) -> None:
    model, config = _Around(), table_config("device", tmp_path, {"max_device_memory": room})
    if fits:
        with offload(model, [], config), torch.no_grad():
            assert model(torch.arange(3)).shape == (3, 64)
    else:
        with pytest.raises(
            CapacityError, match=r"cannot be run on the device.*max_device_memory is 96\.0 KiB"
        ):
            offload(model, [], config)


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


def test_what_has_no_room_over_the_link_travels_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(3)
    trial = hot("three", tmp_path)
    carry, sizes = Link.carry, set[int]()

    def refuse(self: Link, tensor: torch.Tensor, side: str) -> torch.Tensor:
        if tensor.nbytes > 5000:
            raise CapacityError("no room in one piece")
        sizes.add(tensor.nbytes)
        return carry(self, tensor, side)

    monkeypatch.setattr(Link, "carry", refuse)
    some_steps(trial, 3)
    assert max(sizes) > 2500, "no smaller than has to be"
    monkeypatch.setattr(Link, "carry", _refuse_all)
    assert isinstance(trial.model, Clicks)
    with pytest.raises(CapacityError, match="no room at all"):
        trial.model.deep(torch.arange(3000, 3400))
    monkeypatch.undo()
    run_of(trial).close()
    assert_alike(expected, trial)


def _refuse_all(self: Link, tensor: torch.Tensor, side: str) -> torch.Tensor:
    del self, tensor, side
    raise CapacityError("no room at all")


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
                bindings = session.bindings.lock
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
