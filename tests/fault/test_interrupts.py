"""Interrupts at every moment: no bytes are lost, nobody hangs, and the store goes on.

Here they come from a profile function, which is called where a function of Python begins, and raises at the
n-th of those moments, for every n until none is left; and from backends.  For signals see `test_signals`.
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
from tierstore.codec.compressed import Compressed
from tierstore.config import StoreConfig, TierConfig
from tierstore.core import messages as m
from tierstore.core.ledger import Ledger
from tierstore.errors import BackendError
from tierstore.spi import Backend, Buffer, Capabilities, Completion, Record, Slot
from tierstore.testing.faults import Faulty, Gate
from tierstore.wrappers.bandwidth import BandwidthLimited
from tierstore.wrappers.retrying import Retrying
from tierstore_backends.memory import MemoryBackend

ROOT = Path(ts.__file__).parent
OURS = tuple(
    str(ROOT / part)
    for part in ("store.py", "leases.py", "part_reader.py", "spi.py", "engine", "core", "codec", "wrappers")
)


CAPACITIES = (300, 600, 3000)

T = TypeVar("T")


class InterruptAt:
    """Raises ``KeyboardInterrupt`` at one moment of what our code does here: where a function begins.

    Not where one of C returns: a profile function that raises there makes CPython 3.11 mix up objects
    ("'traceback' object is not callable"), and in the end crash.

    Attributes:
        moment: a description of it; ``None``: it has not come.
    """

    def __init__(self, number: int, *, of: tuple[str, ...] = OURS) -> None:
        self.left = number
        self.of = of
        self.moment: str | None = None

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
        while frame is not None:
            swallowed = frame.f_code.co_qualname == "finalize.__call__" or frame.f_code.co_name == "__del__"
            if swallowed:  # CPython does so with what is raised there
                return False
            frame = frame.f_back
        return True


def _calls(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        if frame.f_code.co_filename.startswith(OURS):
            yield frame.f_code.co_qualname
        frame = frame.f_back


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

    def read_parts(
        self, slots: Sequence[Slot], begins: Sequence[int], nbytes: int, into: Buffer
    ) -> Completion:
        return self._later(lambda: self.backend.read_parts(slots, begins, nbytes, into))

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
    """A backend of which one call raises what is no `Exception`, and begins nothing."""

    def __init__(self, backend: MemoryBackend, operation: str) -> None:
        super().__init__(backend)
        self.operation = operation
        self.is_armed = False

    def _snap(self, operation: str, call: Callable[[], T]) -> T:
        if not self.is_armed or operation != self.operation:
            return call()
        self.is_armed = False
        raise KeyboardInterrupt

    def reserve(self, nbytes: int) -> Slot:
        return self._snap("reserve", lambda: super(Snappish, self).reserve(nbytes))

    def read(self, slot: Slot, into: Buffer) -> Completion:
        return self._snap("read", lambda: super(Snappish, self).read(slot, into))

    def read_parts(
        self, slots: Sequence[Slot], begins: Sequence[int], nbytes: int, into: Buffer
    ) -> Completion:
        return self._snap("parts", lambda: super(Snappish, self).read_parts(slots, begins, nbytes, into))

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


def trying_again() -> Backend:
    """Return a backend of which every third operation fails and is tried again, within a bandwidth."""
    away = BackendError("away for a moment", transient=True)
    faulty = Faulty(memory(), error=away, on=["read", "write", "free"], fail_at=range(3, 10**6, 3))
    return Retrying(BandwidthLimited(faulty, 10**6), 30, first_wait_s=1e-6)


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
    with store.lease("b", "c"):
        pass


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


def read_parts(store: ts.Store) -> None:
    reader = store.reader()
    into = torch.zeros(4, 10, dtype=torch.uint8)
    try:
        reader.add("a", "gone")  # of which one has to be brought
        reader.read([("a", 3), ("gone", 0), ("a", 7), ("gone", 90)], into).result()
        reader.remove("a")
        reader.read([("gone", number) for number in range(4)], into).result()
    finally:
        reader.close()
        store._engine.part_reads.wait()  # what is under way holds its keys until then


STEPS: list[Callable[[ts.Store], None]] = [
    put,
    replace,
    get,
    lease,
    move,
    flush,
    drop,
    resize,
    read_parts,
]
KEPT = {"a": numbered(1), "b": numbered(2), "c": numbered(3)}


def filled_store(disk: Backend) -> ts.Store:
    store = make_store(disk)
    for key, tensor in KEPT.items():
        store.put(key, tensor, tier="host")
    store.put("gone", numbered(4), tier="disk")
    return store


def moments(step: Callable[[ts.Store], None], disk: Callable[[], Backend]) -> Iterator[tuple[ts.Store, str]]:
    """Do a step with stores of their own, each interrupted at a later moment; stop when none is left."""
    for number in itertools.count(1):
        store = filled_store(disk())
        interrupted = InterruptAt(number)
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
    "disk",
    [memory, lambda: Elsewhere(memory()), packing, trying_again],
    ids=["now", "later", "codec", "retries"],
)
@pytest.mark.parametrize("step", [step for step in STEPS if step is not flush])
def test_an_interrupt_loses_no_bytes_and_hangs_nobody(
    step: Callable[[ts.Store], None], disk: Callable[[], Backend]
) -> None:
    count = 0
    for store, moment in moments(step, disk):
        count += 1
        assert not store._engine.is_closed, moment
        check_that_all_is_well(store, moment)
    assert count > 3


@pytest.mark.parametrize(
    "disk", [memory, lambda: Elsewhere(memory()), packing], ids=["now", "later", "codec"]
)
def test_an_interrupt_leaves_nothing_held_by_a_reader_that_was_closed(disk: Callable[[], Backend]) -> None:
    count = 0
    for store, moment in moments(read_parts, disk):
        count += 1
        assert [tier.leased_bytes for tier in store.stats().tiers.values()] == [0, 0, 0], moment
    assert count > 10


@pytest.mark.parametrize(
    ("operation", "step"),
    [
        ("reserve", move),
        ("write", move),
        ("read", fetch),
        ("free", drop),
        ("resize", shrink),
        ("parts", read_parts),
    ],
)
def test_what_a_backend_raises_that_is_no_error_costs_that_operation_only(
    operation: str, step: Callable[[ts.Store], None]
) -> None:
    disk = Snappish(memory(), operation)
    store = filled_store(disk)
    disk.is_armed = True
    with contextlib.suppress(BackendError):
        step(store)
    assert not disk.is_armed
    check_that_all_is_well(store, operation)
    close_soon(store)


def test_a_commit_that_raises_what_is_no_error_is_a_flush_that_failed() -> None:
    disk = Snappish(durable_memory(), "commit")
    store = filled_store(disk)
    store.evict(*KEPT, to="disk").result(10)  # so that the flush begins its commit in this thread
    disk.is_armed = True
    with pytest.raises(BackendError, match="making 4 keys durable in 'disk' failed"):
        store.flush()
    store.flush()
    check_that_all_is_well(store, "commit")
    close_soon(store)


def test_what_is_put_into_a_turn_all_the_same_stops_the_store_and_hangs_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate(durable_memory())
    gate.open()
    store = filled_store(gate)
    gate.shut()
    waiting = store.evict("a", to="disk")

    def interrupted(self: Ledger, *events: m.Event) -> Sequence[m.Command]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "apply", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.drop("b")
    for call in (lambda: waiting.result(10), lambda: store.get("a")):
        with pytest.raises((KeyboardInterrupt, ts.StoreClosed)):
            call()
    with pytest.raises(ts.StoreClosed, match="KeyboardInterrupt was put into the midst of a turn"):
        store.get("a")
    gate.open()
    close_soon(store)
