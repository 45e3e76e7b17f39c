"""Rows in hand: the cells of some rows, gathered and scattered by one call each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from tierstore.errors import UsageError
from tierstore.tables.frames import FrameState
from tierstore.tables.layout import ROWS, Indices
from tierstore.tables.page_map import Frames
from tierstore.tables.pages import InHand, TablePages, put_rows

_MOST_REMEMBERED: Final = 1 << 18
"""Rows up to which a visit is remembered, for a step comes after its lookup: 24 bytes each."""


class Visit:
    """Rows of a part of the ids that were asked for, which stay in place until other rows are asked for.

    Attributes:
        part: which of the ids.
    """

    def __init__(self, part: slice, pages: TablePages, frames: Frames, cells: Indices) -> None:
        self.part = part
        self._pages = pages
        self._visit = pages.visit
        self._frames = frames  # distinct
        self._numbers = cells  # of "rows"
        self._cells = torch.from_numpy(cells)

    @property
    def pages_in_hand(self) -> Indices:
        """The pages of these rows, as long as no other rows have been asked for; then none."""
        frames = self._frames if self._visit == self._pages.visit else self._frames[:0]
        return self._pages.frames.pages[frames]

    def gather(self, column: str = ROWS, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a copy of the cells of these rows.

        Args:
            column: which cells.
            out: where to; contiguous ``[n, width]`` of the table's dtype in host memory.

        Returns:
            ``[n, width]``; ``out`` if that was given.

        Raises:
            UsageError: there is no such column, ``out`` is not as it has to be, or other rows have been
                asked for.
        """
        cells = self._cells_of(column)
        if out is None:
            return torch.index_select(self._pages.cells, 0, cells)
        self._check(out, "out")
        torch.index_select(self._pages.cells, 0, cells, out=out.detach())
        return out

    def keep(self, rows: torch.Tensor) -> None:
        """Let who visits the same rows next, before anybody has written to them, have a copy that there is.

        Args:
            rows: what `gather` has returned; nobody writes to it any more.
        """
        last = self._pages.in_hand
        if last is not None and last.cells is self._numbers and last.visit == self._visit:
            self._pages.in_hand = last._replace(copy=rows)

    def take(self) -> torch.Tensor:
        """Return a copy of the rows, as `gather` does: what somebody has kept, if there is such."""
        last = self._pages.in_hand
        if last is None or last.copy is None or last.cells is not self._numbers or last.visit != self._visit:
            return self.gather()
        self._forget_copy()
        return last.copy

    def _forget_copy(self) -> None:
        last = self._pages.in_hand
        if last is not None and last.copy is not None:
            self._pages.in_hand = last._replace(copy=None)

    def scatter(self, column: str, values: torch.Tensor) -> None:
        """Write cells of these rows.

        Args:
            column: which cells.
            values: ``[n, width]`` of the table's dtype, in host memory.

        Raises:
            UsageError: there is no such column, the values are not as they have to be, or other rows have
                been asked for.
        """
        cells = self._cells_of(column)
        self._check(values, "values")
        self._forget_copy()
        self._pages.change(self._frames)
        put_rows(self._pages.cells, cells.numpy(), values.detach())

    def claim(self) -> None:
        """Let the pages of these rows count as written.

        Raises:
            UsageError: other rows have been asked for.
        """
        self._cells_of(ROWS)
        self._pages.change(self._frames)

    def _cells_of(self, column: str) -> torch.Tensor:
        if self._visit != self._pages.visit:
            name = self._pages.traits.name
            raise UsageError(f"table {name!r}: other rows were asked for since, and these may be elsewhere")
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


def are_in_memory(pages: TablePages, ids: Indices) -> npt.NDArray[np.bool_]:
    """Say of each row whether its page is in a frame with its bytes."""
    frames = pages.map.frames_of(ids // pages.layout.rows_per_page)
    are_there: npt.NDArray[np.bool_] = frames >= 0
    are_there[are_there] = pages.frames.states[frames[are_there]] > FrameState.FILLING
    return are_there


def visits_in_memory(pages: TablePages, ids: Indices) -> Iterator[Visit]:
    """Yield rows whose pages are all in memory.  Brings nothing: rows that are in hand stay so."""
    if len(ids):
        page_of, offsets = np.divmod(ids, pages.layout.rows_per_page)
        frames = pages.map.frames_of(page_of)
        yield Visit(slice(0, len(ids)), pages, np.unique(frames), pages.layout.cells_in(frames, offsets))


def visits(pages: TablePages, ids: Indices) -> Iterator[Visit]:
    """Yield the rows of ``ids``, ascending and distinct, in as few parts as frames allow.

    Raises:
        CapacityError, BackendError: as `TablePages.bring`.
    """
    last, layout = pages.in_hand, pages.layout
    if last is not None and last.are(pages.visit, ids):
        pages.bring_again(last.frames)
        yield Visit(slice(0, len(ids)), pages, last.frames, last.cells)
        return
    page_of, offsets = np.divmod(ids, layout.rows_per_page)
    begins = np.flatnonzero(np.concatenate(([True], page_of[1:] != page_of[:-1])))[: len(ids)]
    distinct, counts = page_of[begins], np.diff(begins, append=len(ids))
    at = 0
    while at < len(distinct):
        until = at + pages.most_of(distinct[at:])
        frames = pages.bring(distinct[at:until], counts[at:until])
        part = slice(int(begins[at]), int(begins[until]) if until < len(begins) else len(ids))
        cells = layout.cells_in(np.repeat(frames, counts[at:until]), offsets[part])
        if part == slice(0, len(ids)) and len(ids) <= _MOST_REMEMBERED:
            pages.in_hand = InHand(pages.visit, ids.copy(), frames, cells)
        yield Visit(part, pages, frames, cells)
        at = until
