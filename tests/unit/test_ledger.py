"""The rules of the books that only the ledger shows, one a test, without hardware."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tierstore.core import messages as m
from tierstore.core.eviction import POLICIES
from tierstore.core.ledger import Ledger
from tierstore.core.model import Plan, Tier
from tierstore.errors import BackendError, CapacityError, InvariantError, KeyNotFound, LeaseError

DEVICE, HOST, DISK = 0, 1, 2


class Desk:
    """A ledger and the commands that nobody has carried out yet."""

    def __init__(
        self,
        device: int = 100,
        host: int = 100,
        disk: int = 1000,
        *,
        policy: str = "lru",
        window: int = 1000,
        high: float = 1.0,
        low: float = 1.0,
    ) -> None:
        self.ledger = Ledger(
            [
                Tier("device", device, int(device * high), int(device * low)),
                Tier("host", host, host, host, is_host=True),
                Tier("disk", disk, disk, disk, is_storage=True),
            ],
            POLICIES[policy],
            window,
        )
        self.copies: list[m.StartCopy] = []
        self.frees: list[m.FreeSlot] = []
        self.commits: list[m.Commit] = []
        self.answers: dict[int, BaseException | str | None] = {}
        self.leased: dict[int, Sequence[m.Granted]] = {}
        self.number = 0

    def tell(self, event: m.Event) -> None:
        for command in self.ledger.apply(event):
            match command:
                case m.StartCopy():
                    self.copies.append(command)
                case m.FreeSlot():
                    self.frees.append(command)
                case m.Grant():
                    self.answers[command.request] = "granted"
                    self.leased[command.request] = command.replicas
                case m.Settle():
                    self.answers[command.request] = command.error
                case m.SetCapacity():
                    self.answers[-command.tier] = f"capacity {command.capacity_bytes}"
                case m.Commit():
                    self.commits.append(command)
        self.ledger.check()

    def next(self) -> int:
        self.number += 1
        return self.number

    def put(self, key: str, nbytes: int, tier: int | None = None, *, replace: bool = False) -> int:
        number = self.next()
        self.tell(m.PutRequested(number, key, nbytes, tier, replace))
        return number

    def fetch(self, key: str, tier: int, urgency: m.Urgency = m.Urgency.DEMAND) -> int:
        number = self.next()
        self.tell(m.FetchRequested(number, [key], tier, urgency))
        return number

    def evict(self, key: str, to: int | None = None) -> int:
        number = self.next()
        self.tell(m.EvictRequested(number, [key], to))
        return number

    def lease(self, key: str, tier: int = DEVICE, access: m.Access = m.Access.READ) -> int:
        number = self.next()
        self.tell(m.LeaseRequested(number, [key], tier, access, "me"))
        return number

    def finish(self, index: int = 0, error: BaseException | None = None) -> None:
        self.tell(m.CopyDone(self.copies.pop(index).copy, error))

    def end_commit(self, error: BaseException | None = None) -> None:
        self.tell(m.CommitDone(self.commits.pop(0).commit, error))

    def free(self) -> None:
        while self.frees:
            command = self.frees.pop(0)
            self.tell(m.Freed(command.place))

    def run(self) -> None:
        """Let the hardware do everything."""
        while self.copies or self.frees or self.commits:
            while self.copies:
                self.finish()
            while self.commits:
                self.end_commit()
            self.free()

    def store(self, key: str, nbytes: int, tier: int) -> None:
        self.put(key, nbytes, tier)
        self.run()

    def moving(self) -> list[tuple[str, int | None, int]]:
        return [(c.key, None if c.source is None else c.source.tier, c.target.tier) for c in self.copies]


def test_bytes_stay_charged_until_the_backend_reports_them_freed() -> None:
    desk = Desk()
    desk.store("k", 60, DEVICE)
    desk.tell(m.DropRequested(["k"]))
    assert desk.ledger.books.tier_states[DEVICE].charged_bytes == 60
    desk.put("next", 60, DEVICE)
    assert desk.moving() == []
    desk.free()
    assert desk.moving() == [("next", None, DEVICE)]


def test_wants_for_room_are_served_first_come_first_served() -> None:
    desk = Desk(device=100)
    desk.store("old", 100, DEVICE)
    desk.put("large", 90, DEVICE)
    desk.put("small", 10, DEVICE)
    desk.finish()  # "old" reaches the host
    desk.free()
    assert desk.moving() == [("large", None, DEVICE), ("small", None, DEVICE)]


def test_a_small_want_does_not_overtake_a_large_one() -> None:
    desk = Desk(device=100)
    desk.store("a", 50, DEVICE)
    desk.store("b", 40, DEVICE)
    desk.put("large", 90, DEVICE)
    desk.put("small", 5, DEVICE)
    assert "small" not in [key for key, _, _ in desk.moving()]


def test_demand_goes_before_prefetch_before_write_back() -> None:
    desk = Desk(device=1000, host=1000, window=10)
    for key in ("busy", "write-back", "prefetch", "demand"):
        desk.store(key, 10, DISK)
    desk.fetch("busy", HOST, m.Urgency.DEMAND)
    desk.fetch("write-back", HOST, m.Urgency.WRITE_BACK)
    desk.fetch("prefetch", HOST, m.Urgency.PREFETCH)
    desk.fetch("demand", HOST, m.Urgency.DEMAND)
    order = []
    while desk.copies:
        order.append(desk.copies[0].key)
        desk.finish()
    assert order == ["busy", "demand", "prefetch", "write-back"]


def test_a_demand_hurries_the_prefetch_that_it_joins() -> None:
    desk = Desk(device=1000, host=1000, window=10)
    for key in ("busy", "first", "second"):
        desk.store(key, 10, DISK)
    desk.fetch("busy", HOST)
    desk.fetch("first", HOST, m.Urgency.PREFETCH)
    desk.fetch("second", HOST, m.Urgency.PREFETCH)
    desk.fetch("second", HOST)
    desk.finish()
    assert desk.moving() == [("second", DISK, HOST)]


def test_a_demand_hurries_the_host_leg_of_a_prefetch() -> None:
    desk = Desk(device=1000, host=1000, window=10)
    for key in ("busy", "first", "second"):
        desk.store(key, 10, DISK)
    desk.fetch("busy", HOST)
    desk.fetch("first", DEVICE, m.Urgency.PREFETCH)
    desk.fetch("second", DEVICE, m.Urgency.PREFETCH)
    desk.fetch("second", DEVICE)
    desk.finish()
    assert desk.moving() == [("second", DISK, HOST)]


def test_a_demand_hurries_a_prefetch_that_waits_for_room() -> None:
    desk = Desk(device=100, policy="next-use")
    desk.tell(m.PlanFollowed(Plan(("other", "wanted", "resident"))))
    desk.store("resident", 100, DEVICE)
    desk.store("wanted", 50, DISK)
    desk.store("other", 50, DISK)
    desk.fetch("wanted", DEVICE, m.Urgency.PREFETCH)
    demand = desk.fetch("wanted", DEVICE)
    desk.run()
    assert desk.answers[demand] is None
    assert desk.ledger.where("wanted") == (DEVICE, HOST, DISK)


def test_bytes_in_flight_are_bounded_in_each_direction() -> None:
    desk = Desk(device=1000, host=1000, window=25)
    for number in range(4):
        desk.store(f"k{number}", 10, DISK)
    for number in range(4):
        desk.fetch(f"k{number}", HOST)
    assert len(desk.copies) == 2
    desk.finish()
    assert len(desk.copies) == 2


def test_what_goes_up_to_the_device_passes_through_the_host() -> None:
    desk = Desk()
    desk.store("k", 10, DISK)
    desk.fetch("k", DEVICE)
    assert desk.moving() == [("k", DISK, HOST)]
    desk.finish()
    assert desk.moving() == [("k", HOST, DEVICE)]
    desk.run()
    assert desk.ledger.where("k") == (DEVICE, HOST, DISK)


def test_what_can_never_fit_in_the_host_goes_up_without_it() -> None:
    desk = Desk(host=5)
    desk.store("k", 10, DISK)
    desk.fetch("k", DEVICE)
    assert desk.moving() == [("k", DISK, DEVICE)]


def test_what_finds_the_host_full_of_leases_goes_up_without_it() -> None:
    desk = Desk(host=10)
    desk.store("held", 10, HOST)
    desk.lease("held", HOST)
    desk.store("k", 10, DISK)
    fetch = desk.fetch("k", DEVICE)
    assert desk.moving() == [("k", DISK, DEVICE)]
    desk.run()
    assert desk.answers[fetch] is None


def test_what_goes_down_never_waits_for_the_host() -> None:
    desk = Desk()
    desk.store("k", 10, DEVICE)
    desk.evict("k", DISK)
    assert desk.moving() == [("k", DEVICE, DISK)]


def test_a_failed_host_leg_fails_the_fetch_with_its_cause() -> None:
    desk = Desk()
    desk.store("k", 10, DISK)
    fetch = desk.fetch("k", DEVICE)
    cause = BackendError("the disk is gone")
    desk.finish(error=cause)
    desk.run()
    assert desk.answers[fetch] is cause
    assert desk.ledger.where("k") == (DISK,)


def test_a_failed_write_back_tries_the_next_lower_tier() -> None:
    desk = Desk(device=100)
    desk.store("k", 100, DEVICE)
    put = desk.put("new", 100, DEVICE)
    assert desk.moving() == [("k", DEVICE, HOST)]
    desk.finish(error=BackendError("the host is broken"))
    assert desk.moving() == [("k", DEVICE, DISK)]
    desk.run()
    assert desk.answers[put] is None


def test_when_nothing_can_be_evicted_the_request_fails_with_the_reason() -> None:
    desk = Desk(device=100)
    desk.store("k", 100, DEVICE)
    put = desk.put("new", 100, DEVICE)
    desk.finish(error=BackendError("host"))
    cause = BackendError("disk")
    desk.finish(error=cause)
    desk.free()
    error = desk.answers[put]
    assert isinstance(error, CapacityError)
    assert "could not be moved to a lower tier" in str(error)
    assert error.__cause__ is cause
    assert desk.ledger.where("k") == (DEVICE,)


def test_what_could_not_leave_is_tried_again_for_the_next_request() -> None:
    desk = Desk(device=100)
    desk.store("k", 100, DEVICE)
    desk.put("new", 100, DEVICE)
    desk.finish(error=BackendError("host"))
    desk.finish(error=BackendError("disk"))
    put = desk.put("newer", 100, DEVICE)
    desk.run()
    assert desk.answers[put] is None
    assert DEVICE not in desk.ledger.where("k")


def test_a_lease_on_a_leaving_replica_keeps_it() -> None:
    desk = Desk(device=100)
    desk.store("k", 60, DEVICE)
    put = desk.put("new", 100, DEVICE)
    lease = desk.lease("k")
    desk.run()
    assert desk.answers[lease] == "granted"
    assert DEVICE in desk.ledger.where("k")
    assert isinstance(desk.answers[put], CapacityError)


def test_a_medium_that_refuses_the_shape_makes_more_room_and_tries_again() -> None:
    desk = Desk(device=100)
    desk.store("a", 40, DEVICE)
    put = desk.put("new", 50, DEVICE)
    desk.tell(m.CopyRefused(desk.copies.pop().copy, CapacityError("in pieces")))
    desk.free()
    assert ("a", DEVICE, HOST) in desk.moving()
    desk.run()
    assert desk.answers[put] is None


def test_a_medium_that_refuses_even_when_empty_fails_the_request() -> None:
    desk = Desk(device=100)
    put = desk.put("new", 60, DEVICE)
    cause = CapacityError("in pieces")
    desk.tell(m.CopyRefused(desk.copies.pop().copy, cause))
    desk.free()
    error = desk.answers[put]
    assert isinstance(error, CapacityError)
    assert "not in one piece" in str(error)
    assert error.__cause__ is cause


def test_a_prefetch_that_the_medium_refuses_twice_is_declined() -> None:
    desk = Desk()
    desk.store("k", 10, DISK)
    fetch = desk.fetch("k", HOST, m.Urgency.PREFETCH)
    for _ in range(2):
        desk.tell(m.CopyRefused(desk.copies.pop().copy, CapacityError("in pieces")))
        desk.free()
    desk.run()
    assert desk.answers[fetch] is None
    assert desk.ledger.where("k") == (DISK,)


def test_a_prefetch_that_the_medium_refuses_pushes_out_more_of_what_is_needed_later() -> None:
    desk = Desk(host=100, policy="next-use")
    desk.tell(m.PlanFollowed(Plan(("now", "k", "late"))))
    desk.store("late", 40, HOST)
    desk.store("k", 40, DISK)
    desk.tell(m.Advanced(0))
    fetch = desk.fetch("k", HOST, m.Urgency.PREFETCH)
    desk.tell(m.CopyRefused(desk.copies.pop().copy, CapacityError("in pieces")))
    desk.free()
    assert desk.moving() == [("late", HOST, DISK)]
    desk.run()
    assert desk.answers[fetch] is None
    assert desk.ledger.where("k") == (HOST, DISK)


def test_a_prefetch_pushes_out_only_what_the_plan_needs_later() -> None:
    desk = Desk(device=100, policy="next-use")
    desk.tell(m.PlanFollowed(Plan(("now", "soon", "late"))))
    desk.store("soon", 100, DEVICE)
    desk.store("late", 100, DISK)
    desk.fetch("late", DEVICE, m.Urgency.PREFETCH)
    assert desk.moving() == []
    desk.tell(m.Advanced(1))
    desk.fetch("late", DEVICE, m.Urgency.PREFETCH)
    assert ("soon", DEVICE, HOST) in desk.moving()


def test_a_prefetch_of_what_is_being_written_is_ignored() -> None:
    desk = Desk()
    desk.store("k", 10, DEVICE)
    desk.lease("k", access=m.Access.WRITE)
    fetch = desk.fetch("k", HOST, m.Urgency.PREFETCH)
    assert desk.answers[fetch] is None


def test_a_write_lease_waits_for_the_copy_that_reads_its_bytes() -> None:
    desk = Desk()
    desk.store("k", 10, DEVICE)
    desk.evict("k", HOST)
    lease = desk.lease("k", access=m.Access.WRITE)
    assert lease not in desk.answers
    desk.run()
    assert desk.answers[lease] == "granted"


def test_a_write_lease_ends_evictions_of_its_key() -> None:
    desk = Desk(device=200, host=100, disk=100)
    desk.store("full", 100, HOST)
    desk.store("k", 100, DEVICE)
    evict = desk.evict("k", HOST)
    lease = desk.lease("k", access=m.Access.WRITE)
    desk.run()
    assert desk.answers[lease] == "granted"
    assert isinstance(desk.answers[evict], LeaseError)


def test_a_fetch_ends_evictions_of_its_key_that_would_undo_it() -> None:
    desk = Desk()
    desk.store("k", 10, DISK)
    first = desk.fetch("k", DEVICE)
    desk.run()
    evict = desk.evict("k", DISK)
    again = desk.fetch("k", DEVICE)
    desk.run()
    assert desk.answers[first] is None
    assert isinstance(desk.answers[evict], LeaseError)
    assert desk.answers[again] is None


def test_a_stream_ordered_copy_is_ready_before_its_source_is_free() -> None:
    desk = Desk()
    desk.store("k", 10, HOST)
    lease = desk.lease("k", access=m.Access.WRITE)
    desk.tell(m.CopyOrdered(desk.copies[0].copy))
    assert desk.answers[lease] == "granted"
    desk.tell(m.LeaseReleased(lease, written=True))
    assert desk.frees == [], "the host replica is still being read"
    desk.finish()
    assert [free.place.tier for free in desk.frees] == [HOST]


def test_a_stream_ordered_copy_that_fails_late_drops_its_target() -> None:
    desk = Desk()
    desk.store("k", 10, HOST)
    desk.fetch("k", DEVICE)
    desk.tell(m.CopyOrdered(desk.copies[0].copy))
    desk.finish(error=BackendError("late"))
    desk.free()
    assert desk.ledger.where("k") == (HOST,)


def test_a_copy_that_was_dropped_before_it_was_ordered_is_still_freed() -> None:
    desk = Desk()
    desk.store("k", 10, HOST)
    desk.fetch("k", DEVICE)
    desk.tell(m.DropRequested(["k"]))
    desk.tell(m.CopyOrdered(desk.copies[0].copy))
    desk.run()
    assert desk.ledger.books.entries == {}


def test_what_a_backend_could_not_free_stays_charged_and_hangs_nobody() -> None:
    desk = Desk(device=100)
    desk.store("k", 60, DEVICE)
    desk.tell(m.DropRequested(["k"]))
    put = desk.put("new", 60, DEVICE)
    command = desk.frees.pop()
    desk.tell(m.Freed(command.place, BackendError("stuck")))
    assert isinstance(desk.answers[put], CapacityError)
    assert desk.ledger.books.tier_states[DEVICE].charged_bytes == 60
    small = desk.put("small", 40, DEVICE)
    desk.run()
    assert desk.answers[small] is None


def test_dropping_a_key_cancels_copies_that_have_not_started() -> None:
    desk = Desk(device=1000, host=1000, window=10)
    for key in ("busy", "k"):
        desk.store(key, 10, DISK)
    desk.fetch("busy", HOST)
    fetch = desk.fetch("k", HOST)
    desk.tell(m.DropRequested(["k"]))
    assert isinstance(desk.answers[fetch], KeyNotFound)
    desk.run()
    assert list(desk.ledger) == ["busy"]


def test_dropping_a_key_that_waits_for_its_host_leg_frees_its_room() -> None:
    desk = Desk()
    desk.store("k", 10, DISK)
    desk.fetch("k", DEVICE)
    desk.tell(m.DropRequested(["k"]))
    desk.run()
    assert desk.ledger.books.entries == {}
    assert all(tier_state.charged_bytes == 0 for tier_state in desk.ledger.books.tier_states)


def test_a_resize_binds_new_wants_at_once() -> None:
    desk = Desk(device=100)
    desk.store("k", 80, DEVICE)
    number = desk.next()
    desk.tell(m.ResizeRequested(number, DEVICE, 50, 50, 50))
    put = desk.put("new", 60)
    assert number not in desk.answers
    desk.run()
    assert desk.answers[number] is None
    assert desk.answers[put] is None
    assert desk.ledger.where("new") == (HOST,)
    assert desk.ledger.books.tier_states[DEVICE].tier.capacity_bytes == 50


def test_resizes_of_a_tier_go_one_by_one() -> None:
    desk = Desk(device=100)
    desk.store("k", 80, DEVICE)
    first, second = desk.next(), desk.next()
    desk.tell(m.ResizeRequested(first, DEVICE, 50, 50, 50))
    desk.tell(m.ResizeRequested(second, DEVICE, 200, 200, 200))
    desk.run()
    assert desk.answers[first] is None
    assert desk.answers[second] is None
    assert desk.ledger.books.tier_states[DEVICE].tier.capacity_bytes == 200


def test_a_resize_that_fails_gives_the_old_quota_back() -> None:
    desk = Desk(device=100, host=10, disk=10)
    desk.store("k", 80, DEVICE)
    number = desk.next()
    desk.tell(m.ResizeRequested(number, DEVICE, 50, 50, 50))
    assert isinstance(desk.answers[number], CapacityError)
    put = desk.put("new", 20, DEVICE)
    desk.run()
    assert desk.answers[put] is None


def test_closing_fails_what_waits_and_waits_for_what_moves() -> None:
    desk = Desk(device=100)
    desk.store("k", 80, DEVICE)
    desk.store("low", 10, DISK)
    resize, close = desk.next(), desk.next()
    desk.tell(m.ResizeRequested(resize, DEVICE, 50, 50, 50))
    fetch = desk.fetch("low", HOST)
    desk.tell(m.CloseRequested(close))
    assert type(desk.answers[fetch]).__name__ == "StoreClosed"
    assert type(desk.answers[resize]).__name__ == "StoreClosed"
    assert close not in desk.answers
    desk.run()
    assert desk.answers[close] is None


def test_the_auditor_notices_every_sum_that_is_wrong() -> None:
    names = (
        "charged_bytes",
        "filling_bytes",
        "ready_bytes",
        "draining_bytes",
        "leased_bytes",
        "leaving_bytes",
    )
    for name in names:
        desk = Desk()
        desk.store("k", 10, DEVICE)
        tier_state = desk.ledger.books.tier_states[DEVICE]
        setattr(tier_state, name, getattr(tier_state, name) + 1)
        with pytest.raises(InvariantError, match=name):
            desk.ledger.check()


def test_the_last_replica_of_a_live_key_cannot_be_dropped() -> None:
    desk = Desk()
    desk.store("k", 10, DEVICE)
    with pytest.raises(InvariantError, match="last"):
        desk.ledger.books.drop(desk.ledger.books.index["k"].replicas[DEVICE])


def test_a_replaced_replica_is_freed_when_its_last_lease_ends() -> None:
    desk = Desk()
    desk.store("k", 10, DEVICE)
    lease = desk.lease("k")
    desk.put("k", 10, replace=True)
    desk.finish()
    assert desk.frees == []
    desk.tell(m.LeaseReleased(lease, written=False))
    assert len(desk.frees) == 1


def test_a_replaced_replica_that_is_leased_counts_as_held_not_as_coming_free() -> None:
    desk = Desk(device=20)
    desk.store("k", 10, DEVICE)
    desk.lease("k")
    desk.put("k", 10, DEVICE, replace=True)
    desk.finish()
    put = desk.put("new", 20, DEVICE)
    assert isinstance(desk.answers[put], CapacityError)


def test_a_write_while_a_put_replaces_the_key_fails_the_put() -> None:
    desk = Desk()
    desk.store("k", 10, DEVICE)
    put = desk.put("k", 10, replace=True)
    lease = desk.lease("k", access=m.Access.WRITE)
    desk.run()
    assert isinstance(desk.answers[put], LeaseError)
    assert desk.answers[lease] == "granted"
    desk.tell(m.LeaseReleased(lease, written=True))
    assert list(desk.ledger) == ["k"]


def test_a_demand_gets_room_before_a_write_back_that_asked_earlier() -> None:
    desk = Desk()
    desk.store("old", 100, HOST)
    desk.store("below", 60, DISK)
    desk.tell(m.DropRequested(["old"]))
    desk.fetch("below", HOST, m.Urgency.WRITE_BACK)
    desk.put("urgent", 60, HOST)
    desk.free()
    assert desk.moving() == [("urgent", None, HOST)]
