"""A request of many keys goes in strides, and is answered as if it did not."""

from __future__ import annotations

import pytest

from tierstore.core import messages as m
from tierstore.core.eviction import LeastRecentlyUsed
from tierstore.core.ledger import Ledger
from tierstore.core.model import Tier
from tierstore.errors import BackendError, KeyNotFound, LeaseError

HOST, DISK = 0, 1
KEYS = tuple(f"k{number}" for number in range(7))


class Desk:
    """A ledger of two tiers that lets three keys of a request be on their way at a time."""

    def __init__(self) -> None:
        tiers = [Tier("host", 100, 100, 100, is_host=True), Tier("disk", 100, 100, 100, is_storage=True)]
        self.ledger = Ledger(tiers, LeastRecentlyUsed, stride=3)
        self.copies: list[m.StartCopy] = []
        self.frees: list[m.FreeSlot] = []
        self.answers: dict[int, BaseException | str | None] = {}
        for number, key in enumerate(KEYS):
            self.tell(m.PutRequested(100 + number, key, 10, HOST, replace=False))
            self.end_copies()

    def tell(self, *events: m.Event) -> None:
        for command in self.ledger.apply(*events):
            match command:
                case m.StartCopy():
                    self.copies.append(command)
                case m.FreeSlot():
                    self.frees.append(command)
                case m.Grant():
                    self.answers[command.request] = "granted"
                case m.Settle():
                    self.answers[command.request] = command.error
                case m.SetCapacity() | m.Commit():
                    raise AssertionError("nobody resizes, and nothing is durable")
        self.ledger.check()

    def end_copies(self) -> None:
        copies, self.copies = self.copies, []
        self.tell(*(m.CopyDone(copy.copy) for copy in copies))

    def end_frees(self) -> None:
        frees, self.frees = self.frees, []
        self.tell(*(m.Freed(free.place) for free in frees))

    def run(self) -> int:
        """Let the hardware do everything; return the most copies that were under way at a time."""
        most = 0
        while self.copies or self.frees:
            most = max(most, len(self.copies))
            self.end_copies()
            self.end_frees()
        return most

    def moving(self) -> list[str]:
        return [copy.key for copy in self.copies]


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_only_a_stride_of_a_request_s_keys_is_on_its_way_at_a_time(desk: Desk) -> None:
    desk.tell(m.EvictRequested(1, KEYS, DISK))
    assert desk.moving() == ["k0", "k1", "k2"]
    assert desk.run() == 3
    assert desk.answers[1] is None
    assert {desk.ledger.where(key) for key in KEYS} == {(DISK,)}


def test_the_next_key_begins_when_one_is_done(desk: Desk) -> None:
    desk.tell(m.EvictRequested(1, KEYS, DISK))
    desk.tell(m.CopyDone(desk.copies.pop(1).copy))
    assert desk.moving() == ["k0", "k2"], "its room above is not free yet"
    desk.end_frees()
    assert desk.moving() == ["k0", "k2", "k3"]


def test_keys_that_need_nothing_take_no_part_of_the_stride(desk: Desk) -> None:
    desk.tell(m.FetchRequested(1, KEYS, HOST, m.Urgency.DEMAND))
    assert desk.answers[1] is None
    desk.tell(m.EvictRequested(2, KEYS[5:], DISK))
    desk.run()
    desk.tell(m.FetchRequested(3, KEYS, HOST, m.Urgency.DEMAND))
    assert desk.moving() == ["k5", "k6"]


def test_a_lease_of_more_keys_than_a_stride_holds_them_all(desk: Desk) -> None:
    desk.tell(m.EvictRequested(1, KEYS, DISK))
    desk.run()
    desk.tell(m.LeaseRequested(2, KEYS, HOST, m.Access.READ, "me"))
    assert desk.run() == 3
    assert desk.answers[2] == "granted"
    assert all(entry.holders for entry in desk.ledger.books.entries.values())


def test_a_failure_ends_a_request_whose_turn_has_not_come_everywhere(desk: Desk) -> None:
    desk.tell(m.EvictRequested(1, KEYS, DISK))
    desk.tell(m.CopyDone(desk.copies.pop(0).copy, BackendError("bad block")))
    assert isinstance(desk.answers[1], BackendError)
    assert desk.run() == 2, "nothing new begins for a request that has failed"
    assert desk.ledger.where("k6") == (HOST,)


def test_a_key_whose_turn_has_not_come_can_be_dropped_or_wanted_back(desk: Desk) -> None:
    desk.tell(m.EvictRequested(1, KEYS, DISK))
    desk.tell(m.FetchRequested(2, ["k6"], HOST, m.Urgency.DEMAND))
    assert isinstance(desk.answers[1], LeaseError), "whoever asks last is heard"
    desk.run()
    desk.tell(m.EvictRequested(3, KEYS, DISK))
    desk.tell(m.DropRequested(["k6"]))
    assert isinstance(desk.answers[3], KeyNotFound)
    desk.run()


def test_a_key_that_is_leased_before_its_turn_comes_ends_the_eviction(desk: Desk) -> None:
    desk.tell(m.FetchRequested(1, KEYS, HOST, m.Urgency.DEMAND))
    desk.tell(m.EvictRequested(2, KEYS, DISK))
    desk.tell(m.LeaseRequested(3, ["k6"], HOST, m.Access.READ, "me"))
    assert desk.answers[3] == "granted"
    assert isinstance(desk.answers[2], LeaseError)
    desk.run()
    assert desk.ledger.where("k6") == (HOST,)


def test_two_requests_of_many_keys_pass_each_other(desk: Desk) -> None:
    desk.tell(m.EvictRequested(1, KEYS[:5], DISK))
    desk.tell(m.EvictRequested(2, KEYS[2:], DISK))
    desk.run()
    assert (desk.answers[1], desk.answers[2]) == (None, None)
    assert {desk.ledger.where(key) for key in KEYS} == {(DISK,)}


def test_a_key_that_is_being_written_when_its_turn_comes_fails_the_fetch(desk: Desk) -> None:
    desk.tell(m.FetchRequested(1, KEYS, DISK, m.Urgency.DEMAND))
    desk.tell(m.LeaseRequested(2, ["k6"], HOST, m.Access.WRITE, "me"))
    assert desk.answers[2] == "granted"
    desk.run()
    assert isinstance(desk.answers[1], LeaseError)
    assert desk.ledger.where("k6") == (HOST,)


def test_closing_answers_a_request_whose_turn_has_not_come_everywhere(desk: Desk) -> None:
    desk.tell(m.EvictRequested(1, KEYS, DISK))
    desk.tell(m.CloseRequested(2))
    assert desk.answers[1] is not None
    desk.run()
    assert desk.answers[2] is None
