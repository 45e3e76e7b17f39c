"""Bytes in flight, bounded for each direction.

Only a bound on what is under way gives a bound on memory and lets a demand overtake what was asked
for earlier: a copy that has been handed to the hardware cannot be called back.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice

from tierstore.core.entry import Want
from tierstore.core.messages import Urgency

Direction = tuple[int, int]

MOST_IN_FLIGHT = 512
"""Copies in flight in one direction: enough to keep any medium busy, and few enough that ten thousand
small ones do not make the interpreter's garbage collector walk over all that is under way."""

_MOST_LOOKED_AT = 1024
"""By who asks what is under way: under the lock, and thousands may wait."""


@dataclass(slots=True, eq=False)
class Copy:
    """One movement of a want's bytes from tier ``source`` (-1: the caller of ``put``)."""

    number: int
    want: Want
    source: int
    target: int
    nbytes: int


@dataclass(slots=True)
class CopyWindow:
    """One direction: what is under way and what waits, by urgency."""

    in_flight_bytes: int = 0
    in_flight: int = 0
    copies: int = 0
    moved_bytes: int = 0
    # Ordered ones know their first in no time; a dict looks for it behind all that were taken before.
    waiting: dict[Urgency, OrderedDict[int, Copy]] = field(
        default_factory=lambda: {urgency: OrderedDict() for urgency in Urgency}
    )


class CopyTraffic:
    """All copies: which may start now, which wait for their window.

    A copy larger than the window goes alone.
    """

    def __init__(self, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self.windows: dict[Direction, CopyWindow] = {}
        self.copies: dict[int, Copy] = {}

    def window(self, source: int, target: int) -> CopyWindow:
        """Return the window of a direction."""
        window = self.windows.get((source, target))
        if window is None:
            window = self.windows[source, target] = CopyWindow()
        return window

    def under_way(self, most: int) -> list[Copy]:
        """Return copies that have started and not ended, the oldest first: at most so many, soon found."""
        found: list[Copy] = []
        for copy in islice(self.copies.values(), _MOST_LOOKED_AT):
            waiting = self.window(copy.source, copy.target).waiting.values()
            if not any(copy.number in group for group in waiting):
                found.append(copy)
            if len(found) >= most:
                break
        return found

    def submit(self, copy: Copy) -> list[Copy]:
        """Take a copy in; return those that may start now."""
        self.copies[copy.number] = copy
        window = self.window(copy.source, copy.target)
        group = window.waiting[copy.want.urgency]
        group[copy.number] = copy
        # Behind another of its urgency it changes nothing: that one may not start either.
        return self._start(window) if len(group) == 1 else []

    def expedite(self, copy: Copy, urgency: Urgency) -> None:
        """Let a copy that still waits go with those of ``urgency``."""
        window = self.window(copy.source, copy.target)
        for waiting in window.waiting.values():
            if waiting.pop(copy.number, None) is not None:
                window.waiting[urgency][copy.number] = copy
                return

    def cancel(self, copy: Copy) -> bool:
        """Forget a copy that has not started; return whether it had not."""
        window = self.window(copy.source, copy.target)
        for waiting in window.waiting.values():
            if waiting.pop(copy.number, None) is not None:
                del self.copies[copy.number]
                return True
        return False

    def end(self, copy: Copy, *, is_moved: bool) -> list[Copy]:
        """Take a copy out; return those that may start now."""
        del self.copies[copy.number]
        window = self.window(copy.source, copy.target)
        window.in_flight_bytes -= copy.nbytes
        window.in_flight -= 1
        if is_moved:
            window.copies += 1
            window.moved_bytes += copy.nbytes
        return self._start(window)

    def _may_start(self, window: CopyWindow, copy: Copy) -> bool:
        # A put is made by its own caller: it is never held back.
        if copy.source < 0 or not window.in_flight_bytes:
            return True
        return window.in_flight < MOST_IN_FLIGHT and window.in_flight_bytes + copy.nbytes <= self.window_bytes

    def _count(self, window: CopyWindow, copy: Copy) -> None:
        window.in_flight_bytes += copy.nbytes
        window.in_flight += 1

    def _start(self, window: CopyWindow) -> list[Copy]:
        started: list[Copy] = []
        for group in window.waiting.values():
            while group:
                copy = next(iter(group.values()))
                if not self._may_start(window, copy):
                    return started
                del group[copy.number]
                self._count(window, copy)
                started.append(copy)
        return started
