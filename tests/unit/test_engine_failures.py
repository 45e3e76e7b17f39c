"""The engine when what it drives, or waits for, does not behave: nobody hangs, and nothing is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import pytest
import torch

import tierstore as ts
from tests.stores import memory_backends, numbered
from tierstore.config import StoreConfig, TierConfig
from tierstore.core import messages as m
from tierstore.core.eviction import POLICIES
from tierstore.core.ledger import Ledger
from tierstore.core.model import Tier
from tierstore.engine.engine import MOST_NOTED, Engine
from tierstore.engine.transfer import Transfer
from tierstore.errors import BackendError, StoreClosed
from tierstore.spi import Backend, Buffer, Capabilities, Completion, Slot
from tierstore.testing.faults import Faulty, Gate, Operation
from tierstore_backends.memory import open_backend


class Rude:
    """A backend that raises from ``raises`` what it should have completed with."""

    def __init__(self, backend: Backend, raises: Collection[Operation]) -> None:
        self.backend = backend
        self.raises = raises

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.backend.capabilities, has_parts=False)

    def _be_rude(self, operation: Operation) -> None:
        if operation in self.raises:
            raise OSError(f"{operation} is not what this backend wants to do")

    def reserve(self, nbytes: int) -> Slot:
        self._be_rude("reserve")
        return self.backend.reserve(nbytes)

    def read(self, slot: Slot, into: Buffer) -> Completion:
        self._be_rude("read")
        return self.backend.read(slot, into)

    def write(self, slot: Slot, source: Buffer) -> Completion:
        self._be_rude("write")
        return self.backend.write(slot, source)

    def free(self, slot: Slot) -> Completion:
        self._be_rude("free")
        return self.backend.free(slot)

    def resize(self, capacity_bytes: int) -> None:
        self.backend.resize(capacity_bytes)

    def close(self) -> None:
        self.backend.close()


class Ordered(Gate):
    """A gate whose writes may be used by later work of the device before they have ended."""

    def write(self, slot: Slot, source: Buffer) -> Completion:
        ordered = Completion(is_stream_ordered=True)
        super().write(slot, source).add_done_callback(ordered.complete)
        return ordered


def store_over(wrap: Callable[[Backend], Backend], tier: int = 2) -> ts.Store:
    """Return a store of three tiers of which one is wrapped."""
    backends: list[Backend] = memory_backends((300, 300, 3000))
    backends[tier] = wrap(backends[tier])
    names = ("device", "host", "disk")
    capacities = (300, 300, 3000)
    return ts.Store(
        StoreConfig([TierConfig(*tier) for tier in zip(names, backends, capacities, strict=True)])
    )


def two_disks(wrap: Callable[[Backend], Backend]) -> ts.Store:
    """Return a store of two tiers behind I/O, of which the slower is wrapped: copies need a buffer."""
    fast, slow = (open_backend(capacity_bytes=1000, options={"storage": True}) for _ in range(2))
    return ts.Store(StoreConfig([TierConfig("fast", fast, 1000), TierConfig("slow", wrap(slow), 1000)]))


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate(memory_backends((300, 300, 3000))[2])
    gate.open()
    yield gate
    gate.open()


@pytest.mark.parametrize("operation", ["reserve", "write"])
def test_a_backend_that_raises_fails_the_copy_and_not_its_source(operation: Operation) -> None:
    with store_over(lambda backend: Rude(backend, [operation])) as store:
        store.put("k", numbered(1))
        with pytest.raises(BackendError, match=f"{operation} is not what") as caught:
            store.evict("k", to="disk").result(10)
        assert isinstance(caught.value.__cause__, OSError)
        assert torch.equal(store.get("k"), numbered(1))
        store.check()


def test_a_backend_that_raises_from_free_keeps_the_room_and_hangs_nobody() -> None:
    with store_over(lambda backend: Rude(backend, ["free"]), tier=0) as store:
        store.put("k", numbered(1), tier="device")
        store.drop("k")
        assert store.stats().tiers["device"].charged_bytes == 100, "nobody knows whether it is free"
        with pytest.raises(ts.CapacityError):
            store.put("larger", numbered(2, 300), tier="device")
        store.check()


def test_bytes_between_two_tiers_behind_io_pass_through_a_buffer() -> None:
    with two_disks(lambda backend: backend) as store:
        store.put("k", numbered(1), tier="fast")
        store.evict("k", to="slow").result(10)
        assert store.where("k") == ("slow",)
        assert torch.equal(store.get("k"), numbered(1))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda backend: Faulty(backend, fail_at=1, on=["write"]),
        lambda backend: Rude(backend, ["write"]),
    ],
    ids=["completes with an error", "raises"],
)
def test_a_second_half_that_fails_fails_the_copy_through_the_buffer(
    wrap: Callable[[Backend], Backend],
) -> None:
    with two_disks(wrap) as store:
        store.put("k", numbered(1), tier="fast")
        with pytest.raises(BackendError, match="copying 'k'"):
            store.evict("k", to="slow").result(10)
        assert torch.equal(store.get("k"), numbered(1))


def test_a_first_half_that_fails_never_begins_the_second() -> None:
    written: list[Gate] = []

    def wrap(backend: Backend) -> Backend:
        written.append(Gate(backend, holds=()))
        return Faulty(written[0], fail_at=1, on=["read"])

    with two_disks(wrap) as store:
        store.put("k", numbered(1), tier="slow")
        writes = written[0].writes
        with pytest.raises(BackendError, match="copying 'k'"):
            store.fetch("k", tier="fast").result(10)
        assert written[0].writes == writes
        assert store.where("k") == ("slow",)


def test_a_stream_ordered_copy_is_there_before_it_has_ended() -> None:
    gates: list[Ordered] = []

    def wrap(backend: Backend) -> Backend:
        gates.append(Ordered(backend))
        return gates[0]

    with store_over(wrap, tier=0) as store:
        store.put("k", numbered(1), tier="host")
        store.fetch("k", tier="device").result(10)
        assert gates[0].held == 1, "the copy itself stands still"
        assert store.where("k") == ("device", "host")
        gates[0].open()
        store.check()


# --- a bug in the books -------------------------------------------------------------------------


def test_a_bug_in_the_books_fails_whoever_waits_and_closes_the_store(gate: Gate) -> None:
    store = store_over(lambda _: gate)
    store.put("k", numbered(1), tier="host")
    gate.shut()
    waiting = store.evict("k", to="disk")
    with pytest.raises(KeyError):
        store._engine.tell(m.ReadDone(-1))
    with pytest.raises(KeyError):
        waiting.result(10)
    with pytest.raises(StoreClosed, match="a bug in tierstore"):
        store.get("k")
    store.close()


def test_a_bug_in_the_books_fails_the_put_that_waits_for_room() -> None:
    opening = Transfer[object](("k",))
    engine = small_engine()
    engine._executor.openings[1] = opening  # type: ignore[assignment]  # as `put` does, in another thread
    with pytest.raises(KeyError):
        engine.tell(m.ReadDone(-1))
    with pytest.raises(KeyError):
        opening.result(10)


def test_an_outcome_that_a_broken_store_cannot_take_is_logged_in_the_backends_thread(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_over(lambda _: gate)
    store.put("k", numbered(1), tier="host")
    gate.shut()
    store.evict("k", to="disk")
    with pytest.raises(KeyError):
        store._engine.tell(m.ReadDone(-1))
    with caplog.at_level(logging.CRITICAL, "tierstore"):
        gate.open()
    assert "broken by CopyDone" in caplog.text
    store.close()


# --- waiting ------------------------------------------------------------------------------------


def small_engine() -> Engine:
    tiers = [Tier("host", 100, 100, 100, is_host=True)]
    return Engine(Ledger(tiers, POLICIES["lru"]), memory_backends((100,)), ["host"])


def test_advice_waits_for_the_next_turn_and_no_more_of_it_than_the_engine_keeps() -> None:
    engine = small_engine()
    try:
        for position in range(MOST_NOTED - 1):
            engine.note(m.Advanced(position))
        assert len(engine.told) == MOST_NOTED - 1
        engine.note(m.Advanced(0))
        assert not engine.told
        engine.note(m.Advanced(1))
        engine.turn(m.PlanFollowed(None))
        assert not engine.told
    finally:
        engine.close()


def test_an_answer_that_nobody_waits_for_goes_nowhere() -> None:
    engine = small_engine()
    engine.turn(m.FetchRequested(engine.number(), [], 0, m.Urgency.DEMAND))
    engine.close()


def test_an_awaited_transfer_lets_the_event_loop_run_meanwhile(gate: Gate) -> None:
    with store_over(lambda _: gate) as store:
        store.put("k", numbered(1), tier="host")
        gate.shut()

        async def both() -> list[str]:
            done: list[str] = []

            async def move() -> None:
                await store.evict("k", to="disk")
                done.append("moved")

            moving = asyncio.create_task(move())
            await asyncio.to_thread(gate.wait_until_held)
            done.append("meanwhile")
            gate.open()
            await moving
            return done

        assert asyncio.run(both()) == ["meanwhile", "moved"]
        assert store.where("k") == ("disk",)


def test_a_cancelled_await_leaves_the_transfer_to_end_by_itself(gate: Gate) -> None:
    with store_over(lambda _: gate) as store:
        store.put("k", numbered(1), tier="host")
        gate.shut()
        transfer = store.evict("k", to="disk")

        async def wait() -> None:
            await transfer

        async def lose_patience() -> None:
            waiting = asyncio.create_task(wait())
            await asyncio.sleep(0)  # it begins to wait
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            gate.open()
            await asyncio.sleep(0)  # what is to wake it finds it gone

        asyncio.run(lose_patience())
        transfer.result(10)
        assert store.where("k") == ("disk",)


def test_two_waits_for_one_transfer_both_end() -> None:
    transfer: Transfer[str] = Transfer()
    ended: list[int] = []
    transfer.add_done_callback(lambda: ended.append(1))
    transfer.add_done_callback(lambda: ended.append(2))
    assert transfer.resolve("value")
    assert not transfer.resolve("another")
    assert (ended, transfer.result()) == ([1, 2], "value")
