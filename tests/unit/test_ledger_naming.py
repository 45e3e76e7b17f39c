"""Bytes under another key: what splitting and renaming promise, without hardware."""

from __future__ import annotations

import pytest

from tests.unit.test_ledger import DEVICE, DISK, HOST, Desk
from tierstore.core import messages as m
from tierstore.errors import BackendError, KeyExists, KeyNotFound, LeaseError, UsageError


def desk_with_two_replicas(key: str = "k") -> Desk:
    """Return a desk where ``key`` is READY on the device and in host memory."""
    desk = Desk()
    desk.store(key, 10, HOST)
    desk.fetch(key, DEVICE)
    desk.run()
    assert desk.ledger.where(key) == (DEVICE, HOST)
    return desk


def split(desk: Desk, tier: int = DEVICE, **names: str) -> bool:
    """Lease the keys for writing, split them, and release unless it was refused."""
    lease = desk.next()
    desk.tell(m.LeaseRequested(lease, list(names), tier, m.Access.WRITE, "me"))
    assert desk.answers[lease] == "granted"
    try:
        return split_lease(desk, lease, **names)
    finally:
        desk.tell(m.LeaseReleased(lease, written=False))


def split_lease(desk: Desk, lease: int, **names: str) -> bool:
    number = desk.next()
    places = {replica.place: names[replica.key] for replica in desk.leased[lease] if replica.key in names}
    desk.tell(m.SplitRequested(number, lease, places))
    return desk.answers[number] == "granted"


def rename(desk: Desk, *, replace: bool = False, **names: str) -> None:
    desk.tell(m.RenameRequested(names, replace))


def test_a_split_moves_no_bytes_and_charges_none() -> None:
    desk = desk_with_two_replicas()
    charged = [tier_state.charged_bytes for tier_state in desk.ledger.books.tier_states]
    assert split(desk, k="new")
    assert (desk.ledger.where("k"), desk.ledger.where("new")) == ((HOST,), (DEVICE,))
    assert [tier_state.charged_bytes for tier_state in desk.ledger.books.tier_states] == charged
    assert desk.copies == []
    assert desk.frees == []


def test_the_lower_replica_can_be_split_off_as_well() -> None:
    desk = desk_with_two_replicas()
    assert split(desk, HOST, k="new")
    assert (desk.ledger.where("k"), desk.ledger.where("new")) == ((DEVICE,), (HOST,))


def test_the_last_replica_of_a_key_stays_with_it() -> None:
    desk = Desk()
    desk.store("k", 10, DEVICE)
    assert not split(desk, k="new")
    assert list(desk.ledger) == ["k"]


def test_only_a_lease_for_writing_can_be_split() -> None:
    desk = desk_with_two_replicas()
    with pytest.raises(UsageError, match="writing"):
        split_lease(desk, desk.lease("k"), k="new")


def test_the_lease_goes_on_with_the_new_key_and_the_old_one_is_free() -> None:
    desk = desk_with_two_replicas()
    lease = desk.lease("k", access=m.Access.WRITE)
    assert split_lease(desk, lease, k="new")
    with pytest.raises(LeaseError):
        desk.lease("new")
    desk.lease("k", HOST)
    desk.tell(m.LeaseReleased(lease, written=True))
    assert (desk.ledger.where("k"), desk.ledger.where("new")) == ((HOST,), (DEVICE,))


def desk_whose_copy_is_ordered() -> tuple[Desk, int, int]:
    """Return a desk, the lease of a key whose bytes are still on their way, and a split of it that waits."""
    desk = Desk()
    desk.store("k", 10, HOST)
    lease = desk.lease("k", access=m.Access.WRITE)
    desk.tell(m.CopyOrdered(desk.copies[0].copy))
    number = desk.next()
    desk.tell(m.SplitRequested(number, lease, {desk.leased[lease][0].place: "new"}))
    assert number not in desk.answers
    return desk, lease, number


def test_what_is_ready_in_stream_order_only_leaves_its_key_when_its_bytes_are_there() -> None:
    desk, lease, number = desk_whose_copy_is_ordered()
    desk.run()
    assert desk.answers[number] == "granted"
    desk.tell(m.LeaseReleased(lease, written=True))
    assert (desk.ledger.where("k"), desk.ledger.where("new")) == ((HOST,), (DEVICE,))


def test_what_never_comes_does_not_leave_its_key() -> None:
    desk, lease, number = desk_whose_copy_is_ordered()
    desk.tell(m.CopyDone(desk.copies.pop().copy, BackendError("the link broke")))
    assert desk.answers[number] is None
    assert list(desk.ledger) == ["k"]
    desk.tell(m.LeaseReleased(lease, written=False))
    desk.ledger.check()


def test_a_split_whose_lease_ends_while_it_waits_changes_nothing() -> None:
    desk, lease, number = desk_whose_copy_is_ordered()
    desk.tell(m.LeaseReleased(lease, written=False))
    assert number not in desk.answers
    desk.run()
    assert desk.answers[number] is None
    assert list(desk.ledger) == ["k"]


def test_a_split_whose_name_is_taken_while_it_waits_is_refused() -> None:
    desk, lease, number = desk_whose_copy_is_ordered()
    desk.store("new", 5, DISK)
    desk.run()
    assert isinstance(desk.answers[number], KeyExists)
    desk.tell(m.LeaseReleased(lease, written=False))
    assert set(desk.ledger) == {"k", "new"}


