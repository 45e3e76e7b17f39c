"""Tables of rows against a dict of rows: frames, log, prefetch, growth, columns, snapshots, kills, faults."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar, get_args

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.stores import make_store
from tierstore.errors import BackendError, CapacityError, TierStoreError
from tierstore.spi import Backend
from tierstore.tables import Column, LogPlace, NormalRows, RowStore, Snapshot, StoreBlocks, TableHome
from tierstore.tables.frames import FrameState, Policy
from tierstore.testing.faults import Faulty

_P = ParamSpec("_P")
_T = TypeVar("_T")

_PREFIX = "table/deep/log/"
_PAGE = 4096
_LARGE = 1 << 30
_COLUMNS = (Column("exp_avg", 0.0), Column("sum", 0.1))

Rows = dict[tuple[int, str], torch.Tensor]


class AtOnce(Executor):
    """Does what it is given before it returns."""

    def submit(self, work: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        future: Future[_T] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except TierStoreError as error:
            future.set_exception(error)
        return future


class TableMachine(RuleBasedStateMachine):
    """A table in few frames, with small blocks on a disk that fails and is full, against a dict."""

    def executor(self) -> Executor:
        return AtOnce()

    @initialize(
        base=st.sampled_from([0, 2**40]),
        num_rows=st.integers(1, 60),
        width=st.sampled_from([100, 300, 1030]),
        policy=st.sampled_from(get_args(Policy)),
        data=st.data(),
    )
    def make(self, base: int, num_rows: int, width: int, policy: Policy, data: st.DataObject) -> None:
        self.wrapped: list[Faulty] = []

        def wrap(backend: Backend) -> Backend:
            self.wrapped.append(Faulty(backend))
            return self.wrapped[-1]

        self.store = make_store(1 << 20, _LARGE, wrap=wrap)
        self.disk = self.wrapped[-1]
        self.base, self.num_rows, self.width = base, base + num_rows, width
        self.initial = NormalRows(width, torch.float32, 5)
        self.workers = self.executor()
        self.policy = policy
        self.rows: Rows = {}
        self.kept: tuple[Snapshot, Rows] | None = None
        self.asked: tuple[str, ...] = ()  # blocks of a snapshot that was not kept
        self.table = self.fresh(self.num_rows)
        self.has_log = True
        self.attach(data)

    def fresh(self, num_rows: int) -> RowStore:
        return RowStore(num_rows, self.width, torch.float32, self.initial, name="deep")

    def home(self, data: st.DataObject) -> TableHome:
        pages = data.draw(st.integers(1, 6), label="frames")
        blocks = data.draw(st.integers(1, 5), label="pages a block")
        memory = torch.full((pages * 4 * _PAGE,), 255, dtype=torch.uint8)
        place = LogPlace(StoreBlocks(self.store), _PREFIX, blocks * _PAGE)
        return TableHome(memory, place if self.has_log else None, self.policy, "its share", self.workers)

    # --- what may fail -------------------------------------------------------------------------

    def attempt(self, call: Callable[[], None]) -> bool:
        """Make a call that may fail if something was made to, or there is little room; say if it did not."""
        failures = self.failures
        try:
            call()
        except CapacityError as error:
            told, may_fail = str(error), self.is_full or not self.has_log
        except BackendError:
            told, may_fail = "table 'deep': ", self.failures > failures
        else:
            return True
        assert may_fail
        assert "table 'deep': " in told
        return False

    @property
    def failures(self) -> int:
        return self.disk.failures

    @property
    def is_full(self) -> bool:
        return self.store.config.tiers[-1].capacity_bytes < _LARGE or self.capacity < _LARGE

    @property
    def capacity(self) -> int:
        return self.store.stats().tiers["disk"].capacity_bytes

    @rule(after=st.integers(1, 6))
    def let_an_operation_fail(self, after: int) -> None:
        self.disk.fail_next(after)

    @rule(pages=st.integers(0, 6))
    def fill_the_disk(self, pages: int) -> None:
        self.store.resize("disk", max(1, self.store.stats().tiers["disk"].charged_bytes + pages * _PAGE))

    @rule()
    def heal(self) -> None:
        self.disk.heal()
        self.store.resize("disk", _LARGE)

    # --- rows ----------------------------------------------------------------------------------

    def some_ids(self, data: st.DataObject) -> list[int]:
        return sorted(data.draw(st.sets(st.integers(self.base, self.num_rows - 1), max_size=12), label="ids"))

    def expected(self, id_: int, column: Column) -> torch.Tensor:
        if column.name == "rows":
            return self.rows.get((id_, "rows"), self.initial(torch.tensor([id_]))[0])
        return self.rows.get((id_, column.name), torch.full((self.width,), column.initial))

    @rule(data=st.data(), seed=st.integers(0, 2**31), prefetch=st.booleans())
    def read_and_write(self, data: st.DataObject, seed: int, prefetch: bool) -> None:
        ids = self.some_ids(data)
        column = data.draw(st.sampled_from(self.table.columns))
        values = torch.randn(len(ids), self.width, generator=torch.Generator().manual_seed(seed))
        others = torch.tensor(self.some_ids(data), dtype=torch.int64)

        def visit() -> None:
            for part in self.table.visit(torch.tensor(ids, dtype=torch.int64)):
                wanted = torch.stack([self.expected(id_, column) for id_ in ids[part.part]])
                if prefetch:
                    self.table.prefetch(others)
                assert torch.equal(part.gather(column.name), wanted)
                part.scatter(column.name, values[part.part])
                self.rows.update(
                    {(id_, column.name): values[part.part][at] for at, id_ in enumerate(ids[part.part])}
                )

        self.attempt(visit)

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        ids = self.some_ids(data)

        def visit() -> None:
            for part in self.table.visit(torch.tensor(ids, dtype=torch.int64)):
                for column in self.table.columns:
                    wanted = torch.stack([self.expected(id_, column) for id_ in ids[part.part]])
                    assert torch.equal(part.gather(column.name), wanted)

        self.attempt(visit)

    @rule(data=st.data())
    def prefetch(self, data: st.DataObject) -> None:
        ids = self.some_ids(data)
        self.table.prefetch(torch.tensor(ids[::-1] + ids, dtype=torch.int64))

    @rule(more=st.integers(0, 20))
    def grow(self, more: int) -> None:
        if self.attempt(lambda: self.table.grow(self.num_rows + more)):
            self.num_rows += more
        assert self.table.num_rows == self.num_rows

    @rule(columns=st.sets(st.sampled_from(_COLUMNS)))
    def ensure_columns(self, columns: set[Column]) -> None:
        before = self.table.columns
        done = self.attempt(lambda: self.table.ensure_columns(sorted(columns)))
        assert set(self.table.columns) == (set(before) | columns if done else set(before))

    @rule(names=st.sets(st.sampled_from([column.name for column in _COLUMNS])))
    def drop_columns(self, names: set[str]) -> None:
        names &= {column.name for column in self.table.columns}
        if self.attempt(lambda: self.table.drop_columns(names)):
            self.rows = {key: row for key, row in self.rows.items() if key[1] not in names}

    # --- where they lie ------------------------------------------------------------------------

    @rule(data=st.data(), has_log=st.booleans())
    def attach(self, data: st.DataObject, has_log: bool = True) -> None:
        if not self.is_attached:
            self.has_log = has_log
            home = self.home(data)
            self.attempt(lambda: self.table.attach(home))

    @rule()
    def detach(self) -> None:
        if self.attempt(self.table.detach):
            assert not self.is_attached

    @property
    def is_attached(self) -> bool:
        return self.table._pages.is_fixed

    @rule()
    def write_back(self) -> None:
        if self.attempt(self.table.write_back) and self.table._pages.log is not None:
            assert self.table.stats().dirty_pages == 0

    @precondition(lambda self: self.table._pages.log is not None)
    @rule(is_kept=st.booleans())
    def take_a_snapshot(self, is_kept: bool) -> None:
        """A checkpoint, whose flush succeeds or not."""
        if self.attempt(self.table.write_back):
            snapshot = self.table.snapshot()
            assert all(block in self.store for block in snapshot.blocks)
            self.asked = snapshot.blocks
            if is_kept:
                self.table.keep(snapshot)
                self.kept, self.asked = (snapshot, dict(self.rows)), ()

    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        """Nothing is left but what the last snapshot counts on."""
        self.table.end("its process has been killed")
        blocks = set() if self.kept is None else set(self.kept[0].blocks)
        assert all(block in self.store for block in blocks)
        lost = [key for key in self.store if key not in blocks]
        if lost:
            StoreBlocks(self.store).drop(lost)  # in the same process, where they are held to be read
        self.workers, self.has_log, self.asked = self.executor(), True, ()
        if self.kept is None:
            self.rows = {}
            self.table = self.fresh(self.num_rows)
            self.attach(data)
            return
        snapshot, rows = self.kept
        snapshot = Snapshot.from_tensor(snapshot.as_tensor(), _PREFIX, snapshot.columns)
        self.rows, self.num_rows = dict(rows), snapshot.num_rows
        self.table = RowStore.restored(
            snapshot, self.width, torch.float32, self.initial, self.home(data), name="deep"
        )

    # --- what holds always ---------------------------------------------------------------------

    @invariant()
    def the_books_are_right(self) -> None:
        self.store.check()
        pages = self.table._pages
        used = np.flatnonzero(pages.frames.states != FrameState.FREE)
        assert np.array_equal(pages.map.frames_of(pages.frames.pages[used]), used)
        assert pages.frames.free == len(pages.frames) - len(used)
        assert np.count_nonzero(pages.map._frames) == len(used)
        kept = set(self.asked)
        kept |= set() if self.kept is None else set(self.kept[0].blocks)
        if pages.log is None:
            assert set(self.store) == kept
            return
        logged = pages.map.logged()
        assert pages.log.current_pages == len(logged.pages)
        current = {f"{_PREFIX}{place >> 20}" for place in logged.places.tolist()}
        there = set(self.store) - {f"{_PREFIX}spare"}
        assert current | kept <= there
        assert pages._writer is not None
        assert pages.log.blocks <= len(there) <= pages.log.blocks + pages._writer.under_way

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        self.heal()
        self.table.prefetch(torch.arange(self.base, self.num_rows))
        for column in self.table.columns if self.has_log else ():
            every = torch.arange(self.base, self.num_rows)
            for part in self.table.visit(every):
                wanted = torch.stack([self.expected(id_, column) for id_ in every[part.part].tolist()])
                assert torch.equal(part.gather(column.name), wanted)
        self.table.detach()
        for column in self.table.columns:
            (whole,) = self.table.visit(torch.arange(self.base, self.num_rows))
            wanted = torch.stack([self.expected(id_, column) for id_ in range(self.base, self.num_rows)])
            assert torch.equal(whole.gather(column.name), wanted)
        self.table.end("its process has been killed")
        self.workers.shutdown()
        self.store.close()


class ThreadedTableMachine(TableMachine):
    """The same with blocks and prefetches in threads."""

    def executor(self) -> Executor:
        return ThreadPoolExecutor(3)


TestTables = pytest.mark.timeout(600)(TableMachine.TestCase)
TestThreadedTables = pytest.mark.timeout(600)(ThreadedTableMachine.TestCase)
