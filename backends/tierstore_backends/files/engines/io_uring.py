"""One thread that owns a ring: many calls in the kernel at a time, and no thread waits for any of them.

The thread turns.  A turn begins some of what waits, submits it, and then settles one of the batches that have
ended; so bytes are summed and compared while other fragments are on their way.  What it begins is little at
a time, so that the first fragment moves while the checksum of the second is made.

Rule R1: a batch holds its memory until the kernel has told that the call has ended.
Rule R2: writes in flight are at most `_MOST_WRITE_BYTES`, for a read that comes later waits behind them.
Rule R3: a batch that waits for bounce memory goes on before another begins.

See `tierstore_backends.files.engines.base` for the other rules.
"""

from __future__ import annotations

import enum
import os
import threading
import time
from collections import deque
from collections.abc import Sequence

from tierstore.errors import BackendError, StoreClosed
from tierstore.units import MIB
from tierstore_backends.files.engines.base import Pace, count_off, log, note_unforeseen, tidy_or_log
from tierstore_backends.files.engines.batch_io import BatchIo, Outcome
from tierstore_backends.files.engines.fragment_queue import FragmentQueues
from tierstore_backends.files.io.io_request import Direction, Fragment
from tierstore_backends.files.io.syscalls import Ring

_MOST_WRITE_BYTES = 64 * MIB  # 16 blocks of 4 MiB keep a drive busy; 64 MiB delay a read by 20 ms at 3 GB/s
_AT_ONCE = 8  # batches that are begun in one turn; a call into the kernel costs as much as preparing one
_AT_ONCE_BYTES = MIB  # and how many bytes of them: so many are summed in 30 to 100 microseconds


class _RingOrder(enum.Enum):
    """What the thread does when nothing can begin and nothing has ended."""

    GO_ON = enum.auto()
    WAIT = enum.auto()
    TIDY = enum.auto()
    STOP = enum.auto()


class _RingBatch:
    """A batch that has begun.

    Args:
        batch_io: knows what to ask of the kernel.
        batch: what moves.
    """

    __slots__ = ("batch", "nbytes", "outcome", "steps")

    def __init__(self, batch_io: BatchIo, batch: Sequence[Fragment]) -> None:
        self.batch = batch
        self.nbytes = batch[-1].end - batch[0].address
        self.steps = batch_io.steps(batch)
        self.outcome: Outcome | None = None  # of the last call

    @property
    def write_bytes(self) -> int:
        """Return how many bytes it writes."""
        return self.nbytes if self.batch[0].transfer.direction is Direction.WRITE else 0


