"""What is met for the first time after a program was measured: the store leaves it the device."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.device_shares import TRAINED, share_of
from tierstore.planning.deciding import LEARNING_STEPS, CameBytes, DeviceShare, PhasePeak, StepPhase

LIMIT_BYTES = 1_000_000
HAS_NO_GRADIENTS = replace(TRAINED, gradient_bytes=0)


def _step(
    share: DeviceShare,
    used: Set[str],
    stepped: Set[str],
    model_bytes: int = 100_000,
    optimizer_bytes: int = 100_000,
) -> tuple[int, int]:
    """One step; return what is the store's own when all was used, and when all was stepped."""
    share.begin_use(StepPhase.MODEL)
    share.enter(StepPhase.MODEL, PhasePeak())
    share.expect_more(StepPhase.MODEL, 1)
    share.begin_learning(StepPhase.MODEL, 1)
    own_bytes = share.own_bytes
    for key in sorted(used):
        assert share.meet({key: 1}) == (share.own_bytes < own_bytes)
        own_bytes = share.own_bytes
    share.enter(StepPhase.OPTIMIZER, PhasePeak(model_bytes))
    if share.learns_from(StepPhase.MODEL):
        share.begin_step(0)
    for key in sorted(stepped):
        share.meet({key: 1})
    step_own_bytes = share.own_bytes
    share.enter(StepPhase.BETWEEN, PhasePeak(optimizer_bytes))
    share.end_step()
    return own_bytes, step_own_bytes


def _settled(used: Set[str] = frozenset("ab"), stepped: Set[str] = frozenset("ab")) -> DeviceShare:
    share = share_of(LIMIT_BYTES, trained=HAS_NO_GRADIENTS)
    for _ in range(LEARNING_STEPS + 1):
        _step(share, used, stepped)
    assert not share.is_learning
    return share


def test_what_is_used_for_the_first_time_finds_the_device_until_its_use_ends() -> None:
    share = _settled()
    usual = _step(share, {"a"}, {"a"})
    assert usual == (LIMIT_BYTES - 110_000,) * 2, "nothing of it is new"
    assert _step(share, {"a", "b", "c"}, {"a"}) == (0, usual[1])
    assert _step(share, {"a"}, {"a"}) == usual
    assert _step(share, {"a"}, {"a", "c"}) == (usual[0], 0), "to be stepped is something else"


@pytest.mark.parametrize("is_stepped", [True, False])
def test_what_was_met_is_known_once_it_was_measured(*, is_stepped: bool) -> None:
    share = _settled()
    new = {"a", "b", "c"}
    used, stepped = (set("ab"), new) if is_stepped else (new, set("ab"))
    peaks = (100_000, 300_000) if is_stepped else (300_000, 100_000)
    owns = [_step(share, used, stepped, *peaks)[is_stepped] for _ in range(3)]
    assert owns == [0, 0, LIMIT_BYTES - 330_000], "the first time nobody measured it"
    assert _step(share, set("ab"), set("ab"))[is_stepped] == LIMIT_BYTES - 330_000, "another kind of step"


def test_a_part_that_runs_next_in_a_step_changes_nothing() -> None:
    """What was met has left its activations there."""
    share = _settled()
    own_bytes = []
    for used in ("c", "a"):
        share.begin_use(StepPhase.MODEL)
        share.enter(StepPhase.MODEL, PhasePeak())
        share.meet({used: 1})
        own_bytes.append(share.own_bytes)
    assert own_bytes == [0, 0]


def test_a_step_is_measured_from_its_beginning_or_not_at_all() -> None:
    """What a first forward has made, and is held meanwhile, would be in no peak."""
    share = _settled()
    learns = []
    for _ in range(2):
        for _ in range(2):
            share.begin_use(StepPhase.MODEL)
            share.enter(StepPhase.MODEL, PhasePeak())
            share.begin_learning(StepPhase.MODEL, 1)
            learns.append(share.is_learning)
            share.meet({"c": 1})
        share.enter(StepPhase.BETWEEN, PhasePeak())
        share.end_step()
    assert learns == [False, False, True, True]


