"""Tables whose rows are spread over the processes of a run: who has which, and how others come to them.

1. Each process has a `RowStore` of its own rows, in its own store: the ids are the table's, the pages of
   others are never touched there.
2. A lookup sends the distinct ids of a batch to those that have their rows, which send copies back.  They
   come into the order of their ids, so what is computed of them is bit for bit that of one process.
3. One that cannot read rows sends a mark instead: all processes raise, and the lookup can be made again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tierstore import sides
from tierstore.errors import TierStoreError
from tierstore.modes import Unseen
from tierstore.nn.lookup import read_rows, write_rows
from tierstore.nn.sharding import Act
from tierstore.nn.table_weight import TableWeight
from tierstore.sides import Side
from tierstore.tables import RowStore
from tierstore.training.ranks.row_exchange import RowExchange
from tierstore.training.ranks.row_slices import RowSlice
from tierstore.training.ranks.sharded_gradients import ShardedGradients
from tierstore.training.ranks.where import RankPlace
from tierstore.training.ranks.whole_tables import WholeTables
from tierstore.training.tables.found_tables import Tables


class ShardedTables:
    """The tables of one run, of which this process has a part of the rows.

    Args:
        where: which process this is.
        tables: of the model, with their names.

    Raises:
        UsageError: the processes have other tables; all raise the same.
        TierStoreError: another process has ended.
    """

    def __init__(self, where: RankPlace, tables: Tables) -> None:
        self._where = where
        self._names = list(tables.values())
        self._numbers = {weight: number for number, weight in enumerate(tables)}
        self._exchange = RowExchange(where, self._names)
        self._slices: dict[TableWeight, RowSlice] = {}
        self._former: dict[TableWeight, RowStore] = {}
        self._gradients = ShardedGradients(self._exchange, self._slices)
        self._wholes = WholeTables(self._exchange, self._numbers, self._slices)
        self._wrappers: list[DistributedDataParallel] = []
        self._pauses = 0

    @property
    def processes(self) -> int:
        """How many have a part each."""
        return self._where.world_size

    # --- who has which ------------------------------------------------------------------------

    def divide(self, weight: TableWeight, rows_per_slice: int) -> None:
        """Decide who has which rows of a table.

        Args:
            weight: of the table.
            rows_per_slice: how many consecutive ids go together.
        """
        self._slices[weight] = RowSlice(self._where.rank, self._where.world_size, rows_per_slice)

    def slice_of(self, weight: TableWeight) -> RowSlice:
        """Return which rows of a table are here."""
        return self._slices[weight]

    def own_part(self, weight: TableWeight) -> RowStore:
        """Return what this process has of a table that lies in its memory as a whole: copies."""
        return weight.row_store.part(self._slices[weight])

    def shard(self, weight: TableWeight, part: RowStore) -> None:
        """Let a table have its rows here and in the other processes from now on.

        Args:
            weight: of the table.
            part: what is here.
        """
        self._former.setdefault(weight, weight.row_store)
        weight.row_store = part
        weight.sharding = self

    def opened(self) -> None:
        """There is no way back any more: forget what the tables were before."""
        self._former.clear()

    def give_back(self, weight: TableWeight) -> bool:
        """Let a table be what it was before, as the run could not be opened; return whether there is that."""
        weight.sharding = None
        former = self._former.pop(weight, None)
        if former is not None:
            weight.row_store = former
        return former is not None

    # --- rows ---------------------------------------------------------------------------------

    def read(self, weight: nn.Parameter, ids: torch.Tensor, more: int, act: Act) -> torch.Tensor:
        """See `tierstore.nn.sharding.Sharding.read`.

        Raises:
            UsageError: the processes do different things.
            TierStoreError: another could not read what it has, or has ended.
            CapacityError, BackendError: this one could not; the others raise, too; all can call again.
        """
        assert isinstance(weight, TableWeight)
        with self._exchange.alone(), Unseen():
            found = self._read(weight, ids, more, act)
        sides.note(found.untyped_storage(), Side.HOST)
        return found

    def _read(self, weight: TableWeight, ids: torch.Tensor, more: int, act: Act) -> torch.Tensor:
        order, counts = self._by_owner(weight, ids)
        store = weight.row_store
        theirs = self._begin(act, weight, store.num_rows, counts)
        asked = self._exchange.send(ids[order], counts, theirs)
        distinct, inverse = torch.unique(asked, return_inverse=True)
        failure: Exception | None = None
        try:
            rows = read_rows(store, distinct, more=1)
        except Exception as error:  # noqa: BLE001 - raised below, after the others have heard of it
            failure = error
            rows = torch.zeros(len(distinct) + 1, store.width, dtype=store.dtype, device="cpu")
            rows[-1] = 1
        # Behind the rows for each process one more, which says whether they could be read.
        ends = theirs.cumsum(0)
        places = torch.tensor_split(inverse, ends[:-1])
        last = torch.tensor([len(distinct)], device="cpu")
        rows = rows.index_select(0, torch.cat([each for place in places for each in (place, last)]))
        got = self._exchange.send(rows, theirs + 1, counts + 1)
        marks = (counts + 1).cumsum(0) - 1
        failed = got[marks, 0].nonzero().flatten().tolist()
        if failure is not None:
            raise failure
        if failed:
            raise TierStoreError(
                f"rank {failed[0]} could not read rows of table {store.name!r}, which this process asked it "
                "for; it says why. No process has them: the lookup can be made again."
            )
        is_row = torch.ones(len(got), dtype=torch.bool, device="cpu")
        is_row[marks] = False
        found = torch.zeros(len(ids) + more, store.width, dtype=store.dtype, device="cpu")
        found[order] = got[is_row]
        return found

    def write(self, weight: nn.Parameter, ids: torch.Tensor, values: torch.Tensor) -> None:
        """See `tierstore.nn.sharding.Sharding.write`.

        Raises:
            UsageError: the processes do different things; nothing was written.
            TierStoreError: another has ended.
            CapacityError, BackendError: this one could not write its rows; the others have written theirs.
        """
        assert isinstance(weight, TableWeight)
        with self._exchange.alone(), Unseen():
            order, counts = self._by_owner(weight, ids)
            store = weight.row_store
            theirs = self._begin(Act.SET_ROWS, weight, store.num_rows, counts)
            named = self._exchange.send(ids[order], counts, theirs)
            rows = self._exchange.send(values[order], counts, theirs)
            write_rows(store, named, rows)

    def agree(self, weight: nn.Parameter, act: Act) -> None:
        """See `tierstore.nn.sharding.Sharding.agree`."""
        assert isinstance(weight, TableWeight)
        with self._exchange.alone():
            none = torch.zeros(self.processes, dtype=torch.int64, device="cpu")
            self._begin(act, weight, weight.row_store.num_rows, none)

    def reading(self, weight: nn.Parameter | None, act: Act) -> contextlib.AbstractContextManager[bool]:
        """See `tierstore.nn.sharding.Sharding.reading`."""
        assert weight is None or isinstance(weight, TableWeight)
        return self._wholes.reading(act, 0 if weight is None else self._numbers[weight])

    def blocks(
        self, weight: nn.Parameter, column: str, parts: Sequence[slice]
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """See `tierstore.nn.sharding.Sharding.blocks`."""
        assert isinstance(weight, TableWeight)
        return self._wholes.blocks(weight, column, parts)

    def _by_owner(self, weight: TableWeight, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the order in which ids are sent, and how many go to each rank."""
        owners = self._slices[weight].owner_of(ids)
        return owners.argsort(stable=True), torch.bincount(owners, minlength=self.processes)

    def _begin(self, act: Act, weight: TableWeight, detail: int, counts: torch.Tensor) -> torch.Tensor:
        return self._exchange.begin(act, self._numbers[weight], detail, counts)

    # --- gradients ----------------------------------------------------------------------------

    def is_synced(self) -> bool:
        """See `tierstore.nn.sharding.Sharding.is_synced`."""
        return not self._pauses and all(each.require_backward_grad_sync for each in self._wrappers)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which backward passes only accumulate."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def is_wrapped_by(self, wrapper: DistributedDataParallel) -> None:
        """Note that a wrapper's ``no_sync`` is about the tables, too."""
        self._wrappers.append(wrapper)

    def begin_backward(self, weight: nn.Parameter, *, is_synced: bool) -> None:
        """See `tierstore.nn.sharding.Sharding.begin_backward`."""
        assert isinstance(weight, TableWeight)
        self._gradients.begin(weight, is_synced=is_synced)

    def forget_gradient(self, weight: nn.Parameter) -> None:
        """See `tierstore.nn.sharding.Sharding.forget_gradient`."""
        assert isinstance(weight, TableWeight)
        self._gradients.forget(weight)

    def has_average(self, weight: TableWeight) -> bool:
        """See `tierstore.training.tables.spread_tables.SpreadTables.has_average`."""
        return self._gradients.has_average(weight)

    def own_gradient(self, weight: nn.Parameter) -> torch.Tensor:
        """See `tierstore.nn.sharding.Sharding.own_gradient`."""
        assert isinstance(weight, TableWeight)
        return self._gradients.own(weight)

    def occurrences(self, weight: nn.Parameter, ids: torch.Tensor) -> torch.Tensor:
        """See `tierstore.nn.sharding.Sharding.occurrences`."""
        assert isinstance(weight, TableWeight)
        return self._gradients.occurrences(weight, ids)

    def close(self) -> None:
        """Exchange no more.  Idempotent."""
        self._exchange.close()
