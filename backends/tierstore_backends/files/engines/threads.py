"""Worker threads that share one queue for each direction: the engine that works everywhere.

Each worker moves one batch at a time, with the interpreter's lock given away while the kernel works.
See `tierstore_backends.files.engines.base` for the rules.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Literal

from tierstore_backends.files.engines.base import Move, Pace, move_or_note
from tierstore_backends.files.engines.fragment_queue import FragmentQueues
from tierstore_backends.files.engines.schedule import EngineOrder, Schedule
from tierstore_backends.files.io.io_request import Fragment


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
        self._schedule = Schedule(waiting, pace, self._wake_one)
        self._changed = threading.Condition(self._schedule.lock)  # its lock guards the next two
        self._waiting_workers = 0
        self._is_waking = False  # a worker was woken and does not run yet
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

    @property
    def most_in_flight(self) -> int:
        """See `IoEngine`."""
        return self._schedule.most_in_flight

    def submit(self, fragments: Sequence[Fragment]) -> None:
        """See `IoEngine`."""
        self._schedule.put(fragments)

    def tidy_when_quiet(self) -> None:
        """See `IoEngine`."""
        self._schedule.tidy_when_quiet()

    def close(self) -> None:
        """See `IoEngine`."""
        self._schedule.close()
        for worker in self._workers:
            if worker is not threading.current_thread():
                worker.join()

    def is_worker(self) -> bool:
        """See `IoEngine`."""
        return threading.current_thread() in self._workers

    def _work(self, move: Move) -> None:
        while self._turn(move):
            pass  # no local here: what has moved must not be kept alive by a worker that waits

    def _turn(self, move: Move) -> bool:
        """Do the next thing; return whether there may be more."""
        match self._next():
            case EngineOrder.STOP:
                return False
            case EngineOrder.TIDY:
                self._schedule.tidy_now()
            case batch:
                move_or_note(move, batch)
                self._schedule.end(batch)
        return True

    def _next(self) -> list[Fragment] | Literal[EngineOrder.TIDY, EngineOrder.STOP]:
        with self._schedule.lock:
            while (order := self._schedule.next()) is EngineOrder.WAIT:
                self._waiting_workers += 1
                self._changed.wait(self._schedule.timeout_s)
                self._waiting_workers -= 1
                self._is_waking = False
            if order is EngineOrder.STOP:
                self._changed.notify_all()
            return order

    def _wake_one(self) -> None:
        """Wake a worker, unless one is on its way, which wakes the next.  With the lock."""
        if self._waiting_workers and not self._is_waking:
            self._is_waking = True
            self._changed.notify()
