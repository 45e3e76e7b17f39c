"""Calls at their times, made by one thread: what waits in a wrapper waits here, and blocks nobody."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from tierstore import forks
from tierstore.errors import StoreClosed, UsageError

Call = Callable[[], None]

_log = logging.getLogger("tierstore")


class Timer(Protocol):
    """Makes calls later.  Thread-safe."""

    def now_ns(self) -> int:
        """Return the time, in nanoseconds since whenever."""
        ...

    def at(self, due_ns: int, call: Call) -> None:
        """Make a call at a time, or soon if that has passed; not within this one."""
        ...

    def close(self) -> None:
        """Make no call any more; whoever waits for one has been told.  Blocks until none is under way."""
        ...

    def abandon(self) -> None:
        """Make no call any more.  Does not block."""
        ...


class CallTimer:
    """A `Timer` with a thread of its own, which is started when the first call is to be made.

    Calls of the same time are made in the order in which they were asked for.
    """

    def __init__(self) -> None:
        self._process = forks.here()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._calls: list[tuple[int, int, Call]] = []  # a heap; guarded by _changed, as is all below
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def now_ns(self) -> int:
        """Return the time of the monotonic clock."""
        return time.monotonic_ns()

    def at(self, due_ns: int, call: Call) -> None:
        """See `Timer`.

        Raises:
            StoreClosed: after `close`; `StoreForked` in the child of a fork.
        """
        forks.require_here(self._process, "a backend that waits")
        with self._lock:
            if self._is_closed:
                raise StoreClosed("the backend was closed")
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="tierstore-timer", daemon=True)
                thread.start()
                self._thread = thread
            self._changed.notify()
            heapq.heappush(self._calls, (due_ns, next(self._numbers), call))

    def close(self) -> None:
        """See `Timer`.

        Raises:
            UsageError: within a call, which would wait for its own end.
        """
        if self._process is not forks.here():
            return
        if self._thread is threading.current_thread():
            raise UsageError("a backend cannot be closed from a completion's callback")
        self.abandon()
        if self._thread is not None:
            self._thread.join()

    def abandon(self) -> None:
        """See `Timer`."""
        if self._process is not forks.here():
            return
        with self._lock:
            self._is_closed = True
            self._calls.clear()
            self._changed.notify()

    def _work(self) -> None:
        while (call := self._next()) is not None:
            try:
                call()
            except Exception:  # noqa: BLE001 - logged
                _log.critical("a call at its time failed, which is a bug in tierstore", exc_info=True)
            del call  # it refers to the caller's buffers

    def _next(self) -> Call | None:
        """Wait for the next call; ``None``: there will be none."""
        with self._changed:
            while not self._is_closed:
                left_ns = self._calls[0][0] - self.now_ns() if self._calls else None
                if left_ns is not None and left_ns <= 0:
                    return heapq.heappop(self._calls)[2]
                self._changed.wait(None if left_ns is None else left_ns / 1e9)
            return None
