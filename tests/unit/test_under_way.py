"""Copies that are under way are told while they are, the oldest first, and soon found among thousands."""

from __future__ import annotations

import pytest

from tests.stores import NAMES, make_store, numbered
from tierstore.core import inflight
from tierstore.core.messages import Urgency
from tierstore.spi import Backend
from tierstore.stats import MovingCopy
from tierstore.testing.faults import Gate
from tierstore.training.budgets.clock import Clock


def test_copies_are_told_while_they_move_and_no_longer() -> None:
    gates: list[Gate] = []

    def wrap(backend: Backend) -> Backend:
        gates.append(Gate(backend))
        return gates[-1]

    with make_store(1000, 1000, wrap=wrap) as store:
        for each in gates:
            each.open()
        store.put("a", numbered(1))
        store.put("b", numbered(2))
        assert store.moving() == ()
        for each in gates:
            each.shut()
        moved = store.evict("a"), store.evict("b")
        expected = tuple(MovingCopy(key, NAMES[-2], NAMES[-1], 100) for key in "ab")
        assert store.moving() == expected
        assert store.moving(1) == expected[:1]
        for each in gates:
            each.open()
        for transfer in moved:
            transfer.result(10)
        assert store.moving() == ()


@pytest.mark.parametrize("most", [1, 5, 100])
def test_what_waits_is_not_under_way(most: int) -> None:
    class Want:
        urgency = Urgency.DEMAND

    traffic = inflight.CopyTraffic(window_bytes=30)
    copies = [inflight.Copy(number, Want(), 0, 1, 10) for number in range(1, 8)]  # type: ignore[arg-type]
    started = [each for copy in copies for each in traffic.submit(copy)]
    assert started == copies[:3]
    assert traffic.under_way(most) == copies[:3][:most]
    traffic.end(copies[0], is_moved=True)
    assert traffic.under_way(most) == copies[1:4][:most]


def test_a_look_at_thousands_that_wait_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflight, "_MOST_LOOKED_AT", 4)

    class Want:
        urgency = Urgency.DEMAND

    traffic = inflight.CopyTraffic(window_bytes=10)
    copies = [inflight.Copy(number, Want(), 0, 1, 10) for number in range(1, 8)]  # type: ignore[arg-type]
    other = inflight.Copy(9, Want(), 1, 0, 10)  # type: ignore[arg-type]
    for copy in (*copies, other):
        traffic.submit(copy)
    assert traffic.under_way(100) == copies[:1]


def test_seconds_of_backward_only_grow_also_while_something_else_is_left_out() -> None:
    clock = Clock()
    clock.begin_forward()
    clock.end_forward()
    seen = [clock.backward_s]
    for _ in range(3):
        clock.note_backward()
        clock.leave_out(5.0)
        seen.append(clock.backward_s)
    clock.end_backward()
    seen.append(clock.backward_s)
    assert seen == sorted(seen)
    assert seen[0] == seen[-1] == 0.0, "more was left out than there was"
    clock.begin_forward()
    clock.end_forward()
    clock.note_backward()
    clock.end_backward()
    assert clock.backward_s > 0, "what was left out of one pass is not left out of the next"
