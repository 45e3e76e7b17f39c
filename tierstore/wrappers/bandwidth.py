"""A limit to the bytes that a tier reads and writes each second.

Rule 1: from the start to any moment, no more bytes have begun to move than the rate allows for that time and
one burst (`TokenBucket`).  Between any two moments it is no more than for their distance and one burst, or
one operation where that is larger, as an operation is not parted.
Rule 2: reads go before writes that wait at the same time, since somebody waits for them; within a direction
the first to come is the first to go.
Rule 3: nothing blocks.  What has to wait is begun by a thread of its own, and ends at once, with
``StoreClosed``, when the store closes.

So it is no `tierstore.spi.DirectBackend`: what is begun later by another thread would not be in the order
that the caller's device stream has.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

from tierstore.errors import StoreClosed
from tierstore.pacing import TokenBucket
from tierstore.spi import Backend, Buffer, Capabilities, Completion
from tierstore.units import parse_rate
from tierstore.wrappers.forwarding import Begin, ForwardingBackend, HeldOperation, Operation
from tierstore.wrappers.kinds import WrapperKind, require_storage
from tierstore.wrappers.timing import CallTimer, Timer

BURST_NS: Final = 50_000_000
"""A burst is what the rate lets through in this time: short to people, long to timers."""

_S: Final = 1_000_000_000  # nanoseconds


@dataclass(frozen=True, slots=True)
class BandwidthStats:
    """What a limit did since the store was opened.

    Attributes:
        limit_bytes_per_s: of both directions together, or the smaller one of theirs.
        delayed: how many operations had to wait.
        wait_seconds: how long, summed.
    """

    limit_bytes_per_s: int
    delayed: int = 0
    wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Queued:
    operation: HeldOperation
    nbytes: int
    came_ns: int


class _LimitedLink:
    """A bucket, and who waits for it.  Thread-safe."""

    def __init__(self, rate: int, timer: Timer) -> None:
        self._bucket = TokenBucket(rate, max(1, rate * BURST_NS // _S))
        self._timer = timer
        self._lock = threading.Lock()  # guards all below; never held while something begins or ends
        self._queues: dict[Operation, deque[_Queued]] = {"read": deque(), "write": deque()}  # in this order
        self._since_ns = 0  # when somebody began to wait where nobody did
        self._next_turn_ns: int | None = None  # when the timer calls
        self._is_stopped = False
        self.stats = BandwidthStats(rate)

    def enter(self, kind: Operation, begin: Begin, nbytes: int) -> Completion:
        """Begin an operation now, or later."""
        with self._lock:
            now_ns = self._timer.now_ns()
            may_pass = not any(self._queues.values()) and self._bucket.due_ns(nbytes, now_ns) <= now_ns
            if may_pass:
                self._bucket.take(nbytes, now_ns)
            elif self._is_stopped:
                return Completion.done(_closed())
            else:
                if not any(self._queues.values()):
                    self._since_ns = now_ns
                queued = _Queued(HeldOperation(begin, Completion()), nbytes, now_ns)
                self._queues[kind].append(queued)
                try:
                    self._plan_turn()
                except BaseException:  # there is no thread to be had: it will not begin
                    self._queues[kind].remove(queued)
                    raise
        return begin() if may_pass else queued.operation.outer

    def stop(self) -> None:
        """Let nothing wait any more: what does has failed."""
        with self._lock:
            self._is_stopped = True
            left = [queued for queue in self._queues.values() for queued in queue]
            for queue in self._queues.values():
                queue.clear()
        for queued in left:
            queued.operation.outer.complete(_closed())

    def _first(self) -> deque[_Queued] | None:
        return next((queue for queue in self._queues.values() if queue), None)

    def _plan_turn(self) -> None:
        """Have the timer call when the first may begin.  Under the lock."""
        queue = self._first()
        if queue is None:
            return
        due_ns = self._bucket.due_ns(queue[0].nbytes, self._since_ns)
        if self._next_turn_ns is None or due_ns < self._next_turn_ns:
            self._timer.at(due_ns, functools.partial(self._turn, due_ns))
            self._next_turn_ns = due_ns

    def _turn(self, due_ns: int) -> None:
        """Begin what may begin; the timer calls."""
        with self._lock:
            if self._next_turn_ns != due_ns:
                return  # an earlier call has taken its place: who came later may begin first
            self._next_turn_ns = None
            ready = self._take_ready(self._timer.now_ns())
            self._plan_turn()
        while ready:
            ready.pop(0).go()

    def _take_ready(self, now_ns: int) -> list[HeldOperation]:
        """Return what may begin, and count it.  Under the lock."""
        ready: list[HeldOperation] = []
        while (queue := self._first()) is not None:
            if self._bucket.due_ns(queue[0].nbytes, self._since_ns) > now_ns:
                break
            queued = queue.popleft()
            self._bucket.take(queued.nbytes, now_ns)
            waited_s = self.stats.wait_seconds + (now_ns - queued.came_ns) / _S
            self.stats = replace(self.stats, delayed=self.stats.delayed + 1, wait_seconds=waited_s)
            ready.append(queued.operation)
        return ready


class BandwidthLimited(ForwardingBackend):
    """See the module.  Thread-safe.

    Args:
        backend: what does the work.
        rates: bytes a second: one number for both directions together, or one for reads and one for writes,
            of which one may be ``None``: no limit.
        timer: what the time is, and who waits; tests pass their own.

    Raises:
        ConfigError: the bytes of the backend are used where they lie.
    """

    def __init__(
        self, backend: Backend, rates: int | tuple[int | None, int | None], *, timer: Timer | None = None
    ) -> None:
        require_storage(backend, "a bandwidth limit")
        super().__init__(backend)
        self._timer = timer or CallTimer()
        self._links: dict[Operation, _LimitedLink] = {}
        if isinstance(rates, int):
            self._links = dict.fromkeys(("read", "write"), _LimitedLink(rates, self._timer))
        else:
            for kind, rate in zip(_DIRECTIONS, rates, strict=True):
                if rate is not None:
                    self._links[kind] = _LimitedLink(rate, self._timer)
        # Also when it is forgotten: the thread must not wait for ever.
        weakref.finalize(self, self._timer.abandon).atexit = False

    @property
    def capabilities(self) -> Capabilities:
        """Those of the backend within, but for direct paths."""
        return replace(super().capabilities, has_direct_paths=False, has_waits=True)

    @property
    def stats(self) -> BandwidthStats:
        """What was limited so far."""
        each = [link.stats for link in {id(link): link for link in self._links.values()}.values()]
        return BandwidthStats(
            min(one.limit_bytes_per_s for one in each),
            sum(one.delayed for one in each),
            sum(one.wait_seconds for one in each),
        )

    def operate(self, kind: Operation, begin: Begin, buffers: Sequence[Buffer] = ()) -> Completion:
        """Begin it when its bytes may move."""
        link = self._links.get(kind)
        return begin() if link is None else link.enter(kind, begin, sum(map(len, buffers)))

    def stop_waiting(self) -> None:
        """Fail what waits, at once and from now on."""
        for link in self._links.values():
            link.stop()
        super().stop_waiting()

    def close(self) -> None:
        """Fail what waits, then close the backend within.  Idempotent."""
        for link in self._links.values():
            link.stop()
        self._timer.close()
        super().close()


_DIRECTIONS: Final[tuple[Operation, Operation]] = ("read", "write")
_BOTH, _READ, _WRITE = "max_bandwidth", "max_read_bandwidth", "max_write_bandwidth"


def _closed() -> StoreClosed:
    return StoreClosed("the store was closed while this waited for its share of a tier's bandwidth")


def _rate(value: object) -> int | None:
    return None if value is None else parse_rate(cast("int | str", value))


def _fault(options: Mapping[str, object]) -> tuple[str, str] | None:
    if options.get(_BOTH) is None or (options.get(_READ) is None and options.get(_WRITE) is None):
        return None
    return _BOTH, f"is for both directions together; accepted: that alone, or {_READ} and {_WRITE}"


def _wrap(backend: Backend, options: Mapping[str, object], tier: str) -> BandwidthLimited:
    del tier
    both, read, write = (cast("int | None", options.get(name)) for name in (_BOTH, _READ, _WRITE))
    return BandwidthLimited(backend, (read, write) if both is None else both)


KIND: Final = WrapperKind("bandwidth", dict.fromkeys((_BOTH, _READ, _WRITE), _rate), _fault, _wrap)
"""How a tier's options ask for it."""
