"""Who moves pieces: worker threads, or the caller where asynchronous I/O is off.

Rule 1: reads before writes when both wait, for somebody waits for a read and write-backs are
nobody's hurry; first come, first served within a direction.  The order among reads is the
caller's business.
Rule 2: at most ``depth`` pieces are in the workers' hands.
Rule 3: every transfer ends exactly once, whatever happens to its pieces, outside the lock; those
that moved in one batch end together.
Rule 4: tidying runs after a time of quiet, and no piece begins to move while it runs.
Rule 5: closing moves everything that waits, then stops.

Knows nothing of where bytes are or how they move.
"""

from __future__ import annotations

import enum
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from tierstore.errors import InvariantError, StoreClosed
from tierstore_backends.files.piece_queue import PieceQueue
from tierstore_backends.files.transfer import Direction, Piece, Transfer

_log = logging.getLogger("tierstore.files")

Move = Callable[[Sequence[Piece]], None]
"""Moves a batch, in one thread at a time; notes errors at the pieces."""


class Engine(Protocol):
    """Moves pieces and ends their transfers."""

    def submit(self, pieces: Sequence[Piece]) -> None:
        """Move all pieces of one transfer.

        Raises:
            StoreClosed: the engine was closed; nothing moves.
        """
        ...

    def tidy_when_quiet(self) -> None:
        """Call the tidier when nothing has moved for a while."""
        ...

    def close(self) -> None:
        """Move what waits, then stop.  Blocks until nothing moves.  Idempotent.

        A worker may call this only when no other transfer is under way.
        """
        ...

    def is_worker(self) -> bool:
        """Whether the calling thread moves bytes, and so runs completions' callbacks."""
        ...


class _Order(enum.Enum):
    """What a worker does when it does not move a batch."""

    TIDY = enum.auto()
    STOP = enum.auto()


class ThreadEngine:
    """Workers that share one queue for each direction.

    Args:
        moves: one for each worker.
        reads: the empty queue of reads.
        writes: the empty queue of writes.
        depth: the most pieces in the workers' hands.
        tidy: gives unused disk back; what is reserved while it runs is not yet written (rule 4).
        quiet_s: how long nothing has moved before that.
    """

    def __init__(
        self,
        moves: Sequence[Move],
        reads: PieceQueue,
        writes: PieceQueue,
        *,
        depth: int,
        tidy: Callable[[], None],
        quiet_s: float,
    ) -> None:
        self._depth = depth
        self._tidy = tidy
        self._quiet_s = quiet_s
        self._lock = threading.Lock()  # guards all below
        self._changed = threading.Condition(self._lock)
        self._reads = reads
        self._writes = writes
        self._handed_out = 0
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

    def submit(self, pieces: Sequence[Piece]) -> None:
        """See `Engine`."""
        waiting = self._reads if pieces[0].transfer.direction is Direction.READ else self._writes
        with self._lock:
            if self._is_closed:
                raise StoreClosed("the scratch files were closed")
            for piece in pieces:
                waiting.put(piece)
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
        if order is _Order.STOP:
            return False
        if order is _Order.TIDY:
            self._tidy_now()
        else:
            self._carry_out(move, order)
        return True

    def _next(self) -> list[Piece] | _Order:
        with self._lock:
            while True:
                room = self._depth - self._handed_out
                if room > 0 and not self._is_tidying:
                    batch = self._reads.take(room) or self._writes.take(room)
                    if batch:
                        self._handed_out += len(batch)
                        if self._reads or self._writes:
                            self._wake_one()
                        return batch
                    if self._is_closed:
                        self._changed.notify_all()  # those who waited for the depth wait no more
                        return _Order.STOP
                if self._is_quiet():
                    self._is_tidy_due = False
                    self._is_tidying = True
                    return _Order.TIDY
                self._waiting_workers += 1
                may_tidy = self._is_tidy_due and not self._is_tidying
                self._changed.wait(self._quiet_s if may_tidy else None)
                self._waiting_workers -= 1
                self._is_waking = False

    def _wake_one(self) -> None:
        """Wake a worker, unless one is on its way: it wakes the next if it leaves something."""
        if self._waiting_workers and not self._is_waking:
            self._is_waking = True
            self._changed.notify()

    def _is_quiet(self) -> bool:
        """Whether tidying is due and may begin.  Called when no piece can be taken."""
        return (
            self._is_tidy_due
            and not self._is_tidying
            and time.monotonic() - self._last_moved_s >= self._quiet_s
        )

    def _carry_out(self, move: Move, batch: Sequence[Piece]) -> None:
        _move(move, batch)
        ended: list[Transfer] = []
        with self._lock:
            self._handed_out -= len(batch)
            self._last_moved_s = time.monotonic()
            for piece in batch:
                if piece.transfer.note():
                    ended.append(piece.transfer)  # noqa: PERF401 - ``note`` counts: no comprehension
        for transfer in ended:
            transfer.finish()

    def _tidy_now(self) -> None:
        try:
            self._tidy()
        except OSError:
            _log.warning("unused scratch space could not be given back", exc_info=True)
        with self._lock:
            self._is_tidying = False  # what came meanwhile is taken next, by this worker first


class CallerEngine:
    """Moves pieces in the calling thread, as many callers at a time as there are ``moves``."""

    def __init__(self, moves: Sequence[Move]) -> None:
        self._closing = threading.Lock()  # guards _is_closed; held while close waits
        self._is_closed = False
        self._count = len(moves)
        # The last used first: its memory is warm.  ``None``, once closed, is for ever on top.
        self._idle: queue.LifoQueue[Move | None] = queue.LifoQueue()
        for move in moves:
            self._idle.put(move)

    def submit(self, pieces: Sequence[Piece]) -> None:
        """See `Engine`."""
        move = self._idle.get()
        if move is None:
            self._idle.put(None)
            raise StoreClosed("the scratch files were closed")
        try:
            for piece in pieces:
                _move(move, [piece])
        finally:
            self._idle.put(move)  # also when somebody interrupts the program
        transfer = pieces[0].transfer
        transfer.remaining = 0
        transfer.finish()

    def tidy_when_quiet(self) -> None:
        """Do nothing: without workers nobody knows when it is quiet."""

    def close(self) -> None:
        """See `Engine`."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            for _ in range(self._count):
                self._idle.get()
            self._idle.put(None)

    def is_worker(self) -> bool:
        """See `Engine`: callers run no callbacks, for they have not yet been given a completion."""
        return False


def _move(move: Move, batch: Sequence[Piece]) -> None:
    """Move a batch; whatever goes wrong, note it at the pieces: someone waits for each of them."""
    try:
        move(batch)
    except Exception as error:  # noqa: BLE001 - handed to whoever waits, and logged
        _log.exception("moving scratch bytes failed in an unforeseen way")
        for piece in batch:
            piece.error = InvariantError(f"moving scratch bytes failed in an unforeseen way: {error!r}")
