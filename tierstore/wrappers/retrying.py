"""A backend whose operations are tried again where they failed for a reason that may pass.

Rule 1: what may pass, the backend says: a `BackendError` with ``transient``, or an ``OSError`` whose errno is
among `tierstore.errors.TRANSIENT_ERRNOS`.  Corruption, a full medium and wrong calls never do.
Rule 2: an operation is tried at most so many times more, each after twice the time, up to `LONGEST_WAIT_S`;
by chance up to a half of it earlier, so that what failed together does not come back together.
Rule 3: whoever asked sees one operation: until its end, slots and buffers are the backend's as ever, and a
slot or a commit is in one try at a time.  Trying again changes nothing but what the operation was to change,
for a slot or a commit that failed may be written or said again (`tierstore.spi`).  Of a batch, only the slots
that failed so are tried again, and of parts only those parts.
Rule 4: nothing blocks.  What waits for its next try ends at once, with the error that it has, when the store
closes.

Not tried again: ``reserve``, which returns at once, and ``resize``, whose caller is told of an error at once;
``recovered`` and ``close``, which happen once; and what moves a device's memory straight, as that has to
begin in the caller's thread.
"""

from __future__ import annotations

import functools
import logging
import random
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

from tierstore.config import checks
from tierstore.errors import TRANSIENT_ERRNOS, BackendError, ConfigError, IntegrityError
from tierstore.spi import Backend, Buffer, Capabilities, Completion, PartialError, Record, Slot
from tierstore.wrappers.fan_in import Errors, as_one, each_error, when_all
from tierstore.wrappers.forwarding import ForwardingBackend, Operation, attempt
from tierstore.wrappers.kinds import WrapperKind, require_storage
from tierstore.wrappers.timing import CallTimer, Timer

FIRST_WAIT_S: Final = 0.1
"""Before the first retry, if nobody says otherwise."""

LONGEST_WAIT_S: Final = 10.0
"""Between any two tries."""

MOST_RETRIES: Final = 100

BeginSome = Callable[[Sequence[int]], Completion]
"""Has the backend within begin an operation for the slots at some positions."""

_log = logging.getLogger("tierstore")


@dataclass(frozen=True, slots=True)
class RetryStats:
    """What was tried again since the store was opened.

    Attributes:
        retries: tries after the first.
        recovered: operations that worked in one of them.
        given_up: operations that failed in all of them, or in one for a reason that does not pass.
    """

    retries: int = 0
    recovered: int = 0
    given_up: int = 0


def is_transient(error: BaseException) -> bool:
    """Whether what failed with ``error`` may work when it is tried again."""
    if isinstance(error, BackendError):
        return error.transient and not isinstance(error, IntegrityError)
    return isinstance(error, OSError) and (
        error.errno in TRANSIENT_ERRNOS or isinstance(error, TimeoutError | ConnectionError)
    )


