"""How readers, their keys and their reads end, and how a store ends that has some."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest
import torch

import tierstore as ts
from tests.part_stores import PATIENCE_S, filled, part, store_of
from tests.stores import memory_backends, numbered
from tierstore.core.ledger import Ledger
from tierstore.part_reader import PartReader
from tierstore.testing.faults import Gate
from tierstore.wrappers.forwarding import ForwardingBackend

PAGE = 4096


def test_a_key_that_is_removed_while_it_is_read_is_given_back_afterwards() -> None:
    gate = Gate(memory_backends((1, 10_000))[1])
    gate.open()
    with filled(lambda _: gate) as store, store.reader() as reader:
        reader.add("a", "b")
        gate.shut()
        into = [torch.zeros(2, 10, dtype=torch.uint8) for _ in range(2)]
        reads = [reader.read([("a", 1), ("b", 2)], rows) for rows in into]
        reader.remove("a")
        with pytest.raises(ts.KeyNotFound):
            reader.read([("a", 0)], into[0][:1])
        with pytest.raises(ts.LeaseError):
            store.drop("a")
        gate.step()
        reads[0].result(PATIENCE_S)
        with pytest.raises(ts.LeaseError):
            store.drop("a")
        gate.open()
        reads[1].result(PATIENCE_S)
        store.drop("a")
        with pytest.raises(ts.LeaseError):
            store.drop("b")
        store.check()
    assert all(rows.equal(torch.stack([part("a", 1, 10), part("b", 2, 10)])) for rows in into)


def test_a_closed_reader_holds_nothing_and_reads_nothing() -> None:
    with filled() as store:
        with store.reader() as reader:
            reader.add("a", "b")
        reader.close()
        with pytest.raises(ts.StoreClosed, match="the reader is closed"):
            reader.add("a")
        with pytest.raises(ts.StoreClosed, match="the reader is closed"):
            reader.read([("a", 0)], torch.zeros(1, 4))
        with pytest.raises(ts.KeyNotFound):
            reader.remove("a")
        assert reader.keys == ()
        store.drop("a", "b")


def test_a_reader_that_is_closed_while_a_call_adds_to_it_holds_nothing() -> None:
    gate = Gate(memory_backends((1, 10_000))[1])
    with store_of([memory_backends((10_000,))[0], gate], 10_000) as store:
        store.put("a", numbered(1), tier="host")
        reader = store.reader()
        refused: list[Exception] = []

        def add() -> None:
            try:
                reader.add("a")
            except ts.StoreClosed as error:
                refused.append(error)

        thread = threading.Thread(target=add)
        thread.start()
        gate.wait_until_held()
        reader.close()
        gate.open()
        thread.join(PATIENCE_S)
        assert len(refused) == 1
        store.drop("a")


def test_a_store_that_closes_waits_for_reads_and_refuses_new_ones() -> None:
    class Noted(ForwardingBackend):
        def close(self) -> None:
            closed.append(read.done())
            super().close()

    closed: list[bool] = []
    gate = Gate(Noted(memory_backends((1, 10_000))[1]))
    gate.open()
    store = filled(lambda _: gate)
    reader = store.reader()
    reader.add("a")
    gate.shut()
    into = torch.zeros(1, 10, dtype=torch.uint8)
    read = reader.read([("a", 5)], into)
    closing = threading.Thread(target=store.close)
    closing.start()
    while not store._engine.is_closed:
        closing.join(0.001)
    with pytest.raises(ts.StoreClosed, match="the store is closed"):
        reader.read([("a", 5)], into)
    with pytest.raises(ts.StoreClosed, match="the store is closed"):
        reader.add("b")
    assert closing.is_alive()
    assert closed == []
    gate.open()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert closed == [True]
    assert into[0].equal(part("a", 5, 10))
    reader.remove("a")
    reader.close()


def test_a_store_closes_with_an_open_reader_as_with_a_lease() -> None:
    store = filled()
    reader, lease = store.reader(), store.lease("b", tier="host")
    reader.add("a")
    store.close()
    with pytest.raises(ts.StoreClosed):
        reader.read([("a", 0)], torch.zeros(1, 4))
    reader.close()
    lease.release()


def test_a_store_that_was_stopped_by_a_bug_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled()
    reader = store.reader()
    reader.add("a", "b")
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "apply", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.drop("c")
    with pytest.raises(ts.StoreClosed, match="a bug in tierstore"):
        reader.read([("a", 0)], torch.zeros(1, 4))
    with pytest.raises(ts.StoreClosed, match="a bug in tierstore"):
        reader.add("c")
    reader.remove("a")
    reader.close()
    store.close()


def test_a_transfer_of_parts_can_be_awaited_and_told_of() -> None:
    import asyncio

    async def awaited() -> None:
        await reader.read([("a", 3)], into)

    told: list[bool] = []
    into = torch.zeros(1, 10, dtype=torch.uint8)
    with filled() as store, store.reader() as reader:
        reader.add("a")
        asyncio.run(awaited())
        transfer = reader.read([("a", 3)], into)
        transfer.add_done_callback(lambda: told.append(True))
        assert transfer.tier == reader.tier == "disk"
    assert told == [True]
    assert into[0].equal(part("a", 3, 10))


def test_threads_read_beside_each_other() -> None:
    with filled() as store, store.reader() as reader:
        reader.add("a")
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            key = "bc"[seed % 2]
            into = torch.zeros(20, 10, dtype=torch.uint8)
            try:
                for turn in range(30):
                    own = store.reader()
                    own.add(key)
                    own.read([(key, turn + n) for n in range(20)], into).result(PATIENCE_S)
                    assert into[3].equal(part(key, turn + 3, 10))
                    reader.read([("a", turn + n) for n in range(20)], into).result(PATIENCE_S)
                    assert into[19].equal(part("a", turn + 19, 10))
                    own.close()
            except BaseException as error:  # noqa: BLE001 - carried to the test's own thread
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        store.check()
        store.drop("b", "c")
    assert failures == []


def test_a_read_that_comes_between_a_close_and_its_wait_is_refused_and_holds_nothing() -> None:
    store = filled()
    reader = store.reader()
    reader.add("a")
    store._engine.part_reads.refuse()
    with pytest.raises(ts.StoreClosed, match="the store is closed"):
        reader.read([("a", 0)], torch.zeros(1, 4))
    reader.remove("a")
    store.drop("a")  # it is not under way
    store.close()


def test_a_call_that_is_interrupted_when_keys_were_entered_holds_none_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As may be where a signal has waited for too long; what is read meanwhile is read to its end."""
    gate = Gate(memory_backends((1, 10_000))[1])
    gate.open()
    reads: list[ts.Transfer[None]] = []
    into = torch.zeros(1, 10, dtype=torch.uint8)
    enter = PartReader._enter

    def enter_and_raise(self: PartReader, values: Mapping[str, object]) -> None:
        enter(self, values)  # type: ignore[arg-type]
        if values:
            reads.append(self.read([("a", 5)], into))
            raise KeyboardInterrupt

    with filled(lambda _: gate) as store, store.reader() as reader:
        gate.shut()
        with monkeypatch.context() as patch:
            patch.setattr(PartReader, "_enter", enter_and_raise)
            with pytest.raises(KeyboardInterrupt):
                reader.add("a", "b")
        assert reader.keys == ()
        store.drop("b")
        with pytest.raises(ts.LeaseError):
            store.drop("a")
        gate.open()
        reads[0].result(PATIENCE_S)
        assert into[0].equal(part("a", 5, 10))
        store.drop("a")
