"""Worker threads that share one queue for each direction: the engine that works everywhere.

Each worker moves one batch at a time, with the interpreter's lock given away while the kernel works.
See `tierstore_backends.files.engines.base` for the rules.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Sequence

from tierstore.errors import StoreClosed
from tierstore_backends.files.engines.base import Move, Pace, count_off, move_or_note, tidy_or_log
from tierstore_backends.files.engines.fragment_queue import FragmentQueues
from tierstore_backends.files.io.io_request import Fragment


class _ThreadOrder(enum.Enum):
    """What a worker does when it does not move a batch."""

    TIDY = enum.auto()
    STOP = enum.auto()


class ThreadEngine:
    """Workers that share one queue for each direction.

    Args:
        moves: one for each worker.
        waiting: the empty queues.
        pace: how much at a time, and what comes after.
    """

    def __init__(
        self,
        moves: Sequence[Move],
        waiting: FragmentQueues,
        pace: Pace,
    ) -> None:
        self._pace = pace
        self._lock = threading.Lock()  # guards all below
        self._changed = threading.Condition(self._lock)
        self._waiting = waiting
        self._handed_out = 0
        self.most_in_flight = 0
        self._waiting_workers = 0
        self._is_waking = False  # a worker was woken and does not run yet
        self._is_tidy_due = False
        self._is_tidying = False
        self._is_closed = False
        self._last_moved_s = time.monotonic()
        self._workers: list[threading.Thread] = []
        for i, move in enumerate(moves):
            name = f"tierstore-files-{i}"
            worker = threading.Thread(target=self._work, args=(move,), name=name, daemon=True)
            try:
                worker.start()
            except RuntimeError:  # the system has no more threads
                self.close()
                raise
            self._workers.append(worker)

    def submit(self, fragments: Sequence[Fragment]) -> None:
        """See `Engine`."""
        with self._lock:
            if self._is_closed:
                raise StoreClosed("the scratch files were closed")
            self._waiting.put(fragments)
            self._wake_one()

    def tidy_when_quiet(self) -> None:
        """See `Engine`."""
        if self._is_tidy_due:  # a stale answer only delays tidying until the next call
            return
        with self._lock:
            self._is_tidy_due = True
            self._wake_one()

    def close(self) -> None:
        """See `Engine`."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
        for worker in self._workers:
            if worker is not threading.current_thread():
                worker.join()

    def is_worker(self) -> bool:
        """See `Engine`."""
        return threading.current_thread() in self._workers

    def _work(self, move: Move) -> None:
        while self._turn(move):
            pass  # no local here: what has moved must not be kept alive by a worker that waits

    def _turn(self, move: Move) -> bool:
        """Do the next thing; return whether there may be more."""
        order = self._next()
        if order is _ThreadOrder.STOP:
            return False
        if order is _ThreadOrder.TIDY:
            self._tidy_now()
        else:
            self._carry_out(move, order)
        return True

    def _next(self) -> list[Fragment] | _ThreadOrder:
        with self._lock:
            while True:
                room = self._pace.depth - self._handed_out
                if room > 0 and not self._is_tidying:
                    batch = self._waiting.take(room)
                    if batch:
                        self._handed_out += len(batch)
                        self.most_in_flight = max(self.most_in_flight, self._handed_out)
                        if self._waiting:
                            self._wake_one()
                        return batch
                    if self._is_closed:
                        self._changed.notify_all()  # those who waited for the depth wait no more
                        return _ThreadOrder.STOP
                if self._is_quiet():
                    self._is_tidy_due = False
                    self._is_tidying = True
                    return _ThreadOrder.TIDY
                self._waiting_workers += 1
                may_tidy = self._is_tidy_due and not self._is_tidying
                self._changed.wait(self._pace.quiet_s if may_tidy else None)
                self._waiting_workers -= 1
                self._is_waking = False

    def _wake_one(self) -> None:
        """Wake a worker, unless one is on its way: it wakes the next if it leaves something."""
        if self._waiting_workers and not self._is_waking:
            self._is_waking = True
            self._changed.notify()

    def _is_quiet(self) -> bool:
        """Whether tidying is due and may begin.  Called when no fragment can be taken."""
        return (
            self._is_tidy_due
            and not self._is_tidying
            and time.monotonic() - self._last_moved_s >= self._pace.quiet_s
        )

    def _carry_out(self, move: Move, batch: Sequence[Fragment]) -> None:
        move_or_note(move, batch)
        with self._lock:
            self._handed_out -= len(batch)
            self._last_moved_s = time.monotonic()
            ended = count_off(batch)
        for transfer in ended:
            transfer.finish()

    def _tidy_now(self) -> None:
        tidy_or_log(self._pace.tidy)
        with self._lock:
            self._is_tidying = False  # what came meanwhile is taken next, by this worker first
