"""Which process has which rows of a table.

Consecutive ids that share a page are one slice, and slice s is that of rank ``s % processes``: neither the
order of ids nor the number of rows decides, so a table can grow, and frequent ids that lie together are
not all one process's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RowSlice:
    """The rows that one process has.

    Attributes:
        rank: which process.
        processes: how many there are.
        rows_per_slice: how many consecutive ids go together.
    """

    rank: int
    processes: int
    rows_per_slice: int

    @property
    def where(self) -> str:
        """See `tierstore.tables.OwnRows`."""
        return f"the rows of rank {self.rank} of {self.processes} alone"

    def own(self, ids: torch.Tensor) -> torch.Tensor:
        """See `tierstore.tables.OwnRows`."""
        return self.owner_of(ids) == self.rank

    def as_numbers(self) -> tuple[int, int, int]:
        """See `tierstore.tables.OwnRows`."""
        return self.rank, self.processes, self.rows_per_slice

    def owner_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rank that has the row of each of some ids."""
        return torch.div(ids, self.rows_per_slice, rounding_mode="floor") % self.processes
