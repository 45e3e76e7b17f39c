"""Which rows of a run's tables are in this process: all of them, or a part.

`AllHere` is the answer of a process by itself; `tierstore.training.ranks` has the other one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import nn

from tierstore.nn.table_weight import TableWeight
from tierstore.tables import OwnRows, RowStore
from tierstore.tables.layout import PageLayout
from tierstore.training.tables.cache_wishes import CacheWishes
from tierstore.training.tables.kept_tables import TableLook, refuse_parts


class TableDivision(Protocol):
    """Decides which process has which rows.

    Attributes:
        are_all_here: whether there are no others.
        said_of_parts: what a sentence about the rows of a table begins with where others have a part; "".
    """

    @property
    def are_all_here(self) -> bool: ...  # noqa: D102 - see above

    @property
    def said_of_parts(self) -> str: ...  # noqa: D102 - see above

    # --- the beginning ------------------------------------------------------------------------

    def check_caches(self, wishes: CacheWishes) -> None:
        """Refuse tables that could not keep rows on the device.

        Raises:
            UsageError: it names the first.
        """
        ...

    def check_former(self, former: Mapping[str, TableLook]) -> None:
        """Refuse what a checkpoint has of tables, by name, if it does not fit.

        Raises:
            UsageError: it says why.
        """
        ...

    def divide(self, weight: TableWeight, layout: PageLayout, former: TableLook | None) -> int:
        """Decide who has which rows of a table; return how many pages are here.

        Args:
            weight: of the table.
            layout: of its pages, with all states.
            former: what a checkpoint has of it.
        """
        ...

    def own_rows(self, weight: TableWeight) -> OwnRows | None:
        """Return which rows of a table are here; ``None``: all."""
        ...

    def rows_at_first(self, weight: TableWeight) -> RowStore:
        """Return those rows of a table that will be here; of one that was released none is written."""
        ...

    def take(self, weight: TableWeight, rows: RowStore) -> None:
        """Let a table have its rows here, in ``rows``, and where others have theirs, from now on."""
        ...

    def follow_wrappers(self, model: nn.Module) -> None:
        """Let ``no_sync`` of every wrapper that there is around ``model`` be about the tables, too."""
        ...

    def is_wrapped_by(self, wrapper: nn.parallel.DistributedDataParallel) -> None:
        """Let ``no_sync`` of a wrapper be about the tables, too."""
        ...

    def opened(self) -> None:
        """The run is open: what the tables were before is not asked for any more."""
        ...

    # --- meanwhile ----------------------------------------------------------------------------

    def saving(self) -> contextlib.AbstractContextManager[bool]:
        """Return a context that says whether all rows can be read here, or others write them."""
        ...

    def begin_suspend(self) -> None:
        """The run is about to be suspended, with those of others.

        Raises:
            UsageError: they do something else; all raise the same, and nothing has changed.
            TierStoreError: another has ended.
        """
        ...

    def begin_resume(self) -> None:
        """The run is about to be resumed; otherwise as `begin_suspend`."""
        ...

    def begin_checkpoint(self) -> None:
        """A checkpoint is about to be made; otherwise as `begin_suspend`."""
        ...

    def has_own_gradient(self, weight: TableWeight) -> bool:
        """Whether the gradient of a table is memory of its own, whatever a lookup was lent."""
        ...

    # --- the end ------------------------------------------------------------------------------

    def bring_home(self, weight: TableWeight) -> None:
        """Let the rows of a table lie in memory of the process again.  Blocks.  Where it fails they stay.

        Raises:
            MemoryError: there is too little.
            BackendError: a medium failed.
        """
        ...

    def forget(self, weight: TableWeight) -> None:
        """A table was released: let it be what it was before, if the run was not opened."""
        ...

    def bring_shared_back(
        self,
        needed: Mapping[TableWeight, int],
        fits: Callable[[int], bool],
        came_back: Callable[[TableWeight], None],
    ) -> str:
        """Let tables of which others have a part have all rows, here and there.

        Args:
            needed: bytes that the rows of each take which are here.
            fits: see `RunTables.bring_shared_back`, as is what it returns and raises.
            came_back: told of each.
        """
        ...

    def say_released(self, names: Sequence[str], why: str, kept: Callable[[], str]) -> None:
        """Say which tables are not brought back though everything else is, why, and what there is of them."""
        ...


class AllHere:
    """All rows are in this process; see `TableDivision`.

    Attributes:
        are_all_here: they are.
        said_of_parts: nothing.
    """

    are_all_here = True
    said_of_parts = ""

    def check_caches(self, wishes: CacheWishes) -> None:
        """They may."""

    def check_former(self, former: Mapping[str, TableLook]) -> None:
        """Refuse parts of tables.

        Raises:
            UsageError: it says who has the rest.
        """
        refuse_parts(former)

    def divide(self, weight: TableWeight, layout: PageLayout, former: TableLook | None) -> int:
        """Return how many pages there are."""
        del former
        return layout.pages_of(weight.row_store.num_rows)

    def own_rows(self, weight: TableWeight) -> OwnRows | None:
        """Return that all are here."""
        del weight
        return None

    def rows_at_first(self, weight: TableWeight) -> RowStore:
        """Return the table's rows, or new ones if they were released."""
        store = weight.row_store
        return store if store.why_ended is None else store.anew()

    def take(self, weight: TableWeight, rows: RowStore) -> None:
        """Let a table have its rows in ``rows``."""
        if rows is not weight.row_store:
            weight.row_store = rows

    def follow_wrappers(self, model: nn.Module) -> None:
        """Nobody has to know."""

    def is_wrapped_by(self, wrapper: nn.parallel.DistributedDataParallel) -> None:
        """Nobody has to know."""

    def opened(self) -> None:
        """Nobody has to know."""

    def saving(self) -> contextlib.AbstractContextManager[bool]:
        """Return a context that says that all rows can be read."""
        return contextlib.nullcontext(enter_result=True)

    def begin_suspend(self) -> None:
        """Nobody has to know."""

    def begin_resume(self) -> None:
        """Nobody has to know."""

    def begin_checkpoint(self) -> None:
        """Nobody has to know."""

    def has_own_gradient(self, weight: TableWeight) -> bool:
        """Nobody knows."""
        del weight
        return False

    def bring_home(self, weight: TableWeight) -> None:
        """Let the rows of a table lie in memory of the process again."""
        weight.row_store.detach()

    def forget(self, weight: TableWeight) -> None:
        """There is nothing."""

    def bring_shared_back(
        self,
        needed: Mapping[TableWeight, int],
        fits: Callable[[int], bool],
        came_back: Callable[[TableWeight], None],
    ) -> str:
        """There are none."""
        del needed, fits, came_back
        return ""

    def say_released(self, names: Sequence[str], why: str, kept: Callable[[], str]) -> None:
        """There are none."""
