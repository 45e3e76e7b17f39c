"""When an accelerator has come to points of a run: events on its streams, whose times are asked for later.

1. A point is an event on the stream that is current where it is noted, beside a time of the host's clock.
   Nobody waits for it while a step runs.
2. Times are asked for in the order of the points, each from the one before it, when both events have passed.
3. What a device refuses ends it, and nothing else: from then on there are no points.
4. The device computes what was queued between two points, but where the later one says that it had to wait:
   for the host, which waited for the store, or for copies that the store had the stream wait for.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch

LEAST_LAG_S = 1e-4
"""By how much a device is later than the host, at least, if it is said to be busy: a launch takes less."""

_MS_PER_S = 1e3
_REFUSED = "%s is not timed any more: it has refused an event"

log = logging.getLogger("tierstore")


@dataclass(slots=True, eq=False)
class DevicePoint:
    """A point in what the device does.

    Attributes:
        at_s: when it was noted, by ``time.perf_counter()``.
        thread: where, as ``threading.get_ident()`` says.
        is_apart: whether nothing was computed since the point before it: the store was asked.
        event: that marks it; ``None``: nobody needs it any more.
        is_first: whether time is counted from it.
        reached_s: when the device came there, in seconds of its own; ``None``: it is not known yet.
    """

    at_s: float
    thread: int
    is_apart: bool
    event: torch.Event | None
    is_first: bool
    reached_s: float | None = None


class DeviceClock:
    """Notes points of one device.

    Points are noted from any thread; times are read from one at a time, the one that trains.

    Args:
        device: an accelerator whose streams take events.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_whole = True
        self._is_begun = False
        self._unread: deque[DevicePoint] = deque()
        self._last: DevicePoint | None = None  # whose time was read last

    def begin_anew(self) -> None:
        """Count time from the next point: there was none for a while."""
        self._is_begun = False

    def point(self, at_s: float, *, is_apart: bool = False) -> DevicePoint | None:
        """Note a point, and return it; ``None``: the device has refused one.  Never blocks, never raises.

        Args:
            at_s: now, by ``time.perf_counter()``.
            is_apart: see `DevicePoint`.
        """
        if not self._is_whole:
            return None
        try:
            event = torch.Event(self._device, enable_timing=True)
            event.record(torch.accelerator.current_stream(self._device))
        except Exception:  # of whatever kind a device's are: the run goes on
            log.debug(_REFUSED, self._device, exc_info=True)
            self._end()
            return None
        is_first, self._is_begun = not self._is_begun, True
        found = DevicePoint(at_s, threading.get_ident(), is_apart, event, is_first)
        self._unread.append(found)
        return found

    def read_passed(self) -> None:
        """Ask for the times of points that have passed.  Does not block."""
        self._read(must_wait=False)

    def read_all(self) -> None:
        """Ask for the times of all points.  Blocks until the device has come past them."""
        self._read(must_wait=True)

    def _read(self, *, must_wait: bool) -> None:
        try:
            while self._unread and self._has_passed(self._unread[0], must_wait=must_wait):
                self._take(self._unread.popleft())
        except Exception:
            log.debug(_REFUSED, self._device, exc_info=True)
            self._end()

    @staticmethod
    def _has_passed(point: DevicePoint, *, must_wait: bool) -> bool:
        assert point.event is not None
        if must_wait:
            point.event.synchronize()
            return True
        return point.event.query()

    def _take(self, point: DevicePoint) -> None:
        last = self._last
        if point.is_first or last is None:
            point.reached_s = point.at_s
        else:
            assert last.event is not None
            assert point.event is not None
            assert last.reached_s is not None
            point.reached_s = last.reached_s + last.event.elapsed_time(point.event) / _MS_PER_S
        if last is not None:
            last.event = None
        self._last = point

    def _end(self) -> None:
        self._is_whole = False
        self._unread.clear()
        self._last = None


class DeviceSeconds:
    """How long the device computed what was queued between two times of the host's clock.

    Args:
        points: whose times are known.
        threads: whose points count.
    """

    def __init__(self, points: Iterable[DevicePoint], threads: set[int]) -> None:
        own = sorted((each for each in points if each.thread in threads), key=lambda each: each.at_s)
        self._times = [each.at_s for each in own]
        # Of several streams one may come to a later point earlier: what they do is beside each other.
        self._reached = list(itertools.accumulate((each.reached_s or 0.0 for each in own), max))
        self._computed = [0.0] if own else []  # until each point
        for number, point in enumerate(own[1:], 1):
            taken_s = 0.0 if point.is_apart else self._reached[number] - self._reached[number - 1]
            self._computed.append(self._computed[-1] + taken_s)
        ahead = (reached_s - at_s for reached_s, at_s in zip(self._reached, self._times, strict=True))
        self._offset_s = min(ahead, default=0.0)

    def computing(self, begin_s: float, end_s: float) -> float:
        """Return the seconds in which the device computed what was queued from one time to another."""
        if not self._times:
            return 0.0
        return max(0.0, self._computed[self._number(end_s)] - self._computed[self._number(begin_s)])

    def is_busy(self, at_s: float) -> bool:
        """Return whether the device had not come yet to what was queued last, at a time."""
        if not self._times:
            return False
        number = self._number(at_s)
        return self._reached[number] - self._offset_s - self._times[number] > LEAST_LAG_S

    def _number(self, at_s: float) -> int:
        """Return which is the last point until then; before the first one that."""
        return max(0, bisect.bisect_right(self._times, at_s) - 1)
