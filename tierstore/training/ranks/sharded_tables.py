"""Tables whose rows are spread over the processes of a run: who has which.

Each process has a `RowStore` of its own rows, in its own store: the ids are the table's, the pages of others
are never touched there.  How others come to them: `tierstore.training.ranks.sharded_rows`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tierstore.errors import UsageError
from tierstore.nn.table_weight import TableWeight
from tierstore.tables import RowStore
from tierstore.tables.layout import PageLayout
from tierstore.training.modules import replicas
from tierstore.training.ranks.acts import Act
from tierstore.training.ranks.beginnings import FirstRows, TableBeginning
from tierstore.training.ranks.returning import ReturningTables
from tierstore.training.ranks.row_exchange import RowExchange
from tierstore.training.ranks.row_slices import RowSlice
from tierstore.training.ranks.sharded_gradients import ShardedGradients
from tierstore.training.ranks.sharded_rows import ShardedRows
from tierstore.training.ranks.where import RankPlace
from tierstore.training.ranks.whole_tables import WholeTables
from tierstore.training.tables.cache_wishes import CacheWishes, refuse_cached_rows
from tierstore.training.tables.found_tables import Tables
from tierstore.training.tables.kept_tables import TableLook

log = logging.getLogger("tierstore")


class ShardedTables:
    """The tables of one run, of which this process has a part of the rows; see `TableDivision`.

    Args:
        where: which process this is.
        tables: of the model, with their names.
        beginnings: what each begins with.
        local: how many of the processes are on this machine.

    Attributes:
        are_all_here: they are not.

    Raises:
        UsageError: the processes have other tables; all raise the same.
        TierStoreError: another process has ended.
    """

    are_all_here = False

    def __init__(
        self, where: RankPlace, tables: Tables, beginnings: Mapping[TableWeight, TableBeginning], local: int
    ) -> None:
        self._where = where
        self._numbers = {weight: number for number, weight in enumerate(tables)}
        self._exchange = RowExchange(where, list(tables.values()))
        self._slices: dict[TableWeight, RowSlice] = {}
        self._former: dict[TableWeight, RowStore] = {}
        self._gradients = ShardedGradients(self._exchange, self._slices)
        self._beginnings = beginnings
        self._first_rows = FirstRows(self._exchange, self._numbers)
        self._local = local
        self._returning = ReturningTables(self._exchange, self._numbers)
        self._wholes = WholeTables(self._exchange, self._numbers, self._slices)

    @property
    def said_of_parts(self) -> str:
        """Say that others have a part of the rows of a table."""
        return f" of the {self._where.world_size} processes each had a part:"

    # --- who has which ------------------------------------------------------------------------

    def check_caches(self, wishes: CacheWishes) -> None:
        """Refuse tables that keep rows on the device.

        Raises:
            UsageError: it names the first, and says what to do instead.
        """
        refuse_cached_rows(wishes)

    def check_former(self, former: Mapping[str, TableLook]) -> None:
        """All processes have compared theirs."""

    def divide(self, weight: TableWeight, layout: PageLayout, former: TableLook | None) -> int:
        """Decide who has which rows of a table; return how many pages are here.

        Args:
            weight: of the table.
            layout: of its pages: ids of one page go together.
            former: what a checkpoint has of it, which goes on as it is there.
        """
        part = None if former is None else former.part
        per_slice = layout.rows_per_page if part is None else part[-1]
        self._slices[weight] = RowSlice(self._where.rank, self._where.world_size, per_slice)
        return -(-layout.pages_of(weight.row_store.num_rows) // self._where.world_size)

    def own_rows(self, weight: TableWeight) -> RowSlice:
        """Return which rows of a table are here."""
        return self._slices[weight]

    def rows_at_first(self, weight: TableWeight) -> RowStore:
        """Return what this process will have of a table: rows of the first process, with their state.

        Raises:
            UsageError: the processes keep other states beside the rows.
            TierStoreError: another process has ended.
            CapacityError: there is no memory for them.
        """
        made, beginning, own = weight.row_store, self._beginnings[weight], self._slices[weight]
        like = made.num_rows, made.width, made.dtype, beginning.rows
        part = RowStore(*like, name=made.name, own_rows=own)
        if made.why_ended is None:
            part.ensure_columns(made.columns)
        if beginning.are_written:
            self._first_rows.bring(weight, own, part)
        return part

    def take(self, weight: TableWeight, part: RowStore) -> None:
        """Let a table have its rows here and in the other processes from now on.

        Args:
            weight: of the table.
            part: what is here.
        """
        self._former.setdefault(weight, weight.row_store)
        weight.access = ShardedRows(
            weight,
            self._numbers[weight],
            part,
            self._slices[weight],
            self._exchange,
            self._gradients,
            self._wholes,
        )

    def opened(self) -> None:
        """There is no way back any more: forget what the tables were before."""
        self._former.clear()

    def bring_home(self, weight: TableWeight) -> None:
        """Let a table be what it was before: what is here was copied, and never used."""
        if weight.access.are_all_here:
            return  # it was not taken yet
        part = weight.row_store
        assert weight in self._former, "only what was never used is brought back"
        self.forget(weight)
        part.end(f"the run that had rows of the table {part.name!r} could not be opened")

    def forget(self, weight: TableWeight) -> None:
        """Let a table be what it was before, if the run was not opened."""
        former = self._former.pop(weight, None)
        if former is not None:
            weight.row_store = former

    def bring_shared_back(
        self,
        needed: Mapping[TableWeight, int],
        fits: Callable[[int], bool],
        came_back: Callable[[TableWeight], None],
    ) -> str:
        """Bring all rows of all tables to every process, if all have room; return why not.

        Raises:
            UsageError: the processes do different things; all raise the same.
            TierStoreError, MemoryError: one could not bring the rows of a table, or keep them; all raise.
        """
        if not needed:
            return ""
        if self._exchange.is_over():
            return "cannot come back after an error"
        try:
            if not self._returning.agree(sum(needed.values()), lambda nbytes: fits(nbytes * self._local)):
                return "do not fit into the memory of every process with room to spare"
            for weight in needed:
                self._bring_back(weight)
                came_back(weight)
        except Exception as error:
            if not self._exchange.is_over():
                raise
            return f"cannot come back: {error}"
        return ""

    def _bring_back(self, weight: TableWeight) -> None:
        """Let a table have all rows, in memory of the process, and all of a gradient that was averaged."""
        whole = self._returning.bring(weight)
        is_average = self._gradients.has_average(weight)
        part = self._gradients.part_of_average(weight) if is_average else None
        gradient = self._returning.bring_gradient(weight, part)
        rows, begun_for = weight.row_store, weight.begun_for
        weight.row_store, weight.begun_for = whole, begun_for
        if is_average:
            weight.grad = gradient
        rows.end(f"the rows of the table {rows.name!r} were brought back when its run was closed")

    def say_released(self, names: Sequence[str], why: str, kept: Callable[[], str]) -> None:
        """Say which tables are not brought back, as other processes have a part of their rows."""
        if names:
            log.warning(
                "the run is closed, and the rows of %d tables (%s) are released: they are spread over %d "
                "processes, and %s. %s",
                len(names),
                ", ".join(map(repr, names[:3])),
                self._where.world_size,
                why,
                kept(),
            )

    # --- all together -------------------------------------------------------------------------

    def saving(self) -> AbstractContextManager[bool]:
        """Return a context in which all rows can be read by the first process, which the others serve."""
        return self._wholes.reading(Act.SAVE, 0)

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes only accumulate."""
        return self._gradients.paused()

    def follow_wrappers(self, model: nn.Module) -> None:
        """Note that ``no_sync`` of every wrapper that there is is about the tables; see `is_wrapped_by`."""
        for wrapper in replicas.wrappers_of(model):
            self.is_wrapped_by(wrapper)

    def is_wrapped_by(self, wrapper: DistributedDataParallel) -> None:
        """Note that a wrapper's ``no_sync`` is about the tables, too.

        Raises:
            UsageError: it averages over some of the processes, and tables are averaged over all of them.
        """
        count = wrapper.process_group.size()
        if count != self._where.world_size:
            raise UsageError(
                f"a DistributedDataParallel of the model averages over a process group of {count} processes, "
                f"and the rows of its tables are spread, and their gradients averaged, over all "
                f"{self._where.world_size}. Leave process_group out, or call offload(..., alone=True), which "
                "keeps all rows in each process."
            )
        self._gradients.are_paused_by(wrapper)

    def has_own_gradient(self, weight: TableWeight) -> bool:
        """Whether the gradient of a table was averaged."""
        return self._gradients.has_average(weight)

    def begin_suspend(self) -> None:
        """Return when all processes are about to suspend their runs."""
        self._exchange.agree(Act.SUSPEND)

    def begin_resume(self) -> None:
        """Return when all processes are about to resume their runs."""
        self._exchange.agree(Act.RESUME)

    def begin_checkpoint(self) -> None:
        """Return when all processes are about to make a checkpoint."""
        self._exchange.agree(Act.CHECKPOINT)

    # --- the end ------------------------------------------------------------------------------

    def leave_with(self, error: BaseException) -> None:
        """Exchange no more, as something has failed, and tell the others what.  Idempotent."""
        self._exchange.leave_with(error)

    def close(self) -> None:
        """Exchange no more.  Idempotent."""
        self._exchange.close()
