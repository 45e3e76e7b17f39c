"""The pages of a table that are in memory.

A page that was never touched is nowhere.  One that is asked for gets a frame and is made there: its rows by
the table's `InitialRows`, its states by their columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from tierstore.tables.initial_rows import InitialRows
from tierstore.tables.layout import Indices, PageLayout
from tierstore.tables.page_map import Frames, PageMap
from tierstore.tables.page_numbers import Pages

_FIRST_BYTES = 1 << 20
_AT_A_TIME = 1024


class ResidentPages:
    """Pages in frames, as many as were touched: one matrix of cells, which grows by doubling.

    Args:
        layout: of a page.
        num_rows: of the table.
        initial_rows: what the rows are at first; asked for rows below ``num_rows`` only.
    """

    def __init__(self, layout: PageLayout, num_rows: int, initial_rows: InitialRows) -> None:
        self.layout = layout
        self.num_rows = num_rows
        self.cells = _cells(0, layout)
        self.hits = 0
        self.misses = 0
        self.used = 0
        self._initial_rows = initial_rows
        self._map = PageMap(layout.pages_of(num_rows))

    def bring(self, pages: Pages) -> Frames:
        """Return the frames of these distinct pages, in which they are from now on."""
        frames = self._map.frames_of(pages)
        missing = frames < 0
        wanted = pages[missing]
        self.hits += len(pages) - len(wanted)
        self.misses += len(wanted)
        if len(wanted):
            frames[missing] = self._make(wanted)
        return frames

    def ids_there(self) -> Iterator[Indices]:
        """Yield the ids of all rows in frames, ascending, some thousands at a time."""
        pages = self._map.pages_in_frames()
        per_page = self.layout.rows_per_page
        for begin in range(0, len(pages), _AT_A_TIME):
            ids = (pages[begin : begin + _AT_A_TIME, None] * per_page + np.arange(per_page)).reshape(-1)
            yield ids[ids < self.num_rows]

    def grow(self, num_rows: int) -> None:
        """Let the table have more rows."""
        last = np.array([(self.num_rows - 1) // self.layout.rows_per_page])
        begin, self.num_rows = self.num_rows, num_rows
        self._map.grow(self.layout.pages_of(num_rows))
        frames = self._map.frames_of(last)
        if frames[0] >= 0:  # the page has more rows than it had
            end = min(num_rows, (int(last[0]) + 1) * self.layout.rows_per_page)
            self._fill_rows(np.arange(begin, end), np.repeat(frames, end - begin))

    def _make(self, pages: Pages) -> Frames:
        frames = np.arange(self.used, self.used + len(pages))
        self._make_room(self.used + len(pages))
        per_page = self.layout.rows_per_page
        ids = (pages[:, None] * per_page + np.arange(per_page)).reshape(-1)
        there = ids < self.num_rows
        self._fill_rows(ids[there], np.repeat(frames, per_page)[there])
        made = self.cells[self.used * self.layout.cells_per_page :][: len(pages) * self.layout.cells_per_page]
        by_column = made.view(len(pages), len(self.layout.columns), per_page, self.layout.width)
        for place, column in enumerate(self.layout.columns[1:], 1):
            by_column[:, place].fill_(column.initial)
        self.used += len(pages)
        self._map.set_frames(pages, frames)
        return frames

    def _fill_rows(self, ids: Indices, frames: Frames) -> None:
        """Set rows in these frames to what they are at first."""
        cells = self.layout.cells_in(frames, ids % self.layout.rows_per_page)
        rows = self._initial_rows(torch.from_numpy(ids))
        self.cells.index_put_((torch.from_numpy(cells),), rows.detach())

    def _make_room(self, frames: int) -> None:
        if frames * self.layout.cells_per_page > len(self.cells):
            most = self.layout.pages_of(self.num_rows)
            room = max(frames, min(most, max(2 * self.used, _FIRST_BYTES // self.layout.page_bytes)))
            cells = _cells(room, self.layout)
            used = self.used * self.layout.cells_per_page
            cells[:used] = self.cells[:used]
            self.cells = cells


def _cells(frames: int, layout: PageLayout) -> torch.Tensor:
    """Return memory for so many frames; what is in it is whatever."""
    with torch.inference_mode(mode=False):  # else nobody could write to it later, out of that mode
        return torch.empty(frames * layout.cells_per_page, layout.width, dtype=layout.dtype, device="cpu")
