"""The rows of one table of which each process has a part: how others come to them.

1. A lookup sends the distinct ids of a batch to those that have their rows, which send copies back.  They
   come into the order of their ids, so what is computed of them is bit for bit that of one process.
2. One that cannot read rows sends a mark instead: all processes raise, and the lookup can be made again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

import torch

from tierstore import sides
from tierstore.errors import TierStoreError
from tierstore.modes import Unseen
from tierstore.nn.local_rows import read_rows, write_rows
from tierstore.nn.table_weight import TableWeight
from tierstore.sides import Side
from tierstore.tables import RowStore
from tierstore.training.ranks.acts import Act
from tierstore.training.ranks.row_exchange import RowExchange
from tierstore.training.ranks.row_slices import RowSlice
from tierstore.training.ranks.sharded_gradients import ShardedGradients
from tierstore.training.ranks.whole_tables import WholeTables


class ShardedRows:
    """The rows of one table, of which a part is here; see `tierstore.nn.row_access.RowAccess`.

    Args:
        weight: of the table.
        number: of the table, the same in all processes.
        store: the rows that are here.
        row_slice: which these are.
        exchange: with the other processes.
        gradients: of all tables.
        wholes: reads tables as a whole.

    Attributes:
        store: see there.
        are_all_here: they are not.
    """

    are_all_here = False

    def __init__(
        self,
        weight: TableWeight,
        number: int,
        store: RowStore,
        row_slice: RowSlice,
        exchange: RowExchange,
        gradients: ShardedGradients,
        wholes: WholeTables,
    ) -> None:
        self.store = store
        self._weight = weight
        self._number = number
        self._slice = row_slice
        self._exchange = exchange
        self._gradients = gradients
        self._wholes = wholes

    # --- rows ---------------------------------------------------------------------------------

    def look_up(self, ids: torch.Tensor, more: int, *, keeps: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of rows, and their ids; all processes, each with ids of its own.

        Raises:
            UsageError: the processes do different things.
            TierStoreError: another could not read what it has, or has ended.
            CapacityError, BackendError: this one could not; the others raise, too; all can call again.
        """
        del keeps  # a step reads the rows that this process has, which are others
        self._gradients.refuse_joins(self._weight)
        return self._read(ids, more, Act.LOOKUP), ids

    def read(self, ids: torch.Tensor, more: int) -> torch.Tensor:
        """Return copies of rows; as `look_up`."""
        return self._read(ids, more, Act.ROWS)

    def _read(self, ids: torch.Tensor, more: int, act: Act) -> torch.Tensor:
        with self._exchange.alone(), Unseen():
            found = self._brought(ids, more, act)
        sides.note(found.untyped_storage(), Side.HOST)
        return found

    def _brought(self, ids: torch.Tensor, more: int, act: Act) -> torch.Tensor:
        order, counts = self._by_owner(ids)
        store = self.store
        theirs = self._begin(act, counts)
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
        self._exchange.end()
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

    def write(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Write rows; all processes, each with its own.  Where several name an id, the last one's stays.

        Raises:
            UsageError: the processes do different things; nothing was written.
            TierStoreError: another has ended.
            CapacityError, BackendError: this one could not write its rows; the others have written theirs.
        """
        values = values.detach().to("cpu", self.store.dtype)
        with self._exchange.alone(), Unseen():
            order, counts = self._by_owner(ids)
            theirs = self._begin(Act.SET_ROWS, counts)
            named = self._exchange.send(ids[order], counts, theirs)
            rows = self._exchange.send(values[order], counts, theirs)
            self._exchange.end()
            write_rows(self.store, named, rows)

    def grow(self, num_rows: int) -> None:
        """Have more rows, in all processes, as many in each."""
        self._exchange.agree(Act.GROW, self._number, num_rows)
        self.store.grow(num_rows)

    def _by_owner(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the order in which ids are sent, and how many go to each rank."""
        owners = self._slice.owner_of(ids)
        return owners.argsort(stable=True), torch.bincount(owners, minlength=self._slice.processes)

    def _begin(self, act: Act, counts: torch.Tensor) -> torch.Tensor:
        return self._exchange.begin(act, self._number, self.store.num_rows, counts)

    def _agree(self, act: Act) -> None:
        """Return when all processes have come to call the same."""
        self._exchange.agree(act, self._number, self.store.num_rows)

    # --- all rows -----------------------------------------------------------------------------

    def begin_load(self) -> None:
        """Return when all processes are about to read files; each writes the rows that it has."""
        self._agree(Act.LOAD)

    def begin_copy(self) -> None:
        """Return when all processes are about to load a state dict; each writes the rows that it has."""
        self._agree(Act.COPY)

    def exporting(self) -> AbstractContextManager[bool]:
        """Return a context in which the first process may read `blocks`, and the others serve it."""
        return self._wholes.reading(Act.EXPORT, self._number)

    def blocks(self, column: str, parts: Iterable[slice]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield all rows of some spans of ids, ascending, in the first process."""
        return self._wholes.blocks(self._weight, column, list(parts))

    # --- gradients ----------------------------------------------------------------------------

    def is_synced(self) -> bool:
        """Whether gradients of a lookup that is made now are averaged in backward: not inside ``no_sync``."""
        return self._gradients.are_synced

    def begin_backward(self, *, is_synced: bool) -> None:
        """See `ShardedGradients.begin`."""
        self._gradients.begin(self._weight, is_synced=is_synced)

    def show_gradient(self) -> None:
        """See `ShardedGradients.show`."""
        self._gradients.show()

    def forget_gradient(self) -> None:
        """See `ShardedGradients.forget`."""
        self._gradients.forget(self._weight)

    def own_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the averaged gradient of the rows that this process has: sparse, coalesced.

        Raises:
            UsageError: it was not averaged.
        """
        return self._gradients.own(self._weight, gradient)

    def named(self, ids: torch.Tensor, named: torch.Tensor | None) -> torch.Tensor | None:
        """Return ids as often as all processes have named each."""
        del named
        return ids.repeat_interleave(self._gradients.occurrences(self._weight, ids))
