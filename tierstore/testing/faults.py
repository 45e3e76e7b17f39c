"""Failures, delays and standstills on demand: backends around a backend, for tests.

* `Faulty` fails the operations that it is told to fail, so that a test can walk through all of them.
* `Gate` lets copies stand still until the test opens it or lets one through: what happens *while* a
  copy is under way becomes a line in a test.
* `Slow` does everything at once and says so late, by a schedule that counts operations, not seconds.

They pass on whatever else the backend can do, know nothing of keys or tiers, and never sleep.  They may be
nested.  A batch is one operation; see `tierstore.testing.batching` for one of as many as it has slots.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Collection, Iterable, Sequence

from tierstore.errors import BackendError
from tierstore.spi import Backend, Buffer, Completion, Slot
from tierstore.wrappers.forwarding import Begin, ForwardingBackend, HeldOperation, Operation

__all__ = ["Faulty", "Gate", "Operation", "Slow", "from_nth_on"]

_RUBBISH = 0xA5  # what a failed read leaves in the buffer: nobody may use it


def from_nth_on(first: int) -> Collection[int]:
    """Return the numbers from ``first`` on: ``fail_at`` of a medium that dies and stays dead."""
    return range(first, sys.maxsize)


class Faulty(ForwardingBackend):
    """A backend whose n-th operation fails.

    Operations are counted from 1 over the kinds in ``on``.  A failed ``reserve`` raises; a failed
    ``read`` completes with the error and leaves rubbish in the buffer; a failed ``write`` or
    ``free`` completes with the error and has done nothing.

    Args:
        backend: what does the work.
        fail_at: the number of the operation that fails, or several; `from_nth_on` for all later ones.
        error: what it fails with; a `BackendError` that is not transient if ``None``.
        on: the kinds that count and may fail.  Frees succeed unless they are named.

    Attributes:
        operations: how many operations were counted.
        failures: how many failed.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        fail_at: int | Collection[int] = (),
        error: Exception | None = None,
        on: Collection[Operation] = ("reserve", "read", "write"),
    ) -> None:
        super().__init__(backend)
        self._fail_at: Collection[int] = (fail_at,) if isinstance(fail_at, int) else fail_at
        self._error = error
        self._on = frozenset(on)
        self._lock = threading.Lock()
        self.operations = 0  # guarded by _lock, as are the next and _fail_at
        self.failures = 0

    def reserve(self, nbytes: int) -> Slot:
        """Take room, or raise if this operation is to fail."""
        error = self._draw("reserve")
        if error is not None:
            raise error
        return super().reserve(nbytes)

    def operate(self, kind: Operation, begin: Begin, buffers: Sequence[Buffer] = ()) -> Completion:
        """Begin it, or fail; a read that fails leaves rubbish."""
        error = self._draw(kind)
        if error is None:
            return begin()
        for buffer in buffers if kind == "read" else ():
            buffer.fill_(_RUBBISH)
        return Completion.done(error)

    def fail_next(self, after: int = 1) -> None:
        """Let the operation fail that comes ``after`` (1: next) those counted so far, and no other."""
        with self._lock:
            self._fail_at = (self.operations + after,)

    def heal(self) -> None:
        """Let nothing fail from now on."""
        with self._lock:
            self._fail_at = ()

    def _draw(self, kind: Operation) -> Exception | None:
        """Count one operation; return what it fails with, if it does."""
        if kind not in self._on:
            return None
        with self._lock:
            self.operations += 1
            number = self.operations
            if number not in self._fail_at:
                return None
            self.failures += 1
        return self._error or BackendError(f"operation {number}, a {kind}, fails because a test says so")


