"""What an engine does next: depth, order, quiet and end, kept once for all engines that have a queue.

The rules are those of `tierstore_backends.files.engines.base`.  Whoever moves fragments asks what is `next`,
and tells when it has ended; how it moves them, and how it sleeps meanwhile, is the engine's affair.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Sequence

from tierstore.errors import StoreClosed, TierStoreError
from tierstore_backends.files.engines.base import Pace, tidy_or_log
from tierstore_backends.files.engines.fragment_queue import FragmentQueues
from tierstore_backends.files.io.io_request import Fragment


class EngineOrder(enum.Enum):
    """What to do where no batch is to be moved."""

    WAIT = enum.auto()  # until `wake` is called, or for `timeout_s`
    TIDY = enum.auto()  # call `tidy_now`
    STOP = enum.auto()  # nothing comes any more


class MayBegin(enum.Enum):
    """What an engine could begin with now."""

    ANYTHING = enum.auto()
    READS = enum.auto()  # there are writes enough ahead of a read that comes later
    NOTHING = enum.auto()


class Schedule:
    """The queues of one engine, and what is in flight.

    Attributes:
        lock: guards everything here, and whatever an engine notes about who sleeps.
        most_in_flight: the most fragments that were in flight at a time.

    Args:
        waiting: the empty queues.
        pace: how much at a time, and what comes after.
        wake: has one of those who sleep look what is `next`; called with the lock, and only until the first
            `EngineOrder.STOP`.
        now_s: the time.
    """

    def __init__(
        self,
        waiting: FragmentQueues,
        pace: Pace,
        wake: Callable[[], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lock = threading.Lock()
        self.most_in_flight = 0
        self._waiting = waiting
        self._pace = pace
        self._wake = wake
        self._now_s = now_s
        self._in_flight = 0
        self._is_tidy_due = False
        self._is_tidying = False
        self._refusal: Callable[[], TierStoreError] | None = None  # once nothing more is taken
        self._last_moved_s = now_s()

    def put(self, fragments: Sequence[Fragment]) -> None:
        """Let all fragments of one transfer wait.

        Raises:
            StoreClosed: after `close`; or what `break_off` was told.
        """
        with self.lock:
            if self._refusal is not None:
                raise self._refusal()
            self._waiting.put(fragments)
            self._wake()

    def tidy_when_quiet(self) -> None:
        """Let somebody tidy when nothing has moved for a while."""
        if self._is_tidy_due:  # a stale answer only delays tidying until the next call
            return
        with self.lock:
            if self._refusal is None:
                self._is_tidy_due = True
                self._wake()

    def close(self) -> None:
        """Take nothing more; what waits still moves."""
        with self.lock:
            if self._refusal is None:
                self._refusal = _closed
                self._wake()

    def break_off(self, refusal: Callable[[], TierStoreError]) -> list[list[Fragment]]:
        """Take nothing more; return what waits as if it were in flight, which is to be told to `end`."""
        with self.lock:
            self._refusal = refusal
            waiting = list(iter(lambda: self._waiting.take(1), []))
            self._in_flight += len(waiting)
            return waiting

    @property
    def has_more(self) -> bool:
        """Whether something waits that could begin.  With the lock."""
        return bool(self._waiting) and self._in_flight < self._pace.depth

    @property
    def timeout_s(self) -> float | None:
        """How long to wait at most; ``None``: until woken.  With the lock."""
        is_quiet = not (self._is_tidying or self._in_flight)  # or whoever ends that looks again
        return self._pace.quiet_s if self._is_tidy_due and is_quiet else None

    def next(self, may_begin: MayBegin = MayBegin.ANYTHING) -> list[Fragment] | EngineOrder:
        """Return a batch, which is in flight from now on, or what else to do.  With the lock."""
        room = self._pace.depth - self._in_flight
        if room > 0 and not self._is_tidying and may_begin is not MayBegin.NOTHING:
            batch = self._waiting.take(room, reads_only=may_begin is MayBegin.READS)
            if batch:
                self._in_flight += len(batch)
                self.most_in_flight = max(self.most_in_flight, self._in_flight)
                if self.has_more:
                    self._wake()
                return batch
        if self._in_flight or self._is_tidying or self._waiting:
            return EngineOrder.WAIT
        if self._refusal is not None:
            return EngineOrder.STOP
        if self._is_tidy_due and self._now_s() - self._last_moved_s >= self._pace.quiet_s:
            self._is_tidy_due = False
            self._is_tidying = True
            return EngineOrder.TIDY
        return EngineOrder.WAIT

    def end(self, batch: Sequence[Fragment]) -> None:
        """Note that a batch has moved, and end the transfers that it was the last of.  Without the lock."""
        with self.lock:
            self._in_flight -= len(batch)
            self._last_moved_s = self._now_s()
            ended = [fragment.transfer for fragment in batch if fragment.transfer.note()]
        for transfer in ended:
            transfer.finish()

    def tidy_now(self) -> None:
        """Give unused disk back.  Blocks; without the lock."""
        try:
            tidy_or_log(self._pace.tidy)
        finally:
            with self.lock:
                self._is_tidying = False  # what came meanwhile is taken next, by who tidied first


def _closed() -> StoreClosed:
    return StoreClosed("the files were closed")
