"""The auditor of the books notices every rule that is broken; each test breaks one behind its back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.unit.test_ledger import DEVICE, DISK, HOST, Desk
from tierstore.core import messages as m
from tierstore.core.entry import NOTHING, Entry, EntryLife, WantPhase
from tierstore.core.residency import ReplicaState
from tierstore.core.tier_state import TierState
from tierstore.errors import InvariantError


def resident() -> tuple[Desk, TierState, Entry]:
    """Return a desk with one key, READY on the device."""
    desk = Desk()
    desk.store("k", 10, DEVICE)
    return desk, desk.ledger.books.tier_states[DEVICE], desk.ledger.books.index["k"]


def rising() -> tuple[Desk, Entry]:
    """Return a desk with one key that is being copied from the disk to the host."""
    desk = Desk()
    desk.store("k", 10, DISK)
    desk.fetch("k", HOST)
    return desk, desk.ledger.books.index["k"]


def queued() -> tuple[Desk, TierState, Entry]:
    """Return a desk with one key that waits for room on the device, where another one drains."""
    desk = Desk(device=100)
    desk.store("old", 100, DEVICE)
    desk.tell(m.DropRequested(["old"]))
    desk.put("k", 100, DEVICE)
    return desk, desk.ledger.books.tier_states[DEVICE], desk.ledger.books.index["k"]


def _forget_candidates(tier_state: TierState) -> None:
    for replica in list(tier_state.evictable):
        tier_state.evictable.discard(replica)


def expect(desk: Desk, message: str) -> None:
    """Expect the auditor to say ``message``."""
    with pytest.raises(InvariantError, match=message):
        desk.ledger.check()


def test_an_absent_replica_has_no_place_in_the_books() -> None:
    desk, tier_state, entry = resident()
    entry.replicas[DEVICE].state = ReplicaState.ABSENT
    tier_state.ready_bytes = 0
    _forget_candidates(tier_state)
    expect(desk, "ABSENT replica")


def test_more_is_never_charged_than_the_tier_has() -> None:
    desk, tier_state, _ = resident()
    tier_state.tier = replace(tier_state.tier, capacity_bytes=9)
    expect(desk, "10 charged of 9")


def test_a_replica_is_never_charged_more_than_its_size() -> None:
    desk, tier_state, entry = resident()
    entry.replicas[DEVICE].charge_bytes = tier_state.charged_bytes = tier_state.ready_bytes = 11
    expect(desk, "a replica is charged 11")


def test_a_free_replica_is_a_candidate_for_eviction() -> None:
    desk, tier_state, _ = resident()
    _forget_candidates(tier_state)
    expect(desk, "a READY replica is in 0 sets")


def test_a_replica_that_is_gone_is_no_candidate_for_eviction() -> None:
    desk, tier_state, entry = resident()
    tier_state.stuck[entry.uid + 1] = entry.replicas[DEVICE]
    expect(desk, "forgotten replica")


def test_a_replica_only_leaves_for_a_tier_that_wants_it() -> None:
    desk, _, entry = resident()
    desk.ledger.books.mark_leaving(entry.replicas[DEVICE])
    expect(desk, "no lower tier wants it")


def test_the_number_of_waiting_wants_is_theirs() -> None:
    desk, tier_state, _ = queued()
    tier_state.waiting += 1
    expect(desk, "2 wants are said to wait")


def test_a_want_waits_in_the_queue_of_its_urgency() -> None:
    desk, _, entry = queued()
    entry.wants[DEVICE].urgency = m.Urgency.PREFETCH
    expect(desk, "wrong queue")


def test_a_want_that_waits_is_known_to_its_entry() -> None:
    desk, _, entry = queued()
    entry.wants = NOTHING
    expect(desk, "entry does not know")


def test_the_index_shows_each_entry_under_its_own_key() -> None:
    desk, _, entry = resident()
    desk.ledger.books.index["another"] = entry
    expect(desk, "under 'another'")


def test_a_live_key_has_a_ready_replica() -> None:
    desk = Desk()
    desk.put("k", 10)
    desk.ledger.books.index["k"].life = EntryLife.LIVE
    expect(desk, "no READY replica")


def test_a_coming_key_has_a_put_that_brings_it() -> None:
    desk = Desk()
    desk.put("k", 10)
    desk.ledger.books.index["k"].wants[DEVICE].put = None
    expect(desk, "a put that nobody makes")


def test_a_gone_entry_without_replicas_is_forgotten() -> None:
    desk, _, entry = resident()
    desk.tell(m.DropRequested(["k"]))
    desk.run()
    desk.ledger.books.entries[entry.uid] = entry
    expect(desk, "gone, but not forgotten")


def test_a_writer_is_the_only_holder() -> None:
    desk, _, entry = resident()
    desk.lease("k")
    entry.writer = desk.number + 1
    expect(desk, "leased for writing and by others")


def test_a_holder_has_a_lease() -> None:
    desk, _, entry = resident()
    entry.holders = {1: "somebody"}
    expect(desk, "holders without leases")


def test_a_want_whose_replica_fills_has_its_room() -> None:
    desk, entry = rising()
    entry.wants[HOST].phase = WantPhase.QUEUED
    expect(desk, "in tier 1 is QUEUED")


def test_a_replica_is_only_filled_for_somebody() -> None:
    desk, entry = rising()
    entry.wants = NOTHING
    expect(desk, "nobody wants the FILLING replica")


def test_the_copy_that_fills_a_replica_is_known() -> None:
    desk, _ = rising()
    desk.ledger.scheduler.traffic.copies.clear()
    expect(desk, "the copy that writes 'k' in tier 1 is unknown")


def test_nothing_is_copied_onto_itself() -> None:
    desk, _ = rising()
    (copy,) = desk.ledger.scheduler.traffic.copies.values()
    copy.source = HOST
    expect(desk, "onto itself")


def test_the_bytes_in_flight_are_those_of_the_copies() -> None:
    desk, _ = rising()
    desk.ledger.scheduler.traffic.window(DISK, HOST).in_flight_bytes += 1
    expect(desk, "window 2 -> 1: 11 B in flight, should be 10")


def test_the_bytes_in_flight_are_within_the_window() -> None:
    desk = Desk()
    for key in ("k", "other"):
        desk.store(key, 10, DISK)
    desk.fetch("k", HOST)
    desk.fetch("other", HOST)
    desk.ledger.scheduler.traffic.window_bytes = 19
    expect(desk, "20 B in flight exceed the window")


@pytest.mark.parametrize("state", [resident, rising, queued])
def test_the_auditor_finds_nothing_in_books_that_nobody_broke(state: Callable[[], tuple[Desk, ...]]) -> None:
    state()[0].ledger.check()
