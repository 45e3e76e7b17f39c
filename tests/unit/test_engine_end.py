"""How a store begins and ends when a medium, a caller or Ctrl-C does not behave."""

from __future__ import annotations

import itertools
import logging
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from types import FrameType, SimpleNamespace

import pytest
import torch

import tierstore as ts
from tests.stores import memory_backends, numbered
from tierstore import signals
from tierstore.config import StoreConfig, TierConfig
from tierstore.spi import Backend, Capabilities, Completion, Slot
from tierstore.store import Store
from tierstore.testing.faults import Gate
from tierstore_backends.memory import MemoryBackend


class Recorded(MemoryBackend):
    """A backend that writes down when it was closed, and may fail to."""

    def __init__(self, name: str, closed: list[str], error: BaseException | None = None) -> None:
        super().__init__(1000, is_storage=name != "host")
        self.name = name
        self.closed = closed
        self.error = error

    def close(self) -> None:
        self.closed.append(self.name)
        error, self.error = self.error, None
        if error is not None:
            raise error


class Unable(Recorded):
    """A backend that does not say what its slots take."""

    def __init__(self, name: str, closed: list[str], error: BaseException | None = None) -> None:
        super().__init__(name, closed, error)
        said = asdict(self.capabilities)
        del said["alignment_bytes"]
        self.capabilities = SimpleNamespace(**said)  # type: ignore[assignment]


class Promising(Recorded):
    """A backend that says that it is durable, and is not."""

    commit = None  # type: ignore[assignment]

    def __init__(self, name: str, closed: list[str], error: BaseException | None = None) -> None:
        super().__init__(name, closed, error)
        self.capabilities = Capabilities(medium=self.capabilities.medium, is_durable=True)


class Sized(MemoryBackend):
    """A backend that refuses some quotas."""

    refusals = 0

    def resize(self, capacity_bytes: int) -> None:
        if self.refusals:
            self.refusals -= 1
            raise OSError(f"not {capacity_bytes}")
        super().resize(capacity_bytes)


def tiers(*backends: Backend) -> StoreConfig:
    names = ("host", "disk", "archive")
    return StoreConfig([TierConfig(n, b, 1000) for n, b in zip(names, backends, strict=False)])


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


# --- opening ------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [Unable, Promising])
def test_a_store_that_does_not_open_closes_every_backend_whichever_fails(
    last: type[Recorded], caplog: pytest.LogCaptureFixture
) -> None:
    closed: list[str] = []
    backends = [
        Recorded("host", closed, OSError("host stays")),
        Recorded("disk", closed, OSError("disk stays")),
        last("archive", closed),
    ]
    with pytest.raises((AttributeError, ts.ConfigError), match=r"alignment_bytes|says is_durable=True"):
        Store(tiers(*backends))
    assert sorted(closed) == ["archive", "disk", "host"]
    assert "disk stays" in caplog.text
    assert "host stays" in caplog.text


def test_a_tier_that_cannot_be_opened_closes_those_that_are_whichever_fails() -> None:
    closed: list[str] = []
    config = StoreConfig(
        [
            TierConfig("host", Recorded("host", closed, OSError("stuck")), 1000),
            TierConfig("disk", Recorded("disk", closed, OSError("stuck")), 1000),
            TierConfig("archive", "no such backend", 1000),
        ]
    )
    with pytest.raises(ts.ConfigError, match="no such backend"):
        Store(config)
    assert sorted(closed) == ["disk", "host"]


# --- closing ------------------------------------------------------------------------------------


def test_a_second_close_waits_for_the_first() -> None:
    gate = Gate(memory_backends((300, 300, 3000))[2])
    gate.open()
    store = Store(tiers(MemoryBackend(1000), gate))
    store.put("k", numbered(1), tier="host")
    gate.shut()
    store.evict("k", to="disk")
    gate.wait_until_held()
    order: list[str] = []

    def close(name: str) -> None:
        store.close()
        order.append(name)

    first = in_thread(lambda: close("first"))
    while not store._engine.is_closed:
        first.join(0.01)
    second = in_thread(lambda: close("second"))
    second.join(0.2)
    assert order == [], "the copy stands still"
    gate.open()
    first.join(10)
    second.join(10)
    assert sorted(order) == ["first", "second"]


