"""Blocks of a log in a store: pages are read as parts of files, and faults cost that read alone."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import tierstore as ts
from tests.files_disk import PAGE, Gate, Nth, ScriptedKernel, failing, open_durable, open_files
from tests.part_stores import Whole
from tests.stores import memory_backends
from tierstore.config import StoreConfig, TierConfig
from tierstore.spi import Backend
from tierstore.tables import Column, LogPlace, NormalRows, RowStore, StoreBlocks, TableHome
from tierstore.testing.backend_operations import pattern
from tierstore.testing.faults import Faulty

MIB = 2**20
BLOCK = 16 * PAGE
PATIENCE_S = 20


def opened(disk: Backend, codec: str | None = None) -> ts.Store:
    host = TierConfig("host", memory_backends((MIB,))[0], MIB)
    return ts.Store(StoreConfig([host, TierConfig("disk", disk, 8 * MIB, codec=codec)]))


@pytest.fixture
def kernel() -> ScriptedKernel:
    return ScriptedKernel()


@pytest.fixture
def store(kernel: ScriptedKernel, tmp_path: Path) -> Iterator[ts.Store]:
    with opened(open_files(tmp_path, syscalls=kernel)) as opened_store:
        yield opened_store


@pytest.fixture
def blocks(store: ts.Store) -> StoreBlocks:
    return filled(store)


def filled(store: ts.Store) -> StoreBlocks:
    blocks = StoreBlocks(store)
    for number in range(4):
        blocks.put(f"log/{number}", pattern(BLOCK, number))
    return blocks


def read(blocks: StoreBlocks, *parts: tuple[int, int]) -> torch.Tensor:
    """Return pages by the numbers of their blocks and their own, block by block."""
    into = torch.zeros(len(parts), PAGE, dtype=torch.uint8)
    begins: dict[str, list[int]] = {}
    for number, page in parts:
        begins.setdefault(f"log/{number}", []).append(page * PAGE)
    blocks.read({name: np.array(own) for name, own in begins.items()}, into)
    return into


def pages(*parts: tuple[int, int]) -> torch.Tensor:
    return torch.stack([pattern(BLOCK, number).view(-1, PAGE)[page] for number, page in parts])


PARTS = [(3, 15), (3, 2), (3, 2), (0, 0), (1, 7)]


def test_pages_are_read_and_nothing_else(store: ts.Store, blocks: StoreBlocks) -> None:
    before = store.stats().tiers["disk"].io["read_bytes"]
    assert read(blocks, *PARTS).equal(pages(*PARTS))
    after = store.stats().tiers["disk"].io["read_bytes"]
    assert isinstance(before, int)
    assert isinstance(after, int)
    assert after - before == len(PARTS) * PAGE


def test_a_block_is_held_from_its_first_read_until_it_is_dropped(
    store: ts.Store, blocks: StoreBlocks
) -> None:
    assert store.leased_bytes("disk") == 0
    read(blocks, (0, 1), (1, 1))
    read(blocks, (0, 2))
    assert store.leased_bytes("disk") == 2 * BLOCK
    blocks.drop(["log/0", "log/3"])
    assert store.leased_bytes("disk") == BLOCK
    assert set(store) == {"log/1", "log/2"}
    blocks.drop_others("log/", ["log/2"])
    assert set(store) == {"log/2"}
    assert store.leased_bytes("disk") == 0
    with pytest.raises(ts.KeyNotFound):
        read(blocks, (0, 1))
    blocks.put("log/0", pattern(BLOCK, 7))
    assert read(blocks, (0, 3))[0].equal(pattern(BLOCK, 7)[3 * PAGE : 4 * PAGE])


def test_each_call_of_the_kernel_may_fail_and_the_next_read_works(
    blocks: StoreBlocks, kernel: ScriptedKernel
) -> None:
    for n in range(1, 5):
        kernel.twist = Nth(n, failing(errno.EIO), "read")
        with pytest.raises(ts.BackendError, match="reading 1 of 4 parts of 4096 B in 'disk' failed"):
            read(blocks, (3, 15), (3, 2), (0, 3), (1, 7))
        kernel.twist = None
        assert read(blocks, *PARTS).equal(pages(*PARTS))


def test_a_block_that_is_dropped_while_it_is_read_goes_afterwards(
    store: ts.Store, blocks: StoreBlocks, kernel: ScriptedKernel
) -> None:
    gate = Gate("read")
    kernel.twist = gate
    rows: list[torch.Tensor] = []
    reading = threading.Thread(target=lambda: rows.append(read(blocks, (0, 5), (1, 5))))
    reading.start()
    gate.wait_for_caller()
    blocks.drop(["log/0"])
    assert "log/0" in store
    gate.open()
    reading.join(PATIENCE_S)
    assert not reading.is_alive()
    assert rows[0].equal(pages((0, 5), (1, 5)))
    blocks.drop(["log/2"])
    assert set(store) == {"log/1", "log/3"}
    store.check()


def test_a_tier_without_parts_is_read_whole() -> None:
    whole = Whole(memory_backends((1, 8 * MIB))[1])
    with opened(whole) as store:
        assert read(filled(store), *PARTS).equal(pages(*PARTS))
    assert sorted(whole.read_bytes) == [BLOCK] * 3


def test_a_tier_of_coarser_units_than_pages_is_read_whole(
    store: ts.Store, blocks: StoreBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the blocks of a file system are larger than pages."""
    monkeypatch.setattr(blocks._reader, "alignment_bytes", 16 * PAGE)
    assert read(blocks, *PARTS).equal(pages(*PARTS))
    assert store.leased_bytes("disk") == 0