def test_evaluations_and_what_is_between_meet_nothing() -> None:
    share = _settled()
    for phase in (StepPhase.EVALUATION, StepPhase.BETWEEN):
        share.enter(phase, PhasePeak())
        assert not share.meet({"c": 1})
    assert _step(share, {"a"}, {"a"})[0] > 0


def test_first_steps_count_until_all_was_stepped_again() -> None:
    """They make state: optimizers that step in turn each do so in a step of their own."""
    share = share_of(LIMIT_BYTES, trained=HAS_NO_GRADIENTS)
    owns = [
        _step(share, set("ab"), set(who), 0, optimizer_bytes)[1]
        for who, optimizer_bytes in [
            ("a", 500_000),
            ("b", 700_000),
            ("a", 50_000),
            ("b", 60_000),
            ("a", 50_000),
            ("b", 60_000),
        ]
    ]
    assert owns == [0, 0, 230_000, 230_000, LIMIT_BYTES - 66_000, LIMIT_BYTES - 66_000]


def test_a_bundle_may_be_stepped_in_backward_once_its_own_step_was_measured() -> None:
    share = _settled()
    assert share.allows_step_in_backward("a")
    assert not share.allows_step_in_backward("c")
    for _ in range(2):
        _step(share, set("ab"), set("abc"))
        assert not share.allows_step_in_backward("c")
    _step(share, set("ab"), set("abc"))
    assert share.allows_step_in_backward("c")
    assert share.allows_step_in_backward("a")


@pytest.mark.parametrize("state_bytes", [0, 80_000, 95_000])
def test_gradients_and_state_of_what_is_trained_later_count_once_they_came(state_bytes: int) -> None:
    came = [CameBytes()]
    share = DeviceShare(TRAINED.all_bytes + 100_000, TRAINED, 1 << 40, lambda: 0, lambda: came[0])
    share.quota_bytes = share.own_bytes
    for _ in range(LEARNING_STEPS + 1):
        _step(share, set("ab"), set("ab"), 10_000, 10_000)
    has_room = [share.has_room_for_gradients]
    _step(share, set("abc"), set("ab"), 10_000, 10_000)
    has_room.append(share.has_room_for_gradients)
    came[0] = CameBytes(TRAINED.gradient_bytes, TRAINED.state_bytes + state_bytes)
    for _ in range(16):
        _step(share, set("abc"), set("abc"), 10_000, 10_000)
        has_room.append(share.has_room_for_gradients)
    _step(share, set("abc"), set("abc"), 10_000, 10_000)
    assert has_room == [True] + 17 * [False], "measured without those that are the program's"
    assert share.has_room_for_gradients == (state_bytes < 90_000)


@given(
    st.lists(
        st.tuples(
            st.sets(st.sampled_from("abcd"), min_size=1),
            st.sets(st.sampled_from("abcd")),
        ),
        min_size=1,
        max_size=30,
    )
)
def test_whatever_order_things_come_in_the_program_finds_what_it_takes(
    uses: list[tuple[set[str], set[str]]],
) -> None:
    """Each key takes so much, a first step three times as much: it is left by the store whenever it comes."""
    takes = dict(zip("abcd", (10_000, 40_000, 90_000, 200_000), strict=True))
    share = share_of(LIMIT_BYTES, trained=HAS_NO_GRADIENTS)
    had_state: set[str] = set()
    for used, stepped in uses:
        model_bytes = sum(takes[key] for key in used)
        optimizer_bytes = max((takes[key] * (1 if key in had_state else 3) for key in stepped), default=0)
        had_state |= stepped
        own_bytes, step_own_bytes = _step(share, used, stepped, model_bytes, optimizer_bytes)
        assert own_bytes + sum(map(takes.__getitem__, used)) <= LIMIT_BYTES
        assert step_own_bytes + optimizer_bytes <= LIMIT_BYTES
