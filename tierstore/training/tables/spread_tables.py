"""What a run asks of whoever spreads its tables over several processes; with one process nobody does."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from tierstore.nn.table_weight import TableWeight
from tierstore.tables import OwnRows, RowStore


class SpreadTables(Protocol):
    """Decides which process has which rows.

    Attributes:
        processes: how many have a part each.
    """

    @property
    def processes(self) -> int: ...  # noqa: D102 - see above

    def divide(self, weight: TableWeight, rows_per_slice: int) -> None:
        """Decide who has which rows of a table, of which so many consecutive ones go together."""
        ...

    def slice_of(self, weight: TableWeight) -> OwnRows:
        """Return which rows of a table are here."""
        ...

    def own_part(self, weight: TableWeight) -> RowStore:
        """Return copies of what this process has of a table that lies in its memory as a whole."""
        ...

    def shard(self, weight: TableWeight, part: RowStore) -> None:
        """Let a table have its rows here, in ``part``, and in the other processes from now on."""
        ...

    def has_average(self, weight: TableWeight) -> bool:
        """Whether the gradient of a table is one that was averaged."""
        ...

    def is_wrapped_by(self, wrapper: nn.parallel.DistributedDataParallel) -> None:
        """Note that a wrapper's ``no_sync`` is about the tables, too."""
        ...

    def opened(self) -> None:
        """There is no way back any more."""
        ...

    def give_back(self, weight: TableWeight) -> bool:
        """Let a table be what it was before, unless the run was opened; return whether it is."""
        ...

    def close(self) -> None:
        """Exchange no more.  Idempotent."""
        ...