# --- a table over it ----------------------------------------------------------------------------

WIDTH, ROWS = 128, 400
INITIAL = NormalRows(WIDTH, torch.float32, 3)


def table_in(store: ts.Store, frames: int = 4) -> RowStore:
    """Return a table of which a few pages are in memory and the others in blocks of eight pages."""
    table = RowStore(ROWS, WIDTH, torch.float32, INITIAL, name="deep")
    table.ensure_columns([Column("sum", 0.5)])
    place = LogPlace(StoreBlocks(store), "table/deep/log/", 8 * PAGE)
    table.attach(TableHome(torch.zeros(frames * PAGE, dtype=torch.uint8), place))
    return table


def step(table: RowStore, ids: torch.Tensor, expected: dict[str, torch.Tensor]) -> int:
    """Add to rows and their state; where the medium fails go on from there.  Return how often it did."""
    failures = 0
    while len(ids):
        done = 0
        try:
            for visit in table.visit(ids):
                part = ids[visit.part]
                for column, values in expected.items():
                    visit.scatter(column, visit.gather(column) + 0.25)
                    values[part] += 0.25
                done = visit.part.stop
        except ts.BackendError:
            failures += 1
        else:
            done = len(ids)
        ids = ids[done:]
    return failures


def rows_of(table: RowStore, column: str) -> torch.Tensor:
    return torch.cat([visit.gather(column) for visit in table.visit(torch.arange(ROWS))])


@pytest.mark.parametrize("kind", ["scratch", "durable", "codec", "flaky"])
def test_a_table_that_lies_mostly_in_blocks_has_every_row(kind: str, tmp_path: Path) -> None:
    """Four pages of a hundred are in memory; a read or a write fails in each step where the disk is flaky."""
    disk: Backend = open_durable(tmp_path) if kind == "durable" else open_files(tmp_path)
    faulty = Faulty(disk, on=["read", "write"])
    expected = {"rows": INITIAL(torch.arange(ROWS)), "sum": torch.full((ROWS, WIDTH), 0.5)}
    chance = torch.Generator().manual_seed(1)
    failures = 0
    with opened(faulty, "lz4" if kind == "codec" else None) as store:
        table = table_in(store)
        for turn in range(12):
            if kind == "flaky":
                faulty.fail_next(1 + turn)
            ids = torch.randperm(ROWS, generator=chance)[:120].sort().values
            failures += step(table, ids, expected)
            if store.is_durable:
                store.flush()
        faulty.heal()
        for column, values in expected.items():
            assert rows_of(table, column).equal(values), column
        store.check()
        stats = table.stats()
        table.close()
    assert stats.blocks > 3
    assert stats.page_bytes_read > 20 * PAGE
    assert (failures > 0) is (kind == "flaky")
