"""A trace becomes a plan, and a running step finds its place in it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierstore.planning import Trace, plan_from
from tierstore.planning.planner import LOOK_AHEAD, PlanPosition

KEYS = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=30)


def test_a_trace_keeps_the_order_of_use() -> None:
    trace = Trace()
    for key in "abcab":
        trace.note(key)
    assert trace.accesses == tuple("abcab")
    assert len(trace) == 5


def test_an_immediate_repetition_is_the_same_use() -> None:
    trace = Trace()
    for key in "aabba":
        trace.note(key)
    assert trace.accesses == tuple("aba")


def test_taking_a_trace_begins_a_new_one() -> None:
    trace = Trace()
    trace.note("a")
    assert trace.take() == ("a",)
    assert trace.take() == ()


def test_a_plan_expects_the_step_that_was_recorded() -> None:
    trace = Trace()
    trace.note("a")
    trace.note("b")
    assert plan_from(trace).accesses == ("a", "b")
    assert plan_from(["x"]).accesses == ("x",)


@given(KEYS)
def test_the_next_use_of_a_key_is_where_the_cycle_comes_by_it_again(keys: list[str]) -> None:
    plan = plan_from(keys)
    for position in range(len(keys)):
        for key in "abcdef":
            ahead = [n for n in range(1, len(keys) + 1) if keys[(position + n) % len(keys)] == key]
            assert plan.distance(key, position) == (ahead[0] if ahead else None)


@given(KEYS, st.integers(1, 4))
def test_a_step_that_goes_as_planned_is_never_a_surprise(keys: list[str], cycles: int) -> None:
    place = PlanPosition(plan_from(keys))
    positions = [place.pass_by(key) for _ in range(cycles) for key in keys]
    assert positions == list(range(len(keys))) * cycles
    assert (place.surprises, place.turn) == (0, len(keys) * cycles)


def test_what_was_planned_and_is_skipped_is_passed() -> None:
    place = PlanPosition(plan_from("abcde"))
    place.pass_by("a")
    assert place.pass_by("d") == 3
    assert place.key_at(place.turn) == "e"


def test_a_key_that_is_not_near_is_a_surprise_and_moves_nothing() -> None:
    far = [str(number) for number in range(LOOK_AHEAD + 2)]
    place = PlanPosition(plan_from(far))
    assert place.pass_by("nowhere") is None
    assert place.pass_by(far[-1]) is None
    assert (place.surprises, place.turn) == (2, 0)
    assert place.pass_by(far[LOOK_AHEAD - 1]) == LOOK_AHEAD - 1


def test_a_new_step_begins_at_the_beginning_of_the_plan() -> None:
    place = PlanPosition(plan_from("abc"))
    place.begin_cycle()
    assert place.turn == 0
    place.pass_by("a")
    place.begin_cycle()
    assert (place.turn, place.key_at(place.turn), place.length) == (3, "a", 3)


def test_an_empty_plan_knows_nothing() -> None:
    place = PlanPosition(plan_from([]))
    place.begin_cycle()
    assert place.pass_by("a") is None
