"""Tables whose rows are spread come back whole to every process when the run ends, as parameters do.

1. All processes decide together, by what each has room for; what they decide is the same everywhere.
2. Each sends the rows that it has, with their state, to all, some pages at a time, until none has more.
3. One that cannot read or keep them says so in the place of the next ones: all raise, and the table stays
   where it is, in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from tierstore.errors import TierStoreError, UsageError
from tierstore.modes import Unseen
from tierstore.nn.row_blocks import own_of
from tierstore.nn.table_weight import TableWeight
from tierstore.tables import RowStore
from tierstore.training.ranks.acts import Act
from tierstore.training.ranks.row_exchange import RowExchange

_FAILED = -1


class ReturningTables:
    """Brings all rows of tables to every process.

    Args:
        exchange: with the others.
        numbers: of the tables.
    """

    def __init__(self, exchange: RowExchange, numbers: Mapping[TableWeight, int]) -> None:
        self._exchange = exchange
        self._numbers = numbers

    def agree(self, nbytes: int, fits: Callable[[int], bool]) -> bool:
        """Return whether all processes have room for all rows.  Blocks until all have come to their end.

        Args:
            nbytes: of those that are here.
            fits: whether this one has room for so many bytes of all.

        Raises:
            UsageError: the processes do different things.
            TierStoreError: another has ended.
        """
        exchange = self._exchange
        with exchange.alone():
            mine = torch.tensor(nbytes, device="cpu").expand(exchange.where.world_size)
            all_bytes = int(exchange.begin(Act.CLOSE, 0, 0, mine).sum())
            answer = torch.tensor([[fits(all_bytes)]], device="cpu").to(torch.int64)
            found = exchange.swap(answer.expand(exchange.where.world_size, 1).contiguous())
            exchange.end()
        return bool(found.all())

    def bring(self, weight: TableWeight) -> RowStore:
        """Return all rows of a table with their state, in memory of the process.  All processes.

        Raises:
            UsageError: the processes do different things, or keep other states beside the rows.
            TierStoreError: another could not read or keep rows, or has ended.
            CapacityError, BackendError: this one could not; the others raise, too.  All can call again.
        """
        exchange, blocks = self._exchange, _Blocks(weight)
        with exchange.alone(), Unseen():
            none = torch.zeros(exchange.where.world_size, dtype=torch.int64, device="cpu")
            exchange.begin(Act.RETURN, self._numbers[weight], weight.shape[0], none)
            while self._has_more(blocks):
                pass
            exchange.end()
            if blocks.failure is not None:
                raise blocks.failure
            return blocks.whole

    def bring_gradient(self, weight: TableWeight, part: torch.Tensor | None) -> torch.Tensor | None:
        """Return the whole of an averaged gradient, of which each process has a part.  All processes.

        Args:
            weight: of the table.
            part: sparse and coalesced; ``None``: this process has no average, and gets none.

        Raises:
            UsageError: the processes do different things.
            TierStoreError: another has ended.
        """
        exchange, processes = self._exchange, self._exchange.where.world_size
        ids = torch.zeros(0, dtype=torch.int64, device="cpu") if part is None else part.indices()[0]
        values = torch.zeros(0, weight.shape[1], dtype=weight.dtype, device="cpu")
        values = values if part is None else part.values()
        counts = torch.full((processes,), len(ids), device="cpu")
        with exchange.alone(), Unseen():
            theirs = exchange.begin(Act.RETURN, self._numbers[weight], weight.shape[0], counts)
            ids = exchange.send(ids.repeat(processes), counts, theirs)
            values = exchange.send(values.repeat(processes, 1), counts, theirs)
            exchange.end()
        if part is None:
            return None
        order = ids.argsort()
        return torch.sparse_coo_tensor(
            ids[order][None], values[order], weight.shape, device="cpu", is_coalesced=True,
            check_invariants=False,
        )  # fmt: skip

    def _has_more(self, blocks: _Blocks) -> bool:
        """Send the next rows to all, and keep what comes; return whether any process had some."""
        exchange = self._exchange
        processes = exchange.where.world_size
        ids, cells = blocks.next()
        count = len(ids) if blocks.failure is None else _FAILED
        told = exchange.swap(torch.tensor([[count, len(blocks.names)]], device="cpu").repeat(processes, 1))
        theirs, columns = told[:, 0], told[:, 1].tolist()
        failed = (theirs == _FAILED).nonzero().flatten().tolist()
        if failed:
            blocks.has_failed(failed[0])
        elif len(set(columns)) > 1:
            blocks.have_other_columns(columns)
        if blocks.failure is not None or not theirs.any():
            return False
        counts = torch.full((processes,), count, device="cpu")
        named = exchange.send(ids.repeat(processes), counts, theirs)
        blocks.keep(named, [exchange.send(each.repeat(processes, 1), counts, theirs) for each in cells])
        return True


class _Blocks:
    """The rows of one table that are here, some at a time, and all of them as they come.

    Attributes:
        whole: what came so far.
        names: of the columns.
        failure: what reading or keeping them has failed with, here or elsewhere.
    """

    def __init__(self, weight: TableWeight) -> None:
        self._weight = weight
        self._more: Iterator[torch.Tensor] = iter(())
        self._is_begun = False
        self.whole: RowStore
        self.names: list[str] = []
        self.failure: Exception | None = None

    def _begin(self) -> RowStore:
        store = self._weight.row_store
        if not self._is_begun:
            self._is_begun = True
            self.whole = RowStore(
                store.num_rows, store.width, store.dtype, store.initial_rows, name=store.name
            )
            self.whole.ensure_columns(store.columns)
            self.names = [column.name for column in store.columns]
            self._more = store.written_ids()
        return store

    def next(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the next ids and their cells, by column; no ids: there are no more, or it has failed."""
        try:
            if self.failure is None:
                return self._next()
        except Exception as error:  # noqa: BLE001 - raised by the caller, when the others have heard of it
            self.failure = error
        return torch.zeros(0, dtype=torch.int64, device="cpu"), []

    def _next(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        store = self._begin()
        ids = next(filter(len, (own_of(store, each) for each in self._more)), None)
        if ids is None:
            ids = torch.zeros(0, dtype=torch.int64, device="cpu")
        cells = [torch.empty(len(ids), store.width, dtype=store.dtype, device="cpu") for _ in self.names]
        for visit in store.visit(ids):
            for name, into in zip(self.names, cells, strict=True):
                visit.gather(name, out=into[visit.part])
        return ids, cells

    def keep(self, ids: torch.Tensor, cells: list[torch.Tensor]) -> None:
        """Write what has come."""
        try:
            order = ids.argsort()
            for visit in self.whole.visit(ids[order]):
                for name, each in zip(self.names, cells, strict=True):
                    visit.scatter(name, each[order[visit.part]])
        except Exception as error:  # noqa: BLE001 - as above
            self.failure = error

    def has_failed(self, rank: int) -> None:
        """Note that a process has failed, which may be this one."""
        self.failure = self.failure or TierStoreError(
            f"rank {rank} could not bring the rows of table {self._weight.table_name!r} back; it says why. "
            "They are where they were, in every process."
        )

    def have_other_columns(self, columns: list[int]) -> None:
        """Note that processes keep different states."""
        self.failure = UsageError(
            f"the processes keep different states beside the rows of table {self._weight.table_name!r}: "
            f"{columns} columns, by rank. Build the same optimizers everywhere."
        )