def test_a_split_that_waits_is_answered_before_the_store_is_closed() -> None:
    desk, lease, number = desk_whose_copy_is_ordered()
    closing = desk.next()
    desk.tell(m.CloseRequested(closing))
    desk.run()
    assert number in desk.answers
    desk.tell(m.LeaseReleased(lease, written=False))
    desk.run()
    assert closing in desk.answers


def test_what_is_ready_in_stream_order_only_does_not_stay_behind_alone() -> None:
    desk = desk_with_two_replicas()
    desk.fetch("k", DISK)
    desk.tell(m.CopyOrdered(desk.copies[0].copy))
    desk.put("other", 95, HOST)  # for which the host replica goes
    assert desk.ledger.where("k") == (DEVICE, DISK)
    lease = desk.lease("k", access=m.Access.WRITE)
    number = desk.next()
    desk.tell(m.SplitRequested(number, lease, {desk.leased[lease][0].place: "new"}))
    assert number not in desk.answers, "the copy to disk may fail yet"
    desk.run()
    assert desk.answers[number] == "granted"


def test_several_keys_are_split_together_or_not_at_all() -> None:
    desk = desk_with_two_replicas("a")
    desk.store("b", 10, DEVICE)
    assert not split(desk, a="a'", b="b'")
    assert set(desk.ledger) == {"a", "b"}


def test_a_split_to_a_key_that_is_there_is_refused() -> None:
    desk = desk_with_two_replicas()
    desk.store("new", 10, HOST)
    with pytest.raises(KeyExists):
        split(desk, k="new")


def test_a_split_replica_is_evicted_with_a_copy_as_it_is_the_last_of_its_key() -> None:
    desk = desk_with_two_replicas()
    split(desk, k="new")
    desk.evict("new", HOST)
    assert desk.moving() == [("new", DEVICE, HOST)]
    desk.run()
    assert desk.ledger.where("new") == (HOST,)


def test_a_new_version_takes_the_place_of_the_old_one() -> None:
    desk = desk_with_two_replicas()
    split(desk, k="new")
    lease = desk.lease("new", access=m.Access.WRITE)
    desk.tell(m.LeaseReleased(lease, written=True))
    rename(desk, new="k", replace=True)
    desk.run()
    assert list(desk.ledger) == ["k"]
    assert desk.ledger.where("k") == (DEVICE,)
    assert desk.ledger.books.tier_states[HOST].charged_bytes == 0


def test_a_rename_to_a_key_that_is_there_needs_leave_to_replace_it() -> None:
    desk = Desk()
    desk.store("a", 10, HOST)
    desk.store("b", 10, HOST)
    with pytest.raises(KeyExists):
        rename(desk, a="b")
    assert set(desk.ledger) == {"a", "b"}
    rename(desk, a="c")
    assert set(desk.ledger) == {"b", "c"}


def test_what_is_leased_is_not_replaced() -> None:
    desk = Desk()
    desk.store("a", 10, HOST)
    desk.store("b", 10, HOST)
    desk.lease("b", HOST)
    with pytest.raises(LeaseError) as refused:
        rename(desk, a="b", replace=True)
    assert refused.value.holders == ("lease 3 of 'me'",)
    assert set(desk.ledger) == {"a", "b"}


def test_a_lease_lives_on_under_the_new_name() -> None:
    desk = Desk()
    desk.store("a", 10, HOST)
    lease = desk.lease("a", HOST, m.Access.WRITE)
    rename(desk, a="b")
    with pytest.raises(LeaseError):
        desk.lease("b", HOST)
    desk.tell(m.LeaseReleased(lease, written=True))
    desk.lease("b", HOST)


def test_who_waits_for_a_replaced_key_is_told() -> None:
    desk = Desk()
    desk.store("old", 10, HOST)
    desk.store("new", 10, HOST)
    waiting = desk.fetch("old", DEVICE)
    rename(desk, new="old", replace=True)
    assert isinstance(desk.answers[waiting], KeyNotFound)
    desk.run()
    assert desk.ledger.where("old") == (HOST,)


@pytest.mark.parametrize("names", [{"a": "b", "b": "c"}, {"a": "a"}, {"a": "c", "b": "c"}])
def test_names_that_collide_are_refused_and_nothing_is_renamed(names: dict[str, str]) -> None:
    desk = Desk()
    desk.store("a", 10, HOST)
    desk.store("b", 10, HOST)
    with pytest.raises(UsageError):
        rename(desk, replace=True, **names)
    assert set(desk.ledger) == {"a", "b"}


def test_a_key_whose_first_bytes_are_coming_has_no_name_to_give() -> None:
    desk = Desk()
    desk.put("k", 10)
    with pytest.raises(KeyNotFound):
        rename(desk, k="other")


def test_the_story_tells_of_other_names() -> None:
    desk = desk_with_two_replicas()
    split(desk, k="new")
    rename(desk, new="k", replace=True)
    assert any("split off from 'k' in device" in line for line in desk.ledger.story("k"))
    assert any("renamed from 'new'" in line for line in desk.ledger.story("k"))
