"""What a store records is what happened in it, and recording is nobody's trouble."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.forked import in_child
from tests.stores import make_store, numbered
from tierstore import BackendError, CapacityError, KeyNotFound, Store, StoreClosed, TierStoreError
from tierstore.engine import journal as journals
from tierstore.recorded import Recording, WaitedFor
from tierstore.testing.faults import Faulty

_KEYS = st.sampled_from(["a", "b", "c", "d", "e"])
_DEEDS = st.lists(
    st.tuples(st.sampled_from(["put", "lease", "fetch", "evict", "drop", "resize"]), _KEYS), max_size=12
)


def _do(store: Store, deed: str, key: str) -> None:
    match deed:
        case "put":
            store.put(key, numbered(ord(key)), replace=True)
        case "lease":
            with store.lease(key, write=True) as lease:
                lease[key].add_(1)
        case "fetch":
            store.fetch(key).result()
        case "evict":
            store.evict(key).result()
        case "drop":
            store.drop(key)
        case _:
            store.resize("device", 200 if store.stats().tiers["device"].capacity_bytes > 200 else 300)


def _traffic(store: Store) -> dict[tuple[str, str], int]:
    return {direction: moved.nbytes for direction, moved in store.stats().traffic.items() if moved.nbytes}


def _held_at(recording: Recording, tier: str, at_s: float) -> int:
    stays = [each for each in recording.stays if each.tier == tier]
    return sum(each.charge_bytes for each in stays if each.begin_s <= at_s < each.end_s)


@settings(max_examples=25)
@given(_DEEDS, _DEEDS)
def test_recorded_bytes_are_those_of_the_stats_and_stays_are_what_is_charged(
    before: list[tuple[str, str]], deeds: list[tuple[str, str]]
) -> None:
    with make_store(300, 300, 2000) as store:
        for deed in before:
            _try(store, *deed)
        former = _traffic(store)
        with store.recorded() as recording:
            for deed in deeds:
                _try(store, *deed)
        now = _traffic(store)
        moved = {each: nbytes - former.get(each, 0) for each, nbytes in now.items()}
        assert recording.moved_bytes() == {each: nbytes for each, nbytes in moved.items() if nbytes}
        assert recording.is_whole
        for tier, charges in recording.charges.items():
            assert charges[-1][1] == store.stats().tiers[tier].charged_bytes
            assert [_held_at(recording, tier, at_s) for at_s, _ in charges] == [
                nbytes for _, nbytes in charges
            ]


def _try(store: Store, deed: str, key: str) -> None:
    with contextlib.suppress(KeyNotFound, CapacityError):
        _do(store, deed, key)


def test_leases_say_when_and_whether_they_wrote() -> None:
    with make_store(300, 300, 900) as store:
        store.put("a", numbered(1), tier="host")
        with store.recorded() as recording:
            store.lease("a", tier="host", write=True).release(written=False)
            with store.lease("a"):
                held = store.lease("a")
            with store.lease("a", write=False):
                pass
        held.release()
    first, second, _, unended = recording.leases
    assert (first.keys, first.tier, first.is_written) == (("a",), "host", False)
    assert first.asked_s <= first.begin_s <= first.end_s <= second.asked_s
    assert unended.end_s == float("inf")
    assert {each.thread for each in recording.leases} == {threading.get_ident()}


def test_only_who_had_to_wait_has_waited() -> None:
    with make_store(100, 300, 900) as store:
        store.put("a", numbered(1), tier="device")
        store.put("b", numbered(2), tier="host")
        with store.recorded() as recording:
            with store.lease("a"):
                pass
            with store.lease("b"):  # the other one leaves first
                pass
    (wait,) = recording.waits
    assert (wait.reason, wait.keys, wait.tier) == (WaitedFor.LEASE, ("b",), "device")
    down, up = (each for each in recording.copies if each.is_whole)
    assert (down.key, down.target, up.key, up.target) == ("a", "host", "b", "device")
    assert wait.begin_s <= down.begin_s <= down.end_s <= up.begin_s <= up.end_s <= wait.end_s


def test_puts_and_new_names_are_recorded_and_what_is_refused_is_not() -> None:
    with make_store(300, 300, 900) as store, store.recorded() as recording:
        store.put("a", numbered(1), tier="host")
        with pytest.raises(TierStoreError):
            store.put("a", numbered(1))
        store.rename({"a": "b"})
        with pytest.raises(KeyNotFound):
            store.drop("a")
        store.drop("b")
    assert [(each.key, each.nbytes, each.tier) for each in recording.puts] == [("a", 100, "host")]
    assert [each.names for each in recording.renamings] == [{"a": "b"}, {"b": None}]


def test_a_copy_that_fails_has_not_moved_its_bytes() -> None:
    with make_store(300, 300, 900, wrap=lambda each: Faulty(each, fail_at=1, on=["write"])) as store:
        store.put("a", numbered(1), tier="host")
        with store.recorded() as recording:
            with pytest.raises(BackendError):
                store.evict("a", to="disk").result()
            store.evict("a", to="disk").result()
    assert [each.is_whole for each in recording.copies] == [False, True]
    assert recording.moved_bytes() == {("host", "disk"): 100}


def test_two_record_at_once_each_from_its_own_begin() -> None:
    with make_store(300, 300, 900) as store, store.recorded() as outer:
        store.put("a", numbered(1))
        with store.recorded() as inner:
            store.put("b", numbered(1))
        store.put("c", numbered(1))
    assert [each.key for each in outer.puts] == ["a", "b", "c"]
    assert [each.key for each in inner.puts] == ["b"]
    assert inner.charges["device"][0][1] == 100


def test_nothing_is_told_to_anybody_outside_of_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(journals.Journal, "note", lambda *_: told.append(1))
    with make_store(300, 300, 900) as store:
        with store.recorded():
            store.put("a", numbered(1))
        assert told
        told.clear()
        store.put("b", numbered(1))
        store.drop("b")
    assert not told


def test_a_journal_that_fails_costs_the_store_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    with make_store(300, 300, 900) as store:
        with store.recorded() as recording:
            monkeypatch.setattr(journals, "_note", no_memory)
            store.put("a", numbered(1))
            store.put("b", numbered(2))
            monkeypatch.undo()
        assert not recording.is_whole
        assert torch.equal(store.get("b"), numbered(2))
        store.check()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError, GeneratorExit])
def test_an_exception_ends_a_recording_and_goes_on(kind: type[BaseException]) -> None:
    with make_store(300, 300, 900) as store:
        recorded = store.recorded()
        recording = recorded.__enter__()
        store.put("a", numbered(1))
        error = kind()
        assert not recorded.__exit__(kind, error, None)
        store.put("b", numbered(1))
    assert [each.key for each in recording.puts] == ["a"]
    assert recording.end_s >= recording.begin_s


def test_a_store_may_be_closed_while_it_is_recorded_and_not_before() -> None:
    store = make_store(300, 300, 900)
    with store.recorded() as recording:
        store.put("a", numbered(1))
        store.close()
    assert recording.moved_bytes() == {("caller", "device"): 100}
    with pytest.raises(StoreClosed), store.recorded():
        pass


def test_a_recording_is_the_parents_after_a_fork() -> None:
    with make_store(300, 300, 900) as store:
        recorded = _recorded(store)
        recording = next(recorded)
        in_child(recorded.close)
        store.put("a", numbered(1))
        recorded.close()
    assert [each.key for each in recording.puts] == ["a"]


def _recorded(store: Store) -> Generator[Recording]:
    with store.recorded() as recording:
        yield recording
