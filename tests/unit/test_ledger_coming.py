"""Room for what a plan says is coming, without hardware."""

from __future__ import annotations

from tests.unit.test_ledger import DEVICE, DISK, HOST, Desk
from tierstore.core import messages as m
from tierstore.core.model import Plan


def _expecting(nbytes: int) -> Desk:
    """Return a desk with a full device, at the beginning of a plan that brings so many bytes after "now"."""
    desk = Desk(device=100, policy="next-use")
    desk.tell(m.PlanFollowed(Plan(("before", "now", "soon", "late"), coming=(0, nbytes, 0, 0))))
    desk.store("soon", 50, DEVICE)
    desk.store("late", 50, DEVICE)
    return desk


def test_room_for_what_the_plan_says_is_coming_is_made_before_somebody_waits_for_it() -> None:
    desk = _expecting(30)
    assert desk.moving() == []
    desk.tell(m.Advanced(1))
    assert desk.moving() == [("late", DEVICE, HOST)]
    desk.run()
    desk.tell(m.Advanced(2))  # nothing more is coming after it: what is there stays
    put = desk.put("come", 30, DEVICE)
    assert desk.moving() == [("come", None, DEVICE)]
    desk.run()
    assert desk.answers[put] is None
    assert (desk.ledger.where("soon"), desk.ledger.where("come")) == ((DEVICE,), (DEVICE,))


def test_room_for_what_is_coming_is_made_again_as_soon_as_something_has_come() -> None:
    desk = _expecting(30)
    desk.tell(m.Advanced(1))
    desk.run()
    desk.put("come", 50, DEVICE)
    desk.run()
    assert desk.ledger.where("soon") == (HOST,)


def test_what_is_coming_may_be_more_than_there_is() -> None:
    desk = _expecting(1000)
    desk.tell(m.Advanced(1))
    desk.run()
    assert [desk.ledger.where(key) for key in ("soon", "late")] == [(HOST,), (HOST,)]
    desk.tell(m.PlanFollowed(None))
    fetch = desk.fetch("soon", DEVICE)
    desk.run()
    assert desk.answers[fetch] is None
    assert DEVICE in desk.ledger.where("soon")


def test_a_prefetch_leaves_the_room_for_what_is_coming() -> None:
    desk = _expecting(30)
    desk.store("wanted", 40, DISK)
    desk.tell(m.Advanced(1))
    desk.run()
    desk.fetch("wanted", DEVICE, m.Urgency.PREFETCH)
    assert desk.moving() == []
    desk.tell(m.Advanced(2))
    desk.fetch("wanted", DEVICE, m.Urgency.PREFETCH)
    assert ("wanted", DISK, HOST) in desk.moving()
