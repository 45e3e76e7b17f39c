"""Tables that are found again."""

from __future__ import annotations

import pytest
import torch

from tests.unit.tables.homes import (
    INITIAL,
    PAGE,
    PREFIX,
    WIDTH,
    Sometimes,
    attached,
    new_store,
    values_of,
    write,
)
from tierstore.errors import (
    IntegrityError,
    UsageError,
)
from tierstore.store import Store
from tierstore.tables import LogPlace, RowStore, Snapshot, StoreBlocks, TableHome


def _restored(table: RowStore, snapshot: Snapshot, store: Store, block_pages: int = 3) -> RowStore:
    place = LogPlace(StoreBlocks(store), PREFIX, block_pages * PAGE)
    home = TableHome(torch.empty(4 * PAGE // 4), place, executor=Sometimes())
    return RowStore.restored(snapshot, WIDTH, torch.float32, INITIAL, home, name="deep")


def test_a_restored_table_is_the_one_of_the_snapshot_and_reads_nothing_before_it_must() -> None:
    store = new_store()
    table = attached(4, store, num_rows=2**40)
    ids = [5, 2**39, 2**40 - 1]
    write(table, 1.0, *ids)
    table.write_back()
    snapshot = table.snapshot()
    table.keep(snapshot)
    write(table, 2.0, *ids)
    table.write_back()
    table.close()
    again = Snapshot.from_tensor(snapshot.as_tensor(), PREFIX, snapshot.columns)
    assert again.blocks == snapshot.blocks
    back = _restored(table, again, store)
    assert back.stats().page_bytes_read == 0
    assert set(store) == set(snapshot.blocks)
    assert values_of(back, *ids) == [1.0, 1.0, 1.0]
    assert back.num_rows == 2**40
    write(back, 3.0, *range(10, 20))
    assert values_of(back, 5, *range(10, 20)) == [1.0] + [3.0] * 10


def test_blocks_of_a_snapshot_stay_until_the_next_is_kept() -> None:
    store = new_store()
    table = attached(4, store)
    write(table, 1.0, *range(4))
    table.write_back()
    first = table.snapshot()
    table.keep(first)
    for value in range(5):
        write(table, float(value), *range(4))
        table.write_back()
    assert set(first.blocks) <= set(store)
    second = table.snapshot()
    assert set(first.blocks) <= set(store)
    table.keep(second)
    assert set(store) - {f"{PREFIX}spare"} == set(second.blocks)


def test_a_snapshot_of_dirty_rows_or_without_a_log_is_refused() -> None:
    table = attached(4, new_store())
    write(table, 1.0, 3)
    with pytest.raises(UsageError, match="'deep': pages are dirty; call write_back first"):
        table.snapshot()
    with pytest.raises(UsageError, match="'deep' has no log"):
        attached(4, None).snapshot()
    with pytest.raises(UsageError, match="'deep', as another run calls it, lie in the store of that run"):
        table.attach(TableHome(torch.empty(5000)))


def test_a_tensor_that_is_no_map_is_refused() -> None:
    table = attached(4, new_store())
    write(table, 1.0, 3)
    table.write_back()
    good = table.snapshot().as_tensor()
    for bad in (good[:3], good[:-1], torch.cat([good, good[:1]]), torch.full_like(good, 9)):
        with pytest.raises(IntegrityError, match=f"the map of '{PREFIX}' is not one"):
            Snapshot.from_tensor(bad, PREFIX, table.columns)


def test_a_restored_log_knows_which_pages_of_its_blocks_are_dead() -> None:
    store = new_store()
    table = attached(4, store, block_pages=4)
    for ids in ((0, 1, 2, 3), (0, 1, 2)):
        write(table, 1.0, *ids)
        table.write_back()
    snapshot = table.snapshot()
    table.close()
    stats = _restored(table, snapshot, store).stats()
    assert (stats.log_pages, stats.dead_pages, stats.blocks) == (4, 3, 2)
