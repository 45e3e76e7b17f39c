"""Tables in frames and logs: what is where, and when it goes."""

from __future__ import annotations

import pytest
import torch

from tests.unit.tables.homes import (
    INITIAL,
    PAGE,
    WIDTH,
    Sometimes,
    attached,
    faulty_store,
    new_store,
    pages_in,
    read,
    values_of,
    write,
)
from tierstore.errors import (
    CapacityError,
    UsageError,
)
from tierstore.tables import Column, NormalRows, RowStore, TableHome
from tierstore.tables.frames import Frames, FrameState
from tierstore.tables.layout import Indices
from tierstore.tables.page_numbers import Pages
from tierstore.tables.pages import TablePages

# --- frames ---------------------------------------------------------------------------------


def test_more_pages_than_frames_come_in_parts() -> None:
    table = attached(4, new_store())
    assert [visit.part for visit in table.visit(torch.arange(10))] == [slice(0, 4), slice(4, 8), slice(8, 10)]
    write(table, 3.0, *range(10))
    assert values_of(table, *range(10)) == [3.0] * 10


def test_rows_that_were_only_read_are_never_written() -> None:
    store = new_store()
    table = attached(2, store)
    assert torch.equal(read(table, *range(10)), INITIAL(torch.arange(10)))
    assert len(store) == 0
    assert table.stats().page_bytes_written == 0


def test_rows_of_a_part_are_of_no_use_when_others_were_asked_for() -> None:
    table = attached(2, new_store())
    visits = table.visit(torch.arange(4))
    first = next(visits)
    next(visits)
    with pytest.raises(UsageError, match="'deep': other rows were asked for since"):
        first.gather()
    with pytest.raises(UsageError, match="'deep': other rows were asked for since"):
        first.scatter("rows", torch.zeros(2, WIDTH))


@pytest.mark.parametrize("fails", [False, True])
def test_a_row_written_while_its_block_is_on_its_way_is_written_again(fails: bool) -> None:
    store, disk = faulty_store()
    later = Sometimes()
    table = attached(16, store, executor=later)
    later.is_waiting = True
    write(table, 1.0, *range(16))
    read(table, 15)  # no frame is free: a block is sent off before it is needed
    (first, *_) = sorted(set(range(16)) - pages_in(table, FrameState.DIRTY))
    assert pages_in(table, FrameState.WRITING) == {first}
    write(table, 2.0, first)
    assert pages_in(table, FrameState.OVERTAKEN) == {first}
    if fails:
        disk.fail_next()
    later.work()
    read(table, 15)
    assert disk.failures == fails
    assert first in pages_in(table, FrameState.DIRTY)
    for id_ in range(100, 150):
        read(table, id_)
    assert values_of(table, *range(16)) == [2.0 if id_ == first else 1.0 for id_ in range(16)]


def test_a_dirty_page_is_read_back_after_it_has_left_memory() -> None:
    table = attached(1, new_store())
    for id_ in range(20):
        write(table, float(id_), id_)
    assert [values_of(table, id_) for id_ in range(20)] == [[float(id_)] for id_ in range(20)]
    stats = table.stats()
    assert (stats.pages, stats.frames, stats.log_pages) == (1, 1, 20)
    assert stats.page_bytes_read == 20 * PAGE  # 19 to write over them, or to read; one was in memory


def test_hits_misses_and_bytes_are_counted() -> None:
    store = new_store()
    table = attached(8, store)
    write(table, 1.0, 1, 2, 3)
    table.write_back()
    read(table, 2, 3, 4, 5)
    stats = table.stats()
    assert (stats.hits, stats.misses, stats.pages_made, stats.dirty_pages) == (2, 5, 5, 0)
    assert stats.row_bytes_missed == 5 * PAGE
    assert (stats.page_bytes_written, stats.page_bytes_read, stats.blocks) == (3 * PAGE, 0, 2)


def test_what_is_written_back_stays_in_memory() -> None:
    table = attached(8, new_store())
    write(table, 1.0, 1, 2, 3)
    read(table, 4)
    table.write_back()
    before = table.stats()
    assert (before.dirty_pages, before.log_pages) == (0, 3)
    read(table, 1, 2, 3)
    assert table.stats().misses == before.misses


