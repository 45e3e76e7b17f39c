"""The order of a run's locks, and that tests of training see to it."""

from __future__ import annotations

from tests.lock_order import locks_in_order
from tierstore.training import locks
from tierstore.training.locks import Rank


def test_a_lock_that_is_taken_after_a_later_one_is_noted() -> None:
    with locks_in_order() as out_of_order:
        first, last = locks.new_lock(Rank.BINDINGS), locks.new_lock(Rank.PREFETCHER)
        with first, last, first, last:
            pass
        assert not out_of_order
        with last, first:
            pass
    assert out_of_order == ["BINDINGS was taken by a thread that has PREFETCHER"]


def test_of_some_kinds_a_thread_may_have_several() -> None:
    with locks_in_order() as out_of_order:
        with locks.new_lock(Rank.GRADIENT), locks.new_lock(Rank.GRADIENT):
            pass
        assert not out_of_order
        with locks.new_lock(Rank.BINDINGS), locks.new_lock(Rank.BINDINGS):
            pass
    assert out_of_order == ["BINDINGS was taken by a thread that has BINDINGS"]


def test_a_lock_that_is_tried_without_waiting_may_be_any() -> None:
    with locks_in_order() as out_of_order:
        first, last = locks.new_lock(Rank.OFFLOADED_STORAGE), locks.new_lock(Rank.BINDINGS)
        with last:
            assert first.acquire(blocking=False)
            first.release()
    assert not out_of_order
