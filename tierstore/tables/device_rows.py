"""Hot rows of a table on a device: a second level above its pages, of which a slot holds one row.

Rule 1: a row that is in a slot is right there, with all its columns; what its page has is older while the
slot is DIRTY.  So whoever asks pages for rows gives these back first (`give_back`, `write_back`): `RowStore`
does, and nobody else asks.
Rule 2: slots of the rows in hand, and those that a prefetch has brought, stay.  Of the others those go first
that are used least; what has changed of these and of those that go next is written to the pages in one go.
Rule 3: rows for which there is no slot pass by: they are gathered into the same result, and what becomes of
them is written to the pages.  So a batch may be larger than the cache, and there may be no slot at all.
Rule 4: whatever fails, no row that was written is lost, and the call can be made again.  So where there is
no log, the page of a row that has changed in a slot stays in memory, as if the row had changed there.

The life of a slot is that of a frame (`tierstore.tables.frames`), with a row in the place of a page.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import torch

from tierstore import forks
from tierstore.errors import TierStoreError, UsageError
from tierstore.signals import uninterrupted
from tierstore.tables.cache_stats import CacheStats
from tierstore.tables.device_home import DeviceHome
from tierstore.tables.device_link import DeviceLink, put_cells, take_cells
from tierstore.tables.frames import FORESIGHT, FrameEvent, FrameState, FrameTable
from tierstore.tables.layout import PageLayout
from tierstore.tables.page_changes import Cells, Owe, change_pages
from tierstore.tables.page_numbers import Pages
from tierstore.tables.pages import TablePages
from tierstore.tables.slot_map import Ids, SlotMap, Slots
from tierstore.tables.stream_order import StreamOrder
from tierstore.tables.visits import Visit, are_in_memory, visits, visits_in_memory

_SHARE: Final = 16
"""Rows are written back in parts of one slot in so many: the device needs room for a part meanwhile."""
_LEAST_PART: Final = 1024
_LOOKUPS: Final = 4
"""After so many lookups without a prefetch, what prefetches have brought is on its way out."""
_PREFETCHED_SHARE: Final = 2
"""A prefetch takes no more than one slot in so many."""
_NONE: Final = np.zeros(0, dtype=np.int64)

_Look = Callable[[TablePages, Ids], Iterator[Visit]]

log = logging.getLogger("tierstore")


class DeviceRows:
    """See the module.

    Args:
        home: memory on the device, and how rows come there.
        layout: of the table's pages.
        num_rows: of the table.
        name: of the table, for messages.

    Raises:
        UsageError: the memory is not of the table's width and type, or not contiguous.

    Attributes:
        link: what is carried to the device and back.
    """

    def __init__(self, home: DeviceHome, layout: PageLayout, num_rows: int, name: str) -> None:
        cells = home.cells
        if cells.dtype != layout.dtype or cells.shape[1:] != (layout.width,) or not cells.is_contiguous():
            raise UsageError(
                f"table {name!r}: memory of the device has to be {layout.dtype} [n, {layout.width}], "
                f"contiguous, not {cells.dtype} {list(cells.shape)} with strides {list(cells.stride())}"
            )
        self._cells = cells.detach()
        self._policy = home.policy
        self._name = name
        self._process = forks.here()
        self.link = DeviceLink(home.carrier, self._cells.device)
        self._order = StreamOrder(self._cells.device)
        self._hits = self._misses = self._bypassed = self._evictions = self._prefetched = self._declined = 0
        self._begin(layout, num_rows)

    def _begin(self, layout: PageLayout, num_rows: int) -> None:
        """Let there be slots of these columns, with nothing in them."""
        self._layout = layout
        columns = len(layout.columns)
        slots = len(self._cells) // columns
        self._by_column = self._cells[: slots * columns].view(columns, slots, layout.width)
        self._slots = FrameTable(slots, self._policy)
        self._map = SlotMap(num_rows, slots)
        self._lookups = 0  # since a prefetch

    @property
    def device(self) -> torch.device:
        """Where rows are gathered."""
        return self._cells.device

    @property
    def has_dirty(self) -> bool:
        """Whether there are rows in slots that differ from those in pages."""
        return bool(np.any(self._slots.states >= FrameState.DIRTY))

    def stats(self) -> CacheStats:
        """Return what there is and what happened."""
        return CacheStats(
            slots=len(self._slots),
            used=len(self._slots) - self._slots.free,
            dirty=int(np.count_nonzero(self._slots.states >= FrameState.DIRTY)),
            hits=self._hits,
            misses=self._misses,
            bypassed=self._bypassed,
            prefetched=self._prefetched,
            prefetches_declined=self._declined,
            evictions=self._evictions,
            rows_to_device=self.link.rows_to_device,
            rows_to_host=self.link.rows_to_host,
            bytes_to_device=self.link.bytes_to_device,
            bytes_to_host=self.link.bytes_to_host,
        )

    # --- rows for the device ---------------------------------------------------------------------

    def gather(
        self, pages: TablePages, ids: Ids, names: Sequence[str], *, more: int, is_lookup: bool
    ) -> Cells:
        """See `tierstore.tables.RowStore.gather`."""
        self._begin_use()
        columns = [self._layout.place_of(name) for name in names]
        slots = self._map.slots_of(ids)
        missing = np.flatnonzero(slots < 0)
        self._slots.hold(slots[slots >= 0])
        room = self._make_room(pages, len(missing))
        entering, passing = missing[:room], missing[room:]
        slots[entering], passed = self._bring(pages, ids[entering], ids[passing], names)
        found = self._compact(slots, passing, columns, passed, more)
        self._slots.hold(slots[slots >= 0])
        if is_lookup:
            self._slots.use(slots[slots >= 0])
            self._note_lookup(len(ids) - len(missing), len(missing), len(passing))
        return dict(zip(names, found, strict=True))

    def _note_lookup(self, hits: int, misses: int, bypassed: int) -> None:
        self._hits += hits
        self._misses += misses
        self._bypassed += bypassed
        self._lookups += 1
        if self._lookups > _LOOKUPS:
            self._slots.begin_prefetch(FORESIGHT // _LOOKUPS)  # what the last ones have brought grows older

    def scatter(self, pages: TablePages, ids: Ids, cells: Cells, owe: Owe) -> None:
        """See `tierstore.tables.RowStore.scatter`."""
        self._begin_use()
        self._check(cells, len(ids))
        slots = self._map.slots_of(ids)
        passing = np.flatnonzero(slots < 0)
        if len(passing):
            self._scatter_past(pages, ids, slots, passing, cells, owe)
        elif len(slots):
            self._claim_pages(pages, slots)
            (at,) = self.link.bring_places(slots)
            self._write(slots, at, cells)
        self._slots.hold(_NONE)

    def _claim_pages(self, pages: TablePages, slots: Slots) -> None:
        """Let pages of rows that are about to change stay in memory, where there is nothing below it.

        Or they would have left, for want of room, when the rows come back.

        Raises:
            CapacityError: there is no room for them.
        """
        if pages.is_fixed and pages.log is None:
            clean = slots[self._slots.states[slots] == FrameState.CLEAN]
            for visit in visits(pages, np.sort(self._slots.pages[clean])):
                visit.claim()

    def _scatter_past(
        self, pages: TablePages, ids: Ids, slots: Slots, passing: Slots, cells: Cells, owe: Owe
    ) -> None:
        """Write cells of rows of which some are in no slot."""
        going, at = list(cells.values()), None
        if len(passing) < len(slots):
            staying = np.flatnonzero(slots >= 0)
            slots = slots[staying]
            self._claim_pages(pages, slots)
            at, from_, others = self.link.bring_places(slots, staying, passing)
            going = [each.index_select(0, others) for each in going]
            cells_there = {name: each.index_select(0, from_) for name, each in cells.items()}
        changed = dict(zip(cells, self.link.take_back(torch.stack(going), len(passing)), strict=True))

        def then() -> None:
            if at is not None:
                self._write(slots, at, cells_there)

        change_pages(pages, ids[passing], changed, owe, then)

    def _check(self, cells: Cells, rows: int) -> None:
        wanted = (rows, self._layout.width), self._layout.dtype, self.device
        for name, each in cells.items():
            self._layout.place_of(name)
            given = tuple(each.shape), each.dtype, each.device
            if given != wanted:
                raise UsageError(
                    f"{name}: {given[1]} {list(given[0])} on {given[2]}, not {wanted[1]} {list(wanted[0])} "
                    f"on {wanted[2]}"
                )

    def prefetch(self, pages: TablePages, ids: Ids, in_hand: Pages) -> None:
        """Begin to bring rows to pages, and those whose pages are in memory to slots.  Waits for no medium.

        Args:
            pages: of the table.
            ids: ascending, distinct.
            in_hand: pages of which somebody reads and writes rows: these stay there alone.
        """
        self._begin_use()
        slots = self._map.slots_of(ids)
        self._slots.begin_prefetch()
        self._slots.keep(slots[slots >= 0])
        self._lookups = 0
        missing = ids[slots < 0]
        page_of = missing // self._layout.rows_per_page
        pages.prefetch(np.unique(page_of))
        wanted = missing[are_in_memory(pages, missing) & ~np.isin(page_of, in_hand)]
        try:
            room = self._make_room_ahead(pages, min(len(wanted), len(self._slots) // _PREFETCHED_SHARE))
            self._declined += len(wanted) - room
            slots, _ = self._bring(pages, wanted[:room], _NONE, (), visits_in_memory)
        except (TierStoreError, torch.OutOfMemoryError) as error:
            # Whoever asks for these rows brings them again, and hears of it.
            log.warning("table %r: rows were not prefetched to %s: %s", self._name, self.device, error)
        else:
            self._slots.keep(slots)
            self._prefetched += len(slots)

    # --- rows for the pages ----------------------------------------------------------------------

    def give_back(self, pages: TablePages, ids: Ids) -> None:
        """Let rows be in pages alone: somebody is about to read and write them there.  Blocks.

        Args:
            pages: of the table.
            ids: distinct.

        Raises:
            CapacityError, BackendError: a page could not be brought, or a row not be carried; nothing is
                lost.
        """
        slots = self._map.slots_of(ids)
        slots = slots[slots >= 0]
        if len(slots):
            self._write_back(pages, slots)
            self._forget(slots)

    def end_use(self) -> None:
        """See the function of this name."""
        self._order.take_up()

    def write_back(self, pages: TablePages) -> None:
        """Let pages have what slots have; all slots stay.  Blocks; raises as `give_back`."""
        self._write_back(pages, self._slots.are_in(FrameState.DIRTY))

    def relay(self, layout: PageLayout) -> None:
        """Let there be slots of other columns, with nothing in them.  Nothing is dirty."""
        self._begin(layout, self._map.num_rows)

    def grow(self, num_rows: int) -> None:
        """Let the table have more rows."""
        self._map.grow(num_rows)

    def _write_back(self, pages: TablePages, slots: Slots, look: _Look = visits) -> None:
        """Write to the pages what is DIRTY of these slots, which is CLEAN then: in parts."""
        slots = slots[self._slots.states[slots] == FrameState.DIRTY]
        if len(slots):
            self._begin_use()
        slots = slots[np.argsort(self._slots.pages[slots])]
        step = max(_LEAST_PART, len(self._slots) // _SHARE)
        for begin in range(0, len(slots), step):
            part = slots[begin : begin + step]
            self._slots.step(FrameEvent.WRITE_BEGUN, part)
            try:
                self._copy_to(pages, part, look)
            except BaseException:
                self._slots.step(FrameEvent.UNWRITTEN, part)
                raise
            self._slots.step(FrameEvent.WRITTEN, part)

    def _copy_to(self, pages: TablePages, slots: Slots, look: _Look) -> None:
        """Write rows of slots, which ascend by their ids, to the pages."""
        (at,) = self.link.bring_places(slots)
        cells = self._empty(len(self._by_column), len(slots))
        for column, into in zip(self._by_column, cells, strict=True):
            take_cells(column, at, into)
        changed = self.link.take_back(cells, len(slots))
        for visit in look(pages, self._slots.pages[slots]):
            for column, each in zip(self._layout.columns, changed, strict=True):
                visit.scatter(column.name, each[visit.part])

    # --- slots for rows --------------------------------------------------------------------------

    def _make_room(self, pages: TablePages, wanted: int) -> int:
        """Let there be so many free slots, as far as they can be had; return how many of these there are."""
        while self._slots.free < wanted:
            victims = self._slots.victims(wanted - self._slots.free)
            if not len(victims):
                break
            if np.any(self._slots.states[victims] == FrameState.DIRTY):
                self._write_back(pages, np.concatenate([victims, self._slots.next_victims()]))
            self._forget(victims)
            self._evictions += len(victims)
        return min(wanted, self._slots.free)

    def _make_room_ahead(self, pages: TablePages, wanted: int) -> int:
        """As `_make_room`, waiting for no medium: a row goes only if its page is in memory."""
        while self._slots.free < wanted:
            victims = self._slots.victims(wanted - self._slots.free)
            is_dirty = self._slots.states[victims] == FrameState.DIRTY
            may_go = ~is_dirty | are_in_memory(pages, self._slots.pages[victims])
            if not may_go.any():
                break
            self._write_back(pages, victims[may_go & is_dirty], visits_in_memory)
            self._forget(victims[may_go])
            self._evictions += int(np.count_nonzero(may_go))
        return min(wanted, self._slots.free)

    def _bring(
        self, pages: TablePages, entering: Ids, passing: Ids, names: Sequence[str], look: _Look = visits
    ) -> tuple[Slots, torch.Tensor]:
        """Carry rows to the device.

        Args:
            pages: of the table.
            entering: rows that get a slot each, of which there are enough.
            passing: rows that do not.
            names: of the columns that are wanted of these.
            look: visits rows in pages.

        Returns:
            the slots, and the cells of those that pass: ``[len(names), len(passing), width]``.
        """
        columns, width = [each.name for each in self._layout.columns], self._layout.width
        entering_cells = len(columns) * len(entering)
        staged = self._empty(1, entering_cells + len(names) * len(passing), "cpu")[0]
        if not len(staged):
            return _NONE, self._empty(len(names), 0)
        slots = self._slots.take(entering)
        try:
            _copy_from(look(pages, entering), columns, staged[:entering_cells])
            _copy_from(look(pages, passing), names, staged[entering_cells:])
            brought = self.link.bring(staged, len(entering) + len(passing))
            if len(entering):
                (at,) = self.link.bring_places(slots)
                cells = brought[:entering_cells].view(len(columns), -1, width)
                for column, each in zip(self._by_column, cells, strict=True):
                    put_cells(column, at, each)
        except BaseException:
            self._slots.step(FrameEvent.UNFILLED, slots)
            raise
        self._note_filled(entering, slots)
        return slots, brought[entering_cells:].view(len(names), len(passing), width)

    @uninterrupted
    def _note_filled(self, ids: Ids, slots: Slots) -> None:
        self._map.put(ids, slots)
        self._slots.step(FrameEvent.FILLED, slots)

    @uninterrupted
    def _forget(self, slots: Slots) -> None:
        """Let the rows of these CLEAN slots be in pages alone."""
        self._map.forget(self._slots.pages[slots])
        self._slots.step(FrameEvent.FORGOTTEN, slots)

    # --- cells -----------------------------------------------------------------------------------

    def _compact(
        self, slots: Slots, passing: Slots, columns: Sequence[int], passed: torch.Tensor, more: int
    ) -> list[torch.Tensor]:
        """Return cells of rows, as one tensor of each column.

        Args:
            slots: of rows; -1 of those that pass.
            passing: where these stand.
            columns: numbers of columns.
            passed: the cells of those that pass, ``[len(columns), len(passing), width]``.
            more: how many rows of zeros come behind them.
        """
        made = [self._empty(1, len(slots) + more)[0] for _ in columns]
        for each in made:
            each[len(slots) :].zero_()
        if len(passing) == len(slots):
            for others, into in zip(passed, made, strict=True):
                into[: len(slots)].copy_(others)
        elif len(passing):
            staying = np.flatnonzero(slots >= 0)
            at, to, to_others = self.link.bring_places(slots[staying], staying, passing)
            for column, others, into in zip(columns, passed, made, strict=True):
                put_cells(into, to, self._by_column[column].index_select(0, at))
                put_cells(into, to_others, others)
        else:
            (at,) = self.link.bring_places(slots)
            for column, into in zip(columns, made, strict=True):
                take_cells(self._by_column[column], at, into[: len(slots)])
        return made

    def _write(self, slots: Slots, at: torch.Tensor, cells: Mapping[str, torch.Tensor]) -> None:
        """Write cells of rows that are in slots."""
        self._slots.step(FrameEvent.CHANGED, slots)
        for name, each in cells.items():
            put_cells(self._by_column[self._layout.place_of(name)], at, each.detach())

    def _empty(self, columns: int, rows: int, device: str | torch.device | None = None) -> torch.Tensor:
        shape = columns, rows, self._layout.width
        return torch.empty(shape, dtype=self._layout.dtype, device=device or self.device)

    def _begin_use(self) -> None:
        """Let the current stream use the slots.

        Raises:
            StoreForked: the device is another process's.
        """
        forks.require_here(self._process, f"the table {self._name!r}")
        if self._order.take_up():
            self.link.forget_places()  # the other stream's memory


def end_use(rows: DeviceRows | None) -> None:
    """Let the current stream be behind all that was queued with rows: their memory is another's then."""
    if rows is not None:
        rows.end_use()


def _copy_from(rows: Iterator[Visit], names: Sequence[str], into: torch.Tensor) -> None:
    """Copy cells of rows from pages: ``[len(names) * n, width]``, column after column."""
    by_column = into.view(len(names), -1, into.shape[1]) if len(into) else into
    for visit in rows:
        for name, each in zip(names, by_column, strict=True):
            visit.gather(name, out=each[visit.part])
