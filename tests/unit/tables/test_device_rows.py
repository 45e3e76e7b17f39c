"""Hot rows of a table on a device: which stay, which go and how, what is refused."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from tests.row_carriers import CopyingCarrier, device_home
from tests.unit.tables.homes import INITIAL, WIDTH, Sometimes, attached, faulty_store, read, write
from tierstore.errors import BackendError, CapacityError, StoreClosed, UsageError
from tierstore.tables import CacheStats, Column, DeviceHome, NormalRows, RowStore, TableHome
from tierstore.tables.frames import Policy
from tierstore.tables.slot_map import SlotMap
from tierstore.testing.faults import Faulty

_WIDTH = 4


def table_of(slots: int, policy: Policy = "lru", num_rows: int = 1000) -> tuple[RowStore, CopyingCarrier]:
    """Return a table with so many slots on the device, all of whose pages are in memory."""
    table = RowStore(num_rows, _WIDTH, torch.float32, NormalRows(_WIDTH, torch.float32, 5), name="deep")
    home, carrier = device_home(slots, _WIDTH, policy=policy)
    table.attach_device(home)
    return table, carrier


def look_up(table: RowStore, *ids: int) -> torch.Tensor:
    return table.gather(torch.tensor(ids), is_lookup=True)["rows"]


def step(table: RowStore, *ids: int) -> None:
    """Add 1 to rows."""
    index = torch.tensor(ids)
    table.scatter(index, {"rows": table.gather(index)["rows"] + 1}, _owe_nothing)


def _owe_nothing(ids: torch.Tensor, cells: dict[str, torch.Tensor]) -> None:
    raise AssertionError((ids, cells))


def cache_of(table: RowStore) -> CacheStats:
    cache = table.stats().cache
    assert cache is not None
    return cache


class OnDisk(NamedTuple):
    """A table of which two pages are in memory, each of one row, and the device has some slots."""

    table: RowStore
    carrier: CopyingCarrier
    disk: Faulty
    executor: Sometimes


@contextlib.contextmanager
def on_disk(rows: int, slots: int) -> Iterator[OnDisk]:
    """Give a table whose first rows are written: each consists of its number."""
    store, disk = faulty_store()
    executor = Sometimes()
    table = attached(2, store, executor=executor)
    for row in range(rows):
        write(table, float(row), row)
    table.write_back()
    home, carrier = device_home(slots, table.width)
    table.attach_device(home)
    yield OnDisk(table, carrier, disk, executor)
    table.close()
    store.close()


def hits_of(table: RowStore, *ids: int) -> int:
    """Look rows up; return how many were there."""
    before = cache_of(table).hits
    look_up(table, *ids)
    return cache_of(table).hits - before


# ---------------------------------------------------------------------- who stays


def test_what_is_used_least_recently_makes_room() -> None:
    table, _ = table_of(4)
    for ids in ([1, 2], [3, 4], [1], [5]):
        look_up(table, *ids)
    assert hits_of(table, 1, 3, 4, 5) == 4
    assert cache_of(table).evictions == 1


def test_what_is_used_least_often_makes_room() -> None:
    table, _ = table_of(3, "lfu")
    for ids in ([1, 2], [1, 2], [3], [4], [5]):
        look_up(table, *ids)
    assert hits_of(table, 1, 2) == 2


def test_rows_in_hand_stay_and_the_rest_of_a_large_batch_passes_by() -> None:
    table, _ = table_of(4)
    look_up(table, 1, 2, 3)
    rows = look_up(table, *range(2, 9))
    assert torch.equal(rows.cpu(), table.initial_rows(torch.arange(2, 9)))
    cache = cache_of(table)
    assert (cache.hits, cache.misses, cache.bypassed, cache.used) == (2, 3 + 5, 3, 4)


def test_rows_that_have_changed_go_in_bulk() -> None:
    table, carrier = table_of(64)
    step(table, *range(64))
    look_up(table, 100)
    cache = cache_of(table)
    assert (cache.evictions, cache.rows_to_host, cache.dirty) == (1, 4, 60)
    look_up(table, 101)
    look_up(table, 102)
    assert cache_of(table).rows_to_host == 4
    assert carrier.calls_to_host == 1


def test_a_lookup_counts_and_a_step_of_its_rows_carries_nothing() -> None:
    table, _ = table_of(4)
    look_up(table, 1, 2)
    carried = cache_of(table).bytes_to_device
    step(table, 1, 2)
    cache = cache_of(table)
    assert cache.bytes_to_device == carried  # not even the places of the rows
    assert (cache.hits, cache.misses, cache.hit_ratio) == (0, 2, 0.0)
    assert hits_of(table, 1, 2, 3) == 2
    assert cache_of(table).hit_ratio == 2 / 5


def test_numbers_of_rows_that_have_left_are_forgotten() -> None:
    """A table of 2**40 rows whose ids never come again."""
    slots = SlotMap(2**40, 8)
    for first in range(2**39, 2**39 + 100_000, 8):
        ids = torch.arange(first, first + 8).numpy()
        slots.put(ids, torch.arange(8).numpy())
        assert slots.slots_of(ids).tolist() == list(range(8))
        slots.forget(ids)
    assert len(slots._slots) < 10_000
    assert slots.slots_of(ids).tolist() == [-1] * 8


# ---------------------------------------------------------------------- prefetched rows


def test_prefetched_rows_are_there_and_stay_until_they_are_looked_up() -> None:
    table, _ = table_of(8)
    look_up(table, *range(20))  # their pages are in memory
    look_up(table, 500)  # they are in hand no more
    table.prefetch(torch.tensor([10, 11, 10, 12]))
    assert cache_of(table).prefetched == 3
    look_up(table, *range(100, 130))
    assert hits_of(table, 10, 11, 12) == 3


def test_rows_that_are_there_and_that_a_prefetch_names_stay_as_well() -> None:
    table, _ = table_of(4)
    look_up(table, 1, 2)
    look_up(table, 3, 4)
    table.prefetch(torch.tensor([1, 2]))
    look_up(table, *range(100, 104))
    assert hits_of(table, 1, 2) == 2


def test_a_prefetch_takes_half_of_the_slots_and_none_of_rows_in_hand() -> None:
    table, _ = table_of(8)
    look_up(table, *range(20))
    look_up(table, *range(6))  # in hand: six of eight slots
    table.prefetch(torch.arange(10, 20))
    cache = cache_of(table)
    assert (cache.prefetched, cache.prefetches_declined) == (2, 8)
    assert hits_of(table, *range(6)) == 6
    look_up(table, 500)  # they are in hand no more
    table.prefetch(torch.arange(600, 700))  # nobody has touched their pages
    assert cache_of(table).prefetched == 2
    table.prefetch(torch.arange(12, 20))
    assert cache_of(table).prefetched == 2 + 4


def test_what_a_prefetch_has_brought_makes_room_once_nobody_comes_for_it() -> None:
    table, _ = table_of(4)
    look_up(table, *range(20))
    look_up(table, 0)
    table.prefetch(torch.tensor([10, 11]))
    for first in range(100, 120):
        look_up(table, *range(first, first + 2))
    assert hits_of(table, 10, 11) == 0


@pytest.mark.parametrize("depth", [1, 2, 3, 6])
def test_however_far_ahead_batches_are_told_their_rows_are_there(depth: int) -> None:
    """And none is carried twice."""
    table, _ = table_of(16 * (depth + 2), "lfu")
    look_up(table, *range(1000))  # all pages are in memory
    look_up(table, 0)  # they are in hand no more
    chance = torch.Generator().manual_seed(2)
    batches = [torch.randperm(1000, generator=chance)[:8].sort().values.tolist() for _ in range(40)]
    for number in range(-depth, len(batches)):
        if number + depth < len(batches):
            table.prefetch(torch.tensor(batches[number + depth]))
        if number >= 0:
            assert hits_of(table, *batches[number]) == 8
            step(table, *batches[number])
    cache = cache_of(table)
    assert cache.evictions
    assert cache.prefetches_declined == 0


def test_rows_that_have_changed_make_room_for_prefetched_ones() -> None:
    table, _ = table_of(4)
    look_up(table, *range(20))
    step(table, 0, 1, 2, 3)
    table.prefetch(torch.tensor([10, 11]))
    assert cache_of(table).rows_to_host == 2
    assert hits_of(table, 10, 11) == 2
    assert torch.equal(look_up(table, *range(4)).cpu(), table.initial_rows(torch.arange(4)) + 1)


def test_a_prefetch_waits_for_no_disk() -> None:
    """Rows whose pages are on their way come to the device when they are looked up."""
    with on_disk(20, slots=8) as (table, _, _, executor):
        executor.is_waiting = True
        table.prefetch(torch.tensor([1, 2]))
        assert executor.tasks
        assert cache_of(table).prefetched == 0
        executor.work()
        assert look_up(table, 1, 2).cpu()[:, 0].tolist() == [1.0, 2.0]
        assert table.stats().pages_prefetched == 1  # half of the frames


def test_a_prefetch_raises_nothing_where_the_link_fails(caplog: pytest.LogCaptureFixture) -> None:
    table, carrier = table_of(4)
    look_up(table, *range(20))
    step(table, 0, 1, 2, 3)
    for calls in itertools.count(1):
        failures = carrier.failures
        carrier.fail_next(calls)
        table.prefetch(torch.tensor([10 + calls % 8]))
        if carrier.failures == failures:
            break
        assert "rows were not prefetched" in caplog.text
        caplog.clear()
    assert calls > 2
    carrier.heal()
    expected = table.initial_rows(torch.arange(20)) + (torch.arange(20) < 4)[:, None]
    assert torch.equal(look_up(table, *range(20)).cpu(), expected)


# ---------------------------------------------------------------------- what fails or is refused


@pytest.mark.parametrize("slots", [0, 2])
def test_a_write_that_fails_at_any_page_owes_what_was_there(slots: int) -> None:
    """Most of the rows pass by, and only two of their pages are in memory at once."""
    for calls in itertools.count(1):
        with on_disk(12, slots) as (table, _, disk, _):
            ids = torch.arange(12)
            rows = table.gather(ids)["rows"]
            owed: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
            disk.fail_next(calls)
            try:
                table.scatter(ids, {"rows": rows + 100}, owed.__setitem__)
            except BackendError:
                disk.heal()
                for those, former in owed.items():
                    for visit in table.visit(those):
                        visit.scatter("rows", former["rows"][visit.part])
                assert look_up(table, *range(12)).cpu()[:, 0].tolist() == list(range(12))
            else:
                break
    assert calls > 3


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_without_a_log_rows_change_only_where_their_pages_have_room(slots: int) -> None:
    """A row on the device, too, or there would be no way back for it."""
    table = attached(4, None)  # each page is a row
    home, _ = device_home(slots, table.width)
    table.attach_device(home)
    step(table, 0, 1)
    look_up(table, 10, 11)
    step(table, 2, 3)
    with pytest.raises(CapacityError, match=r"5 pages .* are in use and its share leaves it"):
        step(table, 4)
    step(table, 0, 3)
    table.detach_device()
    expected = table.initial_rows(torch.arange(4)) + 1
    expected[[0, 3]] += 1
    assert torch.equal(read(table, *range(4)), expected)


def test_rows_that_have_changed_on_a_device_need_their_room_where_a_table_is_attached() -> None:
    table = RowStore(1000, WIDTH, torch.float32, INITIAL, name="deep")
    home, _ = device_home(8, WIDTH)
    table.attach_device(home)
    step(table, *range(5))
    with pytest.raises(CapacityError, match=r"5 pages .* are in use"):
        table.attach(TableHome(torch.empty(4 * WIDTH), None, "lru", "its share", Sometimes()))
    table.detach_device()
    assert torch.equal(read(table, *range(5)), INITIAL(torch.arange(5)) + 1)


def test_a_snapshot_is_refused_while_rows_on_the_device_differ() -> None:
    with on_disk(4, slots=8) as (table, _, _, _):
        table.write_back()
        table.snapshot()
        step(table, 1)
        with pytest.raises(UsageError, match="call write_back first"):
            table.snapshot()
        table.write_back()
        table.keep(table.snapshot())
        assert cache_of(table).dirty == 0


@pytest.mark.parametrize(
    "cells",
    [
        torch.empty(8, _WIDTH + 1),
        torch.empty(8, _WIDTH, dtype=torch.float64),
        torch.empty(_WIDTH, 8).t(),
        torch.empty(8 * _WIDTH),
    ],
)
def test_memory_that_is_not_the_table_s_is_refused(cells: torch.Tensor) -> None:
    table = RowStore(10, _WIDTH, torch.float32, NormalRows(_WIDTH, torch.float32, 5), name="deep")
    with pytest.raises(UsageError, match=r"memory of the device has to be torch.float32 \[n, 4\]"):
        table.attach_device(DeviceHome(cells, CopyingCarrier()))
    assert table.device is None
    assert table.stats().cache is None


def test_what_needs_a_device_says_so() -> None:
    table, _ = table_of(4)
    table.detach_device()
    table.detach_device()
    with pytest.raises(UsageError, match="table 'deep' has no device attached"):
        look_up(table, 1)


def test_cells_that_are_not_as_they_have_to_be_are_refused() -> None:
    table, _ = table_of(4)
    rows = look_up(table, 1, 2)
    with pytest.raises(UsageError, match=r"rows: torch.float32 \[1, 4\] on .*, not torch.float32 \[2, 4\]"):
        table.scatter(torch.tensor([1, 2]), {"rows": rows[:1]}, _owe_nothing)
    with pytest.raises(UsageError, match="no column 'sum'"):
        table.scatter(torch.tensor([1, 2]), {"sum": rows}, _owe_nothing)
    with pytest.raises(UsageError, match="no column 'sum'"):
        table.gather(torch.tensor([1, 2]), ["sum"])
    assert cache_of(table).dirty == 0


def test_other_columns_need_no_other_memory() -> None:
    table, _ = table_of(12)
    step(table, 1, 2)
    assert cache_of(table).slots == 12
    table.ensure_columns([Column("exp_avg", 0.5), Column("exp_avg_sq", 0.0)])
    assert (cache_of(table).slots, cache_of(table).used) == (4, 0)
    cells = table.gather(torch.tensor([1, 2]), ["exp_avg", "rows"])
    assert torch.equal(cells["rows"].cpu(), table.initial_rows(torch.tensor([1, 2])) + 1)
    assert cells["exp_avg"].cpu().eq(0.5).all()
    table.drop_columns(["exp_avg", "exp_avg_sq"])
    assert cache_of(table).slots == 12


def test_a_table_that_has_ended_knows_no_device() -> None:
    table, _ = table_of(4)
    look_up(table, 1)
    table.close()
    assert table.device is None
    with pytest.raises((StoreClosed, UsageError)):
        look_up(table, 1)
