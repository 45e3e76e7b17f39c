"""Ctrl-C at every moment: whatever it interrupts, no bytes are lost, nobody hangs, and the store closes.

CPython raises ``KeyboardInterrupt`` where a function of Python begins, where one of C returns, and where a
loop goes back.  A profiler is called at the first two; here it raises at the n-th of those moments, for
every n until none is left.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TypeVar

import pytest
import torch

import tierstore as ts
from tests.stores import NAMES, memory_backends, numbered
from tierstore.config import StoreConfig, TierConfig
from tierstore.spi import Backend, Buffer, Capabilities, Completion, DoneCallback, Record, Slot
from tierstore.testing.faults import Gate
from tierstore.wrappers.compressed import Compressed
from tierstore_backends.memory import MemoryBackend

ROOT = Path(ts.__file__).parent
OURS = tuple(str(ROOT / part) for part in ("store.py", "leases.py", "spi.py", "engine", "core", "wrappers"))


CAPACITIES = (300, 600, 3000)

T = TypeVar("T")


class InterruptAt:
    """Raises ``KeyboardInterrupt`` at one moment of what our code does here: where a function begins.

    Not where one of C returns: a profile function that raises there makes CPython 3.11 mix up objects
    ("'traceback' object is not callable"), and in the end crash.

    Attributes:
        moment: a description of it; ``None``: it has not come.
    """

    def __init__(self, number: int, *, in_books: bool = False, of: tuple[str, ...] = OURS) -> None:
        self.left = number
        self.of = of
        self.moment: str | None = None
        self.in_books = in_books

    def __enter__(self) -> InterruptAt:
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or not self._is_ours(frame):
            return
        self.left -= 1
        if self.left == 0:
            sys.setprofile(None)
            self.moment = f"{event} {argument} in {' < '.join(_calls(frame))}:{frame.f_lineno}"
            raise KeyboardInterrupt

    def _is_ours(self, frame: FrameType | None) -> bool:
        if frame is None or not frame.f_code.co_filename.startswith(self.of):
            return False
        while frame is not None and frame.f_code.co_qualname != "Ledger.apply":
            swallowed = frame.f_code.co_qualname == "finalize.__call__" or frame.f_code.co_name == "__del__"
            if swallowed:  # CPython does so with what is raised there
                return False
            frame = frame.f_back
        return (frame is not None) == self.in_books


def _calls(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        if frame.f_code.co_filename.startswith(OURS):
            yield frame.f_code.co_qualname
        frame = frame.f_back


class AfterTelling(InterruptAt):
    """Raises ``KeyboardInterrupt`` right after the first outcome was told."""

    def __init__(self) -> None:
        super().__init__(0)

    def _look(self, frame: FrameType, event: str, argument: object) -> None:
        is_telling = event == "c_return" and getattr(argument, "__name__", "") == "extend"
        if is_telling and frame.f_code.co_qualname.startswith("Carrier."):
            sys.setprofile(None)
            raise KeyboardInterrupt


class Elsewhere:
    """A durable backend whose copies, frees and commits are done by a thread of its own, in their order."""

    def __init__(self, backend: MemoryBackend) -> None:
        self.backend = backend
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _later(self, operation: Callable[[], Completion]) -> Completion:
        later = Completion()
        self._jobs.put(lambda: operation().add_done_callback(later.complete))
        return later

    @property
    def capabilities(self) -> Capabilities:
        return self.backend.capabilities

    def reserve(self, nbytes: int) -> Slot:
        return self.backend.reserve(nbytes)

    def read(self, slot: Slot, into: Buffer) -> Completion:
        return self._later(lambda: self.backend.read(slot, into))

    def write(self, slot: Slot, source: Buffer) -> Completion:
        return self._later(lambda: self.backend.write(slot, source))

    def free(self, slot: Slot) -> Completion:
        return self._later(lambda: self.backend.free(slot))

    def recovered(self) -> Sequence[Record]:
        return self.backend.recovered()

    def commit(self, records: Sequence[Record], gone: Collection[str] | None = None) -> Completion:
        return self._later(lambda: self.backend.commit(records, gone))

    def resize(self, capacity_bytes: int) -> None:
        self.backend.resize(capacity_bytes)

    def close(self) -> None:
        self._jobs.put(None)
        self.backend.close()


class Snappish(Elsewhere):
    """A backend whose n-th call is interrupted, before or after it has begun what it was called for."""

    def __init__(self, backend: MemoryBackend, operation: str, *, has_begun: bool) -> None:
        super().__init__(backend)
        self.operation = operation
        self.has_begun = has_begun
        self.is_armed = False

    def _snap(self, operation: str, call: Callable[[], T]) -> T:
        if not self.is_armed or operation != self.operation:
            return call()
        self.is_armed = False
        if self.has_begun:
            call()
        raise KeyboardInterrupt

    def reserve(self, nbytes: int) -> Slot:
        return self._snap("reserve", lambda: super(Snappish, self).reserve(nbytes))

    def read(self, slot: Slot, into: Buffer) -> Completion:
        return self._snap("read", lambda: super(Snappish, self).read(slot, into))

    def write(self, slot: Slot, source: Buffer) -> Completion:
        return self._snap("write", lambda: super(Snappish, self).write(slot, source))

    def free(self, slot: Slot) -> Completion:
        return self._snap("free", lambda: super(Snappish, self).free(slot))

    def commit(self, records: Sequence[Record], gone: Collection[str] | None = None) -> Completion:
        return self._snap("commit", lambda: super(Snappish, self).commit(records, gone))

    def resize(self, capacity_bytes: int) -> None:
        self._snap("resize", lambda: super(Snappish, self).resize(capacity_bytes))


def durable_memory() -> MemoryBackend:
    return MemoryBackend(3000, is_storage=True, is_durable=True)


def memory() -> MemoryBackend:
    return MemoryBackend(3000, is_storage=True)


def packing() -> Compressed:
    """Return a backend with a codec: here its threads do all, as what is moved is moved in batches."""
    return Compressed(memory(), "lz4")


def make_store(disk: Backend) -> ts.Store:
    backends = memory_backends(CAPACITIES)
    backends[2] = disk
    tiers = [TierConfig(*tier) for tier in zip(NAMES, backends, CAPACITIES, strict=True)]
    return ts.Store(StoreConfig(tiers))


def close_soon(store: ts.Store, moment: str = "no interrupt") -> None:
    """Close a store in another thread, which may fail but not hang."""
    errors: list[Exception] = []

    def close() -> None:
        try:
            store.close(flush=False)
        except ts.TierStoreError as error:
            errors.append(error)

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive(), f"close hangs after: {moment}"
    assert not errors


def put(store: ts.Store) -> None:
    store.put("new", numbered(9), tier="device")


def replace(store: ts.Store) -> None:
    store.put("a", numbered(1), tier="host", replace=True)


def get(store: ts.Store) -> None:
    store.get("a")


def lease(store: ts.Store) -> None:
    store.lease("b", "c").release()


def move(store: ts.Store) -> None:
    store.evict("a", "b", to="disk").result()
    store.fetch("a", "b").result()


def flush(store: ts.Store) -> None:
    store.flush()


def drop(store: ts.Store) -> None:
    store.drop("gone")


def fetch(store: ts.Store) -> None:
    store.fetch("gone", tier="host").result()


def evict(store: ts.Store) -> None:
    store.evict("a", to="disk").result()


def shrink(store: ts.Store) -> None:
    store.resize("disk", 2900)


def resize(store: ts.Store) -> None:
    store.resize("host", 400)
    store.resize("host", 600)


STEPS: list[Callable[[ts.Store], None]] = [put, replace, get, lease, move, flush, drop, resize]
KEPT = {"a": numbered(1), "b": numbered(2), "c": numbered(3)}


def filled_store(disk: Backend) -> ts.Store:
    store = make_store(disk)
    for key, tensor in KEPT.items():
        store.put(key, tensor, tier="host")
    store.put("gone", numbered(4), tier="disk")
    return store


def moments(
    step: Callable[[ts.Store], None], disk: Callable[[], Backend], *, in_books: bool = False
) -> Iterator[tuple[ts.Store, str]]:
    """Do a step with stores of their own, each interrupted at a later moment; stop when none is left."""
    for number in itertools.count(1):
        store = filled_store(disk())
        interrupted = InterruptAt(number, in_books=in_books)
        try:
            with interrupted:
                step(store)
        except KeyboardInterrupt:
            pass
        if interrupted.moment is None:
            close_soon(store)
            return
        yield store, interrupted.moment
        close_soon(store, interrupted.moment)


def check_that_all_is_well(store: ts.Store, moment: str) -> None:
    """Nothing is lost, and nothing is leased, read or written for ever."""
    try:
        store.check()
        for key, tensor in KEPT.items():
            assert torch.equal(store.get(key), tensor)
        for key in KEPT:
            store.put(key, numbered(7), replace=True)
        with store.lease(*KEPT, tier="host", write=True):
            store.check()
    except Exception as error:
        raise AssertionError(f"after an interrupt at: {moment}") from error


@pytest.mark.parametrize(
    "disk", [memory, lambda: Elsewhere(memory()), packing], ids=["now", "later", "codec"]
)
@pytest.mark.parametrize("step", [step for step in STEPS if step is not flush])
def test_an_interrupt_outside_the_books_loses_no_bytes_and_hangs_nobody(
    step: Callable[[ts.Store], None], disk: Callable[[], Backend]
) -> None:
    count = 0
    for store, moment in moments(step, disk):
        count += 1
        assert not store._engine.is_closed, moment
        check_that_all_is_well(store, moment)
    assert count > 10


def test_an_interrupt_costs_nothing_of_what_a_codec_packs() -> None:
    capacity = 64 * 1024
    text = torch.arange(20_000, dtype=torch.int32).view(torch.uint8)[:20_000]
    count = 0
    for number in itertools.count(1):
        disk = Compressed(MemoryBackend(capacity, is_storage=True), "lz4", chunk_bytes=8192)
        tiers = [TierConfig("host", MemoryBackend(capacity), capacity), TierConfig("disk", disk, capacity)]
        store = ts.Store(StoreConfig(tiers))
        store.put("a", text, tier="host")
        interrupted = InterruptAt(number)
        with contextlib.suppress(KeyboardInterrupt), interrupted:
            store.evict("a").result()
            store.fetch("a", tier="host").result()
        moment = interrupted.moment or "no interrupt"
        assert torch.equal(store.get("a"), text), moment
        store.check()
        close_soon(store, moment)
        if interrupted.moment is None:
            assert disk.codec_stats.packed_tensors == 1
            break
        count += 1
    assert count > 50


def test_a_lease_whose_release_is_interrupted_is_held_no_more() -> None:
    for number in itertools.count(2):  # the first moment is before anything of ours runs
        store = filled_store(memory())
        lease = store.lease("b", "c", write=True)
        interrupted = InterruptAt(number)
        try:
            with interrupted:
                lease.__exit__(None, None, None)
        except KeyboardInterrupt:
            pass
        store.drop("b", "c")  # at once: what was told before is not overtaken
        store.check()
        close_soon(store, interrupted.moment or "")
        if interrupted.moment is None:
            break
    assert number > 20


def test_an_interrupt_during_a_flush_stops_the_store_at_most_where_its_commit_begins() -> None:
    stopped: list[str] = []
    for store, moment in moments(flush, durable_memory):
        if store._engine.is_closed:
            stopped.append(moment)
        else:
            check_that_all_is_well(store, moment)
    assert all("commit" in moment for moment in stopped), stopped


@pytest.mark.parametrize("step", STEPS)
def test_an_interrupt_in_the_books_stops_the_store_and_hangs_nobody(step: Callable[[ts.Store], None]) -> None:
    count = 0
    for store, moment in moments(step, durable_memory, in_books=True):
        count += 1
        if not store._engine.is_closed:  # it was just about to be over
            check_that_all_is_well(store, moment)
            continue
        with pytest.raises(ts.StoreClosed, match="KeyboardInterrupt came while its books were being changed"):
            store.get("a")
    assert count > 10


@pytest.mark.parametrize("has_begun", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("operation", "step"),
    [("reserve", move), ("write", move), ("read", fetch), ("free", drop), ("resize", shrink)],
)
def test_an_interrupt_in_a_backends_call_costs_that_operation_only(
    operation: str, step: Callable[[ts.Store], None], has_begun: bool
) -> None:
    disk = Snappish(memory(), operation, has_begun=has_begun)
    store = filled_store(disk)
    disk.is_armed = True
    with pytest.raises(KeyboardInterrupt):
        step(store)
    check_that_all_is_well(store, operation)
    close_soon(store)


@pytest.mark.parametrize("has_begun", [False, True], ids=["before", "after"])
def test_an_interrupt_where_a_commit_begins_stops_the_store(has_begun: bool) -> None:
    disk = Snappish(durable_memory(), "commit", has_begun=has_begun)
    store = filled_store(disk)
    store.evict(*KEPT, to="disk").result(10)  # so that the flush begins its commit in this thread
    disk.is_armed = True
    with pytest.raises(KeyboardInterrupt):
        store.flush()
    with pytest.raises(ts.StoreClosed, match="KeyboardInterrupt came while a commit was being begun"):
        store.flush()
    close_soon(store)


def test_room_that_an_interrupted_copy_may_still_touch_is_never_used_again() -> None:
    disk = Snappish(memory(), "write", has_begun=True)
    store = filled_store(disk)
    former = store.stats().tiers["disk"].charged_bytes
    disk.is_armed = True
    with pytest.raises(KeyboardInterrupt):
        store.evict("a", to="disk")
    assert store.stats().tiers["disk"].charged_bytes == former + 100
    store.evict("a", to="disk").result(10)
    assert store.stats().tiers["disk"].charged_bytes == former + 200
    assert torch.equal(store.get("a"), numbered(1))
    close_soon(store)


class Clinging(Completion):
    """Interrupts whoever wants to be told of its end, who will be told all the same."""

    def add_done_callback(self, callback: DoneCallback) -> None:
        super().add_done_callback(callback)
        raise KeyboardInterrupt


class Late(Snappish):
    """A backend whose n-th call returns well, and is interrupted next; it ends when the gate is opened."""

    def __init__(self, backend: MemoryBackend, operation: str, gate: threading.Event) -> None:
        super().__init__(backend, operation, has_begun=True)
        self._gate = gate
        self.has_ended = threading.Event()

    def _later(self, operation: Callable[[], Completion]) -> Completion:
        if not self.is_armed:
            return super()._later(operation)
        self.is_armed = False
        end = Clinging()
        self._jobs.put(lambda: self._end_when_let(operation, end))
        return end

    def _end_when_let(self, operation: Callable[[], Completion], end: Completion) -> None:
        self._gate.wait(30)
        operation()
        end.complete()
        self.has_ended.set()

    def _snap(self, operation: str, call: Callable[[], T]) -> T:
        was_armed, self.is_armed = self.is_armed, self.is_armed and operation == self.operation
        try:
            return call()
        finally:
            self.is_armed = was_armed and operation != self.operation


@pytest.mark.parametrize(("operation", "step"), [("write", evict), ("read", fetch), ("free", drop)])
def test_what_was_given_up_and_ends_later_all_the_same_costs_nothing_more(
    operation: str, step: Callable[[ts.Store], None]
) -> None:
    gate = threading.Event()
    disk = Late(memory(), operation, gate)
    store = filled_store(disk)
    disk.is_armed = True
    with pytest.raises(KeyboardInterrupt):
        step(store)
    assert not disk.has_ended.is_set()
    gate.set()
    assert disk.has_ended.wait(30)
    check_that_all_is_well(store, operation)
    close_soon(store)


def test_a_commit_that_ends_after_it_has_stopped_the_store_hangs_nobody() -> None:
    gate = threading.Event()
    disk = Late(durable_memory(), "commit", gate)
    store = filled_store(disk)
    store.evict(*KEPT, to="disk").result(10)
    disk.is_armed = True
    with pytest.raises(KeyboardInterrupt):
        store.flush()
    gate.set()
    assert disk.has_ended.wait(30)
    with pytest.raises(ts.StoreClosed, match="while a commit was being begun"):
        store.get("a")
    close_soon(store)


def test_an_operation_whose_outcome_is_told_is_not_given_up() -> None:
    store = filled_store(memory())
    former = store.stats().tiers["disk"].charged_bytes
    with pytest.raises(KeyboardInterrupt), AfterTelling():
        store.evict("a", to="disk")
    store.evict("a", to="disk").result(10)
    store.drop("a")
    assert store.stats().tiers["disk"].charged_bytes == former
    close_soon(store)


def test_whoever_waits_is_told_what_an_interrupt_has_stopped() -> None:
    gate = Gate(durable_memory())
    gate.open()
    store = filled_store(gate)
    gate.shut()
    waiting = store.evict("a", to="disk")
    with pytest.raises(KeyboardInterrupt), InterruptAt(2, in_books=True):
        store.drop("b")
    with pytest.raises(ts.StoreClosed, match="KeyboardInterrupt"):
        waiting.result(10)
    gate.open()
    close_soon(store)
