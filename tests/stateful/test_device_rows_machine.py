"""Hot rows on a device, above pages in few frames, against a dict of rows: eviction, host visits, faults."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from tests.row_carriers import DEVICE, CopyingCarrier, device_home
from tests.stateful.test_tables_machine import TableMachine
from tierstore.tables import Column, RowStore
from tierstore.tables.device_rows import DeviceRows
from tierstore.tables.frames import FrameState, Policy


class DeviceRowsMachine(TableMachine):
    """The rules of tables, some of whose rows are looked up and stepped on a device."""

    carrier = CopyingCarrier()

    @property
    def slots(self) -> DeviceRows | None:
        return self.table._device_rows

    @property
    def failures(self) -> int:
        return self.disk.failures + self.carrier.failures

    def fresh(self, num_rows: int) -> RowStore:
        """Return a table that has a device from the beginning."""
        table = super().fresh(num_rows)
        home, self.carrier = device_home(self.width % 16 + num_rows % 16, self.width, policy=self.policy)
        table.attach_device(home)
        return table

    @rule(cells=st.integers(0, 40), policy=st.sampled_from(get_args(Policy)))
    def attach_device(self, cells: int, policy: Policy) -> None:
        if self.slots is None:
            home, self.carrier = device_home(cells, self.width, policy=policy)
            self.table.attach_device(home)

    @precondition(lambda self: self.slots is not None)
    @rule()
    def detach_device(self) -> None:
        if self.attempt(self.table.detach_device):
            assert self.slots is None

    @precondition(lambda self: self.slots is not None)
    @rule(after=st.integers(1, 6))
    def let_the_link_fail(self, after: int) -> None:
        self.carrier.fail_next(after)

    @rule()
    def heal_the_link(self) -> None:
        self.carrier.heal()

    def look_up(self, ids: torch.Tensor) -> None:
        found = self.table.gather(ids, is_lookup=True)["rows"]
        assert torch.equal(found.cpu(), self.expected_of(ids.tolist(), self.table.columns[0]))

    def expected_of(self, ids: list[int], column: Column) -> torch.Tensor:
        rows = [self.expected(id_, column) for id_ in ids]
        return torch.stack(rows) if rows else torch.empty(0, self.width)

    @precondition(lambda self: self.slots is not None)
    @rule(data=st.data(), is_lookup=st.booleans(), more=st.integers(0, 1))
    def gather(self, data: st.DataObject, is_lookup: bool, more: int) -> None:
        ids = self.some_ids(data)
        columns = sorted(data.draw(st.sets(st.sampled_from(self.table.columns), min_size=1)))
        before = self.table.stats().cache

        def gather() -> None:
            names = [column.name for column in columns]
            found = self.table.gather(
                torch.tensor(ids, dtype=torch.int64), names, more=more, is_lookup=is_lookup
            )
            assert list(found) == names
            for column in columns:
                cells = found[column.name]
                assert cells.device.type == DEVICE.type
                assert torch.equal(cells[: len(ids)].cpu(), self.expected_of(ids, column))
                assert torch.equal(cells[len(ids) :].cpu(), torch.zeros(more, self.width))

        if self.attempt(gather):
            after = self.table.stats().cache
            assert before is not None
            assert after is not None
            asked = after.hits + after.misses - before.hits - before.misses
            assert asked == (len(ids) if is_lookup else 0)
            assert after.used == min(after.slots, max(after.used, len(ids)))

    def scatter(self, ids: list[int], columns: list[Column], values: torch.Tensor) -> None:
        """Write rows, all or none."""
        index = torch.tensor(ids, dtype=torch.int64)
        owed: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []
        cells = {column.name: each.to(DEVICE) for column, each in zip(columns, values, strict=True)}

        def owe(those: torch.Tensor, former: dict[str, torch.Tensor]) -> None:
            owed.append((those, former))

        if self.attempt(lambda: self.table.scatter(index, cells, owe)):
            assert not owed
            for column, each in zip(columns, values, strict=True):
                self.rows.update({(id_, column.name): row for id_, row in zip(ids, each, strict=True)})
        for those, former in owed:
            self.heal()
            self.carrier.heal()
            for visit in self.table.visit(those):
                for name, each in former.items():
                    visit.scatter(name, each[visit.part])

    @precondition(lambda self: self.slots is not None)
    @rule(data=st.data(), seed=st.integers(0, 2**31))
    def write(self, data: st.DataObject, seed: int) -> None:
        ids = self.some_ids(data)
        columns = sorted(data.draw(st.sets(st.sampled_from(self.table.columns), min_size=1)))
        chance = torch.Generator().manual_seed(seed)
        self.scatter(ids, columns, torch.randn(len(columns), len(ids), self.width, generator=chance))

    @precondition(lambda self: self.slots is not None)
    @rule(batches=st.data(), count=st.integers(1, 4), prefetch=st.booleans())
    def train(self, batches: st.DataObject, count: int, prefetch: bool) -> None:
        columns = list(self.table.columns)
        drawn = [self.some_ids(batches) for _ in range(count)]
        for ids, coming in zip(drawn, [*drawn[1:], []], strict=True):
            index = torch.tensor(ids, dtype=torch.int64)
            if prefetch:
                self.table.prefetch(torch.tensor(coming, dtype=torch.int64))
            if not self.attempt(functools.partial(self.look_up, index)):
                return
            self.scatter(ids, columns, torch.stack([self.expected_of(ids, column) + 1 for column in columns]))

    @precondition(lambda self: self.slots is not None)
    @rule(data=st.data(), seed=st.integers(0, 2**31))
    def write_beside_a_visit(self, data: st.DataObject, seed: int) -> None:
        """Rows of parts that come later are stepped on the device before."""
        ids = self.some_ids(data)
        chance = torch.Generator().manual_seed(seed)

        def visit() -> None:
            for part in self.table.visit(torch.tensor(ids, dtype=torch.int64)):
                there = ids[part.part]
                assert torch.equal(part.gather(), self.expected_of(there, self.table.columns[0]))
                values = torch.randn(1, len(there), self.width, generator=chance)
                part.scatter("rows", values[0])
                self.rows.update({(id_, "rows"): row for id_, row in zip(there, values[0], strict=True)})
                coming = ids[part.part.stop :]
                self.table.gather(torch.tensor(coming, dtype=torch.int64))
                values = torch.randn(1, len(coming), self.width, generator=chance)
                self.scatter(coming, [self.table.columns[0]], values)

        self.attempt(visit)

    @rule(is_pickled=st.booleans())
    def copy(self, is_pickled: bool) -> None:
        """A copy has all rows, and knows no device."""

        def copied() -> None:
            table = pickle.loads(pickle.dumps(self.table)) if is_pickled else copy.deepcopy(self.table)
            assert table.device is None
            every = torch.arange(self.base, self.num_rows)
            for column in self.table.columns:
                (whole,) = table.visit(every)
                assert torch.equal(whole.gather(column.name), self.expected_of(every.tolist(), column))

        self.attempt(copied)

    # --- what holds always ---------------------------------------------------------------------

    @invariant()
    def slots_have_what_their_rows_are(self) -> None:
        if self.slots is None:
            return
        table, columns = self.slots._slots, self.table.columns
        assert set(np.unique(table.states)) <= {FrameState.FREE, FrameState.CLEAN, FrameState.DIRTY}
        used = np.flatnonzero(table.states != FrameState.FREE)
        ids = table.pages[used]
        assert np.array_equal(self.slots._map.slots_of(ids), used)
        assert np.count_nonzero(self.slots._map._slots) == len(used) == len(table) - table.free
        for column, cells in zip(columns, self.slots._by_column.cpu(), strict=True):
            assert torch.equal(cells[torch.from_numpy(used)], self.expected_of(ids.tolist(), column))

    def teardown(self) -> None:
        self.carrier.heal()
        super().teardown()


TestDeviceRows = pytest.mark.timeout(600)(DeviceRowsMachine.TestCase)
