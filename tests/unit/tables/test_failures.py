"""What fails, is full or cut off: nothing is lost, and it is told by name, with numbers."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import pytest
import torch

from tests.forked import in_child
from tests.unit.tables.homes import (
    INITIAL,
    PAGE,
    PREFIX,
    WIDTH,
    Sometimes,
    attached,
    faulty_store,
    new_store,
    read,
    values_of,
    write,
)
from tierstore.errors import (
    BackendError,
    CapacityError,
    IntegrityError,
    StoreForked,
    UsageError,
)
from tierstore.tables import LogPlace, RowStore, StoreBlocks, TableHome
from tierstore.tables.frames import FrameState
from tierstore.testing.faults import Faulty

_T = TypeVar("_T")


def test_whatever_operation_fails_nothing_is_lost_and_the_call_can_be_made_again() -> None:
    for number in itertools.count(1):
        store, disk = faulty_store()
        table = attached(3, store)
        disk.fail_next(number)
        written = dict[int, float]()
        for step in range(12):
            ids = step * 2 % 12, step * 2 % 12 + 1
            _until_it_works(functools.partial(write, table, float(step), *ids), disk)
            written |= dict.fromkeys(ids, float(step))
        _until_it_works(table.write_back, disk)
        assert _until_it_works(functools.partial(values_of, table, *range(12)), disk) == list(
            written.values()
        )
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
    store, disk = faulty_store()
    table = attached(1, store)
    write(table, 1.0, 0)
    read(table, 1)
    disk.fail_next()
    with pytest.raises(BackendError, match="fails because a test says so"):
        read(table, 0)
    assert table.stats().pages == 0
    assert values_of(table, 0) == [1.0]


def test_a_page_that_comes_back_different_is_named() -> None:
    store = new_store()
    table = attached(2, store)
    write(table, 1.0, *range(6))
    table.write_back()
    pages = table._pages
    (key,) = {f"{PREFIX}{place >> 20}" for place in pages.map.places_of(torch.tensor([1]).numpy()).tolist()}
    block = store.get(key)
    block[-1] ^= 1
    store.put(key, block, tier="disk", replace=True)
    with pytest.raises(
        IntegrityError, match=f"page 1 in '{key}' at byte 4096 is not what was written; likewise 1 "
    ):
        read(table, 1)
    assert values_of(table, 0) == [1.0]


def test_a_full_disk_is_told_with_numbers_and_nothing_has_changed() -> None:
    store = new_store(disk_pages=8)
    table = attached(2, store)
    write(table, 1.0, *range(10))
    with pytest.raises(CapacityError) as caught:
        write(table, 2.0, 10, 11)
    assert str(caught.value) == (
        "table 'deep': 2 dirty pages, 0 B free of 'disk' 32.0 KiB, 32.0 KiB current; nothing has changed"
    )
    assert caught.value.tier == "disk"
    with pytest.raises(CapacityError):
        read(table, 0)
    assert values_of(table, 8, 9) == [1.0, 1.0]
    store.resize("disk", 1 << 20)
    assert values_of(table, *range(10)) == [1.0] * 10


def test_what_found_no_room_ahead_of_its_need_fails_no_later_call(caplog: pytest.LogCaptureFixture) -> None:
    store, executor = new_store(disk_pages=1), Sometimes()
    table = attached(32, store, executor=executor)
    write(table, 1.0, *range(32))
    executor.is_waiting = True
    read(table, 0)
    assert executor.tasks  # no frame is free, so some are written ahead
    executor.work()  # there is no room for them
    store.resize("disk", 5000 * PAGE)
    table.write_back()
    assert "dirty pages could not be written yet" in caplog.text
    assert values_of(table, *range(32)) == [1.0] * 32
    table.close()


def test_what_fails_ahead_of_its_need_while_a_call_waits_for_it_is_written_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (store, disk), gate = faulty_store(), threading.Event()
    with ThreadPoolExecutor(1) as executor:
        table = attached(32, store, executor=executor)
        write(table, 1.0, *range(32))
        executor.submit(gate.wait)
        read(table, 0)
        disk.fail_next()
        threading.Timer(0.05, gate.set).start()
        write(table, 2.0, *range(32, 40))
        assert disk.failures == 1
        assert "dirty pages could not be written yet" in caplog.text
        assert values_of(table, *range(40)) == [1.0] * 32 + [2.0] * 8
        table.close()


def test_a_disk_full_of_dead_pages_is_compacted() -> None:
    """Of 16 pages at most 6 are current."""
    store = new_store(disk_pages=16)
    table = attached(1, store, block_pages=2)
    written = dict[int, float]()
    generator = torch.Generator().manual_seed(0)
    for step in range(300):
        id_ = int(torch.randint(0, 6, (), generator=generator))
        write(table, float(step), id_)
        written[id_] = float(step)
    assert {id_: values_of(table, id_)[0] for id_ in written} == written
    store.check()


def test_a_full_disk_is_compacted_with_the_room_that_was_put_by() -> None:
    """Of 18 pages on the disk 6 are dead, no block of them all; four more are put by, and that is all."""
    store = new_store()
    table = attached(12, store, block_pages=4)
    for ids in (range(12), (0, 4, 8), (1, 5, 9)):
        write(table, float(len(ids)), *ids)
        table.write_back()
    assert (table.stats().log_pages, table.stats().dead_pages) == (12, 6)
    table._pages.log.put_by()  # type: ignore[union-attr]
    store.resize("disk", 22 * PAGE)
    write(table, 7.0, 2, 6, 10)
    table.write_back()
    assert values_of(table, *range(12)) == [3.0, 3.0, 7.0, 12.0] * 3
    table._pages.forget_all()
    assert values_of(table, *range(12)) == [3.0, 3.0, 7.0, 12.0] * 3
    assert table.stats().dead_pages < 6


def test_a_log_is_never_mostly_dead() -> None:
    """Each block has a page that stays and three that are soon dead: none would ever be dropped as it is."""
    table = attached(8, new_store(), block_pages=4)
    for step in range(40):
        write(table, float(step), 0, 1, 2, 3 + step)
        table.write_back()
        assert table.stats().dead_pages <= table.stats().log_pages + 4
    assert table.stats().log_pages == 43
    table._pages.forget_all()
    assert values_of(table, *range(43)) == [39.0] * 3 + [float(step) for step in range(40)]


@pytest.mark.parametrize("has_log", [False, True])
def test_a_call_that_is_cut_off_while_rows_are_made_leaves_no_trace(has_log: bool) -> None:
    is_cut_off = [False]

    def initial(ids: torch.Tensor) -> torch.Tensor:
        if is_cut_off.pop():
            raise KeyboardInterrupt
        is_cut_off.append(False)
        return INITIAL(ids)

    table = RowStore(100, WIDTH, torch.float32, initial, name="deep")
    place = LogPlace(StoreBlocks(new_store()), PREFIX) if has_log else None
    table.attach(TableHome(torch.empty(4 * WIDTH), place, executor=Sometimes()))
    write(table, 1.0, 1, 2)
    for _ in range(9):
        is_cut_off[:] = [True]
        with pytest.raises(KeyboardInterrupt):
            read(table, 2, 3, 4)
        is_cut_off[:] = [False]
    assert table.stats().frames - table._pages.frames.free == 2
    assert torch.equal(read(table, 3, 4), INITIAL(torch.tensor([3, 4])))
    assert values_of(table, 1, 2) == [1.0, 1.0]


@pytest.mark.parametrize("has_log", [False, True])
def test_frames_that_an_interrupt_left_behind_are_found_again(has_log: bool) -> None:
    table = attached(4, new_store() if has_log else None)
    write(table, 1.0, 1)
    abandoned = table._pages.frames.take(np.array([7, 8, 9]))  # and nobody ever fills them
    assert torch.equal(read(table, 2, 3), INITIAL(torch.tensor([2, 3])))
    assert values_of(table, 1) == [1.0]
    assert len(abandoned) == 3
    assert table._pages.frames.are_in(FrameState.FILLING).tolist() == []


@pytest.mark.parametrize(
    "rows", [torch.zeros(1, 3), torch.zeros(4, WIDTH, dtype=torch.float64), torch.zeros(WIDTH)]
)
def test_initial_rows_of_another_kind_are_refused(rows: torch.Tensor) -> None:
    table = RowStore(100, WIDTH, torch.float32, lambda _: rows, name="deep")
    with pytest.raises(
        UsageError, match=r"'deep': its initial rows are .*, not torch.float32 \[1, 1024\] on cpu"
    ):
        read(table, 3)
    assert table.stats().pages == 0


def test_memory_that_is_not_plain_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"contiguous host memory, not \[5, 9\] with strides \[1, 5\] on cpu"
    ):
        RowStore(1, 1, torch.float32, INITIAL).attach(TableHome(torch.empty(9, 5).T))


def test_a_table_of_the_parent_is_refused_in_a_child() -> None:
    table = attached(4, new_store())
    write(table, 1.0, 1)
    in_child(functools.partial(_refuses_all, table))
    assert values_of(table, 1) == [1.0]


def _refuses_all(table: RowStore) -> None:
    ids = torch.tensor([1])
    for call in (table.write_back, table.detach, lambda: table.prefetch(ids), lambda: read(table, 1)):
        with pytest.raises(StoreForked, match="the table 'deep'"):
            call()
    table.close()
