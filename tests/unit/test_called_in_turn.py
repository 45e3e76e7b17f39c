"""What is expected where a program without an optimizer calls parts of a model in turn."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.planning.deciding import Advance, Follow, Follower, PrefetchWindow
from tierstore.planning.deciding.part_order import PartOrder


def _order(calls: str) -> PartOrder:
    order = PartOrder()
    for part, following in itertools.pairwise(calls):
        order.note(part, (part,), following)
    return order


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ("aa", "a"),
        ("abab", "ba"),
        ("abcabc", "cab"),
        ("abbbabbb", "bba"),  # once more, as nobody knows how often
        ("abbba", "abb"),
        ("abbbbcabbbb", "bbca"),
        ("abbbbcabbbbc", "cabb"),
        ("abcbcbcabcbc", "cbca"),  # b and c in turn; a, some time
        ("abacab", "ba"),
    ],
)
def test_one_part_follows_another_until_one_comes_again(calls: str, expected: str) -> None:
    found = _order(calls).expected(calls[-1])
    assert "".join(map(str, found)).startswith(expected)


@pytest.mark.parametrize("before", [1, 20, 500])
def test_a_program_that_changes_its_ways_is_followed_soon(before: int) -> None:
    """However often another part came next: what is expected is what comes now, after a few more calls."""
    found = _order("ab" * before + "ac" * 12 + "a").expected("a")
    assert found[:2] == ["a", "c"]


@given(st.text("abcd", min_size=2, max_size=30))
def test_every_known_part_is_expected(calls: str) -> None:
    order = _order(calls + calls[0])
    found = order.expected(calls[0])
    assert found[0] == calls[0]
    assert set(found) == set(calls)
    assert len(found) <= len(set(calls)) + 1
    for each in set(calls) if len(set(calls)) > 1 else ():
        assert order.comes_again(each) == (order.expected(each)[:2] == [each, each])


def test_a_call_that_ended_early_changes_nothing_of_what_a_part_uses() -> None:
    order = PartOrder()
    assert order.note("a", ("x", "y"), "a")
    assert not order.note("a", (), "a")
    assert order.accesses("a") == ("x", "y")
    assert order.note("a", ("x",), "a")
    assert "b" not in order


# ---------------------------------------------------------------------- what a follower makes of it

USES = {"a": ["a0", "a1"], "b": ["b0", "b1", "b2"], "c": ["c0"], "-": []}


def _call(follower: Follower, part: str) -> list[Sequence[str]]:
    """One call; returns the plans that are to be followed from then on."""
    advice = list(follower.begin_inference(part))
    for key in USES[part]:
        advice += follower.note(key)
    return [each.plan.accesses for each in advice if isinstance(each, Follow)]


def _plans(calls: str) -> list[list[Sequence[str]]]:
    follower = Follower([PrefetchWindow("host", 1)], "host", lambda _: 1, 0)
    return [_call(follower, part) for part in calls]


@pytest.mark.parametrize("parts", ["ab", "abc", "a-b", "cab-"])
def test_parts_that_are_called_in_turn_follow_one_plan(parts: str) -> None:
    plans = _plans(4 * parts)
    assert not any(plans[2 * len(parts) :])
    used = [key for part in parts for key in USES[part]]
    (last,) = [each for each in plans if each][-1]
    assert sorted(last) == sorted(used)


def test_a_part_that_comes_again_is_planned_for_alone_and_what_is_called_now_and_then_comes_after_it() -> (
    None
):
    plans = _plans(3 * "abbbb")[-5:]
    a, b = USES["a"], USES["b"]
    assert plans[0] == [(*a, *b, *b)]
    assert plans[1:] == [[(*b, *b, *a)], [], [], []]


@given(st.text("abc-", min_size=1, max_size=20))
def test_whatever_is_called_advances_along_the_plan_that_is_followed(calls: str) -> None:
    follower = Follower([], "host", lambda _: 1, 0)
    plan: Sequence[str] = ()
    for part in calls:
        advice = list(follower.begin_inference(part))
        for key in [None, *USES[part]]:
            advice += [] if key is None else follower.note(key)
            for each in advice:
                if isinstance(each, Follow):
                    plan = each.plan.accesses
                elif isinstance(each, Advance):
                    assert plan[each.position] == key
            advice.clear()
