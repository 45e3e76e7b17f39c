"""Keeps a number of operations in flight: two ways, both woken by what happens.

`Submitter` begins operations and takes their completions, in one thread: for those that the store does by
itself.  `Lanes` has a thread for each operation in flight: for those that block.  Neither has two
operations on one tensor in flight.  Whoever waits, waits for a completion, or for the moment at which
``rate`` lets the next one begin.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import tierstore as ts
from bench.fio.job import Job, are_asynchronous
from bench.fio.meter import Meter
from bench.fio.operations import Burst, Operations
from bench.fio.samples import Kind, Recorder
from bench.fio.sequence import Io


class Pace:
    """When ``rate`` and ``rate_iops`` let an operation begin.  Not for several threads."""

    def __init__(self, job: Job, meter: Meter) -> None:
        self._meter = meter
        self._per_byte_ns = [1e9 / rate if rate else 0.0 for rate in (job.rate.read, job.rate.write)]
        self._per_io_ns = [1e9 / rate if rate else 0.0 for rate in (job.rate_iops.read, job.rate_iops.write)]
        self._due_ns = [0.0, 0.0]

    def wait_ns(self, io: Io) -> float:
        """Return how long the operation has to wait still; 0 or less: it may begin."""
        return self._due_ns[not io.is_read] - self._meter.now_ns()

    def begin(self, io: Io, nbytes: int) -> None:
        """The operation begins now."""
        way = 0 if io.is_read else 1
        cost_ns = self._per_byte_ns[way] * nbytes + self._per_io_ns[way]
        self._due_ns[way] = max(self._due_ns[way], self._meter.now_ns() - cost_ns) + cost_ns


@dataclass
class Course:
    """How far a job thread is, and whether it is to go on.

    Attributes:
        budget: how many operations may still begin.
    """

    job: Job
    operations: Operations
    meter: Meter
    budget: float
    stop: threading.Event
    before: Callable[[Io], None] | None = None

    def __post_init__(self) -> None:
        self._end_ns = (self.job.ramp_s + self.job.runtime_s) * 1e9 if self.job.runtime_s else float("inf")
        self._ramp_ns = self.job.ramp_s * 1e9
        self._unsynced = 0
        self.has_ramped = not self._ramp_ns
        self.ramp_end_ns = 0
        self.written: set[int] = set()

    @property
    def is_over(self) -> bool:
        """Whether no operation may begin any more."""
        now_ns = self.meter.now_ns()
        if not self.has_ramped and now_ns >= self._ramp_ns:
            self.has_ramped = True
            self.ramp_end_ns = now_ns
            self.meter.restart()
        return self.budget <= 0 or now_ns >= self._end_ns or self.stop.is_set()

    def note(self, io: Io) -> None:
        """An operation begins."""
        self.budget -= 1
        if self.before is not None:
            self.before(io)
        if not io.is_read:
            self.written.add(io.tensor)

    def needs_sync(self, io: Io) -> bool:
        """Say whether the store is to be flushed after this operation, for ``fsync``."""
        if io.is_read or not self.job.fsync:
            return False
        self._unsynced += 1
        if self._unsynced < self.job.fsync:
            return False
        self._unsynced = 0
        return True

    def sync(self, recorder: Recorder) -> None:
        """Flush the store."""
        begun = time.perf_counter_ns()
        self.operations.store.flush()
        ended = time.perf_counter_ns()
        recorder.record(Kind.SYNC, self.meter.at(ended), -1, ended - begun, 0, 1)


class Driver(Protocol):
    """Does operations, ``iodepth`` at a time."""

    recorders: list[Recorder]

    def run(self, ios: Iterable[Io]) -> None:
        """Do them, until they end or the course is over; return when none is in flight."""
        ...


def driver(course: Course) -> Driver:
    """Return what suits the job's operations."""
    return Submitter(course) if are_asynchronous(course.job) else Lanes(course)


def _kind(io: Io) -> Kind:
    return Kind.READ if io.is_read else Kind.WRITE


# ---------------------------------------------------------------------- one thread, many in flight


class _Ended(NamedTuple):
    burst: Burst
    begun_ns: int
    called_ns: int
    ended_ns: int
    depth: int
    transfer: ts.Transfer[None]


def bursts(ios: Iterable[Io], length: int) -> Iterator[Burst]:
    """Yield operations that begin in one call: of one direction, on different tensors, at most ``length``."""
    burst: list[Io] = []
    for io in ios:
        is_other = bool(burst) and io.is_read != burst[0].is_read
        if burst and (is_other or len(burst) == length or any(io.tensor == each.tensor for each in burst)):
            yield tuple(burst)
            burst = []
        burst.append(io)
    if burst:
        yield tuple(burst)


