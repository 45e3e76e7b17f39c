"""Dirty pages on their way from frames to the log.

Rule 1: a block is a copy of its frames' bytes, so rows can be written while it is on its way.
Rule 2: up to four blocks are on their way, but no more than a sixteenth of the frames, or two: what is beside
the frames is 16 MiB at most, by default.
Rule 3: frames are CLEAN when their block is in the log, and DIRTY again when it could not be put.
Rule 4: where the medium is full, the log is compacted and the block put again, once.
Rule 5: a call raises for blocks that it has begun itself.  That one before it could not be put is a warning:
its frames are DIRTY, and whoever needs them written begins again, as there may be room by now.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass

import numpy as np
import torch

from tierstore.errors import CapacityError, TierStoreError
from tierstore.signals import uninterrupted
from tierstore.tables.frames import FrameEvent, FrameState, FrameTable
from tierstore.tables.page_log import PageBlock, PageLog
from tierstore.tables.page_map import Frames
from tierstore.units import format_bytes

_MOST_BLOCKS, _LEAST_BLOCKS, _SHARE = 4, 2, 16
"""So many blocks are on their way at most; fewer, where they would be more than a share of the frames."""

log = logging.getLogger("tierstore")


@dataclass(frozen=True)
class _Write:
    """A block on its way.

    Attributes:
        block: what goes.
        frames: that it is a copy of.
        leave_as_of: the frames that nobody has used since this moment are free when it is there; None: all
            stay.
        future: of the put.
    """

    block: PageBlock
    frames: Frames
    leave_as_of: int | None
    future: Future[None]


class PageWriter:
    """See the module.

    Args:
        name: of the table, for messages.
        frames: that are written.
        page_log: where to.
        executor: in which blocks are put.
        contents: returns the bytes of frames, uint8 ``[n, page_bytes]``, which are the caller's own.
        forget: lets the pages of CLEAN frames leave memory.
    """

    def __init__(
        self,
        name: str,
        frames: FrameTable,
        page_log: PageLog,
        executor: Executor,
        contents: Callable[[Frames], torch.Tensor],
        forget: Callable[[Frames], None],
    ) -> None:
        self._name = name
        self._frames = frames
        self._log = page_log
        self._contents = contents
        self._forget = forget
        self._executor = executor
        self._under_way: deque[_Write] = deque()
        few = len(frames) // (_SHARE * page_log.pages_per_block)
        self._most = min(max(few, _LEAST_BLOCKS), _MOST_BLOCKS)
        self._earlier = 0  # so many of them, the first ones, are of calls before this one

    @property
    def room(self) -> int:
        """How many frames can begin to be written at once."""
        return (self._most - len(self._under_way)) * self._log.pages_per_block

    @property
    def under_way(self) -> int:
        """How many blocks are on their way."""
        return len(self._under_way)

    @property
    def leaving(self) -> int:
        """How many frames may be free when all blocks have come to the log."""
        return sum(len(write.frames) for write in self._under_way if write.leave_as_of is not None)

    def begin(self, frames: Frames, *, leave: bool) -> None:
        """Begin to write these DIRTY frames.  Blocks where too many blocks would be on their way.

        Args:
            frames: distinct.
            leave: whether they are to be free then, unless somebody uses them meanwhile.

        Raises:
            CapacityError, BackendError: as of `finish`; frames that have not gone are DIRTY.
        """
        for begin in range(0, len(frames), self._log.pages_per_block):
            while len(self._under_way) >= self._most:
                self.finish()
            part = frames[begin : begin + self._log.pages_per_block]
            block = self._log.pack(self._frames.pages[part], self._contents(part))
            self._log.put_by()
            self._send(block, part, self._frames.moment if leave else None)

    @uninterrupted
    def _send(self, block: PageBlock, frames: Frames, leave_as_of: int | None) -> None:
        self._frames.step(FrameEvent.WRITE_BEGUN, frames)
        future = self._executor.submit(self._log.put, block)
        self._under_way.append(_Write(block, frames, leave_as_of, future))

    def finish(self) -> None:
        """Wait for the block that is longest on its way.

        Raises:
            CapacityError: the medium is full, and compacting did not help.
            BackendError: it failed.  In either case the frames are DIRTY, and the block is of this call.
        """
        is_earlier = self._earlier > 0
        error = self._end_oldest()
        if error is None:
            return
        if is_earlier:
            self._warn(error)
        elif isinstance(error, CapacityError):
            raise self._full(error) from error
        else:
            raise error

    def finish_all(self) -> None:
        """Wait for all blocks; raises as `finish` does, the first error, when none is on its way any more."""
        first: Exception | None = None
        while self._under_way:
            try:
                self.finish()
            except TierStoreError as error:
                first = first or error
        if first is not None:
            raise first

    def take_note(self) -> None:
        """Take note of blocks that have come to their end, as a call begins: those before are not its own."""
        while self._under_way and self._under_way[0].future.done():
            error = self._end_oldest()
            if error is not None:
                self._warn(error)
        self._earlier = len(self._under_way)

    def _warn(self, error: BaseException) -> None:
        log.warning("table %r: dirty pages could not be written yet: %s", self._name, error)

    def _end_oldest(self) -> BaseException | None:
        """Wait for the block that is longest on its way; return why it is not in the log."""
        write = self._under_way[0]
        wait([write.future])
        error = write.future.exception()
        if isinstance(error, CapacityError):
            error = self._put_again(write.block, error)
        self._note_end(write, error)
        self._compact()
        return error

    @uninterrupted
    def _note_end(self, write: _Write, error: BaseException | None) -> None:
        """Keep the books of a block whose put has come to its end, once and for all."""
        self._under_way.popleft()
        self._earlier = max(0, self._earlier - 1)
        if error is not None:
            self._frames.step(FrameEvent.UNWRITTEN, write.frames)
            return
        self._log.record(write.block)
        self._frames.step(FrameEvent.WRITTEN, write.frames)
        if write.leave_as_of is not None:
            clean = write.frames[self._frames.states[write.frames] == FrameState.CLEAN]
            self._forget(self._frames.unused_since(clean, write.leave_as_of))
        self._log.drop_dead()

    def _put_again(self, block: PageBlock, error: CapacityError) -> CapacityError | None:
        """Put a block that found no room, if some can be made; return why it is not there."""
        try:
            if not self._log.make_room():
                return error
            self._log.put(block)
        except TierStoreError:
            return error
        return None

    def _compact(self) -> None:
        """Keep the log from being mostly of dead pages; nobody needs that now, so errors are only noted."""
        if self._log.is_wasteful:
            try:
                self._log.compact()
            except TierStoreError as error:
                log.warning("table %r: the log could not be compacted yet: %s", self._name, error)

    def _full(self, error: CapacityError) -> CapacityError:
        states = self._frames.states
        dirty = int(np.count_nonzero(states >= FrameState.DIRTY))
        current = format_bytes(self._log.current_pages * self._log.stored_bytes)
        return CapacityError(
            f"table {self._name!r}: {dirty} dirty pages, {self._log.place.medium.room()}, {current} current; "
            "nothing has changed",
            key=error.key,
            tier=error.tier,
            needed_bytes=error.needed_bytes,
            free_bytes=error.free_bytes,
        )