class Retrying(ForwardingBackend):
    """See the module.  Thread-safe.

    Args:
        backend: what does the work.
        retries: how often an operation is tried again.
        first_wait_s: how long at most before the first of these.
        tier: whose backend it is, for messages.
        timer: what the time is, and who waits; tests pass their own.
        chance: returns a number from 0 to 1.

    Raises:
        ConfigError: the bytes of the backend are used where they lie.
    """

    def __init__(
        self,
        backend: Backend,
        retries: int,
        *,
        first_wait_s: float = FIRST_WAIT_S,
        tier: str = "",
        timer: Timer | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        require_storage(backend, "retries")
        super().__init__(backend)
        self.retries = retries
        self._first_wait_s = first_wait_s
        self._tier = tier
        self._timer = timer or CallTimer()
        self._chance = chance
        self._lock = threading.Lock()  # guards the next three
        self._waiting: set[_RetriedOperation] = set()
        self._is_stopped = False
        self._stats = RetryStats()
        # Also when it is forgotten: the thread must not wait for ever.
        weakref.finalize(self, self._timer.abandon).atexit = False

    @property
    def capabilities(self) -> Capabilities:
        """Those of the backend within."""
        return replace(super().capabilities, has_waits=True)

    @property
    def stats(self) -> RetryStats:
        """What was tried again so far."""
        return self._stats

    def read(self, slot: Slot, into: Buffer) -> Completion:
        """See `tierstore.spi.Backend`."""
        return self._try("read", lambda _: self.within.read(slot, into), [into])

    def write(self, slot: Slot, source: Buffer) -> Completion:
        """See `tierstore.spi.Backend`."""
        return self._try("write", lambda _: self.within.write(slot, source), [source])

    def read_many(self, slots: Sequence[Slot], into: Sequence[Buffer]) -> Completion:
        """See `tierstore.spi.BatchBackend`."""
        return self._try("read", _some(self.within.read_many, slots, into), into, batch=len(slots))

    def write_many(self, slots: Sequence[Slot], sources: Sequence[Buffer]) -> Completion:
        """See `tierstore.spi.BatchBackend`."""
        return self._try("write", _some(self.within.write_many, slots, sources), sources, batch=len(slots))

    def read_parts(
        self, slots: Sequence[Slot], begins: Sequence[int], nbytes: int, into: Buffer
    ) -> Completion:
        """See `tierstore.spi.PartBackend`."""
        begin = functools.partial(_begin_parts, self.within.read_parts, slots, begins, nbytes, into)
        return self._try("read", begin, [into], batch=len(begins))

    def free(self, slot: Slot) -> Completion:
        """See `tierstore.spi.Backend`."""
        return self._try("free", lambda _: self.within.free(slot))

    def commit(self, records: Sequence[Record], gone: Collection[str] | None = None) -> Completion:
        """See `tierstore.spi.DurableBackend`."""
        return self._try("commit", lambda _: self.within.commit(records, gone))

    def stop_waiting(self) -> None:
        """Try nothing again from now on; what waits for that has failed."""
        self._stop()
        super().stop_waiting()

    def close(self) -> None:
        """Try nothing again, and close the backend within.  Idempotent."""
        self._stop()
        super().close()  # what is under way there ends, and is not tried again
        self._timer.close()

    def _try(
        self, kind: Operation, begin: BeginSome, buffers: Sequence[Buffer] = (), *, batch: int | None = None
    ) -> Completion:
        positions = range(1 if batch is None else batch)
        if not positions or not all(buffer.is_cpu for buffer in buffers):
            return begin(positions)
        operation = _RetriedOperation(self, kind, begin, positions, is_batch=batch is not None)
        try:
            first = begin(positions)
        except Exception as error:
            if not is_transient(error):
                raise
            first = Completion.done(error)
        if first.is_done and first.error is None:
            return first
        first.add_done_callback(operation.note)
        return operation.outer

    def wait_for_retry(self, operation: _RetriedOperation, error: BaseException) -> bool:
        """Have an operation go on later; return whether somebody else sees to it from now on."""
        wait_s = min(self._first_wait_s * 2.0 ** (operation.tries - 1), LONGEST_WAIT_S)
        wait_s *= 1 - self._chance() / 2
        with self._lock:
            if self._is_stopped or operation.tries > self.retries:
                return False
            self._waiting.add(operation)
            is_first = len(self._waiting) == 1
        # One line says that there is trouble: a medium that is away for a while fails a lot at a time.
        _log.log(
            logging.WARNING if is_first else logging.DEBUG,
            "tier %r: a %s failed and is tried again in %.2f s (%d of %d): %s",
            self._tier, operation.kind, wait_s, operation.tries, self.retries, error,
        )  # fmt: skip
        try:
            self._timer.at(self._timer.now_ns() + int(wait_s * 1e9), lambda: self._go_on(operation))
        except Exception:  # noqa: BLE001 - closed meanwhile, or no thread is to be had: it ends with its error
            with self._lock:
                has_ended = operation not in self._waiting  # who stops the others came first
                self._waiting.discard(operation)
            return has_ended
        return True

    def count(self, operation: _RetriedOperation, *, has_worked: bool) -> None:
        """Count the end of an operation that was tried again."""
        with self._lock:
            stats = self._stats
            self._stats = replace(
                stats, recovered=stats.recovered + has_worked, given_up=stats.given_up + (not has_worked)
            )
        if not has_worked:
            _log.warning("tier %r: a %s failed in %d tries", self._tier, operation.kind, operation.tries)

    def _go_on(self, operation: _RetriedOperation) -> None:
        with self._lock:
            if operation not in self._waiting:
                return  # it was told meanwhile that there is no further try
            self._waiting.remove(operation)
            self._stats = replace(self._stats, retries=self._stats.retries + 1)
        operation.go()

    def _stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            waiting, self._waiting = self._waiting, set()
        for operation in waiting:
            operation.finish()


class _RetriedOperation:
    """One operation until it has worked, or has failed for good.  In one thread at a time.

    Attributes:
        kind: which.
        outer: what whoever asked was given.
        tries: how many there were.
    """

    __slots__ = ("_begin", "_errors", "_is_batch", "_left", "_retrying", "kind", "outer", "tries")

    def __init__(
        self, retrying: Retrying, kind: Operation, begin: BeginSome, left: Sequence[int], *, is_batch: bool
    ) -> None:
        self._retrying = retrying
        self._begin: BeginSome | None = begin  # until the end: it refers to the buffers
        self._left = left  # positions that the current try is about
        self._errors: dict[int, BaseException] = {}
        self._is_batch = is_batch
        self.kind = kind
        self.outer = Completion()
        self.tries = 1

    def go(self) -> None:
        """Try again."""
        self.tries += 1
        begin, left = self._begin, self._left
        assert begin is not None  # it has not ended
        attempt(lambda: begin(left)).add_done_callback(self.note)

    def note(self, error: BaseException | None) -> None:
        """Look at what a try came to."""
        again: list[int] = []
        for position, each in zip(self._left, each_error(error, len(self._left)), strict=True):
            self._errors.pop(position, None)
            if each is not None:
                self._errors[position] = each
                if is_transient(each):
                    again.append(position)
        self._left = again
        if not again or not self._retrying.wait_for_retry(self, self._errors[again[0]]):
            self.finish()

    def finish(self) -> None:
        """Tell whoever asked."""
        self._begin = None
        if self.tries > 1:
            self._retrying.count(self, has_worked=not self._errors)
            for position in self._left:
                self._errors[position] = _given_up(self._errors[position], self.tries)
        errors, self._errors = self._errors, {}
        if self._is_batch:
            self.outer.complete(PartialError(errors) if errors else None)
        else:
            self.outer.complete(errors.get(0))


def _given_up(error: BaseException, tries: int) -> BackendError:
    final = BackendError(f"{error} (tried {tries} times)", transient=True)
    final.__cause__ = error
    return final


def _some(
    move: Callable[[Sequence[Slot], Sequence[Buffer]], Completion],
    slots: Sequence[Slot],
    buffers: Sequence[Buffer],
) -> BeginSome:
    """Return what moves some slots of a batch."""
    return lambda left: move([slots[i] for i in left], [buffers[i] for i in left])


def _begin_parts(
    move: Callable[[Sequence[Slot], Sequence[int], int, Buffer], Completion],
    slots: Sequence[Slot],
    begins: Sequence[int],
    nbytes: int,
    into: Buffer,
    left: Sequence[int],
) -> Completion:
    """Read the parts at some positions: each run of neighbours in one call, as those have one buffer."""
    if len(left) == len(begins):
        return move(slots, begins, nbytes, into)
    runs = list(_runs(left))
    operations = [
        attempt(
            functools.partial(
                move, slots[start:stop], begins[start:stop], nbytes, into[start * nbytes : stop * nbytes]
            )
        )
        for start, stop in runs
    ]
    whole = Completion()

    def end(errors: Errors) -> None:
        each = [
            one
            for error, (start, stop) in zip(errors, runs, strict=True)
            for one in each_error(error, stop - start)
        ]
        whole.complete(as_one(each))

    when_all(operations, end)
    return whole


def _runs(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges that ascending positions are made of: the first, and one past the last."""
    start = stop = positions[0]
    for position in positions:
        if position > stop:
            yield start, stop
            start = position
        stop = position + 1
    yield start, stop


def _retries(value: object) -> int | None:
    if value is None:
        return None
    number = checks.whole(value)
    if number is None or not 0 <= number <= MOST_RETRIES:
        raise ConfigError(f"accepted: an int from 0 to {MOST_RETRIES}, or None")
    return number


def _wait_s(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LONGEST_WAIT_S:
        raise ConfigError(f"accepted: seconds, more than 0 and at most {LONGEST_WAIT_S}, or None")
    return float(value)


def _fault(options: Mapping[str, object]) -> tuple[str, str] | None:
    if options.get("retry_wait_s") is None or options.get("retries"):
        return None
    return "retry_wait_s", "means nothing without retries; accepted: both, or neither"


def _wrap(backend: Backend, options: Mapping[str, object], tier: str) -> Retrying:
    wait_s = cast("float | None", options.get("retry_wait_s"))
    return Retrying(backend, cast("int", options["retries"]), first_wait_s=wait_s or FIRST_WAIT_S, tier=tier)


KIND: Final = WrapperKind("retries", {"retries": _retries, "retry_wait_s": _wait_s}, _fault, _wrap)
"""How a tier's options ask for it."""
