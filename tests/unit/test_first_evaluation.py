"""What a store keeps on a device in a first evaluation, of which nothing was measured yet."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.device_shares import BUNDLE, TRAINED, Use, begin, share_of
from tierstore.planning.deciding import DeviceShare, EvaluationEnd, PhasePeak, StepPhase


def _guessed(share: DeviceShare, standing_bytes: int, peaks: list[int]) -> list[int]:
    """What is the store's own in a first evaluation, after each peak of it."""
    begin(share, StepPhase.EVALUATION, Use(0, standing_bytes=standing_bytes))
    found = []
    for peak_bytes in peaks:
        assert share.is_guessing
        share.guess(peak_bytes, 0, 0)
        found.append(share.own_bytes)
    return found


@pytest.mark.parametrize("widening", [1.0, 16.0])
def test_a_first_evaluation_has_half_of_the_device_or_what_wider_layers_leave(widening: float) -> None:
    share = share_of(1_024_000, trained=replace(TRAINED, widening=widening))
    turning = int(512_000 / 4 / widening)
    own = _guessed(share, 0, [0, turning, turning + 1000, 2 * turning])
    assert own == [512_000, 512_000, 512_000 - 4000 * widening, 0]


@given(st.integers(0, 400_000), st.lists(st.integers(0, 500_000), min_size=1), st.floats(1, 100))
def test_a_guess_and_what_the_program_has_are_within_the_budget(
    standing_bytes: int, peaks: list[int], widening: float
) -> None:
    limit_bytes = 500_000
    share = share_of(limit_bytes, trained=replace(TRAINED, widening=widening))
    for own_bytes, peak_bytes in zip(_guessed(share, standing_bytes, peaks), peaks, strict=True):
        assert own_bytes == 0 or own_bytes + peak_bytes <= limit_bytes
        standing = min(standing_bytes, peak_bytes)
        assert own_bytes <= (limit_bytes - standing + 1) // 2


@pytest.mark.parametrize("how", EvaluationEnd)
def test_a_guess_ends_with_its_evaluation(how: EvaluationEnd) -> None:
    share = share_of(1_000_000)
    _guessed(share, 0, [10_000])
    share.end_evaluation(PhasePeak(10_000, whole_bytes=2_000_000), how)
    share.enter(share.around_evaluation, PhasePeak())
    kept_bytes = 0 if how is EvaluationEnd.OUT_OF_MEMORY else 500_000
    assert share.own_bytes == (
        1_000_000 - 11_000 if how is EvaluationEnd.WHOLE else kept_bytes
    )  # a wrong guess is no unseen byte
    begin(share, StepPhase.EVALUATION, Use(0))
    assert share.is_guessing == (how is EvaluationEnd.BROKEN)  # it may have been what made the other one fail


@pytest.mark.parametrize(
    ("kept_bytes", "whole_bytes", "needed_bytes"),
    [
        (0, 1_500_000, 1_500_000),  # the program and what was leased: nothing was kept
        (300_000, 1_300_000, None),  # without what was kept it would have fitted
        (300_000, 1_500_000, 1_200_000),  # it would not
        (0, 0, None),  # nobody knows
    ],
)
@pytest.mark.parametrize("how", EvaluationEnd)
def test_a_first_evaluation_tells_whether_the_program_alone_was_too_much(
    kept_bytes: int, whole_bytes: int, needed_bytes: int | None, how: EvaluationEnd
) -> None:
    share = share_of(1_000_000)
    begin(share, StepPhase.EVALUATION, Use(0))
    share.guess(1000, 0, 0)
    quota_bytes = share.grow(BUNDLE, 0, 1000)
    assert quota_bytes is not None
    share.quota_bytes = BUNDLE + kept_bytes
    share.guess(900_000, whole_bytes, 0)
    share.end_evaluation(PhasePeak(900_000), how)
    share.enter(share.around_evaluation, PhasePeak())
    assert begin(share, StepPhase.EVALUATION, Use(0)) == needed_bytes
