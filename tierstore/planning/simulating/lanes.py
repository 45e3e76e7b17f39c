"""What computes, and when: the device, the host, and who waits for what.

Where the device has streams the host goes on while it computes: what it computes begins when the device is
free, the host has asked for it and its bytes are there, which the host waits for as well.  Where it has none,
the host computes itself, one thing after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.planning.program import Moment
from tierstore.planning.simulating.exchanges import NetworkLanes
from tierstore.planning.simulating.ledger_store import LedgerStore, Waited
from tierstore.planning.timeline import COMPUTE, HOST, WAITING, Interval, StallCause


class Lanes:
    """The device's lane and the host's.

    Args:
        store: where bytes come from.
        has_streams: whether the device computes beside the host.
        host_tier: index of the tier where the host computes.
        network: carries out the collectives of a rank; ``None``: there are none.

    Attributes:
        intervals: what was computed, and what was waited for.
        device_free_s: when the device has done what it was told.
        host_free_s: when the lane of steps beside it has.
        host_tier: see above.
    """

    def __init__(
        self,
        store: LedgerStore,
        *,
        has_streams: bool,
        host_tier: int,
        network: NetworkLanes | None = None,
    ) -> None:
        self._store = store
        self._network = network
        self._has_streams = has_streams
        self.host_tier = host_tier
        self.intervals: list[Interval] = []
        self.device_free_s = 0.0
        self.host_free_s = 0.0

    def compute(self, moment: Moment, keys: Sequence[str]) -> None:
        """Let the device compute a moment with keys that are leased."""
        queue = self._store.queue
        queue.run_until(queue.now_s + moment.host_s)
        for key in keys:
            self._store.wait_for_bytes(key)
        begin_s = max(queue.now_s, self.device_free_s)
        self._note_stalls(self.device_free_s, begin_s)
        if self._network is not None:
            begin_s = self._network.reach(moment.name, queue.now_s, begin_s, self.intervals)
        end_s = begin_s + moment.compute_s
        if moment.compute_s:
            self.intervals.append(Interval(begin_s, end_s, COMPUTE, moment.name))
        self.device_free_s = end_s
        if self._has_streams:
            until_s = end_s if self._network is None else max(end_s, self._network.busy_until_s(moment.name))
            for key in keys:
                self._store.used_until_s[key] = until_s
        else:
            queue.run_until(end_s)

    def step_on_host(self, name: str, seconds: float, host_s: float) -> None:
        """Let the host step while the device waits."""
        queue = self._store.queue
        queue.run_until(max(queue.now_s + host_s, self.host_free_s))
        self._note_stalls(self.device_free_s, queue.now_s)
        begin_s = queue.now_s
        queue.run_until(begin_s + seconds)
        self.host_free_s = queue.now_s
        if seconds:
            self.intervals.append(Interval(begin_s, queue.now_s, HOST, name))
            stall_s = max(begin_s, self.device_free_s)
            if stall_s < queue.now_s:
                self.intervals.append(
                    Interval(stall_s, queue.now_s, WAITING, name, cause=StallCause.HOST_STEP)
                )
        self.device_free_s = max(self.device_free_s, queue.now_s)

    def synchronize(self) -> None:
        """Let the host wait for the device, and enter what was waited for until then."""
        self._store.queue.run_until(self.device_free_s)
        self._note_stalls(self.device_free_s, self._store.queue.now_s)
        self.device_free_s = max(self.device_free_s, self._store.queue.now_s)

    def _note_stalls(self, from_s: float, to_s: float) -> None:
        """Enter what was waited for while nothing was computed."""
        waits, self._store.waits = self._store.waits, []
        for each in _joined(waits):
            begin_s, end_s = max(each.begin_s, from_s), min(each.end_s, to_s)
            if begin_s < end_s:
                self.intervals.append(
                    Interval(begin_s, end_s, WAITING, each.key, each.key or None, cause=each.cause)
                )


def _joined(waits: Sequence[Waited]) -> list[Waited]:
    """Return parts of waits, those that follow each other and are alike as one."""
    found: list[Waited] = []
    for each in waits:
        last = found[-1] if found else None
        if last is not None and (last.end_s, last.cause, last.key) == (each.begin_s, each.cause, each.key):
            found[-1] = Waited(last.begin_s, each.end_s, each.cause, each.key)
        else:
            found.append(each)
    return found
