"""The threads that pack and unpack, and the memory that they do it in.

Three kinds of jobs wait: those that need no memory go first, then reads, then writes; within a kind the first
to come is the first to go.  A read or a write that needs memory gets one of its lane's *pads*: page-aligned
memory of a fixed size, made when first used and kept.  There are few, so packing takes a bounded amount of
memory whatever the tensors' sizes; a job waits for a pad, and so for the medium, but no thread does.

Jobs are parts of *operations*, which begin with one and end; whoever closes waits for their ends.  An
interrupt (``KeyboardInterrupt`` and its like, in the thread that begins one) finds it either not begun or in
the hands of a thread that no interrupt reaches.

Knows nothing of backends.
"""

from __future__ import annotations

import collections
import enum
import functools
import logging
import mmap
import threading
from collections.abc import Callable
from typing import Final

import numpy as np

from tierstore import forks
from tierstore.codec.blocks import Bytes
from tierstore.errors import StoreClosed, UsageError

Job = Callable[[], None]
PadJob = Callable[[Bytes], None]

PADS: Final = 4
"""For each lane: one is packed, one or two are on their way to the medium, one is about to be."""

_log = logging.getLogger("tierstore")


class PadUse(enum.Enum):
    """What a pad is needed for: reads never wait for writes."""

    READ = enum.auto()
    WRITE = enum.auto()


class CodecWorkers:
    """A few threads, started when the first job comes.  Thread-safe.

    Args:
        threads: how many.
        pad_bytes: the size of a pad.
        pads: how many there are for each lane.
    """

    def __init__(self, threads: int, pad_bytes: int, pads: int = PADS) -> None:
        self._count = threads
        self._pad_bytes = pad_bytes
        self._process = forks.here()
        # Of its own, and not what a condition makes: leaving that may be interrupted before it is let go.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []  # guarded by _changed, as is all below
        self._jobs: collections.deque[Job] = collections.deque()
        self._waiting: dict[PadUse, collections.deque[PadJob]] = {
            lane: collections.deque() for lane in PadUse
        }
        self._pads: dict[PadUse, list[Bytes]] = {lane: [] for lane in PadUse}
        self._unmade = dict.fromkeys(PadUse, pads)
        self._operations = 0
        self._is_closed = False

    def begin(self, job: Job) -> None:
        """Count an operation, whose first job is ``job``: `close` waits for its end.

        Raises:
            StoreClosed: after `close`; `StoreForked` in the child of a fork.
        """
        # Before the lock is touched: a thread that the child does not have may hold it.
        forks.require_here(self._process, "a backend with a codec")
        if len(self._threads) < self._count:
            self._start()
        with self._lock:
            if self._is_closed:
                raise StoreClosed("the backend with a codec was closed")
            self._changed.notify()
            # Last, and without another call between: it is counted if, and only if, it will be done.
            self._operations += 1
            self._jobs.append(job)

    def end(self) -> None:
        """Count the end of an operation."""
        with self._changed:
            self._operations -= 1
            self._changed.notify_all()

    def submit(self, job: Job) -> None:
        """Let ``job`` be done, before all that need a pad.  Within an operation; it must not raise."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()

    def submit_with_pad(self, lane: PadUse, job: PadJob) -> None:
        """Let ``job`` be done when there is a pad for it, which it sees to be given back."""
        with self._changed:
            self._waiting[lane].append(job)
            self._changed.notify()

    def give_back(self, lane: PadUse, pad: Bytes) -> None:
        """Let another job have a pad."""
        with self._changed:
            self._pads[lane].append(pad)
            self._changed.notify()

    def is_worker(self) -> bool:
        """Whether the calling thread is one of these."""
        return threading.current_thread() in self._threads

    def close(self) -> None:
        """Let every operation end, then every thread.  Blocks.  Idempotent.

        Raises:
            UsageError: called by one of the threads, which would wait for itself.
        """
        if self._process is not forks.here():
            return
        if self.is_worker():
            raise UsageError("a backend with a codec cannot be closed from a completion's callback")
        with self._changed:
            self._changed.wait_for(lambda: not self._operations)
        self.abandon()
        for thread in list(self._threads):
            thread.join()
        self._pads = {lane: [] for lane in PadUse}

    def abandon(self) -> None:
        """Let the threads end, without waiting for them: nothing is under way."""
        if self._process is not forks.here():
            return
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _start(self) -> None:
        """Start the threads that are missing: all, or those that an interrupted call left out."""
        for number in range(len(self._threads), self._count):
            threading.Thread(target=self._work, name=f"tierstore-codec-{number}", daemon=True).start()

    def _work(self) -> None:
        with self._lock:
            if self._is_closed or len(self._threads) == self._count:  # two callers started them at a time
                return
            self._threads.append(threading.current_thread())
        while (job := self._next()) is not None:
            try:
                job()
            except Exception:  # noqa: BLE001 - logged
                _log.critical("a job of a codec failed, which is a bug in tierstore", exc_info=True)
            del job  # it refers to the caller's buffers

    def _next(self) -> Job | None:
        """Wait for a job that can be done now; None: there will be none."""
        with self._changed:
            while True:
                if self._jobs:
                    return self._jobs.popleft()
                for lane, waiting in self._waiting.items():
                    if waiting and (self._pads[lane] or self._unmade[lane]):
                        return functools.partial(waiting.popleft(), self._take_pad(lane))
                if self._is_closed:
                    return None
                self._changed.wait()

    def _take_pad(self, lane: PadUse) -> Bytes:
        if self._pads[lane]:
            return self._pads[lane].pop()
        self._unmade[lane] -= 1
        # Pages are real only once they are used.
        return np.frombuffer(mmap.mmap(-1, self._pad_bytes), np.uint8)
