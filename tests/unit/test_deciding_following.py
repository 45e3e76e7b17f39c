"""What a follower advises: rules over any sequence of uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.planning.deciding import (
    Advance,
    Advice,
    Follow,
    Follower,
    Prefetch,
    PrefetchWindow,
    room_bytes,
)
from tierstore.planning.deciding.following import USES_BEFORE_ROOM
from tierstore.planning.homes import Home
from tierstore.planning.residents import Staying

SIZES = {"a": 100, "b": 40, "c": 70, "d": 300, "activation": 0}
PASSING = 60  # bytes of the activation

steps_of_keys = st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=12)


def _use(follower: Follower, key: str) -> list[Advice]:
    if SIZES[key]:
        return list(follower.note(key))
    return list(follower.note_passing(key, PASSING))


def _step(follower: Follower, keys: list[str]) -> list[Advice]:
    advice = list(follower.begin_forward())
    for key in keys:
        advice += _use(follower, key)
    follower.note_step(0)
    return advice


def _follower(*limits: int) -> tuple[Follower, list[PrefetchWindow]]:
    windows = [PrefetchWindow(tier, limit) for tier, limit in zip(("device", "host"), limits, strict=True)]
    return Follower(windows, "device", SIZES.__getitem__, optimizers=1), windows


def _nbytes(key: str) -> int:
    return SIZES[key] or PASSING


def _without_repetitions(keys: list[str]) -> list[str]:
    return [key for number, key in enumerate(keys) if not number or keys[number - 1] != key]


@given(st.lists(steps_of_keys, min_size=2, max_size=6), st.integers(0, 500), st.integers(0, 500))
def test_what_lies_ahead_is_within_the_window_or_one_key(
    steps: list[list[str]], device_bytes: int, host_bytes: int
) -> None:
    follower, windows = _follower(device_bytes, host_bytes)
    for keys in steps:
        for key in keys:
            _use(follower, key)
            for window in windows:
                assert window.ahead_bytes == sum(window.ahead)
                sizes = [nbytes for nbytes in window.ahead if nbytes]
                assert window.ahead_bytes <= window.limit_bytes or len(sizes) == 1
        follower.note_step(0)
        list(follower.begin_forward())


@given(steps_of_keys, st.integers(0, 500))
def test_a_step_that_repeats_is_followed_access_by_access(keys: list[str], limit_bytes: int) -> None:
    follower, _ = _follower(limit_bytes, limit_bytes)
    assert _step(follower, keys) == []  # nothing is known yet
    accesses = _without_repetitions(keys)
    for number in range(3):
        advice = _step(follower, keys)
        plans = [each.plan for each in advice if isinstance(each, Follow)]
        assert [list(plan.accesses) for plan in plans] == ([accesses] if number == 0 else [])
        positions = [each.position for each in advice if isinstance(each, Advance)]
        assert positions == list(range(len(accesses)))


@given(steps_of_keys)
def test_with_room_for_all_every_key_is_fetched_to_where_it_goes_before_its_use(keys: list[str]) -> None:
    follower, _ = _follower(10_000, 10_000)
    _step(follower, keys)
    _step(follower, keys)
    asked: list[tuple[str, str]] = []
    list(follower.begin_forward())
    for number, key in enumerate(accesses := _without_repetitions(keys)):
        advice = _use(follower, key)
        assert advice[0] == Advance(number)
        asked += [(each.key, each.tier) for each in advice if isinstance(each, Prefetch)]
    # In a steady state each use lets one key in, the same one in the next cycle: all of them, once each.
    assert (
        sorted(asked)
        == sorted([(key, "device") for key in accesses if SIZES[key]] + [(key, "host") for key in accesses])
        or len(accesses) == 1
    )


@given(st.lists(steps_of_keys, min_size=2, max_size=6))
def test_an_activation_is_never_fetched_to_the_first_tier(steps: list[list[str]]) -> None:
    follower, _ = _follower(10_000, 10_000)
    advice = [each for keys in steps for each in _step(follower, keys)]
    assert Prefetch("activation", "device") not in advice


@given(steps_of_keys, steps_of_keys)
def test_a_step_that_goes_another_way_is_recorded_anew(first: list[str], second: list[str]) -> None:
    follower, _ = _follower(100, 100)
    _step(follower, first)
    _step(follower, second)
    follows = [each for each in follower.begin_forward() if isinstance(each, Follow)]
    is_other = _without_repetitions(first) != _without_repetitions(second)
    assert [list(each.plan.accesses) for each in follows] == (
        [_without_repetitions(second)] if is_other else []
    )


class _Same:
    """Chooses the same whatever a step used."""

    is_stale = False

    def __init__(self, staying: Staying) -> None:
        self._staying = staying

    def choose(self, accesses: Sequence[str], gradients: Sequence[str]) -> Staying:
        del accesses, gradients
        return self._staying


def test_gradients_and_new_values_are_in_the_plan_and_residents_are_asked_for() -> None:
    asked: list[tuple[tuple[str, ...], tuple[str, ...]]] = []

    class Chooser:
        is_stale = False

        def choose(self, accesses: Sequence[str], gradients: Sequence[str]) -> Staying:
            asked.append((tuple(accesses), tuple(gradients)))
            return Staying(frozenset({"a"}), frozenset({"b"}))

    chooser = Chooser()
    follower = Follower([], "device", SIZES.__getitem__, 1, chooser)
    list(follower.note("a"))
    list(follower.note_gradient("b"))
    follower.note_step(0)
    (follow,) = follower.begin_forward()
    assert isinstance(follow, Follow)
    assert asked == [(("a", "b"), ("b",))]
    assert tuple(follow.plan.accesses) == ("a", "b", "b")  # a gradient is kept to the step's end
    assert follow.plan.aliases == {"a~next": "a", "b~next": "b"}
    assert follow.plan.residents == {"a"}
    assert follower.residents == frozenset({"a"})
    assert follower.leaving == frozenset({"b"})
    for chooser.is_stale in (False, True):
        list(follower.note("a"))
        list(follower.note_gradient("b"))
        follower.note_step(0)
        assert len(list(follower.begin_forward())) == chooser.is_stale
    assert len(asked) == 2  # in a step like the last one only where others would be chosen


@pytest.mark.parametrize(
    ("is_slowest", "has_gradients", "brought"),
    [(False, False, "a b"), (False, True, "a b"), (True, False, ""), (True, True, "a b")],
)
def test_second_replicas_are_brought_to_the_slowest_tier_for_steps_beside_old_values_alone(
    *, is_slowest: bool, has_gradients: bool, brought: str
) -> None:
    window = PrefetchWindow("host", 1000, is_slowest=is_slowest)
    follower = Follower([window], "device", lambda _: 64, 1)
    for _ in range(2):
        found = [each for key in "cab" for each in follower.note(key)]
        found += follower.note_gradient("g") if has_gradients else ()
        follower.note_step(0)
        list(follower.begin_forward())
    keys = [each.key for each in found if isinstance(each, Prefetch)]
    assert {key for key in keys if key in "ab"} == set(brought.split())


def test_what_stays_above_is_brought_to_no_other_tier() -> None:
    windows = [PrefetchWindow(tier, 1000) for tier in ("device", "host")]
    follower = Follower(windows, "device", lambda _: 64, 1, _Same(Staying(frozenset({"a"}))))
    for _ in range(2):
        found = [each for key in "cab" for each in follower.note(key)]
        follower.note_step(0)
        list(follower.begin_forward())
    brought = {(each.key, each.tier) for each in found if isinstance(each, Prefetch)}
    assert brought >= {("a", "device"), ("b", "device"), ("b", "host")}
    assert ("a", "host") not in brought


def _prefetched(room_bytes: int | None, keys: str, limit_bytes: int = 1000) -> list[str]:
    """Return what is prefetched with each use of the second step: keys of 10 bytes; capitals stay."""
    staying = Staying(frozenset(filter(str.isupper, keys)), ahead_bytes=room_bytes)
    window = PrefetchWindow("device", limit_bytes)
    follower = Follower([window], "device", lambda _: 10, 1, _Same(staying))
    for key in keys:
        list(follower.note(key))
    follower.note_step(0)
    list(follower.begin_forward())
    found = []
    for key in keys:
        found.append("".join(each.key for each in follower.note(key) if isinstance(each, Prefetch)))
        assert window.coming_bytes == sum(window.coming.values())
    return found


def test_what_does_not_stay_is_ahead_within_its_room_and_in_its_order() -> None:
    assert _prefetched(None, "abcdef")[:2] == ["bcdef", "a"]
    assert _prefetched(20, "abcdef") == ["bc", "d", "e", "f", "a", "b"]
    assert _prefetched(0, "abcdef") == ["b", "c", "d", "e", "f", "a"]  # the next one whatever its size


def test_what_stays_is_ahead_whatever_room_there_is_and_takes_none() -> None:
    assert _prefetched(20, "aXbYcd")[0] == "XbYc"
    assert _prefetched(20, "aXbYcd", 20)[0] == "Xb"  # but within the window


def test_a_key_that_is_ahead_twice_takes_its_room_once() -> None:
    assert _prefetched(20, "abcbdef")[0] == "bcb"


def _coming(*uses: str | tuple[str, int]) -> list[int]:
    """Return what a plan says that is coming, of a step that uses keys, and of gradients with their room."""
    follower = Follower([], "host", lambda _: 64, 1)
    for use in uses:
        list(follower.note(use) if isinstance(use, str) else follower.note_gradient(*use))
    follower.note_step(0)
    (follow,) = follower.begin_forward()
    assert isinstance(follow, Follow)
    assert not follow.plan.coming or len(follow.plan.coming) == len(follow.plan.accesses)
    return list(follow.plan.coming)


def test_room_is_made_for_the_next_gradients_until_it_would_do_for_the_largest_one() -> None:
    found = _coming("a", ("bias", 2), ("weight", 10), "b", ("small", 4), ("next", 5), ("last", 6), "c")
    assert found == [12, 10, 15, 15, 11, 6, 0, 0, 0, 0, 0, 0, 0]  # at its end each is looked at once more


def test_room_is_made_for_a_gradient_a_few_uses_before_it_comes_and_only_when_it_does() -> None:
    forward = [f"forward {number}" for number in range(USES_BEFORE_ROOM + 3)]
    found = _coming(*forward, ("gradient", 7), "a", ("gradient", 7), "b")
    assert found == [0] * 3 + [7] * USES_BEFORE_ROOM + [0] * 5


def test_no_room_is_made_where_gradients_need_none() -> None:
    assert _coming("a", ("gradient", 0), "b") == []


@pytest.mark.parametrize(
    ("tier", "first_tier", "expected"),
    [(None, "host", 1024), ("host", "host", 1024), ("disk", "host", 0), (None, "device", 0)],
)
def test_a_gradient_needs_room_where_host_memory_is_first_and_takes_it(
    tier: str | None, first_tier: str, expected: int
) -> None:
    assert room_bytes(Home(tier, "cpu"), first_tier, 600) == expected


def test_a_use_that_is_left_out_is_in_no_plan_and_the_one_after_it_is() -> None:
    follower, _ = _follower(100, 100)
    _step(follower, ["a", "b"])
    follower.leave_out(["c", "b"])
    list(follower.begin_forward())
    follower.leave_out(["c"])
    for key in ("a", "b", "c", "c"):
        _use(follower, key)
    follower.note_step(0)
    (follow,) = follower.begin_forward()
    assert isinstance(follow, Follow)
    assert tuple(follow.plan.accesses) == ("a", "b", "c")


def test_a_use_that_is_left_out_may_be_that_of_the_last_key() -> None:
    follower, _ = _follower(100, 100)
    for key in ("a", "b"):
        _use(follower, key)
    follower.leave_out(["b"])
    for key in ("b", "c", "b"):
        _use(follower, key)
    follower.note_step(0)
    (follow,) = follower.begin_forward()
    assert isinstance(follow, Follow)
    assert tuple(follow.plan.accesses) == ("a", "b", "c", "b")


def test_new_values_are_brought_where_old_ones_would_be_in_vain() -> None:
    there = {"b~next"}
    windows = [PrefetchWindow(tier, 100) for tier in ("device", "host")]
    follower = Follower(windows, "device", SIZES.__getitem__, 1, is_there=there.__contains__)
    keys = ["a", "b", "c"]
    _step(follower, keys)
    list(follower.begin_forward())
    brought = [(each.key, each.tier) for each in _use(follower, "a") if isinstance(each, Prefetch)]
    assert brought == [("b~next", "device"), ("b", "host")]
    assert follower.has_plan
    there.clear()
    list(_use(follower, "b"))
    assert ("a", "device") in [
        (each.key, each.tier) for each in _use(follower, "c") if isinstance(each, Prefetch)
    ]


def test_a_plan_that_nobody_took_is_given_again() -> None:
    follower, _ = _follower(100, 100)
    _step(follower, ["a", "b"])
    follower.begin_forward()  # taken by nobody: whoever asked was interrupted
    assert not follower.has_plan
    for key in ("a", "b"):
        _use(follower, key)
    follower.note_step(0)
    assert [type(each) for each in follower.begin_forward()] == [Follow]
    assert follower.has_plan


def test_a_use_in_the_midst_of_advice_counts_for_the_rest_of_it() -> None:
    keys = [f"key {number}" for number in range(6)]
    window = PrefetchWindow("host", 1000)
    follower = Follower([window], "device", lambda _: 64, optimizers=1)
    for _ in range(2):
        list(follower.begin_forward())
        for key in keys:
            list(follower.note(key))
        follower.note_step(0)
    list(follower.begin_forward())
    window.limit_bytes = 0  # one key ahead at a time
    advice: Iterator[Advice] = follower.note(keys[0])
    assert next(advice) == Advance(0)
    assert Advance(3) in list(follower.note(keys[3]))
    assert list(advice) == []  # what comes after the other use was asked for by that one
    assert window.ahead_bytes == sum(window.ahead)


@pytest.mark.parametrize("optimizers", [1, 2])
def test_a_step_ends_when_every_optimizer_stepped_or_one_of_them_sixteen_times(optimizers: int) -> None:
    follower = Follower([], "device", SIZES.__getitem__, optimizers)
    list(follower.note("a"))
    for number in range(16):
        assert (list(follower.begin_forward()) == []) == (number == 0 or optimizers > 1)
        if follower.has_plan:
            return
        follower.note_step(0)
    assert [type(each) for each in follower.begin_forward()] == [Follow]


def test_where_everything_fits_nothing_is_advised() -> None:
    follower = Follower(None, "device", SIZES.__getitem__, optimizers=1)
    assert [each for _ in range(3) for each in _step(follower, ["a", "b"])] == []
    assert list(follower.begin_inference()) == []
    assert not follower.is_planning


def test_a_model_without_an_optimizer_steps_with_each_use() -> None:
    follower, _ = _follower(100, 100)
    assert list(follower.begin_inference()) == []
    list(follower.note("a"))
    assert [type(each) for each in follower.begin_inference()] == [Follow]
    list(follower.note("a"))
    assert list(follower.begin_inference()) == []  # as before


def test_a_limit_holds_from_then_on() -> None:
    follower, (device, host) = _follower(0, 0)
    follower.set_limit("host", 1000)
    assert (device.limit_bytes, host.limit_bytes) == (0, 1000)


def test_no_key_is_fetched_for_the_use_that_is_now() -> None:
    keys = ["a", "b", "c"]
    follower, _ = _follower(10_000, 10_000)
    for _ in range(2):
        _step(follower, keys)
    list(follower.begin_forward())
    for key in keys:
        assert key not in [each.key for each in _use(follower, key) if isinstance(each, Prefetch)]


def test_a_step_begins_at_the_plans_beginning_however_many_gradients_end_the_last() -> None:
    follower = Follower([], "device", lambda _: 64, optimizers=1)
    positions: list[int] = []
    for _ in range(3):
        list(follower.begin_forward())
        for key in ("a", "b"):
            positions += [each.position for each in follower.note(key) if isinstance(each, Advance)]
        for gradient in range(100):
            list(follower.note_gradient(f"gradient {gradient}"))
        follower.note_step(0)
    assert positions == [0, 1, 0, 1]


def test_what_was_skipped_is_not_fetched_any_more() -> None:
    keys = [f"key {number}" for number in range(6)]
    window = PrefetchWindow("host", 64)
    follower = Follower([window], "device", lambda _: 64, optimizers=1)
    for _ in range(2):
        list(follower.begin_forward())
        for key in keys:
            list(follower.note(key))
        follower.note_step(0)
    list(follower.begin_forward())
    list(follower.note(keys[0]))
    assert list(follower.note(keys[3])) == [Advance(3), Prefetch(keys[4], "host")]


def test_another_plan_is_prefetched_from_its_beginning() -> None:
    follower, _ = _follower(0, 0)
    for _ in range(5):
        _step(follower, ["a", "b", "c"])
    _step(follower, ["b", "d"])
    list(follower.begin_forward())
    assert _use(follower, "b") == [Advance(0), Prefetch("d", "device"), Prefetch("d", "host")]