# --- without a log --------------------------------------------------------------------------


def test_without_a_log_all_that_is_written_has_to_fit() -> None:
    table = attached(4, None)
    write(table, 1.0, 0, 1, 2)
    assert torch.equal(read(table, *range(3, 50)), INITIAL(torch.arange(3, 50)))  # by way of the last frame
    write(table, 2.0, 3)
    with pytest.raises(CapacityError) as caught:
        read(table, 4)
    assert str(caught.value) == (
        "table 'deep': 5 pages (20.0 KiB) are in use and its share leaves it 16.0 KiB; "
        "give it a disk, or more"
    )
    assert values_of(table, 0, 1, 2, 3) == [1.0, 1.0, 1.0, 2.0]


def test_memory_below_a_page_is_refused_with_numbers() -> None:
    table = RowStore(10, 2000, torch.float32, NormalRows(2000, torch.float32, 5), name="deep")
    write(table, 1.0, 3)
    with pytest.raises(
        CapacityError, match=r"'deep': a page of 1 rows with their state takes 7.8 KiB, .* 4.0 KiB"
    ):
        table.attach(TableHome(torch.empty(1024)))
    assert values_of(table, 3) == [1.0]


def test_a_state_for_which_there_is_no_room_is_refused_and_nothing_changes() -> None:
    table = attached(4, None, width=512)  # with a state, a page is one row
    write(table, 1.0, *range(8))
    with pytest.raises(CapacityError, match="'deep': 5 pages"):
        table.ensure_columns([Column("sum", 0.1)])
    assert [column.name for column in table.columns] == ["rows"]
    assert values_of(table, *range(8)) == [1.0] * 8


def test_without_a_log_dirty_rows_are_visited_all_at_once() -> None:
    table = attached(8, None)
    write(table, 1.0, *range(8))
    assert [visit.part for visit in table.visit(torch.arange(8))] == [slice(0, 8)]


@pytest.mark.parametrize("clean", [1, 3])
def test_without_a_log_other_rows_take_what_is_not_dirty(clean: int) -> None:
    table = attached(8, None)
    write(table, 1.0, *range(8 - clean))
    parts = [len(visit.gather()) for visit in table.visit(torch.arange(8 - clean, 20))]
    assert parts == [clean] * ((12 + clean) // clean)
    parts = [len(visit.gather()) for visit in table.visit(torch.arange(20))]
    assert parts == [8] + [clean] * (12 // clean)
    assert values_of(table, *range(8 - clean)) == [1.0] * (8 - clean)


def test_rows_asked_for_again_are_looked_for_once_and_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    table = attached(3, new_store())
    write(table, 1.0, 4, 7)
    asked: list[list[int]] = []
    bring = TablePages.bring

    def noted(pages: TablePages, wanted: Pages, rows: Indices) -> Frames:
        asked.append(wanted.tolist())
        return bring(pages, wanted, rows)

    monkeypatch.setattr(TablePages, "bring", noted)
    hits = table.stats().hits
    write(table, 2.0, 4, 7)
    assert values_of(table, 4, 7) == [2.0, 2.0]
    assert asked == []
    assert table.stats().hits == hits + 4
    write(table, 3.0, 0, 1, 2, 3)  # more than fit: 4 and 7 leave
    assert values_of(table, 4, 7) == [2.0, 2.0]
    assert values_of(table, 0, 1, 2, 3) == [3.0] * 4
    assert asked[:3] == [[0, 1, 2], [3], [4, 7]]


def test_rows_asked_for_again_let_what_goes_next_be_written_as_well() -> None:
    executor = Sometimes()
    table = attached(512, new_store(disk_pages=1000), executor=executor)
    write(table, 1.0, *range(512))
    executor.is_waiting = True
    for _ in range(2):  # a lookup and its step: as much at once as may be under way, and then the next
        write(table, 2.0, 0)
        assert executor.tasks
        executor.work()
        executor.is_waiting = True
    executor.work()
    assert values_of(table, *range(512)) == [2.0, *[1.0] * 511]
