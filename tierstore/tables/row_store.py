"""The rows of a table and the state that an optimizer keeps beside them.

`RowStore` is what modules and optimizers see of this package: rows by their ids, gathered and scattered.
It knows neither modules nor optimizers nor autograd.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tierstore.errors import UsageError
from tierstore.tables.initial_rows import InitialRows
from tierstore.tables.layout import ROWS, Column, Indices, PageLayout
from tierstore.tables.pages import ResidentPages


@dataclass(frozen=True, slots=True)
class RowStats:
    """One table, now and since it was made.

    Attributes:
        pages: how many are in memory.
        page_bytes: bytes of one.
        hits: pages that were asked for and in memory.
        misses: those that were not.
    """

    pages: int
    page_bytes: int
    hits: int
    misses: int


class Visit:
    """Rows of a part of the ids that were asked for, which stay in place until the next part is.

    Attributes:
        part: which of the ids.
    """

    def __init__(self, part: slice, pages: ResidentPages, cells: Indices) -> None:
        self.part = part
        self._pages = pages
        self._cells = torch.from_numpy(cells)

    def gather(self, column: str = ROWS, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a copy of the cells of these rows.

        Args:
            column: which cells.
            out: where to; contiguous ``[n, width]`` of the table's dtype in host memory.

        Returns:
            ``[n, width]``; ``out`` if that was given.

        Raises:
            UsageError: there is no such column, or ``out`` is not as it has to be.
        """
        cells = self._cells_of(column)
        if out is not None:
            self._check(out, "out")
            torch.index_select(self._pages.cells, 0, cells, out=out.detach())
            return out
        return torch.index_select(self._pages.cells, 0, cells)

    def scatter(self, column: str, values: torch.Tensor) -> None:
        """Write cells of these rows.

        Args:
            column: which cells.
            values: ``[n, width]`` of the table's dtype, in host memory.

        Raises:
            UsageError: there is no such column, or the values are not as they have to be.
        """
        cells = self._cells_of(column)
        self._check(values, "values")
        self._pages.cells.index_put_((cells,), values.detach())

    def _cells_of(self, column: str) -> torch.Tensor:
        layout = self._pages.layout
        place = layout.place_of(column)
        return self._cells + place * layout.rows_per_page if place else self._cells

    def _check(self, tensor: torch.Tensor, name: str) -> None:
        wanted = (len(self._cells), self._pages.layout.width), self._pages.layout.dtype, "cpu"
        given = tuple(tensor.shape), tensor.dtype, tensor.device.type
        if given != wanted:
            raise UsageError(
                f"{name}: {given[1]} {list(given[0])} on {given[2]}, not {wanted[1]} {list(wanted[0])} on cpu"
            )


class RowStore:
    """Rows by their ids, each with a cell of every column.

    The pages that are touched stay in memory; others are nowhere, so a table may have 2**40 rows.  Not for
    several threads at a time.

    Args:
        num_rows: at least 1.
        width: elements of a row; at least 1.
        dtype: of rows and states.
        initial_rows: what rows are before they are written: a pure function of their ids.
        name: of the table, for messages.
    """

    def __init__(
        self,
        num_rows: int,
        width: int,
        dtype: torch.dtype,
        initial_rows: InitialRows,
        *,
        name: str = "table",
    ) -> None:
        self.name = name
        self._initial_rows = initial_rows
        self._pages = ResidentPages(PageLayout(width, dtype), num_rows, initial_rows)

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return self._pages.num_rows

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self._pages.layout.width

    @property
    def dtype(self) -> torch.dtype:
        """The type of every element."""
        return self._pages.layout.dtype

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns, ``"rows"`` first."""
        return self._pages.layout.columns

    def ensure_columns(self, columns: Sequence[Column]) -> None:
        """Let there be these columns; those that are there stay as they are.

        What is there is copied to pages of the new layout; for a while both are in memory.

        Raises:
            UsageError: a column of the same name starts with another value; nothing was changed.
        """
        there = {column.name: column for column in self.columns}
        for column in columns:
            known = there.setdefault(column.name, column)
            if column.name != ROWS and known != column:
                raise UsageError(
                    f"table {self.name!r}: the column {column.name!r} starts with {known.initial}, not with "
                    f"{column.initial}"
                )
        self._relay(tuple(there.values()))

    def drop_columns(self, names: Collection[str]) -> None:
        """Forget columns and what is in them.

        Raises:
            UsageError: there is no such column, or it is ``"rows"``; nothing was changed.
        """
        for name in names:
            if not self._pages.layout.place_of(name):
                raise UsageError(f"table {self.name!r}: the column {name!r} is the table itself")
        self._relay(tuple(column for column in self.columns if column.name not in names))

    def visit(self, ids: torch.Tensor) -> Iterator[Visit]:
        """Yield parts of the rows of ``ids`` in which they can be read and written, in order.

        Rows of a part stay in place until the next one is asked for.  No ids have no parts.

        Args:
            ids: int64 in host memory, ascending, distinct, at least 0 and below `num_rows`: the caller has
                checked.
        """
        if len(ids):
            yield from self._visit(self._pages, ids.numpy())

    @staticmethod
    def _visit(pages: ResidentPages, ids: Indices) -> Iterator[Visit]:
        of_ids, offsets = np.divmod(ids, pages.layout.rows_per_page)
        begins = np.concatenate(([True], of_ids[1:] != of_ids[:-1]))
        frames = pages.bring(of_ids[begins])[np.cumsum(begins) - 1]
        yield Visit(slice(0, len(ids)), pages, pages.layout.cells_in(frames, offsets))

    def prefetch(self, ids: torch.Tensor) -> None:
        """Advise that rows will be visited: any order, repeats allowed.  Never raises for want of room."""

    def grow(self, num_rows: int) -> None:
        """Let the table have more rows: those that a table made with so many has.

        Raises:
            UsageError: they are fewer than there are; nothing was changed.
        """
        if num_rows < self.num_rows:
            raise UsageError(f"table {self.name!r}: {self.num_rows} rows cannot grow to {num_rows}")
        self._pages.grow(num_rows)

    def stats(self) -> RowStats:
        """Return what there is and what happened."""
        pages = self._pages
        return RowStats(pages.used, pages.layout.page_bytes, pages.hits, pages.misses)

    def _relay(self, columns: tuple[Column, ...]) -> None:
        """Copy all that is there to pages with other columns."""
        old = self._pages
        if columns == old.layout.columns:
            return
        new = ResidentPages(old.layout.with_columns(columns), old.num_rows, self._initial_rows)
        kept = [column.name for column in old.layout.columns if column in columns]
        for ids in old.ids_there():
            (source,), (target,) = self._visit(old, ids), self._visit(new, ids)
            for name in kept:
                target.scatter(name, source.gather(name))
        self._pages = new
