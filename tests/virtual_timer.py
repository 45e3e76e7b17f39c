"""A timer whose time a test turns on."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

S = 1_000_000_000  # nanoseconds


class VirtualTimer:
    """A `tierstore.wrappers.timing.Timer` that makes its calls in `advance`, in the thread of the test."""

    def __init__(self) -> None:
        self.time_ns = 0
        self.calls: list[tuple[int, int, Callable[[], None]]] = []
        self.is_closed = False
        self._numbers = itertools.count()

    def now_ns(self) -> int:
        return self.time_ns

    def at(self, due_ns: int, call: Callable[[], None]) -> None:
        heapq.heappush(self.calls, (due_ns, next(self._numbers), call))

    def close(self) -> None:
        self.is_closed = True

    def abandon(self) -> None:
        self.is_closed = True

    def advance(self, to_ns: int) -> None:
        """Let the time come, and make what is due on the way, each at its time."""
        while self.calls and self.calls[0][0] <= to_ns:
            due_ns, _, call = heapq.heappop(self.calls)
            self.time_ns = max(self.time_ns, due_ns)
            call()
        self.time_ns = max(self.time_ns, to_ns)

    def run_out(self) -> None:
        """Make all calls, whenever they are due."""
        while self.calls:
            self.advance(self.calls[0][0])
