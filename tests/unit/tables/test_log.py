"""Rows that come back from the log, in whatever layout."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.stores import make_store
from tests.unit.tables.homes import (
    INITIAL,
    PAGE,
    PREFIX,
    WIDTH,
    Sometimes,
    attached,
    new_store,
    read,
    values_of,
    write,
)
from tierstore.errors import CapacityError
from tierstore.spi import Backend
from tierstore.tables import Column, LogPlace, NormalRows, RowStore, StoreBlocks, TableHome
from tierstore.testing.faults import Gate


def test_rows_that_have_grown_into_a_page_of_the_log_are_there_when_it_is_read_again() -> None:
    table = attached(2, new_store(), num_rows=3, width=256)  # four rows a page
    write(table, 1.0, 0, 1, 2)
    table.write_back()
    table.grow(12)
    read(table, *range(4, 12))
    wanted = NormalRows(256, torch.float32, 5)(torch.tensor([3]))
    assert torch.equal(read(table, 3), wanted)
    assert values_of(table, 0, 1, 2) == [1.0] * 3


def test_a_relay_that_finds_no_room_changes_nothing() -> None:
    store = new_store(disk_pages=10)
    table = attached(2, store, width=512)
    write(table, 1.0, *range(12))
    with pytest.raises(CapacityError, match=r"'deep': . dirty pages, .* free of 'disk' 40.0 KiB"):
        table.ensure_columns([Column("sum", 0.1)])
    assert [column.name for column in table.columns] == ["rows"]
    assert values_of(table, *range(12)) == [1.0] * 12
    store.resize("disk", 1 << 20)
    table.ensure_columns([Column("sum", 0.1)])
    assert values_of(table, *range(12)) == [1.0] * 12
    (visit,) = table.visit(torch.tensor([7]))
    assert torch.equal(visit.gather("sum"), torch.full((1, 512), 0.1))
    assert table.stats().log_pages >= 10
    store.check()


def test_a_miss_reads_a_page_and_not_its_block() -> None:
    store = new_store()
    table = attached(16, store, block_pages=16)
    write(table, 1.0, *range(16))
    table.write_back()
    table._pages.forget_all()
    assert table.stats().blocks == 1
    assert values_of(table, 3, 9, 10) == [1.0] * 3
    assert store.stats().traffic["disk", "caller"].nbytes == 3 * PAGE
    assert table.stats().page_bytes_read == 3 * PAGE


def test_a_block_that_is_being_read_is_dropped_when_that_has_ended() -> None:
    gates: list[Gate] = []

    def wrap(backend: Backend) -> Backend:
        gates.append(Gate(backend))
        return gates[-1]

    store = make_store(1 << 20, 1 << 30, wrap=wrap)
    blocks = StoreBlocks(store)
    for gate in gates:
        gate.open()
    blocks.put("a", torch.arange(2 * PAGE, dtype=torch.uint8))
    blocks.put("b", torch.zeros(PAGE, dtype=torch.uint8))
    gates[-1].shut()
    into = torch.empty(1, PAGE, dtype=torch.uint8)
    thread = threading.Thread(target=blocks.read, args=({"a": np.array([PAGE])}, into))
    thread.start()
    with gates[-1]._changed:
        assert gates[-1]._changed.wait_for(lambda: gates[-1].held, 60)
    blocks.drop(["a", "b"])
    assert set(store) == {"a"}
    gates[-1].open()
    thread.join()
    blocks.put("c", torch.zeros(PAGE, dtype=torch.uint8))
    assert set(store) == {"c"}
    assert torch.equal(into[0], torch.arange(2 * PAGE, dtype=torch.uint8)[PAGE:])


def test_a_table_comes_home_and_leaves_its_log() -> None:
    store = new_store()
    table = attached(2, store)
    write(table, 1.0, *range(10))
    table.detach()
    assert len(store) == 0
    assert table.stats().frames >= 10
    assert values_of(table, *range(10)) == [1.0] * 10
    assert torch.equal(read(table, 500), INITIAL(torch.tensor([500])))


def test_a_table_tells_which_rows_were_written() -> None:
    table = attached(2, new_store(), width=256)  # four rows a page
    write(table, 1.0, 1, 9, 10, 40)
    read(table, *range(60, 70))
    assert torch.cat(list(table.written_ids())).tolist() == [*range(4), *range(8, 12), *range(40, 44)]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda table: pickle.loads(pickle.dumps(table))])
@pytest.mark.parametrize("has_home", [False, True])
def test_a_copy_has_what_was_written_and_makes_the_rest(
    duplicate: Callable[[RowStore], RowStore], has_home: bool
) -> None:
    table = RowStore(2**40, WIDTH, torch.float32, INITIAL, name="deep")
    table.ensure_columns([Column("sum", 0.1)])
    if has_home:
        place = LogPlace(StoreBlocks(new_store()), PREFIX)
        table.attach(TableHome(torch.empty(6 * WIDTH), place, executor=Sometimes()))
    ids = [3, 4, 5, 2**39, 2**40 - 1]
    write(table, 1.0, *ids)
    for visit in table.visit(torch.tensor([4, 2**39])):
        visit.scatter("sum", torch.full((visit.part.stop - visit.part.start, WIDTH), 7.0))
    twin = duplicate(table)
    write(table, 2.0, *ids)
    assert values_of(twin, *ids) == [1.0] * 5
    (visit,) = twin.visit(torch.tensor(ids))
    assert visit.gather("sum")[:, 0].tolist() == pytest.approx([0.1, 7.0, 0.1, 7.0, 0.1])
    assert torch.equal(read(twin, 9), INITIAL(torch.tensor([9])))
    assert (twin.num_rows, twin.columns, twin.name) == (table.num_rows, table.columns, "deep")


def test_a_table_by_itself_can_be_copied() -> None:
    table = RowStore(100, 4, torch.float32, NormalRows(4, torch.float32, 5), name="deep")
    write(table, 1.0, 3)
    twin = copy.deepcopy(table)
    write(table, 2.0, 3)
    assert values_of(twin, 3) == [1.0]
    assert torch.equal(read(twin, 9), read(table, 9))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 3, 8, 700])
def test_rows_of_every_size_come_back_from_the_log(dtype: torch.dtype, width: int) -> None:
    store, num_rows = new_store(), 900 if width == 700 else 9000
    table = RowStore(num_rows, width, dtype, NormalRows(width, dtype, 5), name="deep")
    table.ensure_columns([Column("m", 0.5)])
    place = LogPlace(StoreBlocks(store), PREFIX, 3 * PAGE)
    table.attach(TableHome(torch.empty(5 * PAGE, dtype=torch.uint8), place))
    ids = torch.arange(0, num_rows, 7)
    values = torch.randn(len(ids), width, dtype=dtype, generator=torch.Generator().manual_seed(1))
    for visit in table.visit(ids):
        visit.scatter("m", values[visit.part])
        visit.scatter("rows", -values[visit.part])
    for visit in table.visit(ids):
        assert torch.equal(visit.gather("m"), values[visit.part])
        assert torch.equal(visit.gather(), -values[visit.part])
    table.close()
