"""Who waits for what in the ledger: for a put, a reader, a lower tier; and what the wait comes to."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.unit.test_ledger import DEVICE, DISK, HOST, Desk
from tierstore.core import messages as m
from tierstore.core.entry import Replica
from tierstore.core.eviction import POLICIES, LeastRecentlyUsed
from tierstore.core.ledger import Ledger
from tierstore.core.model import Tier
from tierstore.errors import BackendError, CapacityError, KeyNotFound, LeaseError

ARCHIVE = 3


def read(desk: Desk, key: str) -> int:
    number = desk.next()
    desk.tell(m.ReadRequested(number, key))
    return number


def flush(desk: Desk) -> int:
    number = desk.next()
    desk.tell(m.FlushRequested(number))
    return number


def durable_desk() -> Desk:
    """Return a desk whose disk is durable."""
    desk = Desk()
    desk.ledger = Ledger(
        [
            Tier("device", 100, 100, 100),
            Tier("host", 100, 100, 100, is_host=True),
            Tier("disk", 1000, 1000, 1000, is_storage=True, is_durable=True),
        ],
        POLICIES["lru"],
    )
    return desk


def four_tiers() -> Desk:
    """Return a desk with two tiers below the host, and a key in the lower of them."""
    desk = Desk()
    desk.ledger = Ledger(
        [
            Tier("device", 100, 100, 100),
            Tier("host", 100, 100, 100, is_host=True),
            Tier("disk", 1000, 1000, 1000, is_storage=True),
            Tier("archive", 1000, 1000, 1000, is_storage=True),
        ],
        POLICIES["lru"],
    )
    desk.store("k", 10, ARCHIVE)
    return desk


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda desk: desk.fetch("k", HOST), None),
        (lambda desk: desk.lease("k", HOST), "granted"),
        (lambda desk: read(desk, "k"), "granted"),
        (lambda desk: desk.evict("k", DISK), None),
        (flush, None),
    ],
    ids=["fetch", "lease", "read", "evict", "flush"],
)
def test_what_is_asked_of_a_key_that_is_being_put_waits_for_its_bytes(
    ask: Callable[[Desk], int], answer: str | None
) -> None:
    desk = durable_desk()
    desk.put("k", 10, DEVICE)
    number = ask(desk)
    assert number not in desk.answers
    assert desk.moving() == [("k", None, DEVICE)], "nothing else moves before the bytes are there"
    desk.run()
    assert desk.answers[number] == answer


def test_a_put_whose_key_is_dropped_meanwhile_fails_and_leaves_nothing() -> None:
    desk = Desk()
    put = desk.put("k", 10)
    desk.tell(m.DropRequested(["k"]))
    assert isinstance(desk.answers[put], KeyNotFound)
    desk.run()
    assert desk.ledger.books.entries == {}
    assert desk.ledger.books.tier_states[DEVICE].charged_bytes == 0


def test_a_medium_that_refuses_a_copy_whose_key_was_dropped_leaves_nothing() -> None:
    desk = Desk()
    put = desk.put("k", 10)
    desk.tell(m.DropRequested(["k"]))
    desk.tell(m.CopyRefused(desk.copies.pop().copy, CapacityError("in pieces")))
    desk.run()
    assert isinstance(desk.answers[put], KeyNotFound)
    assert desk.ledger.books.entries == {}


def test_a_replica_is_held_until_the_last_of_its_leases_ends() -> None:
    desk = Desk(device=100)
    desk.store("k", 100, DEVICE)
    first, second = desk.lease("k"), desk.lease("k")
    desk.tell(m.LeaseReleased(first, written=False))
    assert isinstance(desk.answers[desk.put("new", 100, DEVICE)], CapacityError)
    desk.tell(m.LeaseReleased(second, written=False))
    put = desk.put("new", 100, DEVICE)
    desk.run()
    assert desk.answers[put] is None


def test_a_write_lease_waits_for_the_get_that_reads_its_bytes() -> None:
    desk = Desk()
    desk.store("k", 10, DEVICE)
    get = read(desk, "k")
    lease = desk.lease("k", access=m.Access.WRITE)
    assert lease not in desk.answers
    desk.tell(m.ReadDone(get))
    assert desk.answers[lease] == "granted"


def test_a_copy_that_arrives_leaves_alone_the_want_that_still_waits_for_room() -> None:
    desk = Desk(device=100)
    desk.store("k", 100, DISK)
    desk.store("old", 100, DEVICE)
    desk.tell(m.DropRequested(["old"]))
    up = desk.fetch("k", DEVICE)
    host = desk.fetch("k", HOST)
    desk.finish()
    assert desk.answers[host] is None
    assert up not in desk.answers
    assert desk.moving() == []
    desk.run()
    assert desk.answers[up] is None


def test_a_request_in_strides_fails_at_a_key_that_is_leased_for_writing_meanwhile() -> None:
    desk = Desk()
    desk.ledger = Ledger(
        [
            Tier("device", 100, 100, 100),
            Tier("host", 100, 100, 100, is_host=True),
            Tier("disk", 1000, 1000, 1000, is_storage=True),
        ],
        POLICIES["lru"],
        stride=1,
    )
    desk.store("first", 10, DISK)
    desk.store("second", 10, DEVICE)
    fetch = desk.next()
    desk.tell(m.FetchRequested(fetch, ["first", "second"], HOST, m.Urgency.DEMAND))
    assert desk.moving() == [("first", DISK, HOST)]
    lease = desk.lease("second", access=m.Access.WRITE)
    assert desk.answers == {1: None, 2: None, lease: "granted"}
    desk.finish()
    assert isinstance(desk.answers[fetch], LeaseError)
    assert desk.ledger.where("first") == (HOST, DISK)


def test_a_demand_joins_a_prefetch_that_is_under_way() -> None:
    desk = Desk()
    desk.store("k", 10, DISK)
    prefetch = desk.fetch("k", HOST, m.Urgency.PREFETCH)
    demand = desk.fetch("k", HOST)
    assert desk.moving() == [("k", DISK, HOST)]
    desk.finish()
    assert (desk.answers[prefetch], desk.answers[demand]) == (None, None)


def test_a_fetch_by_way_of_the_host_goes_direct_once_when_leases_take_the_host() -> None:
    desk = four_tiers()
    desk.put("held", 100, HOST)
    desk.lease("held", HOST)
    fetch = desk.fetch("k", DEVICE)
    desk.fetch("k", DISK)
    assert desk.moving() == [("held", None, HOST), ("k", ARCHIVE, DISK)]
    desk.finish(1)
    desk.finish(0)
    assert desk.moving() == [("k", DISK, DEVICE)]
    desk.run()
    assert desk.answers[fetch] is None


def test_a_fetch_fails_once_when_its_host_leg_fails_after_a_lower_copy_arrived() -> None:
    desk = four_tiers()
    fetch = desk.fetch("k", DEVICE)
    desk.fetch("k", DISK)
    assert desk.moving() == [("k", ARCHIVE, HOST), ("k", ARCHIVE, DISK)]
    desk.finish(1)
    cause = BackendError("the host is broken")
    desk.finish(error=cause)
    desk.run()
    assert desk.answers[fetch] is cause
    assert desk.ledger.where("k") == (DISK, ARCHIVE)
    assert desk.ledger.books.tier_states[DEVICE].charged_bytes == 0


def test_a_prefetch_is_declined_once_when_its_host_leg_is_refused_after_a_lower_copy_arrived() -> None:
    desk = four_tiers()
    prefetch = desk.fetch("k", DEVICE, m.Urgency.PREFETCH)
    desk.fetch("k", DISK)
    desk.finish(1)
    for _ in range(2):
        desk.tell(m.CopyRefused(desk.copies.pop().copy, CapacityError("in pieces")))
        desk.free()
    desk.run()
    assert desk.answers[prefetch] is None
    assert desk.ledger.where("k") == (DISK, ARCHIVE)
    assert desk.ledger.books.tier_states[DEVICE].charged_bytes == 0


def test_a_policy_that_names_a_victim_twice_evicts_it_once() -> None:
    class Stuttering(LeastRecentlyUsed):
        def victims(self, needed_bytes: int) -> Iterator[Replica]:
            for victim in super().victims(needed_bytes):
                yield from (victim, victim)

    desk = Desk()
    desk.ledger = Ledger([Tier("device", 100, 100, 100), Tier("disk", 100, 100, 100)], Stuttering)
    desk.store("a", 40, DEVICE)
    desk.store("b", 40, DEVICE)
    put = desk.put("new", 90, DEVICE)
    desk.run()
    assert desk.answers[put] is None
    assert desk.ledger.books.tier_states[DEVICE].counters.evictions == 2
