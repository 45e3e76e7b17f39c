"""How the rows of a table and the state of an optimizer lie together: cells, columns, records, pages.

1. A *cell* is ``width`` elements: one row of one column.
2. A *column* is the rows themselves, or one state that an optimizer keeps for each row.
3. A *record* is the cells of one row, one a column.
4. A *page* holds the records of ``rows_per_page`` consecutive ids, column after column: 4096 bytes, as far
   as whole records fill them, or a single record that is larger.
5. Pages lie one after another without gaps, so any number of them is one matrix of cells ``[cells,
   width]``, and rows of any column in whatever pages are gathered by one call.

Decides and computes; holds no bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tierstore.errors import UsageError

ROWS: Final = "rows"
"""The name of the column that holds the rows themselves; always the first."""
PAGE_BYTES: Final = 4096
"""What a page comes to where records are small, and what pages are padded to on disk: a block of direct
I/O."""

Indices = npt.NDArray[np.int64]


class Column(NamedTuple):
    """One cell a row.

    Attributes:
        name: ``"rows"``, or that of an optimizer's state.
        initial: what every element of a state is before the row's first step; of ``"rows"``, `InitialRows`
            says it.
    """

    name: str
    initial: float


@dataclass(frozen=True)
class PageLayout:
    """Where each cell of a table lies in its page.

    Attributes:
        width: elements of a cell.
        dtype: of every cell.
        columns: ``"rows"`` and the states, in the order in which they lie.
    """

    width: int
    dtype: torch.dtype
    columns: tuple[Column, ...] = (Column(ROWS, 0.0),)

    @property
    def cell_bytes(self) -> int:
        """Bytes of one row of one column."""
        return self.width * self.dtype.itemsize

    @property
    def record_bytes(self) -> int:
        """Bytes of a row with its states."""
        return self.cell_bytes * len(self.columns)

    @property
    def rows_per_page(self) -> int:
        """How many consecutive ids share a page."""
        return max(1, PAGE_BYTES // self.record_bytes)

    @property
    def cells_per_page(self) -> int:
        """Cells of a page, all columns together."""
        return self.rows_per_page * len(self.columns)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in memory: no padding."""
        return self.rows_per_page * self.record_bytes

    def pages_of(self, num_rows: int) -> int:
        """Return how many pages ``num_rows`` rows take."""
        return -(-num_rows // self.rows_per_page)

    def place_of(self, name: str) -> int:
        """Return the number of a column.

        Raises:
            UsageError: there is none of this name.
        """
        for place, column in enumerate(self.columns):
            if column.name == name:
                return place
        names = ", ".join(column.name for column in self.columns)
        raise UsageError(f"no column {name!r}: there are {names}")

    def cells_in(self, frames: Indices, offsets: Indices) -> Indices:
        """Return the cells of ``"rows"`` of the rows at ``offsets`` of the pages in ``frames``.

        Those of column c are ``c * rows_per_page`` further on.
        """
        return frames * self.cells_per_page + offsets

    def with_columns(self, columns: tuple[Column, ...]) -> PageLayout:
        """Return the layout of the same rows with other states."""
        return PageLayout(self.width, self.dtype, columns)
