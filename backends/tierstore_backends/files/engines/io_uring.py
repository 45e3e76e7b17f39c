"""One thread that owns a ring: many calls in the kernel at a time, and no thread waits for any of them.

The thread turns.  A turn begins some of what waits, submits it, and then settles one of the batches that have
ended, or several that are not summed; so bytes are summed and compared while other fragments are on their
way.  What it begins is little at a time, so that the first fragment moves while the checksum of the second is
made.

Rule R1: a batch holds its memory until the kernel has told that the call has ended.
Rule R2: writes in flight are at most `_MOST_WRITE_BYTES`, for a read that comes later waits behind them.
Rule R3: a batch that waits for bounce memory goes on before another begins.

See `tierstore_backends.files.engines.base` for the other rules.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence

from tierstore.errors import BackendError
from tierstore.units import MIB
from tierstore_backends.files.engines.base import Pace, log, note_unforeseen
from tierstore_backends.files.engines.batch_io import BatchIo, Outcome
from tierstore_backends.files.engines.fragment_queue import FragmentQueues
from tierstore_backends.files.engines.schedule import EngineOrder, MayBegin, Schedule
from tierstore_backends.files.io.io_request import Direction, Fragment, PartsRun
from tierstore_backends.files.io.syscalls import Ring

_MOST_WRITE_BYTES = 64 * MIB  # 16 blocks of 4 MiB keep a drive busy; 64 MiB delay a read by 20 ms at 3 GB/s
_AT_ONCE = 8  # batches that are begun in one turn; a call into the kernel costs as much as preparing one
_AT_ONCE_BYTES = MIB  # and how many bytes of them: so many are summed in 30 to 100 microseconds


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
        self._schedule = Schedule(waiting, pace, self._rouse)
        self._is_asleep = False  # guarded by the schedule's lock
        # The thread alone has the rest.
        self._flights: dict[int, _RingBatch] = {}  # in the kernel's hands, by token
        self._ended: deque[_RingBatch] = deque()  # out of them
        self._stalled: deque[_RingBatch] = deque()  # without bounce memory
        self._next_token = 0
        self._batches = 0  # begun, and not yet at their end
        self._write_bytes = 0  # of these
        self._thread = threading.Thread(target=self._work, name="tierstore-files-ring", daemon=True)
        self._thread.start()

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
        if not self.is_worker():
            self._thread.join()

    def is_worker(self) -> bool:
        """See `IoEngine`."""
        return threading.current_thread() is self._thread

    def _rouse(self) -> None:
        """End the thread's sleep.  With the lock: an awake one looks before it falls asleep."""
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
            for _ in range(_AT_ONCE - 1):  # those that are not summed cost next to nothing
                if not (self._ended and isinstance(self._ended[0].batch[0], PartsRun)):
                    break
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
        with self._schedule.lock:
            order = self._schedule.next(self._may_begin()) if self._schedule.has_more else EngineOrder.WAIT
        return order if isinstance(order, list) else []

    def _may_begin(self) -> MayBegin:
        if self._stalled or self._batches >= self._entries:
            return MayBegin.NOTHING
        return MayBegin.READS if self._write_bytes >= _MOST_WRITE_BYTES else MayBegin.ANYTHING

    def _begin_one(self, batch: Sequence[Fragment]) -> int:
        """Begin a batch; return how many bytes it moves."""
        flight = _RingBatch(self._batch_io, batch)
        self._batches += 1
        self._write_bytes += flight.write_bytes
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
        self._write_bytes -= flight.write_bytes
        self._schedule.end(flight.batch)

    def _rest(self) -> bool:
        """Sleep, tidy or stop, for nothing has ended; or begin what has come.  Return whether to go on."""
        with self._schedule.lock:
            order = self._schedule.next(self._may_begin())
            self._is_asleep = order is EngineOrder.WAIT
            timeout_s = self._schedule.timeout_s
        match order:
            case EngineOrder.STOP:
                return False
            case EngineOrder.TIDY:
                self._schedule.tidy_now()
            case EngineOrder.WAIT:
                self._ring.wait(timeout_s)
                with self._schedule.lock:
                    self._is_asleep = False
            case batch:
                self._begin_one(batch)
        return True

    def _break(self, error: Exception) -> None:
        """Fail everything: the ring itself does not work.

        The ring stays, and what is in the kernel's hands too, for it may still write there (rule R1).
        """
        log.critical("the ring of the scratch files broke", exc_info=error)
        waiting = self._schedule.break_off(
            lambda: BackendError(f"the ring broke: {error!r}. Open it with engine='threads'")
        )
        lost = [*self._flights.values(), *self._ended, *self._stalled]
        for batch in [*(flight.batch for flight in lost), *waiting]:
            note_unforeseen(batch, error)
            self._schedule.end(batch)
