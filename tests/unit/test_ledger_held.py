"""A medium that takes less than it was charged for: the books follow, whatever became of the replica."""

from __future__ import annotations

import pytest

from tests.unit.test_ledger import DEVICE, DISK, HOST, Desk
from tierstore.core import messages as m
from tierstore.core.tier_state import TierState
from tierstore.errors import BackendError, InvariantError


def end(desk: Desk, charge_bytes: int, index: int = 0) -> None:
    """Let a copy end well, its target taking ``charge_bytes``; the desk audits the books."""
    desk.tell(m.CopyDone(desk.copies.pop(index).copy, charge_bytes=charge_bytes))


def disk_of(desk: Desk) -> TierState:
    return desk.ledger.books.tier_states[DISK]


def test_a_replica_is_charged_whole_until_its_copy_has_ended() -> None:
    desk = Desk()
    desk.put("k", 60, DISK)
    assert (disk_of(desk).charged_bytes, disk_of(desk).filling_bytes) == (60, 60)
    end(desk, 20)
    assert (disk_of(desk).charged_bytes, disk_of(desk).ready_bytes) == (20, 20)
    assert disk_of(desk).peak_charged_bytes == 60


def test_room_that_a_copy_did_not_need_goes_to_whoever_waits_at_once() -> None:
    desk = Desk(disk=100)
    desk.put("k", 60, DISK)
    desk.put("next", 60, DISK)
    assert desk.moving() == [("k", None, DISK)]
    end(desk, 40)
    assert desk.moving() == [("next", None, DISK)]


def test_a_tier_holds_more_keys_than_their_sizes_say() -> None:
    desk = Desk(disk=100)
    for index in range(5):
        desk.put(f"k{index}", 60, DISK)
        end(desk, 10)
    assert disk_of(desk).charged_bytes == 50
    assert all(desk.ledger.where(f"k{index}") == (DISK,) for index in range(5))


def test_a_key_that_could_never_be_held_whole_is_refused_as_ever() -> None:
    desk = Desk(disk=100)
    with pytest.raises(Exception, match="more than the whole capacity"):
        desk.put("k", 101, DISK)


def test_what_is_freed_is_what_was_charged() -> None:
    desk = Desk()
    desk.put("k", 60, DISK)
    end(desk, 20)
    desk.tell(m.DropRequested(["k"]))
    assert disk_of(desk).draining_bytes == 20
    desk.free()
    assert disk_of(desk).charged_bytes == 0


def test_a_replica_that_takes_nothing_is_a_replica() -> None:
    desk = Desk()
    desk.put("k", 60, DISK)
    end(desk, 0)
    assert desk.ledger.where("k") == (DISK,)
    assert disk_of(desk).charged_bytes == 0


def test_a_copy_that_ends_after_its_key_was_dropped_shrinks_what_drains() -> None:
    desk = Desk()
    desk.store("k", 60, HOST)
    desk.evict("k")
    desk.tell(m.DropRequested(["k"]))
    assert disk_of(desk).draining_bytes == 60
    end(desk, 20)
    assert (disk_of(desk).draining_bytes, disk_of(desk).charged_bytes) == (20, 20)
    desk.free()
    assert disk_of(desk).charged_bytes == 0


def test_a_replica_that_was_leased_in_stream_order_shrinks_when_its_copy_ends() -> None:
    desk = Desk()
    desk.store("k", 60, HOST)
    desk.fetch("k", DEVICE)
    desk.tell(m.CopyOrdered(desk.copies[0].copy))
    desk.lease("k")
    tier_state = desk.ledger.books.tier_states[DEVICE]
    assert tier_state.leased_bytes == 60
    end(desk, 20)
    assert (tier_state.leased_bytes, tier_state.ready_bytes, tier_state.charged_bytes) == (20, 20, 20)


def test_a_leased_replica_of_a_replaced_key_shrinks_when_its_copy_ends() -> None:
    desk = Desk()
    desk.store("k", 60, HOST)
    desk.fetch("k", DEVICE)
    desk.tell(m.CopyOrdered(desk.copies[0].copy))
    lease = desk.lease("k")
    desk.put("k", 10, DISK, replace=True)
    desk.finish(1)
    tier_state = desk.ledger.books.tier_states[DEVICE]
    assert (tier_state.leased_bytes, tier_state.draining_bytes) == (60, 0)
    end(desk, 20)
    assert (tier_state.leased_bytes, tier_state.draining_bytes, tier_state.charged_bytes) == (20, 0, 20)
    desk.tell(m.LeaseReleased(lease, written=False))
    assert (tier_state.leased_bytes, tier_state.draining_bytes) == (0, 20)


def test_a_replica_that_leaves_before_its_copy_ended_shrinks_when_it_ends() -> None:
    desk = Desk(device=100)
    desk.put("k", 60, DEVICE)
    desk.tell(m.CopyOrdered(desk.copies[0].copy))
    desk.put("next", 60, DEVICE)
    tier_state = desk.ledger.books.tier_states[DEVICE]
    assert tier_state.leaving_bytes == 60
    end(desk, 40)
    assert tier_state.leaving_bytes == 40
    assert ("next", None, DEVICE) in desk.moving()


def test_a_copy_that_failed_leaves_the_charge_until_its_room_is_freed() -> None:
    desk = Desk()
    desk.put("k", 60, DISK)
    desk.finish(error=BackendError("bad block"))
    assert disk_of(desk).charged_bytes == 60
    desk.free()
    assert disk_of(desk).charged_bytes == 0


def test_a_smaller_quota_waits_only_for_what_is_really_held() -> None:
    desk = Desk(disk=100)
    desk.put("k", 60, DISK)
    number = desk.next()
    desk.tell(m.ResizeRequested(number, DISK, 30, 30, 30))
    assert number not in desk.answers
    end(desk, 20)
    assert desk.answers[number] is None
    assert disk_of(desk).tier.capacity_bytes == 30


def test_a_medium_that_takes_more_than_it_was_charged_breaks_the_books() -> None:
    desk = Desk()
    desk.put("k", 60, DISK)
    with pytest.raises(InvariantError, match="takes 61 B in tier 2, but was charged 60 B"):
        end(desk, 61)


def test_the_story_tells_what_a_replica_takes() -> None:
    desk = Desk()
    desk.put("k", 60, DISK)
    end(desk, 20)
    assert any("takes 20 B in disk" in line for line in desk.ledger.story("k"))