def test_a_close_that_was_interrupted_is_taken_up_again() -> None:
    closed: list[str] = []
    store = Store(tiers(Recorded("host", closed), Recorded("disk", closed, KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        store.close()
    assert closed == ["disk"]
    store.close()
    assert closed == ["disk", "disk", "host"]
    store.close()
    assert closed == ["disk", "disk", "host"]


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Return what raises ``KeyboardInterrupt`` in the main thread, and returns when it has come."""
    raised = threading.Event()

    def handle(_number: int, _frame: FrameType | None) -> None:
        raised.set()
        raise KeyboardInterrupt

    def send() -> None:
        while not raised.wait(0.05):  # one that comes just before a wait begins does not end that wait
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    former = signal.signal(signal.SIGUSR1, handle)
    yield send
    signal.signal(signal.SIGUSR1, former)


def test_a_close_that_was_interrupted_while_it_waited_is_taken_up_again(
    interrupt: Callable[[], None],
) -> None:
    gate = Gate(memory_backends((300, 300, 3000))[2])
    gate.open()
    store = Store(tiers(MemoryBackend(1000), gate))
    store.put("k", numbered(1), tier="host")
    gate.shut()
    moving = store.evict("k", to="disk")
    gate.wait_until_held()

    closing_has_begun = threading.Event()
    moving.add_done_callback(closing_has_begun.set)

    def come_in_between() -> None:
        closing_has_begun.wait(10)
        interrupt()

    helper = in_thread(come_in_between)
    with pytest.raises(KeyboardInterrupt):
        store.close()
    helper.join(10)
    closing = in_thread(store.close)
    closing.join(0.1)
    assert closing.is_alive(), "the copy stands still"
    gate.open()
    closing.join(10)
    assert not closing.is_alive()


def test_close_in_a_callback_of_the_thread_that_closes_returns() -> None:
    gate = Gate(memory_backends((300, 300, 3000))[2])
    gate.open()
    store = Store(tiers(MemoryBackend(1000), gate))
    store.put("k", numbered(1), tier="host")
    gate.shut()
    waiting = store.evict("k", to="disk")
    waiting.add_done_callback(store.close)
    threading.Timer(0.05, gate.open).start()
    store.close()
    assert waiting.done()


# --- media --------------------------------------------------------------------------------------


class Watched(Gate):
    """A gate that writes down how many copies stood still when a slot was freed."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.held_at_frees: list[int] = []

    def free(self, slot: Slot) -> Completion:
        self.held_at_frees.append(self.held)
        return super().free(slot)


def main_thread_calls() -> list[str]:
    """Return the functions that the main thread is in."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return [each.f_code.co_name for each, _ in traceback.walk_stack(frame)]


@pytest.mark.parametrize("verb", ["put", "get"])
@pytest.mark.usefixtures("interrupt")
def test_room_is_not_given_back_while_the_medium_is_at_work_on_it(verb: str) -> None:
    watched = Watched(memory_backends((300, 300, 3000))[2])
    watched.open()
    store = Store(tiers(MemoryBackend(1000), watched))
    store.put("k", numbered(1), tier="disk")
    watched.shut()
    is_over = threading.Event()

    def come_in_between() -> None:
        watched.wait_until_held()
        while "_wait" not in main_thread_calls():
            pass
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)  # its handler waits
        store.drop("k")
        is_over.wait(0.2)  # in vain, if the call waits for the medium
        watched.open()

    helper = in_thread(come_in_between)

    def use() -> None:
        store.get("k") if verb == "get" else store.put("new", numbered(2), tier="disk")
        while signals.waiting:  # until the call has ended
            pass

    with pytest.raises(KeyboardInterrupt):
        use()
    is_over.set()
    helper.join(10)
    store.check()
    if verb == "put":  # which has ended before the interrupt came
        assert torch.equal(store.get("new"), numbered(2))
        store.drop("new")
    assert watched.held_at_frees[-1] == 0
    assert (0 in watched.held_at_frees) or verb == "put"
    assert store.stats().tiers["disk"].charged_bytes == 0
    store.close()


@pytest.mark.parametrize("capacity", [500, 2000])
def test_a_quota_that_the_medium_refuses_is_an_error_of_whoever_asked_for_it(capacity: int) -> None:
    medium = Sized(1000)
    with Store(tiers(medium, MemoryBackend(1000, is_storage=True))) as store:
        store.put("k", numbered(1), tier="host")
        medium.refusals = 2
        with pytest.raises(ts.BackendError, match=f"'host' did not take a capacity of {capacity} B: not"):
            store.resize("host", capacity)
        medium.refusals = 0
        store.resize("host", capacity)
        for number in itertools.count():
            try:
                store.put(str(number), numbered(number), tier="host")
            except ts.CapacityError:
                break
            if store.stats().tiers["disk"].charged_bytes:
                break
        assert store.stats().tiers["host"].charged_bytes == capacity
        store.check()


def test_a_callback_that_raises_costs_neither_the_next_one_nor_the_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = Gate(memory_backends((300, 300, 3000))[2])
    gate.open()
    with Store(tiers(MemoryBackend(1000), gate)) as store:
        store.put("a", numbered(1), tier="host")
        gate.shut()
        waiting = store.evict("a", to="disk")
        called: list[str] = []
        waiting.add_done_callback(lambda: 1 / 0)
        waiting.add_done_callback(lambda: called.append("next"))
        with caplog.at_level(logging.ERROR, "tierstore"):
            gate.open()
        waiting.result(10)
        assert called == ["next"]
        assert "ZeroDivisionError" in caplog.text
        assert store.where("a") == ("disk",)
        store.check()
