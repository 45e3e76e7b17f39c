"""Runs the jobs that the store does: sets up, starts them together, collects what came of it.

Jobs of one batch begin when all are set up.  A job that fails ends with an error number and a message;
the others go on.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import tierstore as ts
from bench.fio.content import Tensors, VerifyError, shared_content
from bench.fio.drive import Course, driver
from bench.fio.job import Job
from bench.fio.meter import DiskMeter, Meter
from bench.fio.operations import Operations
from bench.fio.plan import Planned
from bench.fio.samples import Samples
from bench.fio.sequence import Io, chance, tensor_sizes
from bench.fio.sequence import Sequence as Order
from bench.fio.shelf import Held, Shelf
from bench.fio.traces import Optimum, accesses, optimum
from bench.place import PlaceError
from tierstore.planning import plan_from

_MOVING = frozenset({"fetch", "evict", "flush"})


@dataclass
class Finished:
    """What came of one thread of a job.

    Attributes:
        samples: the operations that count; their clock begins with the first of them.
        runtime_ns: how long they took, on the job's clock.
        elapsed_s: how long all took, by the wall.
        counted: what process and store counted meanwhile; see `Meter`.
        error: 0, or an errno.
        stats: each tier at the end: its capacity, the most that was ever charged, and what its codec did.
        optimum: for a trace.
    """

    planned: Planned
    job: Job
    clone: int
    samples: Samples = field(default_factory=lambda: Samples.joined([]))
    runtime_ns: int = 0
    elapsed_s: float = 0.0
    counted: Counter[str] = field(default_factory=Counter)
    error: int = 0
    message: str = ""
    verified_bytes: int = 0
    stats: dict[str, dict[str, object]] = field(default_factory=dict)
    optimum: Optimum | None = None


def run_batch(batch: Sequence[Planned], shelf: Shelf, spaces: Spaces) -> list[Finished]:
    """Run jobs of the store at the same time; return what came of each of their threads."""
    threads = [
        JobThread(planned, planned.job, clone, shelf, spaces)
        for planned in batch
        if planned.job is not None
        for clone in range(planned.job.numjobs)
    ]
    for each in threads:
        each.set_up()
    start = threading.Event()
    running = [
        threading.Thread(target=each.work, args=(start,), name=each.finished.job.name) for each in threads
    ]
    for thread in running:
        thread.start()
    start.set()
    for thread in running:
        thread.join()
    for each in threads:
        shelf.give(each.finished.job)
    return [each.finished for each in threads]


class Spaces:
    """The tensors that there are, by store and name: jobs with one ``filename`` find the same."""

    def __init__(self) -> None:
        self._spaces: dict[tuple[int, str], Tensors] = {}

    def take(self, job: Job, clone: int, held: Held) -> Tensors:
        """Return the tensors that this thread of the job works on.

        Raises:
            UsageError: another job cut them differently.
        """
        name = job.filename or f"{job.name}.{clone}"
        mix = job.blocks.read if job.direction.has_reads else job.blocks.write
        sizes = tensor_sizes(mix, job.size_bytes, chance(job, clone, "sizes"))
        tensors = self._spaces.get((id(held), name))
        if tensors is None:
            content = shared_content(job.content, job.zero_percent, mix.largest, job.randseed or 0)
            tensors = self._spaces[id(held), name] = Tensors(name, sizes, content)
        elif tensors.sizes != sizes:
            raise ts.UsageError(
                f"filename={name}: another job has {len(tensors.sizes)} tensors of {sum(tensors.sizes)} "
                f"bytes, [{job.name}] wants {len(sizes)} of {sum(sizes)}; give both the same size and bs"
            )
        return tensors


class JobThread:
    """One thread of one job, from its set-up to what came of it."""

    def __init__(self, planned: Planned, job: Job, clone: int, shelf: Shelf, spaces: Spaces) -> None:
        self.finished = Finished(planned, job, clone)
        self._job = job
        self._shelf = shelf
        self._spaces = spaces
        self._course: Course | None = None
        self._tensors: Tensors | None = None

    def set_up(self) -> None:
        """Open the store and lay out what will be read.  A failure is kept as the job's error."""
        job = self._job
        try:
            held = self._shelf.take(job)
            self._tensors = self._spaces.take(job, self.finished.clone, held)
            operations = Operations(job, held, self._tensors)
            operations.lay_out()
        except (ts.TierStoreError, OSError, PlaceError) as error:
            self._fail(error)
            return
        budget = float(job.number_ios) if job.number_ios else float("inf")
        self._course = Course(job, operations, Meter(lambda: held.store), budget, threading.Event())

    def work(self, start: threading.Event) -> None:
        """Do the job once ``start`` is set."""
        start.wait()
        course, tensors = self._course, self._tensors
        if course is None or tensors is None:
            return
        course.stop.wait(self._job.startdelay_s)
        begun = time.monotonic()
        try:
            self._measure(course, tensors)
            if self._job.trace:
                course.operations.store.follow(None)
            course.operations.finish(sorted(course.written))
        except (ts.TierStoreError, VerifyError, OSError) as error:
            self._fail(error)
        self.finished.elapsed_s = time.monotonic() - begun
        self.finished.verified_bytes = course.operations.verified_bytes
        self.finished.stats = _tiers(course.operations.store)

    def _measure(self, course: Course, tensors: Tensors) -> None:
        drive = driver(course)
        try:
            for ios in self._batches(course, tensors):
                course.operations.prepare(ios)
                course.meter.resume()
                try:
                    drive.run(ios)
                finally:
                    course.meter.pause()
                if course.is_over:
                    break
            if self._job.is_flushed_at_end:
                course.meter.resume()
                course.sync(drive.recorders[0])
                course.meter.pause()
        finally:
            samples = Samples.joined([recorder.samples() for recorder in drive.recorders])
            self.finished.samples = (
                samples.since(course.ramp_end_ns) if course.has_ramped else Samples.joined([])
            )
            self.finished.runtime_ns = course.meter.now_ns() - course.ramp_end_ns
            self.finished.counted = course.meter.counted

    def _batches(self, course: Course, tensors: Tensors) -> Iterator[list[Io]]:
        """Yield operations whose tensors can be made ready together."""
        if self._job.trace:
            yield self._traced(course, tensors)
            return
        order = Order(self._job, self.finished.clone, tensors.sizes)
        loop = 0
        while loop < self._job.loops or self._job.is_time_based:
            loop += 1
            yield from self._cut(order.loop(), tensors.sizes)

    def _cut(self, ios: Iterable[Io], sizes: Sequence[int]) -> Iterator[list[Io]]:
        """Cut a loop where a tensor would have to be made ready twice, or there is no room for more.

        And where the store is flushed: that brings down everything that is ready to be written.
        """
        steps = {True: self._job.steps.read, False: self._job.steps.write}
        room_bytes = left_bytes = self._write_room_bytes()
        flushed_after = 1 if steps[False].op == "flush" else self._job.fsync
        batch: list[Io] = []
        seen: set[int] = set()
        for io in ios:
            is_moving = steps[io.is_read].op in _MOVING
            needed_bytes = sizes[io.tensor] if is_moving and not io.is_read else 0
            if batch and ((is_moving and io.tensor in seen) or needed_bytes > left_bytes):
                yield batch
                batch, seen, left_bytes = [], set(), room_bytes
            batch.append(io)
            seen.add(io.tensor)
            left_bytes -= needed_bytes
            if not io.is_read and flushed_after and sum(not each.is_read for each in batch) == flushed_after:
                yield batch
                batch, seen, left_bytes = [], set(), room_bytes
        if batch:
            yield batch

    def _write_room_bytes(self) -> int:
        step = self._job.steps.write
        if step.op not in {"evict", "flush"} or not self._job.direction.has_writes:
            return 0
        capacity_bytes = self._job.store.capacity_bytes(step.origin)
        return capacity_bytes // 2 if self._job.batch is None else self._job.batch.of(capacity_bytes)

    def _traced(self, course: Course, tensors: Tensors) -> list[Io]:
        job, sizes = self._job, tensors.sizes
        mean_bytes = sum(sizes) / len(sizes)
        length = max(1, round(job.loops * job.loop_bytes / mean_bytes))
        order = accesses(job.trace, len(sizes), length, chance(job, 0, "trace"))
        store = course.operations.store
        if job.store.eviction == "next-use":
            store.follow(plan_from([tensors.keys[tensor] for tensor in order]))
            positions = iter(range(length))
            course.before = lambda _: store.advance(next(positions))
        self.finished.optimum = optimum(order, sizes, job.store.capacity_bytes(job.steps.read.tier))
        return [Io(tensor, is_read=True) for tensor in order]

    def _fail(self, error: Exception) -> None:
        self.finished.error = _number(error)
        self.finished.message = f"{type(error).__name__}: {error}"