class RingEngine:
    """See the module.

    Args:
        batch_io: what is asked of the kernel; its memory is shared by all that is in flight.
        ring: where it is asked.
        entries: the most batches in flight: what the ring was opened for.
        waiting: the empty queues.
        pace: how much at a time, and what comes after.
    """

    def __init__(
        self, batch_io: BatchIo, ring: Ring, entries: int, waiting: FragmentQueues, pace: Pace
    ) -> None:
        self._batch_io = batch_io
        self._ring = ring
        self._entries = entries
        self._pace = pace
        self._lock = threading.Lock()  # guards the next five
        self._waiting = waiting
        self._is_asleep = False
        self._is_closed = False
        self._is_tidy_due = False
        self._broken_by: Exception | None = None
        # The thread alone has the rest.
        self._flights: dict[int, _RingBatch] = {}  # in the kernel's hands, by token
        self._ended: deque[_RingBatch] = deque()  # out of them
        self._stalled: deque[_RingBatch] = deque()  # without bounce memory
        self._next_token = 0
        self._batches = 0  # in flight, as are the next two: begun, and not yet at their end
        self._in_flight = 0
        self._write_bytes = 0
        self.most_in_flight = 0
        self._last_moved_s = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="tierstore-files-ring", daemon=True)
        self._thread.start()

    def submit(self, fragments: Sequence[Fragment]) -> None:
        """See `Engine`."""
        with self._lock:
            if self._broken_by is not None:
                raise BackendError(f"the ring broke: {self._broken_by!r}. Open it with engine='threads'")
            if self._is_closed:
                raise StoreClosed("the scratch files were closed")
            self._waiting.put(fragments)
            self._rouse()

    def tidy_when_quiet(self) -> None:
        """See `Engine`."""
        if self._is_tidy_due:  # a stale answer only delays tidying until the next call
            return
        with self._lock:
            self._is_tidy_due = True
            self._rouse()

    def close(self) -> None:
        """See `Engine`."""
        with self._lock:
            self._is_closed = True
            self._rouse()
        if not self.is_worker():
            self._thread.join()

    def is_worker(self) -> bool:
        """See `Engine`."""
        return threading.current_thread() is self._thread

    def _rouse(self) -> None:
        """End the thread's sleep.  Called with the lock: an awake one looks before it falls asleep."""
        if self._is_asleep:
            self._is_asleep = False
            self._ring.wake()

    def _work(self) -> None:
        try:
            while self._turn():
                pass  # no local here: what has moved must not be kept alive by a thread that waits
        except Exception as error:  # noqa: BLE001 - told to whoever waits, and logged
            self._break(error)
        else:
            self._ring.close()

    def _turn(self) -> bool:
        """Do the next things; return whether there may be more."""
        has_begun = self._begin()
        self._ring.submit()
        self._reap()
        if self._ended:
            self._settle(self._ended.popleft())
            return True
        return has_begun or self._rest()

    def _begin(self) -> bool:
        """Begin some of what waits; return whether there was anything."""
        begun_bytes = 0
        for count in range(_AT_ONCE):
            batch = self._take()
            if not batch:
                return count > 0
            begun_bytes += self._begin_one(batch)
            if begun_bytes >= _AT_ONCE_BYTES:
                break
        return True

    def _take(self) -> list[Fragment]:
        room = self._pace.depth - self._in_flight
        with self._lock:
            if not self._may_begin():
                return []
            return self._waiting.take(room)

    def _may_begin(self) -> bool:
        """Whether something waits that may begin.  Called with the lock."""
        if self._stalled or self._in_flight >= self._pace.depth or self._batches >= self._entries:
            return False
        return bool(self._waiting.reads or (self._waiting.writes and self._write_bytes < _MOST_WRITE_BYTES))

    def _begin_one(self, batch: Sequence[Fragment]) -> int:
        """Begin a batch; return how many bytes it moves."""
        flight = _RingBatch(self._batch_io, batch)
        self._batches += 1
        self._in_flight += len(batch)
        self._write_bytes += flight.write_bytes
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        self._go_on(flight)
        return flight.nbytes

    def _go_on(self, flight: _RingBatch) -> None:
        """Ask the next of the kernel; or end the flight."""
        try:
            call = flight.steps.send(flight.outcome)  # type: ignore[arg-type]  # first None: Python demands it
        except StopIteration:
            self._end(flight)
            return
        except Exception as error:  # noqa: BLE001 - handed to whoever waits, and logged
            note_unforeseen(flight.batch, error)
            self._end(flight)
            return
        if call is None:
            flight.outcome = 0
            self._stalled.append(flight)
            return
        token = self._next_token
        self._next_token += 1
        self._flights[token] = flight
        self._ring.put(token, call)

    def _reap(self) -> None:
        """Take back what the kernel has done with."""
        for token, result in self._ring.reap():
            flight = self._flights.pop(token)
            flight.outcome = result if result >= 0 else OSError(-result, os.strerror(-result))
            self._ended.append(flight)

    def _settle(self, flight: _RingBatch) -> None:
        """Look at what came of a call; what else waited for its memory may go on then."""
        self._go_on(flight)
        for _ in range(len(self._stalled)):
            self._go_on(self._stalled.popleft())

    def _end(self, flight: _RingBatch) -> None:
        self._batches -= 1
        self._in_flight -= len(flight.batch)
        self._write_bytes -= flight.write_bytes
        self._last_moved_s = time.monotonic()
        for transfer in count_off(flight.batch):
            transfer.finish()

    def _rest(self) -> bool:
        """Sleep, tidy or stop, for nothing can begin and nothing has ended; return whether to go on."""
        timeout_s: float | None = None
        with self._lock:
            order = self._order()
            if order is _RingOrder.WAIT:
                self._is_asleep = True
                timeout_s = self._pace.quiet_s if self._is_tidy_due else None
            elif order is _RingOrder.TIDY:
                self._is_tidy_due = False
        match order:
            case _RingOrder.WAIT:
                self._ring.wait(timeout_s)
                with self._lock:
                    self._is_asleep = False
            case _RingOrder.TIDY:
                tidy_or_log(self._pace.tidy)
        return order is not _RingOrder.STOP

    def _order(self) -> _RingOrder:
        """Say what to do.  Called with the lock."""
        if self._may_begin():
            return _RingOrder.GO_ON
        if self._flights:
            return _RingOrder.WAIT
        if self._is_closed:
            return _RingOrder.STOP
        is_quiet = time.monotonic() - self._last_moved_s >= self._pace.quiet_s
        return _RingOrder.TIDY if self._is_tidy_due and is_quiet else _RingOrder.WAIT

    def _break(self, error: Exception) -> None:
        """Fail everything: the ring itself does not work.

        The ring stays, and what is in the kernel's hands too, for it may still write there (rule R1).
        """
        log.critical("the ring of the scratch files broke", exc_info=error)
        with self._lock:
            self._broken_by = error
            waiting = list(iter(lambda: self._waiting.take(1), []))
        lost = [*self._flights.values(), *self._ended, *self._stalled]
        for batch in [*(flight.batch for flight in lost), *waiting]:
            note_unforeseen(batch, error)
            for transfer in count_off(batch):
                transfer.finish()
