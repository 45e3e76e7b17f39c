"""The pages of a table: in frames as far as they go, others in a log, and those that nobody wrote nowhere.

Rule 1: a page that is asked for gets a frame, and is read from the log or made there: its rows by the table's
`InitialRows`, its states by their columns.
Rule 2: frames of the rows in hand stay until other rows are asked for.
Rule 3: where frames are few, what goes first is what is used least.  Clean frames are forgotten; dirty ones
are written to the log; without a log they stay.
Rule 4: whatever fails, no row that was written is lost, and the call can be made again.
Rule 5: the books (map, frames, log) are of the caller's thread; an executor's threads read and write bytes
only.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tierstore import forks
from tierstore.errors import CapacityError, InvariantError, UsageError
from tierstore.signals import uninterrupted
from tierstore.tables.frames import FrameEvent, FrameState, FrameTable, Policy
from tierstore.tables.initial_rows import InitialRows
from tierstore.tables.layout import Indices, PageLayout
from tierstore.tables.memory import FixedMemory, FrameMemory, GrowingMemory
from tierstore.tables.page_log import PageLog
from tierstore.tables.page_map import NOWHERE, Frames, Logged, PageMap
from tierstore.tables.page_numbers import Pages
from tierstore.tables.page_writer import PageWriter
from tierstore.units import format_bytes

_AT_A_TIME: Final = 1024
_SPARE_SHARE: Final = 16
"""Dirty frames are written before they are needed where fewer than one in so many is free."""
_PREFETCHED_SHARE: Final = 2
"""A prefetch takes no more than one frame in so many."""

log = logging.getLogger("tierstore")


@dataclass
class PageCounts:
    """What happened to pages; see `tierstore.tables.row_stats.RowStats`."""

    hits: int = 0
    misses: int = 0
    rows_missed: int = 0
    made: int = 0
    prefetched: int = 0
    declined: int = 0


@dataclass(frozen=True)
class TableTraits:
    """What a table is, but for its layout, its size and where it lies.

    Attributes:
        name: for messages.
        initial_rows: see there; asked for rows of the table only.
        executor: that reads and puts blocks beside the caller.
        policy: which pages leave memory first.
        setting: what messages tell to raise where there are too few frames.
    """

    name: str
    initial_rows: InitialRows
    executor: Executor
    policy: Policy = "lfu"
    setting: str = "its memory"


def put_rows(matrix: torch.Tensor, rows: Indices, values: torch.Tensor) -> None:
    """Write rows of a contiguous matrix, each in one piece: NumPy copies them so, PyTorch by their elements.

    Args:
        matrix: ``[rows, width]``, in host memory.
        rows: which, distinct.
        values: ``[n, width]``, of the matrix' dtype.
    """
    _in_pieces(matrix).put(rows, _in_pieces(values.contiguous()))


def _in_pieces(matrix: torch.Tensor) -> npt.NDArray[np.void]:
    """Return a contiguous matrix as an array with one item a row."""
    array: npt.NDArray[np.uint8] = matrix.view(torch.uint8).numpy()
    return array.view(np.dtype((np.void, array.shape[1]))).reshape(-1)


@dataclass(frozen=True)
class _Read:
    """Pages on their way to frames because of a prefetch."""

    pages: Pages
    frames: Frames
    future: Future[None]


class InHand(NamedTuple):
    """Rows that were visited at once.

    Attributes:
        visit: its number.
        ids: theirs; nobody else writes to them.
        frames: distinct.
        cells: of "rows".
        copy: of the rows, of which nobody else knows; ``None``: there is none.
    """

    visit: int
    ids: Indices
    frames: Frames
    cells: Indices
    copy: torch.Tensor | None = None

    def are(self, visit: int, ids: Indices) -> bool:
        """Whether these are the rows that somebody asks for, and ``visit`` is the last."""
        return self.visit == visit and np.array_equal(self.ids, ids)


class TablePages:
    """See the module.

    Args:
        traits: of the table.
        layout: of a page.
        num_rows: of the table.
        memory: of the frames.
        page_map: of the table; no page is in a frame.
        page_log: with the same map; None: there is none.

    Raises:
        CapacityError: the memory has no room for a single page.

    Attributes:
        cells: of all frames, ``[frames * cells_per_page, width]``.
        frames: what is in each.
        map: where each page is.
        log: see above.
        visit: the number of the rows in hand.
        in_hand: what was visited last, for who visits it again.
        counts: what happened.
    """

    def __init__(
        self,
        traits: TableTraits,
        layout: PageLayout,
        num_rows: int,
        memory: FrameMemory,
        page_map: PageMap,
        page_log: PageLog | None = None,
    ) -> None:
        self.traits = traits
        self.layout = layout
        self.num_rows = num_rows
        self.memory = memory
        self.cells = (
            memory.begin(layout, traits.name) if isinstance(memory, FixedMemory) else memory.begin(layout)
        )
        self.map = page_map
        self.log = page_log
        self.frames = FrameTable(
            len(self.cells) // layout.cells_per_page, traits.policy, can_write=page_log is not None
        )
        self.counts = PageCounts()
        self.visit = 0
        self.in_hand: InHand | None = None
        self._process = forks.here()
        self._reads: deque[_Read] = deque()
        self._writer = (
            PageWriter(traits.name, self.frames, page_log, traits.executor, self._contents_of, self._forget)
            if page_log is not None
            else None
        )

    # --- rows in hand --------------------------------------------------------------------------

    @property
    def is_fixed(self) -> bool:
        """Whether there are as many frames as at the beginning, whatever is touched."""
        return isinstance(self.memory, FixedMemory)

    def most_of(self, pages: Pages) -> int:
        """Return how many of these pages, from the first on, `bring` can bring at once; at least 1.

        Without a log, what is dirty stays in its frame, and only the others are there for other pages.

        Args:
            pages: distinct, at least one.
        """
        if not self.is_fixed or len(pages) <= self.frames.free:
            return len(pages)
        if self.log is not None:
            return len(self.frames)
        dirty = self.frames.states == FrameState.DIRTY
        frames = self.map.frames_of(pages[: len(self.frames)])
        takes = (frames < 0) | ~dirty[frames]
        room = len(self.frames) - int(np.count_nonzero(dirty))
        return max(1, int(np.searchsorted(np.cumsum(takes), room, side="right")))

    def bring(self, pages: Pages, rows: Indices) -> Frames:
        """Return the frames of pages, which stay there until other pages are asked for.  Blocks.

        Args:
            pages: distinct, at most `most_of` them.
            rows: how many rows of each are wanted, for the statistics.

        Raises:
            CapacityError: there is no room for them: in memory, or on the medium for what would have to go.
            BackendError: the medium failed.  In either case nothing is lost.
        """
        self._require_here()
        self.visit += 1
        frames = self.map.frames_of(pages)
        if self._reads:
            self._take_note_of_reads(wanted=frames[frames >= 0])
            frames = self.map.frames_of(pages)
        missing = frames < 0
        if self.is_fixed:
            self.frames.hold(frames[~missing])
        wanted = pages[missing]
        self.counts.hits += len(pages) - len(wanted)
        if len(wanted):
            self.counts.misses += len(wanted)
            self.counts.rows_missed += int(rows[missing].sum())
            frames[missing] = self._bring_in(wanted)
        if self.is_fixed:
            self.frames.hold(frames)
            self.frames.use(frames)
            self._clean_ahead()
        return frames

    def bring_again(self, frames: Frames) -> None:
        """Note that rows in hand, whose frames these are, are asked for again."""
        self._require_here()
        self.counts.hits += len(frames)
        if self.is_fixed:
            self.frames.use(frames)
            self._clean_ahead()

    def change(self, frames: Frames) -> None:
        """Note that rows in these frames are about to be written."""
        self.frames.step(FrameEvent.CHANGED, frames)

    def written_ids(self) -> Iterator[Indices]:
        """Yield the ids of all rows of pages that were ever written, ascending, some at a time."""
        states = self.frames.states
        dirty = self.frames.pages[states >= FrameState.DIRTY]
        pages = np.union1d(dirty, self.map.logged().pages)
        per_page = self.layout.rows_per_page
        for begin in range(0, len(pages), _AT_A_TIME):
            ids = (pages[begin : begin + _AT_A_TIME, None] * per_page + np.arange(per_page)).reshape(-1)
            yield ids[ids < self.num_rows]

    def grow(self, num_rows: int) -> None:
        """Let the table have more rows; raises as `bring` does, and then nothing has changed."""
        begin, per_page = self.num_rows, self.layout.rows_per_page
        last = np.array([(begin - 1) // per_page])
        end = min(num_rows, (int(last[0]) + 1) * per_page)
        is_logged = self.map.places_of(last)[0] != NOWHERE
        if end > begin and (is_logged or self.map.frames_of(last)[0] >= 0):
            frames = self.bring(last, np.zeros(1, dtype=np.int64))
            if is_logged:  # what is there has other bytes in the place of the new rows
                self.change(frames)
            self._make_rows(np.arange(begin, end), np.repeat(frames, end - begin))
        self.num_rows = num_rows
        self.map.grow(self.layout.pages_of(num_rows))

    def prefetch(self, pages: Pages) -> None:
        """Begin to read pages from the log into frames, as far as frames can be had at once.

        Args:
            pages: distinct, of the table.
        """
        if self._writer is None or self.log is None:
            return
        self._require_here()
        self._take_note_of_reads()
        frames = self.map.frames_of(pages)
        self.frames.begin_prefetch()
        self.frames.keep(frames[frames >= 0])
        wanted = pages[frames < 0]
        wanted = wanted[self.map.places_of(wanted) != NOWHERE]
        most = min(len(wanted), len(self.frames) // _PREFETCHED_SHARE)
        self._writer.take_note()
        if self.frames.free < most:
            self._send_off(self.frames.victims(most - self.frames.free), at_once=True)
        most = min(most, self.frames.free)
        self.counts.declined += len(wanted) - most
        if most:
            self._begin_read(wanted[:most])

    # --- the log -------------------------------------------------------------------------------

    def write_back(self) -> None:
        """Write every dirty page to the log; the frames stay, clean.  Blocks.

        Raises:
            CapacityError: the medium is full.
            BackendError: it failed.  In either case what is not in the log is dirty, and nothing is lost.
        """
        if self._writer is not None:
            self._require_here()
            self._writer.take_note()
            self._writer.finish_all()
            dirty = self.frames.are_in(FrameState.DIRTY)
            self._writer.begin(dirty[np.argsort(self.frames.pages[dirty])], leave=False)
            self._writer.finish_all()

    def settle(self) -> None:
        """Wait until nothing is on its way; what could not be written is dirty."""
        self._require_here()
        self._take_note_of_reads(all_of_them=True)
        if self._writer is not None:
            self._writer.take_note()
            self._writer.finish_all()  # raises nothing: they are of calls before

    def forget_all(self) -> None:
        """Let every page leave memory; none is dirty."""
        self.settle()
        self.visit += 1
        self._forget(self.frames.are_in(FrameState.CLEAN))

    @property
    def has_dirty(self) -> bool:
        """Whether there are pages in frames that differ from those in the log."""
        return bool(np.any(self.frames.states >= FrameState.DIRTY))

    @property
    def is_here(self) -> bool:
        """Whether this is the process that the threads and the store belong to."""
        return not self.is_fixed or self._process is forks.here()

    def _require_here(self) -> None:
        """Raise `StoreForked` where the threads and the store are another process's."""
        if not self.is_here:
            forks.require_here(self._process, f"the table {self.traits.name!r}")

    # --- frames for pages ----------------------------------------------------------------------

    def _bring_in(self, pages: Pages) -> Frames:
        """Return frames with the bytes of pages that were in none."""
        self._make_free(len(pages))
        frames = self.frames.take(pages)
        try:
            self._fill(pages, frames)
        except BaseException:
            self.frames.step(FrameEvent.UNFILLED, frames)
            raise
        self._note_filled(pages, frames)
        return frames

    @uninterrupted
    def _note_filled(self, pages: Pages, frames: Frames) -> None:
        self.map.set_frames(pages, frames)
        self.frames.step(FrameEvent.FILLED, frames)

    def _free_abandoned(self) -> bool:
        """Free frames that an interrupted call has left FILLING; say whether there are any."""
        filling = self.frames.are_in(FrameState.FILLING)
        abandoned = np.setdiff1d(
            filling, np.concatenate([filling[:0], *(each.frames for each in self._reads)])
        )
        self.frames.step(FrameEvent.UNFILLED, abandoned)
        return bool(len(abandoned))

    def _make_free(self, wanted: int) -> None:
        """Let there be so many free frames."""
        if not isinstance(self.memory, FixedMemory):
            self._enlarge(wanted, self.memory)
        elif self._writer is None:
            self._forget_clean(wanted)
        else:
            self._writer.take_note()
            while self.frames.free < wanted:
                self._make_some_free(wanted, self._writer)

    def _make_some_free(self, wanted: int, writer: PageWriter) -> None:
        """Make a step towards free frames."""
        lacking = wanted - self.frames.free
        if writer.leaving >= lacking:
            writer.finish()
            return
        assert self.log is not None
        victims = self.frames.victims(max(lacking - writer.leaving, self._bulk(self.log)))
        if len(victims):
            self._send_off(victims)
        elif writer.under_way:
            writer.finish()
        elif self._reads:
            self._take_note_of_reads(all_of_them=True)
        elif not self._free_abandoned():
            victims = self.frames.victims(lacking, kept_too=True)
            if not len(victims):
                raise InvariantError(f"table {self.traits.name!r}: {wanted} frames wanted, none can go")
            self._send_off(victims)

    def _send_off(self, victims: Frames, *, at_once: bool = False) -> None:
        """Forget clean victims, and begin to write dirty ones.

        Args:
            victims: CLEAN or DIRTY.
            at_once: write only what needs no waiting.
        """
        assert self._writer is not None
        dirty = self.frames.states[victims] == FrameState.DIRTY
        self._forget(victims[~dirty])
        going = victims[dirty]
        if at_once:
            going = going[: self._writer.room]
        self._writer.begin(going, leave=True)

    def _clean_ahead(self) -> None:
        """Begin to write those that go next, before their frames are needed."""
        writer = self._writer
        if writer is None or self.log is None:
            return
        writer.take_note()
        lacking = len(self.frames) // _SPARE_SHARE - self.frames.free - writer.leaving
        if writer.room > 0 and lacking >= max(1, self._bulk(self.log) // 2):
            self._send_off(self.frames.victims(min(lacking, writer.room)), at_once=True)

    def _bulk(self, page_log: PageLog) -> int:
        """Return how many frames go at once, so that blocks are not of a few pages."""
        return min(page_log.pages_per_block, len(self.frames) // _SPARE_SHARE)

    def _forget_clean(self, wanted: int) -> None:
        """Let there be so many free frames where what is dirty can go nowhere.

        Raises:
            CapacityError: there are too few frames; nothing was changed.
        """
        while self.frames.free < wanted:
            victims = self.frames.victims(wanted - self.frames.free, kept_too=True)
            if len(victims):
                self._forget(victims)
            elif not self._free_abandoned():
                raise self._too_few(wanted)

    @uninterrupted
    def _forget(self, frames: Frames) -> None:
        """Let the pages of these CLEAN frames leave memory."""
        self.map.set_frames(self.frames.pages[frames], NOWHERE)
        self.frames.step(FrameEvent.FORGOTTEN, frames)

    def _too_few(self, wanted: int) -> CapacityError:
        page, there = self.layout.page_bytes, len(self.frames)
        in_use = there - self.frames.free + wanted
        return CapacityError(
            f"table {self.traits.name!r}: {in_use} pages ({format_bytes(in_use * page)}) are in use and "
            f"{self.traits.setting} leaves it {format_bytes(there * page)}; give it a disk, or more",
            needed_bytes=in_use * page,
            free_bytes=self.frames.free * page,
        )

    def _enlarge(self, wanted: int, memory: GrowingMemory) -> None:
        if self.frames.free < wanted:
            needed = len(self.frames) - self.frames.free + wanted
            most = self.layout.pages_of(self.num_rows)
            self.cells = memory.enlarge(self.cells, self.layout, needed, most)
            self.frames.enlarge(len(self.cells) // self.layout.cells_per_page)

    # --- bytes ---------------------------------------------------------------------------------

    def _fill(self, pages: Pages, frames: Frames) -> None:
        """Read pages from the log, and make those that are not there."""
        places = self.map.places_of(pages)
        there = places != NOWHERE
        if self.log is not None and there.any():
            logged = Logged(pages[there], places[there], self.map.checks_of(pages[there]))
            self._read_into(self.log, logged, frames[there], self.cells)
            self.log.bytes_read += len(logged.pages) * self.log.stored_bytes
        if not there.all():
            self._make(pages[~there], frames[~there])

    def _make(self, pages: Pages, frames: Frames) -> None:
        """Let frames have the bytes of pages that were never written."""
        per_page = self.layout.rows_per_page
        ids = (pages[:, None] * per_page + np.arange(per_page)).reshape(-1)
        frame_of = np.repeat(frames, per_page)
        there = ids < self.num_rows
        if not there.all():  # the last page: what is beyond is not of the table, but goes to the log with it
            beyond = self.layout.cells_in(frame_of[~there], ids[~there] % per_page)
            self.cells.index_fill_(0, torch.from_numpy(beyond), 0)
        self._make_rows(ids[there], frame_of[there])
        by_column = self.cells.view(-1, len(self.layout.columns), per_page, self.layout.width)
        index = torch.from_numpy(frames)
        for place, column in enumerate(self.layout.columns[1:], 1):
            by_column[:, place].index_fill_(0, index, column.initial)
        self.counts.made += len(pages)

    def _make_rows(self, ids: Indices, frames: Frames) -> None:
        """Set rows in frames to what they are at first."""
        cells = self.layout.cells_in(frames, ids % self.layout.rows_per_page)
        rows = self.traits.initial_rows(torch.from_numpy(ids))
        if rows.shape != (len(ids), self.layout.width) or rows.dtype != self.layout.dtype or not rows.is_cpu:
            raise UsageError(
                f"table {self.traits.name!r}: its initial rows are {rows.dtype} {list(rows.shape)} on "
                f"{rows.device.type}, not {self.layout.dtype} {[len(ids), self.layout.width]} on cpu"
            )
        put_rows(self.cells, cells, rows.detach())

    def _contents_of(self, frames: Frames) -> torch.Tensor:
        by_frame = self.cells.view(len(self.frames), -1)
        return by_frame.index_select(0, torch.from_numpy(frames)).view(torch.uint8)

    @staticmethod
    def _read_into(page_log: PageLog, logged: Logged, frames: Frames, cells: torch.Tensor) -> None:
        """Read pages into frames that nobody else touches.  In any thread."""
        order = np.argsort(logged.places)
        contents = page_log.read(logged.only(order)).view(cells.dtype)
        put_rows(cells.view(-1, contents.shape[1]), frames[order], contents)

    # --- prefetched pages ----------------------------------------------------------------------

    @uninterrupted
    def _begin_read(self, pages: Pages) -> None:
        assert self.log is not None
        frames = self.frames.take(pages)
        self.map.set_frames(pages, frames)
        self.frames.keep(frames)
        logged = Logged(pages, self.map.places_of(pages), self.map.checks_of(pages))
        future = self.traits.executor.submit(self._read_into, self.log, logged, frames, self.cells)
        self._reads.append(_Read(pages, frames, future))

    def _take_note_of_reads(self, wanted: Frames | None = None, *, all_of_them: bool = False) -> None:
        """Let frames be CLEAN that prefetches have filled, and FREE those of prefetches that failed.

        Args:
            wanted: frames of which none may be FILLING afterwards.
            all_of_them: wait for every prefetch.
        """
        if wanted is not None and np.any(self.frames.states[wanted] == FrameState.FILLING):
            all_of_them = True
        while self._reads and (all_of_them or self._reads[0].future.done()):
            wait([self._reads[0].future])
            self._end_read()

    @uninterrupted
    def _end_read(self) -> None:
        """Take note of the prefetch that is longest under way; it has come to its end."""
        read = self._reads.popleft()
        error = read.future.exception()
        if error is None:
            assert self.log is not None
            self.frames.step(FrameEvent.FILLED, read.frames)
            self.counts.prefetched += len(read.pages)
            self.log.bytes_read += len(read.pages) * self.log.stored_bytes
            return
        self.map.set_frames(read.pages, NOWHERE)
        self.frames.step(FrameEvent.UNFILLED, read.frames)
        # Whoever asks for these pages reads them again, and hears of it.
        log.warning("table %r: %d pages were not prefetched: %s", self.traits.name, len(read.pages), error)
