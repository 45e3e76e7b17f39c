"""The rows of a table and the state that an optimizer keeps beside them.

`RowStore` is what modules, optimizers and training see of this package: rows by their ids, gathered and
scattered, wherever they lie.  It knows neither modules nor optimizers nor autograd.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final

import numpy as np
import torch

from tierstore import signals
from tierstore.errors import StoreClosed, UsageError
from tierstore.tables.copied_pages import copied, drop_log, new_pages, relay, staging_of
from tierstore.tables.device_home import DeviceHome
from tierstore.tables.device_rows import DeviceRows, end_use
from tierstore.tables.initial_rows import InitialRows
from tierstore.tables.layout import ROWS, Column, PageLayout
from tierstore.tables.memory import FixedMemory, GrowingMemory
from tierstore.tables.own_rows import OwnRows, require_whole
from tierstore.tables.page_changes import Cells, Owe
from tierstore.tables.page_log import PageLog, Snapshot
from tierstore.tables.pages import TablePages, TableTraits
from tierstore.tables.row_stats import RowStats, stats_of
from tierstore.tables.slot_map import Ids
from tierstore.tables.table_home import RowUse, TableHome
from tierstore.tables.table_lock import locked, new_table_lock
from tierstore.tables.visits import Visit, visits
from tierstore.tables.workers import TableWorkers

_NONE: Final = np.zeros(0, dtype=np.int64)


class RowStore:
    """Rows by their ids, each with a cell of every column.

    By itself it keeps the pages that are touched in memory, so a table may have 2**40 rows.  In a run it is
    `attach`ed to memory of fixed size, and to a log on a medium.  From several threads: each call is whole;
    who visits rows, or makes several calls that belong together, has `lock` meanwhile.

    Attributes:
        lock: see above; it may be had several times by one thread.
        own_rows: see there.

    Args:
        num_rows: at least 1.
        width: elements of a row; at least 1.
        dtype: of rows and states.
        initial_rows: what rows are before they are written: a pure function of their ids.
        name: of the table, for messages.
        own_rows: which rows are here; ``None``: all.  Nobody asks for others.
    """

    def __init__(
        self,
        num_rows: int,
        width: int,
        dtype: torch.dtype,
        initial_rows: InitialRows,
        *,
        name: str = "table",
        own_rows: OwnRows | None = None,
    ) -> None:
        if signals.not_yet:
            signals.set_up()
        self.lock = new_table_lock()
        self._executor = TableWorkers(name)
        self._traits = TableTraits(name, initial_rows, self._executor)
        self.own_rows = own_rows
        self._ended: str | None = None
        self._last_log: PageLog | None = None  # before it was detached
        self._device_rows: DeviceRows | None = None
        self._in_hand: weakref.ref[Visit] | None = None  # the last rows that somebody visited
        self._use: RowUse | None = None
        self._pages = new_pages(self._traits, PageLayout(width, dtype), num_rows, GrowingMemory())

    @property
    def name(self) -> str:
        """What messages call it."""
        return self._traits.name

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
    def initial_rows(self) -> InitialRows:
        """What rows are before they are written."""
        return self._traits.initial_rows

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns, ``"rows"`` first."""
        return self._pages.layout.columns

    def layout_with(self, states: int) -> PageLayout:
        """Return how pages are, if there are so many columns beside the rows."""
        return PageLayout(self.width, self.dtype, tuple(Column(str(n), 0.0) for n in range(1 + states)))

    def require_whole(self, what: str) -> None:
        """Raise ``UsageError`` if other processes have a part of the rows; ``what`` would need them all."""
        require_whole(self.name, self.own_rows, what)

    def require(self, what: str) -> None:
        """Raise, as the home does, if programs may not use rows now to do ``what``: a clause."""
        if self._use is not None:
            self._use.require(what)

    # --- rows ----------------------------------------------------------------------------------

    def visit(self, ids: torch.Tensor) -> Iterator[Visit]:
        """Yield parts of the rows of ``ids`` in which they can be read and written, in order.  Blocks.

        Rows of a part stay in place until the next one, or other rows, are asked for.  No ids have no parts.

        Args:
            ids: int64 in host memory, ascending, distinct, at least 0 and below `num_rows`: the caller has
                checked.

        Raises:
            CapacityError: there is no room for pages: in memory, or on the medium for what would have to go.
            BackendError: the medium failed.  In either case nothing that was written is lost, and the visit
                can be made again.
        """
        numbers = ids.numpy()
        parts, begin = visits(self._here(), numbers), 0
        while True:
            self._give_back(numbers[begin:])  # before each part: a device may have got rows meanwhile
            visit = next(parts, None)
            if visit is None:
                return
            begin = visit.part.stop
            self._in_hand = weakref.ref(visit)
            yield visit

    @locked
    def prefetch(self, ids: torch.Tensor) -> None:
        """Begin to bring rows from the log that will be visited.  Does not block for a medium.

        It is advice: it never raises for want of room or because a medium fails, and brings what there are
        frames for.  What it brought stays until it is visited, unless the visit does not come.  Where a
        device is attached, rows that are in host memory already go there, as far as there are slots that
        nobody needs.

        Args:
            ids: int64 in host memory, at least 0 and below `num_rows`; any order, repeats allowed.
        """
        pages, numbers = self._here(), ids.numpy()
        if self._device_rows is None:
            pages.prefetch(np.unique(numbers // pages.layout.rows_per_page))
        else:
            visit = None if self._in_hand is None else self._in_hand()
            in_hand = _NONE if visit is None else visit.pages_in_hand
            self._device_rows.prefetch(pages, np.unique(numbers), in_hand)

    @locked
    def grow(self, num_rows: int) -> None:
        """Let the table have more rows: those that a table made with so many has.

        Raises:
            UsageError: they are fewer than there are.
            CapacityError, BackendError: as of `visit`, of the page that is last now.  In any case nothing has
                changed.
        """
        if num_rows < self.num_rows:
            raise UsageError(f"table {self.name!r}: {self.num_rows} rows cannot grow to {num_rows}")
        self._here().grow(num_rows)
        if self._device_rows is not None:
            self._device_rows.grow(num_rows)

    def written_ids(self) -> Iterator[torch.Tensor]:
        """Yield the ids of all rows that may differ from what they were at first, ascending, some at a time.

        They are whole pages: of each, all rows if one of them, or of its states, was ever written.  Rows may
        be visited meanwhile, but no others written.

        Raises:
            CapacityError, BackendError: what has changed on a device cannot be brought back.
        """
        self._bring_back()
        yield from map(torch.from_numpy, self._pages.written_ids())

    # --- rows on a device ----------------------------------------------------------------------

    @property
    def device(self) -> torch.device | None:
        """Where `gather` gathers; ``None``: no device is attached."""
        return None if self._device_rows is None else self._device_rows.device

    @locked
    def gather(
        self, ids: torch.Tensor, names: Sequence[str] = (ROWS,), *, more: int = 0, is_lookup: bool = False
    ) -> Cells:
        """Return copies of cells of rows on the device, each column's as one tensor.  Blocks.

        Rows that are not there are carried, and stay there as far as there are slots for them.

        Args:
            ids: as of `visit`.
            names: of columns.
            more: how many rows of zeros to put behind them.
            is_lookup: whether the statistics count it, and the policy: a step's gathering of what was looked
                up before is none.

        Returns:
            ``[len(ids) + more, width]`` of each column, by its name.

        Raises:
            UsageError: there is no such column, or no device is attached.
            CapacityError, BackendError: as of `visit`; also if the carrier fails.  In any case nothing is
                lost, and the call can be made again.
        """
        numbers = ids.numpy()
        return self._there().gather(self._here(), numbers, names, more=more, is_lookup=is_lookup)

    @locked
    def scatter(self, ids: torch.Tensor, cells: Cells, owe: Owe) -> None:
        """Write cells of rows from the device: all, or none.  Blocks where there are no slots for them.

        Rows that were in hand are no more than others then.

        Args:
            ids: as of `visit`.
            cells: ``[len(ids), width]`` on the device, of each column by its name.
            owe: told ids and former cells (in host memory) where it fails after some were written: these are
                to be written back before anybody sees rows again.

        Raises:
            UsageError: there is no such column, the cells are not as they have to be, or no device is
                attached.
            CapacityError, BackendError: as of `gather`.
        """
        self._there().scatter(self._here(), ids.numpy(), cells, owe)

    @locked
    def bring_numbers(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return numbers on the device: int64 in host memory, at least 0; carried and counted as rows are.

        Raises:
            UsageError: no device is attached.
            BackendError: the carrier failed.
        """
        return self._there().link.bring_numbers(numbers)

    @locked
    def take_numbers_back(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return numbers of the device in host memory; otherwise as `bring_numbers`.  Blocks."""
        return self._there().link.take_numbers_back(numbers)

    @locked
    def attach_device(self, home: DeviceHome) -> None:
        """Keep hot rows in memory of a device from now on, which nobody else touches until `detach_device`.

        Whoever visits rows, copies or keeps them finds them as ever: what has changed on the device is
        brought back first.

        Raises:
            UsageError: a device is attached already, or the memory is not as it has to be.
        """
        if self._device_rows is not None:
            raise UsageError(f"table {self.name!r} has a device already: {self.device}")
        self._device_rows = DeviceRows(home, self._here().layout, self.num_rows, self.name)

    @locked
    def detach_device(self) -> None:
        """Let rows be in host memory, or below, alone.  Blocks.  Nothing where no device is attached.

        Raises:
            CapacityError, BackendError: as of `visit`, of rows that have changed; also if the carrier fails.
                It is attached still, and nothing is lost.
        """
        self._bring_back()
        end_use(self._device_rows)
        self._device_rows = None

    @locked
    def _bring_back(self) -> None:
        """Let pages have what has changed on the device."""
        if self._device_rows is not None:
            self._device_rows.write_back(self._here())

    @locked
    def _give_back(self, ids: Ids) -> None:
        """Let rows be in pages alone."""
        if self._device_rows is not None:
            self._device_rows.give_back(self._here(), ids)

    def _there(self) -> DeviceRows:
        if self._device_rows is None:
            raise UsageError(f"table {self.name!r} has no device attached")
        return self._device_rows

    # --- columns -------------------------------------------------------------------------------

    @locked
    def ensure_columns(self, columns: Sequence[Column]) -> None:
        """Let there be these columns; those that are there stay as they are.

        All that was written is copied to pages of the new layout.

        Raises:
            UsageError: a column of the same name starts with another value.
            CapacityError, BackendError: the copy found no room, or a medium failed.  In any case nothing has
                changed.
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

    @locked
    def drop_columns(self, names: Collection[str]) -> None:
        """Forget columns and what is in them; otherwise as `ensure_columns`.

        Raises:
            UsageError: there is no such column, or it is ``"rows"``; nothing has changed.
        """
        for name in names:
            if not self._pages.layout.place_of(name):
                raise UsageError(f"table {self.name!r}: the column {name!r} is the table itself")
        self._relay(tuple(column for column in self.columns if column.name not in names))

    # --- where rows lie ------------------------------------------------------------------------

    @locked
    def attach(self, home: TableHome) -> None:
        """Let pages lie in the frames and the log of ``home`` from now on.  Blocks.

        Nobody else touches its memory until `detach`.

        Raises:
            UsageError: it is attached already.
            CapacityError, BackendError: there is too little room, or the medium failed.  In any case nothing
                has changed.
        """
        if self._here().is_fixed:
            raise UsageError(
                f"the rows of the table {self.name!r}, as another run calls it, lie in the store of that "
                "run: close it first, or offload both models as one, such as an nn.ModuleList of them"
            )
        self._bring_back()
        old, self._traits = self._pages, home.traits_of(self._traits, self._executor)
        try:
            new = new_pages(
                self._traits, old.layout, old.num_rows, FixedMemory(home.memory), home.log, self._last_log
            )
            self._pages, self._use = copied(old, new), home.use
        except BaseException:
            self._traits = old.traits
            raise

    @locked
    def detach(self) -> None:
        """Let what was written lie in growing memory again, and the log be forgotten.  Blocks.

        Nothing where it is not attached.

        Raises:
            BackendError: the medium failed; nothing has changed.
        """
        if self._here().is_fixed:
            old = self._pages
            self._pages = copied(old, new_pages(self._traits, old.layout, old.num_rows, GrowingMemory()))
            self._use, self._last_log = None, old.log or self._last_log
            drop_log(old)
            if old.log is not None:
                old.log.place.medium.close()

    @locked
    def move(self, memory: torch.Tensor | None) -> None:
        """Let frames be in other memory from now on, and nothing in that where they were.  Blocks.

        What is dirty is written to the log first; no page is in memory then.

        Args:
            memory: as of a `TableHome`; None: a little of the process, with which all works, slowly.

        Raises:
            UsageError: there is no log.
            CapacityError, BackendError: the medium is full or failed, or the memory has no room for a page.
                In any case the table stays where it is, and nothing is lost.
        """
        old = self._here()
        if old.log is None:
            raise UsageError(f"table {self.name!r} has no log, in which rows could be without memory")
        self._bring_back()
        old.settle()
        old.write_back()
        new = TablePages(
            old.traits,
            old.layout,
            old.num_rows,
            staging_of(old) if memory is None else FixedMemory(memory),
            old.map,
            old.log,
        )
        old.forget_all()
        new.counts = old.counts
        self._pages = new

    @locked
    def write_back(self) -> None:
        """Write what is dirty to the log; all that is in memory stays there.  Blocks.  Nothing without a log.

        Raises:
            CapacityError: the medium is full.
            BackendError: it failed.  In either case nothing is lost.
        """
        self._bring_back()
        self._here().write_back()

    @locked
    def snapshot(self) -> Snapshot:
        """Return what has to be kept beside the blocks of the log so that the table can be `restored`.

        The blocks stay until another snapshot is `keep`t, whatever is written meanwhile.

        Raises:
            UsageError: there is no log, or something is dirty: `write_back` comes first.
        """
        pages = self._here()
        if pages.log is None:
            raise UsageError(f"table {self.name!r} has no log")
        if pages.has_dirty or (self._device_rows is not None and self._device_rows.has_dirty):
            raise UsageError(f"table {self.name!r}: pages are dirty; call write_back first")
        return pages.log.snapshot(self.num_rows)

    @locked
    def keep(self, snapshot: Snapshot) -> None:
        """Note that ``snapshot`` is safe, with its blocks; drop those that only earlier ones count on."""
        if self._pages.log is not None:
            self._pages.log.keep(snapshot)

    @classmethod
    def restored(
        cls,
        snapshot: Snapshot,
        width: int,
        dtype: torch.dtype,
        initial_rows: InitialRows,
        home: TableHome,
        *,
        name: str = "table",
        own_rows: OwnRows | None = None,
    ) -> RowStore:
        """Return a table, attached, as it was when ``snapshot`` was taken.  Reads no page.

        Blocks under the log's prefix that the snapshot does not count on are dropped.

        Args:
            snapshot: that is kept, with its blocks.
            width: as the table was made with, as are ``dtype`` and ``initial_rows``.
            dtype: see there.
            initial_rows: see there.
            home: with the same log; the size of its blocks may be another.
            name: see the class.
            own_rows: see there.

        Raises:
            UsageError: the home has no log.
            CapacityError: the memory has no room for a single page.
        """
        if home.log is None:
            raise UsageError(f"table {name!r}: a snapshot is read from a log, and there is none")
        table = cls(snapshot.num_rows, width, dtype, initial_rows, name=name, own_rows=own_rows)
        table._traits, table._use = home.traits_of(table._traits, table._executor), home.use
        layout = PageLayout(width, dtype, snapshot.columns)
        table._pages = new_pages(table._traits, layout, snapshot.num_rows, FixedMemory(home.memory), home.log)
        assert table._pages.log is not None
        table._pages.log.restore(snapshot)
        home.log.medium.drop_others(home.log.prefix, snapshot.blocks)
        return table

    def close(self) -> None:
        """End it: it was closed.  See `end`."""
        self.end(f"table {self.name!r} was closed")

    @locked
    def end(self, why: str) -> None:
        """Wait for what is on its way, and end the table's threads: its rows cannot be asked for any more.

        In the child of a fork it does nothing: what it would end is the parent's.

        Args:
            why: what whoever asks for them is told.
        """
        if not self._pages.is_here:
            return
        self._ended, self._use = why, None
        end_use(self._device_rows)
        self._device_rows = None  # what has changed there is lost as what is dirty in pages
        self._pages.settle()
        self._executor.shutdown()
        if self._pages.log is not None:
            self._pages.log.place.medium.close()

    @property
    def why_ended(self) -> str | None:
        """Why nobody can ask for its rows any more, as a whole message; None: they can be asked for."""
        return self._ended

    def anew(self) -> RowStore:
        """Return a table by itself as this one was made, with as many rows: of it, none was written."""
        made = self.num_rows, self.width, self.dtype, self.initial_rows
        return RowStore(*made, name=self.name)

    def _here(self) -> TablePages:
        """Return the pages.

        Raises:
            StoreClosed: the table has ended.
        """
        if self._ended is not None:
            raise StoreClosed(self._ended)
        return self._pages

    def stats(self) -> RowStats:
        """Return what there is and what happened."""
        return stats_of(self._pages, self._device_rows)

    # --- copies --------------------------------------------------------------------------------

    @locked
    def __deepcopy__(self, memo: dict[int, object]) -> RowStore:
        """Return a table by itself with the same rows: not attached, wherever this one lies."""
        self.require_whole("deepcopy")
        memo[id(self)] = copy = self.anew()
        copy.ensure_columns(self.columns)
        self._bring_back()
        copy._pages = copied(self._pages, copy._pages)  # noqa: SLF001 - one of us
        return copy

    def __reduce__(self) -> tuple[Callable[..., RowStore], tuple[object, ...]]:
        """What `pickle` keeps: what was written, and how the rest is made."""
        self.require_whole("pickle")
        written = []
        for ids in self.written_ids():
            cells = [torch.empty(len(ids), self.width, dtype=self.dtype, device="cpu") for _ in self.columns]
            for visit in self.visit(ids):
                for column, into in zip(self.columns, cells, strict=True):
                    into[visit.part] = visit.gather(column.name)
            written.append((ids, cells))
        traits = self._traits
        made = self.num_rows, self.width, self.dtype, traits.initial_rows, traits.name, self.columns
        return _unpickled, (*made, written)

    def _relay(self, columns: tuple[Column, ...]) -> None:
        """Copy all that was written to pages with other columns."""
        old = self._here()
        if columns != old.layout.columns:
            self._bring_back()
            relay(old, old.layout.with_columns(columns), self._take)
            if self._device_rows is not None:
                self._device_rows.relay(self._pages.layout)

    def _take(self, pages: TablePages) -> None:
        self._pages = pages


def _unpickled(
    num_rows: int,
    width: int,
    dtype: torch.dtype,
    initial_rows: InitialRows,
    name: str,
    columns: tuple[Column, ...],
    written: list[tuple[torch.Tensor, list[torch.Tensor]]],
) -> RowStore:
    table = RowStore(num_rows, width, dtype, initial_rows, name=name)
    table.ensure_columns(columns)
    for ids, cells in written:
        for visit in table.visit(ids):
            for column, values in zip(columns, cells, strict=True):
                visit.scatter(column.name, values[visit.part])
    return table