def _number(error: BaseException) -> int:
    """Return the errno that fio would report."""
    numbers: list[tuple[type[BaseException], int]] = [
        (VerifyError, errno.EILSEQ),
        (ts.IntegrityError, errno.EILSEQ),
        (ts.CapacityError, errno.ENOSPC),
        (ts.LeaseError, errno.EBUSY),
        (ts.UsageError, errno.EINVAL),
    ]
    for kind, number in numbers:
        if isinstance(error, kind):
            return number
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno:
            return cause.errno
        cause = cause.__cause__
    return errno.EIO


def _tiers(store: ts.Store) -> dict[str, dict[str, object]]:
    tiers: dict[str, dict[str, object]] = {}
    for name, tier in store.stats().tiers.items():
        tiers[name] = {"capacity_bytes": tier.capacity_bytes, "peak_charged_bytes": tier.peak_charged_bytes}
        if tier.codec is not None:
            tiers[name]["codec"] = asdict(tier.codec)
    return tiers


@dataclass
class Measured:
    """A batch with the disk that it used."""

    finished: list[Finished]
    disk: dict[str, object] | None
    pid: int = field(default_factory=os.getpid)


def measure_batch(batch: Sequence[Planned], shelf: Shelf, spaces: Spaces, scratch: Path) -> Measured:
    """Run a batch and look at the disk under ``scratch`` meanwhile."""
    disk = DiskMeter(scratch)
    finished = run_batch(batch, shelf, spaces)
    return Measured(finished, disk.entry())