class Gate(ForwardingBackend):
    """A backend whose operations stand still until the gate opens.  Thread-safe.

    A held operation has not begun: no byte has moved and no slot was given back.

    Args:
        backend: what does the work.
        holds: the kinds that stand still; ``free`` passes unless it is named.

    Attributes:
        reads: how many reads were asked for, held ones included; ``writes`` and ``frees`` likewise.
    """

    def __init__(self, backend: Backend, *, holds: Collection[Operation] = ("read", "write")) -> None:
        super().__init__(backend)
        self._holds = frozenset(holds)
        self._changed = threading.Condition()
        self._held: list[HeldOperation] = []  # guarded by _changed, as is all below
        self._is_open = False
        self.reads = 0
        self.writes = 0
        self.frees = 0

    @property
    def held(self) -> int:
        """How many operations stand still now."""
        return len(self._held)

    def operate(self, kind: Operation, begin: Begin, buffers: Sequence[Buffer] = ()) -> Completion:
        """Begin it, when let through."""
        del buffers
        # Not stream-ordered, whatever the wrapped backend says: a held copy has not been queued.
        operation = HeldOperation(begin, Completion())
        with self._changed:
            self.reads += kind == "read"
            self.writes += kind == "write"
            self.frees += kind == "free"
            if kind in self._holds and not self._is_open:
                self._held.append(operation)
                self._changed.notify_all()
                return operation.outer
        return begin()

    def open(self) -> None:
        """Let everything through, in the order it came, and hold nothing from now on."""
        with self._changed:
            self._is_open = True
            held, self._held = self._held, []
        for operation in held:
            operation.go()

    def shut(self) -> None:
        """Hold again what comes from now on."""
        with self._changed:
            self._is_open = False

    def step(self, index: int = 0) -> None:
        """Let one held operation through: the oldest, or the one at ``index`` in order of arrival.

        Raises:
            IndexError: there is none.
        """
        with self._changed:
            operation = self._held.pop(index)
        operation.go()

    def wait_until_held(self, count: int = 1, *, timeout_s: float = 30.0) -> None:
        """Block until at least ``count`` operations stand still.

        Raises:
            TimeoutError: they did not come.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._held) >= count, timeout_s):
                raise TimeoutError(f"{len(self._held)} operations are held after {timeout_s} s, not {count}")

    def close(self) -> None:
        """Let everything through, then close the wrapped backend."""
        self.open()
        super().close()


class Slow(ForwardingBackend):
    """A backend that does everything at once and says so late.  Thread-safe.

    Time is a counter of operations: each ``read``, ``write``, ``free`` and ``commit`` is one tick, and its
    completion is delivered ``delay`` ticks after it really ended, in the thread that makes the tick.
    Completions so overtake each other.  A test that blocks on one must `advance` in another thread.

    Args:
        backend: what does the work.
        delays: the delays of the operations, in ticks; repeated without end.
        on: the kinds that are late.
    """

    def __init__(
        self,
        backend: Backend,
        delays: Iterable[int] = (1,),
        *,
        on: Collection[Operation] = ("read", "write", "free", "commit"),
    ) -> None:
        super().__init__(backend)
        self._delays = itertools.cycle(delays)
        self._on = frozenset(on)
        self._lock = threading.Lock()
        self._now = 0  # guarded by _lock, as is the next
        self._late: list[tuple[int, Completion, BaseException | None]] = []

    @property
    def pending(self) -> int:
        """How many operations have ended without anybody being told."""
        return len(self._late)

    def operate(self, kind: Operation, begin: Begin, buffers: Sequence[Buffer] = ()) -> Completion:
        """Begin it; complete late."""
        del buffers
        inner = begin()
        if kind not in self._on:
            self.advance()
            return inner
        outer = Completion(is_stream_ordered=inner.is_stream_ordered)
        delay = next(self._delays)

        def ended(error: BaseException | None) -> None:
            with self._lock:
                if delay > 0:
                    self._late.append((self._now + delay, outer, error))
                    return
            outer.complete(error)

        self.advance()
        inner.add_done_callback(ended)
        return outer

    def advance(self, ticks: int = 1) -> None:
        """Let ``ticks`` pass and deliver what is due."""
        with self._lock:
            self._now += ticks
            now = self._now
            due = [late for late in self._late if late[0] <= now]
            self._late = [late for late in self._late if late[0] > now]
        for _, outer, error in sorted(due, key=lambda late: late[0]):
            outer.complete(error)

    def drain(self) -> None:
        """Deliver everything that has ended, however late it was to be."""
        while self.pending:
            with self._lock:
                ticks = max((late[0] - self._now for late in self._late), default=0)
            self.advance(max(ticks, 0))

    def close(self) -> None:
        """Close the wrapped backend and deliver everything."""
        super().close()
        self.drain()
