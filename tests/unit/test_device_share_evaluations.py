"""How a device is divided where a program evaluates: what each evaluation leaves the store."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.device_shares import Use, begin, share_of, step
from tierstore.planning.deciding import DeviceShare, EvaluationEnd, PhasePeak, StepPhase


def _evaluate(share: DeviceShare, use: Use, how: EvaluationEnd = EvaluationEnd.WHOLE) -> bool:
    """One evaluation; return whether it was learned from."""
    begin(share, StepPhase.EVALUATION, use)
    is_learned = share.end_evaluation(PhasePeak(use.model_bytes), how)
    share.enter(share.around_evaluation, PhasePeak())
    return is_learned


def test_a_part_whose_inputs_have_grown_is_measured_again_however_large_those_of_another_are() -> None:
    share = share_of(400_000)
    encoder, decoder = (
        Use(100_000, elements=1000, called="encoder"),
        Use(50_000, elements=10, called="decoder"),
    )
    for use in (encoder, decoder):
        _evaluate(share, use)
    _evaluate(share, Use(0, elements=11, called="decoder"))  # little larger
    assert share.own_bytes == 400_000 - 110_000
    begin(share, StepPhase.EVALUATION, Use(0, elements=20, called="decoder"))
    assert (share.own_bytes, share.is_learning) == (200_000, True)  # what a first one has at its beginning
    assert share.is_guessing
    share.guess(60_000, 0, 0)
    assert share.own_bytes == 400_000 - 4 * 60_000
    share.end_evaluation(PhasePeak(150_000), EvaluationEnd.WHOLE)
    assert share.own_bytes == 400_000 - 165_000


@pytest.mark.parametrize(("first_bytes", "left_bytes"), [(100_000, 200_000), (300_000, 70_000)])
def test_a_part_that_was_not_measured_leaves_half_or_what_those_before_it_left(
    first_bytes: int, left_bytes: int
) -> None:
    share = share_of(400_000)
    _evaluate(share, Use(first_bytes, called="encoder"))
    begin(share, StepPhase.EVALUATION, Use(0, called="decoder"))
    assert (share.own_bytes, share.is_guessing) == (left_bytes, True)
    share.guess(0, 0, 0)
    assert share.own_bytes == left_bytes
    share.end_evaluation(PhasePeak(20_000), EvaluationEnd.BROKEN)  # as where features are all that is wanted
    begin(share, StepPhase.EVALUATION, Use(0, called="decoder"))
    assert (share.own_bytes, share.is_guessing) == (left_bytes, True)
    share.end_evaluation(PhasePeak(20_000), EvaluationEnd.OUT_OF_MEMORY)  # it may have been in the way
    begin(share, StepPhase.EVALUATION, Use(0, called="decoder"))
    assert (share.own_bytes, share.is_guessing) == (0, False)


@pytest.mark.parametrize("elements", [10, 5])
def test_a_part_whose_first_evaluation_failed_is_measured_in_the_next(elements: int) -> None:
    share = share_of(400_000)
    encoder = Use(100_000, called="encoder")
    _evaluate(share, encoder)
    _evaluate(share, Use(50_000, elements=10, called="decoder"), EvaluationEnd.BROKEN)
    _evaluate(share, encoder)
    assert share.own_bytes == 400_000 - 110_000
    decoder = Use(200_000, elements=elements, called="decoder")
    begin(share, StepPhase.EVALUATION, decoder)
    assert (share.own_bytes, share.is_learning, share.is_guessing) == (200_000, True, True)
    share.end_evaluation(PhasePeak(200_000), EvaluationEnd.WHOLE)
    assert share.own_bytes == 400_000 - 220_000
    begin(share, StepPhase.EVALUATION, decoder)
    assert not share.is_guessing


def test_what_one_evaluation_leaves_is_the_stores_own_until_a_step_was_measured() -> None:
    share = share_of(200_000, has_streams=False)
    assert all(_evaluate(share, Use(nbytes)) for nbytes in (40_000, 50_000, 30_000))
    assert (share.phase, share.own_bytes) == (StepPhase.BETWEEN, 200_000 - 55_000)
    begin(share, StepPhase.MODEL, Use(0))
    assert share.own_bytes == 0  # a first step takes the same bytes whatever there was before
    for _ in range(3):
        step(share, Use(100_000))
    share.begin_use(StepPhase.MODEL)
    assert share.own_bytes == 200_000 - 110_000


def test_an_evaluation_between_the_first_two_steps_gives_the_store_nothing_in_steps() -> None:
    share = share_of(400_000)
    step(share, Use(100_000))
    for _ in range(2):
        _evaluate(share, Use(50_000))
        share.begin_use(StepPhase.MODEL)
        share.enter(StepPhase.MODEL, PhasePeak())
        assert share.own_bytes == 0
    step(share, Use(100_000))
    _evaluate(share, Use(50_000))
    assert share.own_bytes == 400_000 - 110_000


def test_of_an_evaluation_that_failed_nothing_is_learned() -> None:
    share = share_of(200_000)
    assert _evaluate(share, Use(10_000), EvaluationEnd.BROKEN)
    assert (share.own_bytes, share.is_learning) == (100_000, False)  # as at the beginning of it
    assert _evaluate(share, Use(50_000))
    assert share.own_bytes == 200_000 - 55_000


@given(st.integers(100, 10_000), st.lists(st.integers(0, 10), max_size=60))
def test_while_inputs_grow_little_by_little_the_store_has_what_is_left_at_each_length(
    elements: int, growth: list[int]
) -> None:
    """As tokens are generated: what they take is taken to grow with them, before it is known."""
    share = share_of(1 << 40)
    per_element = 1000
    _evaluate(share, Use(elements * per_element, elements=elements))
    for more in growth:
        elements += more
        begin(share, StepPhase.EVALUATION, Use(0, elements=elements))
        assert share.own_bytes <= (1 << 40) - elements * per_element
        share.end_evaluation(PhasePeak(elements * per_element), EvaluationEnd.WHOLE)
        assert share.own_bytes == (1 << 40) - int(elements * per_element * 1.1)
        share.enter(share.around_evaluation, PhasePeak())


@given(st.lists(st.integers(0, 100_000), min_size=2, max_size=20), st.integers(0, 100_000), st.booleans())
def test_an_evaluation_leaves_room_for_what_the_program_has_kept_since_the_last(
    held: list[int],
    made_bytes: int,
    has_streams: bool,
) -> None:
    """A cache of keys and values that grows, outputs that are collected."""
    share = share_of(1 << 30, has_streams=has_streams)
    measured_bytes = int((held[0] + made_bytes) * 1.1)
    for number, held_bytes in enumerate(held):
        begin(share, StepPhase.EVALUATION, Use(0))
        share.expect_held(held_bytes)
        needed_bytes = held_bytes + made_bytes
        if number and not has_streams:
            assert share.own_bytes == (1 << 30) - int(needed_bytes * 1.1)
        elif number:
            is_much = needed_bytes > measured_bytes
            assert share.own_bytes == (1 << 30) - (int(needed_bytes * 1.1) if is_much else measured_bytes)
        share.end_evaluation(PhasePeak(held_bytes + made_bytes), EvaluationEnd.WHOLE)
        share.enter(share.around_evaluation, PhasePeak())
