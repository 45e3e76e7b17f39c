"""Tables in frames and logs: what happens when, and what is said when it cannot."""

from __future__ import annotations

import copy
import functools
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

import numpy as np
import pytest
import torch

from tests.stores import make_store
from tierstore.errors import BackendError, CapacityError, IntegrityError, TierStoreError, UsageError
from tierstore.spi import Backend
from tierstore.store import Store
from tierstore.tables import Column, LogPlace, NormalRows, RowStore, Snapshot, StoreBlocks, TableHome
from tierstore.tables.frames import FrameState
from tierstore.tables.page_map import Frames
from tierstore.tables.pages import TablePages
from tierstore.testing.faults import Faulty, Gate

_P = ParamSpec("_P")
_T = TypeVar("_T")

_PAGE = 4096
_WIDTH = 1024  # float32: a row is a page
_INITIAL = NormalRows(_WIDTH, torch.float32, 5)
_PREFIX = "table/deep/log/"


class Sometimes(Executor):
    """Does what it is given before it returns, or when it is told to."""

    def __init__(self) -> None:
        self.is_waiting = False
        self.tasks: list[Callable[[], None]] = []

    def submit(self, work: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        future: Future[_T] = Future()

        def task() -> None:
            try:
                future.set_result(work(*args, **kwargs))
            except TierStoreError as error:
                future.set_exception(error)

        self.tasks.append(task)
        if not self.is_waiting:
            self.work()
        return future

    def work(self) -> None:
        """Do all of it, and from now on at once."""
        self.is_waiting = False
        while self.tasks:
            self.tasks.pop(0)()


def _table(
    frames: int,
    store: Store | None,
    *,
    num_rows: int = 1000,
    block_pages: int = 2,
    executor: Executor | None = None,
    width: int = _WIDTH,
) -> RowStore:
    """Return a table whose pages are rows, in so many frames."""
    table = RowStore(num_rows, width, torch.float32, NormalRows(width, torch.float32, 5), name="deep")
    place = None if store is None else LogPlace(StoreBlocks(store), _PREFIX, block_pages * _PAGE)
    table.attach(
        TableHome(torch.empty(frames * _PAGE // 4), place, "lru", "its share", executor or Sometimes())
    )
    return table


def _store(disk_pages: int = 5000) -> Store:
    return make_store(1 << 20, disk_pages * _PAGE)


def _write(table: RowStore, value: float, *ids: int) -> None:
    for visit in table.visit(torch.tensor(ids)):
        visit.scatter("rows", torch.full((len(ids[visit.part]), table.width), value))


def _read(table: RowStore, *ids: int) -> torch.Tensor:
    return torch.cat([visit.gather() for visit in table.visit(torch.tensor(ids))])


def _values(table: RowStore, *ids: int) -> list[float]:
    """Return what `_write` wrote."""
    rows = _read(table, *ids)
    assert torch.equal(rows, rows[:, :1].expand_as(rows))
    return rows[:, 0].tolist()


# --- frames ---------------------------------------------------------------------------------


def test_more_pages_than_frames_come_in_parts() -> None:
    table = _table(4, _store())
    assert [visit.part for visit in table.visit(torch.arange(10))] == [slice(0, 4), slice(4, 8), slice(8, 10)]
    _write(table, 3.0, *range(10))
    assert _values(table, *range(10)) == [3.0] * 10


def test_rows_that_were_only_read_are_never_written() -> None:
    store = _store()
    table = _table(2, store)
    assert torch.equal(_read(table, *range(10)), _INITIAL(torch.arange(10)))
    assert len(store) == 0
    assert table.stats().page_bytes_written == 0


def test_rows_of_a_part_are_of_no_use_when_others_were_asked_for() -> None:
    table = _table(2, _store())
    visits = table.visit(torch.arange(4))
    first = next(visits)
    next(visits)
    with pytest.raises(UsageError, match="'deep': other rows were asked for since"):
        first.gather()
    with pytest.raises(UsageError, match="'deep': other rows were asked for since"):
        first.scatter("rows", torch.zeros(2, _WIDTH))


@pytest.mark.parametrize("fails", [False, True])
def test_a_row_written_while_its_block_is_on_its_way_is_written_again(fails: bool) -> None:
    store, disk = _faulty()
    later = Sometimes()
    table = _table(16, store, executor=later)
    later.is_waiting = True
    _write(table, 1.0, *range(16))
    _read(table, 15)  # no frame is free: a block is sent off before it is needed
    (first, *_) = sorted(set(range(16)) - _in_state(table, FrameState.DIRTY))
    assert _in_state(table, FrameState.WRITING) == {first}
    _write(table, 2.0, first)
    assert _in_state(table, FrameState.OVERTAKEN) == {first}
    if fails:
        disk.fail_next()
    later.work()
    _read(table, 15)
    assert disk.failures == fails
    assert first in _in_state(table, FrameState.DIRTY)
    for id_ in range(100, 150):
        _read(table, id_)
    assert _values(table, *range(16)) == [2.0 if id_ == first else 1.0 for id_ in range(16)]


def _in_state(table: RowStore, state: FrameState) -> set[int]:
    """Return the pages of frames in a state."""
    frames = table._pages.frames
    return set(frames.pages[frames.are_in(state)].tolist())


def test_a_dirty_page_is_read_back_after_it_has_left_memory() -> None:
    table = _table(1, _store())
    for id_ in range(20):
        _write(table, float(id_), id_)
    assert [_values(table, id_) for id_ in range(20)] == [[float(id_)] for id_ in range(20)]
    stats = table.stats()
    assert (stats.pages, stats.frames, stats.log_pages) == (1, 1, 20)
    assert stats.page_bytes_read == 20 * _PAGE  # 19 to write over them, or to read; one was in memory


def test_hits_misses_and_bytes_are_counted() -> None:
    store = _store()
    table = _table(8, store)
    _write(table, 1.0, 1, 2, 3)
    table.write_back()
    _read(table, 2, 3, 4, 5)
    stats = table.stats()
    assert (stats.hits, stats.misses, stats.pages_made, stats.dirty_pages) == (2, 5, 5, 0)
    assert stats.row_bytes_missed == 5 * _PAGE
    assert (stats.page_bytes_written, stats.page_bytes_read, stats.blocks) == (3 * _PAGE, 0, 2)


# --- without a log --------------------------------------------------------------------------


def test_without_a_log_all_that_is_written_has_to_fit() -> None:
    table = _table(4, None)
    _write(table, 1.0, 0, 1, 2)
    assert torch.equal(_read(table, *range(3, 50)), _INITIAL(torch.arange(3, 50)))  # by way of the last frame
    _write(table, 2.0, 3)
    with pytest.raises(CapacityError) as caught:
        _read(table, 4)
    assert str(caught.value) == (
        "table 'deep': 5 pages (20.0 KiB) are in use and its share leaves it 16.0 KiB; "
        "give it a disk, or more"
    )
    assert _values(table, 0, 1, 2, 3) == [1.0, 1.0, 1.0, 2.0]


def test_memory_below_a_page_is_refused_with_numbers() -> None:
    table = RowStore(10, 2000, torch.float32, NormalRows(2000, torch.float32, 5), name="deep")
    _write(table, 1.0, 3)
    with pytest.raises(
        CapacityError, match=r"'deep': a page of 1 rows with their state takes 7.8 KiB, .* 4.0 KiB"
    ):
        table.attach(TableHome(torch.empty(1024)))
    assert _values(table, 3) == [1.0]


def test_a_state_for_which_there_is_no_room_is_refused_and_nothing_changes() -> None:
    table = _table(4, None, width=512)  # with a state, a page is one row
    _write(table, 1.0, *range(8))
    with pytest.raises(CapacityError, match="'deep': 5 pages"):
        table.ensure_columns([Column("sum", 0.1)])
    assert [column.name for column in table.columns] == ["rows"]
    assert _values(table, *range(8)) == [1.0] * 8


# --- failures -------------------------------------------------------------------------------


def _faulty() -> tuple[Store, Faulty]:
    wrapped: list[Faulty] = []

    def wrap(backend: Backend) -> Backend:
        wrapped.append(Faulty(backend))
        return wrapped[-1]

    return make_store(1 << 20, 1 << 30, wrap=wrap), wrapped[-1]


def test_whatever_operation_fails_nothing_is_lost_and_the_call_can_be_made_again() -> None:
    for number in itertools.count(1):
        store, disk = _faulty()
        table = _table(3, store)
        disk.fail_next(number)
        written = dict[int, float]()
        for step in range(12):
            ids = step * 2 % 12, step * 2 % 12 + 1
            _until_it_works(functools.partial(_write, table, float(step), *ids), disk)
            written |= dict.fromkeys(ids, float(step))
        _until_it_works(table.write_back, disk)
        assert _until_it_works(functools.partial(_values, table, *range(12)), disk) == list(written.values())
        table.close()
        if not disk.failures:
            assert number > 30
            break


def _until_it_works(call: Callable[[], _T], disk: Faulty) -> _T:
    try:
        return call()
    except BackendError:
        assert disk.failures == 1
        return call()


def test_a_read_that_fails_leaves_no_page_that_looks_read() -> None:
    store, disk = _faulty()
    table = _table(1, store)
    _write(table, 1.0, 0)
    _read(table, 1)
    disk.fail_next()
    with pytest.raises(BackendError, match="fails because a test says so"):
        _read(table, 0)
    assert table.stats().pages == 0
    assert _values(table, 0) == [1.0]


def test_a_page_that_comes_back_different_is_named() -> None:
    store = _store()
    table = _table(2, store)
    _write(table, 1.0, *range(6))
    table.write_back()
    pages = table._pages
    (key,) = {f"{_PREFIX}{place >> 20}" for place in pages.map.places_of(torch.tensor([1]).numpy()).tolist()}
    block = store.get(key)
    block[-1] ^= 1
    store.put(key, block, tier="disk", replace=True)
    with pytest.raises(
        IntegrityError, match=f"page 1 in '{key}' at byte 4096 is not what was written; likewise 1 "
    ):
        _read(table, 1)
    assert _values(table, 0) == [1.0]


def test_a_full_disk_is_told_with_numbers_and_nothing_has_changed() -> None:
    store = _store(disk_pages=8)
    table = _table(2, store)
    _write(table, 1.0, *range(10))
    with pytest.raises(CapacityError) as caught:
        _write(table, 2.0, 10, 11)
    assert str(caught.value) == (
        "table 'deep': 2 dirty pages, 0 B free of 'disk' 32.0 KiB, 32.0 KiB current; nothing has changed"
    )
    assert caught.value.tier == "disk"
    with pytest.raises(CapacityError):
        _read(table, 0)
    assert _values(table, 8, 9) == [1.0, 1.0]
    store.resize("disk", 1 << 20)
    assert _values(table, *range(10)) == [1.0] * 10


def test_a_disk_full_of_dead_pages_is_compacted() -> None:
    """Of 16 pages at most 6 are current."""
    store = _store(disk_pages=16)
    table = _table(1, store, block_pages=2)
    written = dict[int, float]()
    generator = torch.Generator().manual_seed(0)
    for step in range(300):
        id_ = int(torch.randint(0, 6, (), generator=generator))
        _write(table, float(step), id_)
        written[id_] = float(step)
    assert {id_: _values(table, id_)[0] for id_ in written} == written
    store.check()


def test_a_log_is_never_mostly_dead() -> None:
    store = _store()
    table = _table(2, store, block_pages=4)
    generator = torch.Generator().manual_seed(0)
    for step in range(200):
        ids = torch.randperm(24, generator=generator)[:3].sort().values
        _write(table, float(step), *ids.tolist())
        table.write_back()
    stats = table.stats()
    assert stats.log_pages == 24
    assert stats.dead_pages <= 24 + 4
    assert stats.page_bytes_read > 0


# --- prefetch -------------------------------------------------------------------------------


def _prefetching() -> tuple[RowStore, Sometimes, Faulty]:
    """Return a table with rows 0 to 9 in the log, and eight frames of which none is in use."""
    store, disk = _faulty()
    later = Sometimes()
    table = _table(8, store, executor=later)
    _write(table, 1.0, *range(10))
    table.write_back()
    table._pages.forget_all()
    later.is_waiting = True
    return table, later, disk


def test_prefetched_rows_are_hits() -> None:
    table, later, _ = _prefetching()
    table.prefetch(torch.tensor([3, 1, 3]))
    later.work()
    before = table.stats()
    assert _values(table, 1, 3) == [1.0, 1.0]
    after = table.stats()
    assert (after.hits - before.hits, after.misses - before.misses) == (2, 0)
    assert after.pages_prefetched == 2


def test_a_visit_of_other_rows_does_not_wait_for_a_prefetch() -> None:
    table, later, _ = _prefetching()
    table.prefetch(torch.tensor([1, 3]))
    assert torch.equal(_read(table, 50), _INITIAL(torch.tensor([50])))
    assert len(later.tasks) == 1
    assert _in_state(table, FrameState.FILLING) == {1, 3}
    later.work()
    assert _values(table, 1, 3) == [1.0, 1.0]


def test_a_visit_of_prefetched_rows_waits_for_them() -> None:
    table, later, _ = _prefetching()
    table.prefetch(torch.tensor([1, 3]))
    thread = threading.Thread(target=later.work)
    wait = TablePages._take_note_of_reads

    def start_when_it_waits(pages: TablePages, wanted: Frames) -> None:
        thread.start()
        wait(pages, wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TablePages, "_take_note_of_reads", start_when_it_waits)
        assert _values(table, 1, 3) == [1.0, 1.0]
    thread.join()


def test_a_prefetch_that_fails_is_only_advice() -> None:
    table, later, disk = _prefetching()
    disk.fail_next()
    table.prefetch(torch.arange(2))
    later.work()
    assert disk.failures == 1
    assert _values(table, *range(4)) == [1.0] * 4


def test_a_prefetch_takes_no_frame_of_rows_in_hand() -> None:
    table, later, _ = _prefetching()
    part = next(table.visit(torch.arange(4, 10)))
    table.prefetch(torch.arange(4))
    later.work()
    assert part.gather()[:, 0].tolist() == [1.0] * 6
    assert table.stats().prefetches_declined == 2


def test_prefetched_rows_stay_until_they_are_visited() -> None:
    table, later, _ = _prefetching()
    table.prefetch(torch.tensor([0, 1]))
    later.work()
    for begin in range(200, 300, 6):
        _write(table, 2.0, *range(begin, begin + 6))
    before = table.stats()
    assert _values(table, 0, 1) == [1.0, 1.0]
    assert table.stats().misses == before.misses


# --- snapshots ------------------------------------------------------------------------------


def _restored(table: RowStore, snapshot: Snapshot, store: Store, block_pages: int = 3) -> RowStore:
    place = LogPlace(StoreBlocks(store), _PREFIX, block_pages * _PAGE)
    home = TableHome(torch.empty(4 * _PAGE // 4), place, executor=Sometimes())
    return RowStore.restored(snapshot, _WIDTH, torch.float32, _INITIAL, home, name="deep")


def test_a_restored_table_is_the_one_of_the_snapshot_and_reads_nothing_before_it_must() -> None:
    store = _store()
    table = _table(4, store, num_rows=2**40)
    ids = [5, 2**39, 2**40 - 1]
    _write(table, 1.0, *ids)
    table.write_back()
    snapshot = table.snapshot()
    table.keep(snapshot)
    _write(table, 2.0, *ids)
    table.write_back()
    table.close()
    again = Snapshot.from_tensor(snapshot.as_tensor(), _PREFIX, snapshot.columns)
    assert again.blocks == snapshot.blocks
    back = _restored(table, again, store)
    assert back.stats().page_bytes_read == 0
    assert set(store) == set(snapshot.blocks)
    assert _values(back, *ids) == [1.0, 1.0, 1.0]
    assert back.num_rows == 2**40
    _write(back, 3.0, *range(10, 20))
    assert _values(back, 5, *range(10, 20)) == [1.0] + [3.0] * 10


def test_blocks_of_a_snapshot_stay_until_the_next_is_kept() -> None:
    store = _store()
    table = _table(4, store)
    _write(table, 1.0, *range(4))
    table.write_back()
    first = table.snapshot()
    table.keep(first)
    for value in range(5):
        _write(table, float(value), *range(4))
        table.write_back()
    assert set(first.blocks) <= set(store)
    second = table.snapshot()
    assert set(first.blocks) <= set(store)
    table.keep(second)
    assert set(store) - {f"{_PREFIX}spare"} == set(second.blocks)


def test_a_snapshot_of_dirty_rows_or_without_a_log_is_refused() -> None:
    table = _table(4, _store())
    _write(table, 1.0, 3)
    with pytest.raises(UsageError, match="'deep': pages are dirty; call write_back first"):
        table.snapshot()
    with pytest.raises(UsageError, match="'deep' has no log"):
        _table(4, None).snapshot()
    with pytest.raises(UsageError, match="'deep' is attached already"):
        table.attach(TableHome(torch.empty(5000)))


def test_a_tensor_that_is_no_map_is_refused() -> None:
    table = _table(4, _store())
    _write(table, 1.0, 3)
    table.write_back()
    good = table.snapshot().as_tensor()
    for bad in (good[:3], good[:-1], torch.cat([good, good[:1]]), torch.full_like(good, 9)):
        with pytest.raises(IntegrityError, match=f"the map of '{_PREFIX}' is not one"):
            Snapshot.from_tensor(bad, _PREFIX, table.columns)


# --- other layouts --------------------------------------------------------------------------


def test_rows_that_have_grown_into_a_page_of_the_log_are_there_when_it_is_read_again() -> None:
    table = _table(2, _store(), num_rows=3, width=256)  # four rows a page
    _write(table, 1.0, 0, 1, 2)
    table.write_back()
    table.grow(12)
    _read(table, *range(4, 12))
    wanted = NormalRows(256, torch.float32, 5)(torch.tensor([3]))
    assert torch.equal(_read(table, 3), wanted)
    assert _values(table, 0, 1, 2) == [1.0] * 3


def test_a_relay_that_finds_no_room_changes_nothing() -> None:
    store = _store(disk_pages=10)
    table = _table(2, store, width=512)
    _write(table, 1.0, *range(12))
    with pytest.raises(CapacityError, match=r"'deep': . dirty pages, .* free of 'disk' 40.0 KiB"):
        table.ensure_columns([Column("sum", 0.1)])
    assert [column.name for column in table.columns] == ["rows"]
    assert _values(table, *range(12)) == [1.0] * 12
    store.resize("disk", 1 << 20)
    table.ensure_columns([Column("sum", 0.1)])
    assert _values(table, *range(12)) == [1.0] * 12
    (visit,) = table.visit(torch.tensor([7]))
    assert torch.equal(visit.gather("sum"), torch.full((1, 512), 0.1))
    assert table.stats().log_pages >= 10
    store.check()


def test_a_miss_reads_a_page_and_not_its_block() -> None:
    store = _store()
    table = _table(16, store, block_pages=16)
    _write(table, 1.0, *range(16))
    table.write_back()
    table._pages.forget_all()
    assert table.stats().blocks == 1
    assert _values(table, 3, 9, 10) == [1.0] * 3
    assert store.stats().traffic["disk", "caller"].nbytes == 3 * _PAGE
    assert table.stats().page_bytes_read == 3 * _PAGE


def test_a_block_that_is_being_read_is_dropped_when_that_has_ended() -> None:
    gates: list[Gate] = []

    def wrap(backend: Backend) -> Backend:
        gates.append(Gate(backend))
        return gates[-1]

    store = make_store(1 << 20, 1 << 30, wrap=wrap)
    blocks = StoreBlocks(store)
    for gate in gates:
        gate.open()
    blocks.put("a", torch.arange(2 * _PAGE, dtype=torch.uint8))
    blocks.put("b", torch.zeros(_PAGE, dtype=torch.uint8))
    gates[-1].shut()
    into = torch.empty(1, _PAGE, dtype=torch.uint8)
    thread = threading.Thread(target=blocks.read, args=({"a": np.array([_PAGE])}, into))
    thread.start()
    with gates[-1]._changed:
        assert gates[-1]._changed.wait_for(lambda: gates[-1].held, 60)
    blocks.drop(["a", "b"])
    assert set(store) == {"a"}
    gates[-1].open()
    thread.join()
    blocks.put("c", torch.zeros(_PAGE, dtype=torch.uint8))
    assert set(store) == {"c"}
    assert torch.equal(into[0], torch.arange(2 * _PAGE, dtype=torch.uint8)[_PAGE:])


def test_a_table_comes_home_and_leaves_its_log() -> None:
    store = _store()
    table = _table(2, store)
    _write(table, 1.0, *range(10))
    table.detach()
    assert len(store) == 0
    assert table.stats().frames >= 10
    assert _values(table, *range(10)) == [1.0] * 10
    assert torch.equal(_read(table, 500), _INITIAL(torch.tensor([500])))


def test_a_table_by_itself_can_be_copied() -> None:
    table = RowStore(100, 4, torch.float32, NormalRows(4, torch.float32, 5), name="deep")
    _write(table, 1.0, 3)
    twin = copy.deepcopy(table)
    _write(table, 2.0, 3)
    assert _values(twin, 3) == [1.0]
    assert torch.equal(_read(twin, 9), _read(table, 9))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 3, 8, 700])
def test_rows_of_every_size_come_back_from_the_log(dtype: torch.dtype, width: int) -> None:
    store, num_rows = _store(), 900 if width == 700 else 9000
    table = RowStore(num_rows, width, dtype, NormalRows(width, dtype, 5), name="deep")
    table.ensure_columns([Column("m", 0.5)])
    place = LogPlace(StoreBlocks(store), _PREFIX, 3 * _PAGE)
    table.attach(TableHome(torch.empty(5 * _PAGE, dtype=torch.uint8), place))
    ids = torch.arange(0, num_rows, 7)
    values = torch.randn(len(ids), width, dtype=dtype, generator=torch.Generator().manual_seed(1))
    for visit in table.visit(ids):
        visit.scatter("m", values[visit.part])
        visit.scatter("rows", -values[visit.part])
    for visit in table.visit(ids):
        assert torch.equal(visit.gather("m"), values[visit.part])
        assert torch.equal(visit.gather(), -values[visit.part])
    table.close()