class Submitter:
    """Begins operations in one thread and takes their completions from a queue."""

    def __init__(self, course: Course) -> None:
        self.recorders = [Recorder()]
        self._course = course
        self._pace = Pace(course.job, course.meter)
        self._ended: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
        self._busy: set[int] = set()  # tensors with an operation in flight

    def run(self, ios: Iterable[Io]) -> None:
        """See `Driver`."""
        try:
            for burst in bursts(ios, self._course.job.iodepth_batch):
                if self._course.is_over:
                    break
                self._wait_for_room(burst)
                self._wait_for_pace(burst[0])
                self._begin(burst)
                for _ in filter(self._course.needs_sync, burst):
                    self._course.sync(self.recorders[0])
            while self._busy:
                self._take(self._ended.get())
        except BaseException:
            while self._busy:  # what was begun ends, before anybody closes the store
                self._busy.difference_update(io.tensor for io in self._ended.get().burst)
            raise

    def _wait_for_room(self, burst: Burst) -> None:
        room = self._course.job.iodepth - len(burst)
        while len(self._busy) > room or any(io.tensor in self._busy for io in burst):
            self._take(self._ended.get())

    def _wait_for_pace(self, io: Io) -> None:
        while (wait_ns := self._pace.wait_ns(io)) > 0:
            try:
                self._take(self._ended.get(timeout=wait_ns / 1e9))
            except queue.Empty:
                continue  # it is time

    def _begin(self, burst: Burst) -> None:
        operations = self._course.operations
        for io in burst:
            self._pace.begin(io, operations.nbytes(io))
            self._course.note(io)
        begun_ns = time.perf_counter_ns()
        transfer = operations.begin(burst)
        called_ns = time.perf_counter_ns()
        self._busy.update(io.tensor for io in burst)
        depth = len(self._busy)
        transfer.add_done_callback(functools.partial(self._end, burst, begun_ns, called_ns, depth, transfer))

    def _end(
        self, burst: Burst, begun_ns: int, called_ns: int, depth: int, transfer: ts.Transfer[None]
    ) -> None:
        """Note the moment, in whatever thread ended the transfer."""
        self._ended.put(_Ended(burst, begun_ns, called_ns, time.perf_counter_ns(), depth, transfer))

    def _take(self, ended: _Ended) -> None:
        self._busy.difference_update(io.tensor for io in ended.burst)
        ended.transfer.result()
        for io in ended.burst:
            self.recorders[0].record(
                _kind(io),
                self._course.meter.at(ended.ended_ns),
                ended.called_ns - ended.begun_ns,
                ended.ended_ns - ended.called_ns,
                self._course.operations.nbytes(io),
                ended.depth,
            )
            self._course.operations.check(io)


# ---------------------------------------------------------------------- many threads, one in flight each


class Lanes:
    """Does blocking operations in as many threads as may be in flight; the caller's is one of them."""

    def __init__(self, course: Course) -> None:
        self.recorders = [Recorder() for _ in range(course.job.iodepth)]
        self._course = course
        self._changed = threading.Condition()  # guards the course, the pace and what follows
        self._pace = Pace(course.job, course.meter)
        self._busy: set[int] = set()
        self._error: BaseException | None = None

    def run(self, ios: Iterable[Io]) -> None:
        """See `Driver`."""
        source = iter(ios)
        name = f"bench-{self._course.job.name}"
        threads = [
            threading.Thread(target=self._lane, args=(source, recorder), name=name)
            for recorder in self.recorders[1:]
        ]
        for thread in threads:
            thread.start()
        self._lane(source, self.recorders[0])
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _lane(self, source: Iterator[Io], recorder: Recorder) -> None:
        while (taken := self._take(source)) is not None:
            io, depth = taken
            try:
                self._perform(io, depth, recorder)
            except BaseException as error:  # noqa: BLE001 - raised in the thread that called run
                self._fail(error)
            finally:
                self._give(io)

    def _perform(self, io: Io, depth: int, recorder: Recorder) -> None:
        course = self._course
        begun_ns, taken_ns = course.operations.perform(io)
        ended_ns = course.meter.at(begun_ns + taken_ns)
        recorder.record(_kind(io), ended_ns, -1, taken_ns, course.operations.nbytes(io), depth)
        with self._changed:
            needs_sync = course.needs_sync(io)
        if needs_sync:
            course.sync(recorder)

    def _take(self, source: Iterator[Io]) -> tuple[Io, int] | None:
        """Return the next operation when it may begin, and how many are in flight with it."""
        with self._changed:
            if self._error is not None or self._course.is_over:
                return None
            io = next(source, None)
            if io is None:
                return None
            while io.tensor in self._busy:
                self._changed.wait()
            while (wait_ns := self._pace.wait_ns(io)) > 0:
                self._changed.wait(wait_ns / 1e9)
            self._pace.begin(io, self._course.operations.nbytes(io))
            self._course.note(io)
            self._busy.add(io.tensor)
            return io, len(self._busy)

    def _give(self, io: Io) -> None:
        with self._changed:
            self._busy.discard(io.tensor)
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
