"""How a device is divided between a program and its store: rules over any sequence of uses."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.device_shares import BUNDLE, PLENTY, TRAINED, Use, begin, share_of, step
from tierstore.planning.deciding import (
    ALIGNMENT_BYTES,
    LEARNING_STEPS,
    CameBytes,
    DeviceShare,
    EvaluationEnd,
    PhasePeak,
    StepPhase,
    TrainedBytes,
    high_of,
)


def _own(share: DeviceShare, use: Use) -> dict[StepPhase, int]:
    """What the store's own is in the phases of another step."""
    found = {}
    begin(share, StepPhase.MODEL, use)
    found[StepPhase.MODEL] = share.own_bytes
    share.enter(StepPhase.OPTIMIZER, PhasePeak(use.model_bytes))
    found[StepPhase.OPTIMIZER] = share.own_bytes
    share.enter(StepPhase.BETWEEN, PhasePeak(use.optimizer_bytes))
    share.end_step()
    return found


def test_nothing_is_the_stores_own_before_two_steps_were_measured() -> None:
    share, use = share_of(200_000), Use(50_000, 10_000)
    seen = []
    for _ in range(4):
        seen.append((share.own_bytes, share.is_learning))  # what a step taught is known when the next begins
        step(share, use)
    assert seen == [(0, False), (0, True), (0, True), (200_000 - 55_000, False)]


def test_what_finds_no_room_below_is_the_stores_own_from_the_beginning() -> None:
    below_bytes = TRAINED.all_bytes // 2
    ahead_bytes = TRAINED.largest_bytes + TRAINED.largest_bundle_bytes
    share = share_of(400_000, below_bytes)
    assert share.own_bytes == TRAINED.all_bytes + ahead_bytes - below_bytes
    assert share_of(50_000, below_bytes).own_bytes == 50_000  # and never more than all
    assert share_of(33_000, TRAINED.all_bytes + 10_000).own_bytes == 23_000  # nor for steps that do not fit


def test_what_is_pinned_is_the_stores_own_from_the_beginning() -> None:
    pinned = TrainedBytes(TRAINED.all_bytes, TRAINED.gradient_bytes, 3 * BUNDLE, 60_000, BUNDLE)
    assert share_of(400_000, PLENTY, pinned).own_bytes == 3 * BUNDLE


uses = st.builds(
    Use,
    st.integers(0, 300_000),
    st.integers(0, 300_000),
    st.just(1),
    st.integers(0, 300_000),
    st.integers(0, 300_000),
)


@given(uses, st.integers(60_000, 500_000), st.integers(0, 400_000), st.integers(0, 100_000))
def test_own_bytes_and_the_programs_peaks_are_within_the_budget_or_the_floor(
    use: Use, limit_bytes: int, below_bytes: int, staying_bytes: int
) -> None:
    share = share_of(limit_bytes, below_bytes, staying_bytes=staying_bytes)
    floor_bytes = share.own_bytes
    for _ in range(3):
        step(share, use)
    own = _own(share, use)
    for phase, peak_bytes in (
        (StepPhase.MODEL, use.model_bytes),
        (StepPhase.OPTIMIZER, use.optimizer_bytes),
    ):
        varying_bytes = peak_bytes - min(use.standing_bytes, peak_bytes)
        spared_bytes = peak_bytes + varying_bytes * 0.1
        gradient_bytes = TRAINED.gradient_bytes if share.has_room_for_gradients else staying_bytes
        assert own[phase] == floor_bytes or own[phase] + spared_bytes + gradient_bytes <= limit_bytes + 1
        assert floor_bytes <= own[phase] <= limit_bytes


@given(uses, st.integers(60_000, 500_000), st.integers(0, 200_000))
def test_a_larger_budget_leaves_no_less_to_the_store(use: Use, limit_bytes: int, more_bytes: int) -> None:
    small, large = share_of(limit_bytes), share_of(limit_bytes + more_bytes)
    for _ in range(3):
        step(small, use)
        step(large, use)
    if small.has_room_for_gradients == large.has_room_for_gradients and (
        small.allows_steps_in_backward == large.allows_steps_in_backward
    ):
        own, more = _own(small, use), _own(large, use)
        assert all(own[phase] <= more[phase] for phase in own)


@given(uses)
def test_gradients_are_the_programs_own_exactly_where_all_is_known_to_fit(use: Use) -> None:
    varying_bytes = use.model_bytes - min(use.standing_bytes, use.model_bytes)
    needed_bytes = TRAINED.all_bytes + use.model_bytes - varying_bytes + int(varying_bytes * 1.1)
    for limit_bytes, fits in ((needed_bytes, True), (needed_bytes - 1, False)):
        share = share_of(limit_bytes)
        for _ in range(3):
            assert not share.has_room_for_gradients
            step(share, use)
        assert share.has_room_for_gradients == fits


@given(st.integers(0, 20_000), st.integers(0, 20_000), st.integers(0, 20_000))
def test_steps_in_backward_are_allowed_where_a_bundle_and_its_new_values_fit_beside_activations(
    model_bytes: int, at_gradients_bytes: int, optimizer_bytes: int
) -> None:
    use = Use(model_bytes, optimizer_bytes, at_gradients_bytes=at_gradients_bytes)
    ahead_bytes = TRAINED.largest_bytes + TRAINED.largest_bundle_bytes
    taken_bytes = max(int(1.1 * model_bytes), int(1.1 * (at_gradients_bytes + optimizer_bytes)))
    assume(taken_bytes >= 1)  # a budget below what a step ahead takes is all of it
    for limit_bytes, is_allowed in (
        (ahead_bytes + taken_bytes + 1, True),
        (ahead_bytes + taken_bytes - 1, False),
    ):
        share = share_of(limit_bytes)
        for _ in range(3):
            assert not share.allows_steps_in_backward
            step(share, use)
        assert share.allows_steps_in_backward == is_allowed


@pytest.mark.parametrize("peaks", [(100_000, 50_000), (50_000, 100_000)])
def test_the_larger_of_two_steps_counts_and_of_optimizers_the_last_as_the_first_makes_state(
    peaks: Sequence[int],
) -> None:
    share = share_of(380_000)
    for nbytes in peaks:
        step(share, Use(nbytes, nbytes))
    own = _own(share, Use(1))
    assert own[StepPhase.MODEL] == 380_000 - 110_000
    assert own[StepPhase.OPTIMIZER] == 380_000 - int(peaks[-1] * 1.1)


def test_room_for_gradients_is_left_where_they_are_the_programs_own() -> None:
    share = share_of(400_000, staying_bytes=7000)
    for _ in range(2):
        step(share, Use(50_000))
    assert _own(share, Use(1))[StepPhase.MODEL] == 400_000 - 55_000 - TRAINED.gradient_bytes
    share = share_of(380_000, staying_bytes=7000)
    for _ in range(2):
        step(share, Use(50_000))
    assert _own(share, Use(1))[StepPhase.MODEL] == 380_000 - 55_000 - 7000


@pytest.mark.parametrize("came_bytes", [0, TRAINED.gradient_bytes, TRAINED.gradient_bytes + 1, 150_000])
def test_gradients_that_came_though_no_optimizer_steps_them_need_room_as_well(came_bytes: int) -> None:
    more_bytes = max(0, came_bytes - TRAINED.gradient_bytes)
    needed_bytes = TRAINED.all_bytes + 55_000 + more_bytes
    for limit_bytes, fits in ((needed_bytes, True), (needed_bytes - 1, False)):
        share = share_of(limit_bytes, came_bytes=came_bytes)
        for _ in range(2):
            step(share, Use(50_000))
        own_bytes = _own(share, Use(1))[StepPhase.MODEL]
        assert share.has_room_for_gradients == fits
        assert own_bytes == limit_bytes - 55_000 - (TRAINED.gradient_bytes + more_bytes if fits else 0)


@pytest.mark.parametrize(
    ("kept_bytes", "below_bytes", "elsewhere_bytes", "high"),
    [
        (0, 1100, 0, 1.0),  # it is not known yet
        (300, 1100, 0, 0.75),  # a quarter at most
        (900, 2000, 0, round(1 - 150 / 900, 2)),  # one bundle of 100 bytes, and half of one
        (1000, 1100, 0, 1.0),  # all of it fits
        (900, 1100, 100, 1.0),  # all that is not the program's own does
        (300, 1099, 0, 1.0),  # the device has to hold what is nowhere else
    ],
)
def test_a_device_writes_back_early_where_it_cannot_hold_everything_and_the_tiers_below_can(
    kept_bytes: int, below_bytes: int, elsewhere_bytes: int, high: float
) -> None:
    trained = TrainedBytes(1000, 250, 0, 100, 25)
    assert high_of(kept_bytes, trained, below_bytes, elsewhere_bytes) == high


@given(
    limit=st.integers(TRAINED.largest_bytes, 2 * TRAINED.all_bytes),
    model=st.integers(0, TRAINED.all_bytes),
    said=st.none() | st.floats(0.1, 1),
)
def test_what_stays_leaves_room_for_what_is_written_back_early(
    limit: int, model: int, said: float | None
) -> None:
    for has_streams in (True, False):
        share = DeviceShare(limit, TRAINED, PLENTY, lambda: 0, CameBytes, said, has_streams=has_streams)
        share.quota_bytes = share.own_bytes
        _check_room_of(share, model, said, has_streams=has_streams)


def _check_room_of(share: DeviceShare, model: int, said: float | None, *, has_streams: bool) -> None:
    assert share.high == (1.0 if said is None else said), "nothing is known yet"
    for _ in range(LEARNING_STEPS + 1):
        step(share, Use(model, model))
    assert share.staying_room_bytes == int(share.kept_bytes * share.high)
    fits = share.has_room_for_gradients or share.kept_bytes >= TRAINED.all_bytes
    if said is not None:
        assert share.high == said
    elif share.kept_bytes:
        assert (share.high == 1) == (fits or not has_streams)
        free_bytes = share.kept_bytes - share.staying_room_bytes
        assert share.high == 1 or free_bytes >= min(1.2 * TRAINED.largest_bytes, 0.2 * share.kept_bytes)


def test_a_peak_that_was_hidden_is_no_less_than_the_one_before() -> None:
    share = share_of(400_000)
    step(share, Use(100_000))
    begin(share, StepPhase.MODEL, Use(0))
    share.enter(StepPhase.OPTIMIZER, PhasePeak(10_000, is_hidden=True))
    share.end_step()
    assert _own(share, Use(1))[StepPhase.MODEL] == 400_000 - 110_000


def test_larger_inputs_are_expected_to_take_more_in_proportion_and_are_measured_again() -> None:
    share = share_of(400_000)
    for _ in range(3):
        step(share, Use(100_000, 20_000, elements=10))
    assert not share.is_learning
    share.begin_use(StepPhase.MODEL)
    share.enter(StepPhase.MODEL, PhasePeak())
    assert share.expect_more(StepPhase.MODEL, 20)
    assert share.own_bytes == 400_000 - 220_000
    assert share.begin_learning(StepPhase.MODEL, 20)
    assert not share.has_room_for_gradients
    share.enter(StepPhase.OPTIMIZER, PhasePeak(200_000))
    assert share.own_bytes == 400_000 - 44_000
    assert not share.expect_more(StepPhase.MODEL, 20)  # no larger than any before


def test_smaller_inputs_teach_nothing_about_larger_ones() -> None:
    share = share_of(400_000)
    step(share, Use(100_000, elements=10))
    for _ in range(4):
        step(share, Use(1000, elements=5))
    assert share.is_learning  # two of the largest have not been seen
    step(share, Use(100_000, elements=10))
    assert _own(share, Use(1000, elements=5))[StepPhase.MODEL] == 400_000 - 110_000


def test_a_smaller_step_in_between_does_not_lessen_what_larger_ones_are_expected_to_take() -> None:
    share = share_of(400_000)
    step(share, Use(100_000, elements=10))
    step(share, Use(1000, elements=5))
    share.begin_use(StepPhase.MODEL)
    share.enter(StepPhase.MODEL, PhasePeak())
    assert share.expect_more(StepPhase.MODEL, 20)
    assert share.own_bytes == 400_000 - 220_000


def test_what_an_optimizer_takes_in_backward_comes_on_top_of_what_is_there_at_gradients() -> None:
    share = share_of(300_000)
    for _ in range(2):
        begin(share, StepPhase.MODEL, Use(0))
        share.note_at_gradients(20_000)
        share.enter(StepPhase.OPTIMIZER, PhasePeak(20_000))
        share.begin_step(50_000)
        share.enter(StepPhase.BETWEEN, PhasePeak(60_000))  # 10,000 of its own
        share.end_step()
    assert _own(share, Use(1))[StepPhase.MODEL] == 300_000 - 33_000
    assert share.allows_steps_in_backward


def test_what_was_there_at_gradients_is_that_of_the_last_step_measured() -> None:
    share = share_of(300_000)
    for at_gradients_bytes in (90_000, 30_000):
        step(share, Use(1000, at_gradients_bytes=at_gradients_bytes))
    assert _own(share, Use(1))[StepPhase.MODEL] == 300_000 - 33_000


def test_what_the_whole_device_had_beyond_the_stores_quota_was_the_programs() -> None:
    share = share_of(400_000)
    for _ in range(2):
        step(share, Use(10_000, whole_bytes=200_000))
    assert _own(share, Use(1))[StepPhase.MODEL] == 400_000 - 220_000


def test_a_phase_that_had_more_than_the_budget_leaves_less_to_the_store_from_then_on() -> None:
    share = share_of(400_000)
    for _ in range(3):
        step(share, Use(100_000))
    before = _own(share, Use(100_000))[StepPhase.MODEL]
    step(share, Use(100_000, whole_bytes=401_000))
    once = _own(share, Use(100_000))[StepPhase.MODEL]
    step(share, Use(100_000, whole_bytes=401_000))
    twice = _own(share, Use(100_000))[StepPhase.MODEL]
    step(share, Use(100_000, whole_bytes=401_000))
    thrice = _own(share, Use(100_000))[StepPhase.MODEL]
    # The third time it is told what two times were not enough for.
    assert (before - once, once - twice, twice - thrice) == (1000, 1000, 2000)


def test_where_there_is_nothing_to_take_from_the_store_the_next_use_is_refused() -> None:
    share = share_of(60_000)
    assert step(share, Use(50_000, elements=10, whole_bytes=70_000)) is None
    assert step(share, Use(50_000, elements=9)) is None  # smaller
    assert step(share, Use(50_000, elements=10)) == 70_000


def test_what_parts_take_that_are_called_apart_counts_for_its_most() -> None:
    share = share_of(400_000)
    judge, maker = Use(200_000, 20_000, called="judge"), Use(50_000, 40_000, called="maker")
    for use in (judge, maker, maker):
        step(share, use)
    found = [_own(share, each) for each in (judge, maker)]
    assert [each[StepPhase.MODEL] for each in found] == [400_000 - 220_000] * 2
    assert [each[StepPhase.OPTIMIZER] for each in found] == [400_000 - 44_000] * 2


def test_uses_of_the_same_parts_that_take_more_in_turn_count_for_their_most() -> None:
    share = share_of(400_000)

    def use(model_bytes: int) -> None:
        begin(share, StepPhase.MODEL, Use(0, elements=10, called="maker"))
        step(share, Use(model_bytes, 20_000, elements=10, called="judge"))

    for model_bytes in (200_000, 50_000, 50_000):
        use(model_bytes)
    assert _own(share, Use(0, elements=10, called="maker"))[StepPhase.MODEL] == 400_000 - 220_000


@pytest.mark.parametrize("elements", [10, 30])
def test_a_part_that_was_not_measured_leaves_the_store_nothing_until_it_was(elements: int) -> None:
    share = share_of(400_000)
    judge, maker = Use(50_000, elements=20, called="judge"), Use(200_000, elements=elements, called="maker")
    for _ in range(3):
        step(share, judge)
    assert not share.is_learning
    assert _own(share, maker)[StepPhase.MODEL] == 0
    assert share.learns_from(StepPhase.MODEL)
    share.end_step()
    assert _own(share, judge)[StepPhase.MODEL] == 400_000 - 220_000


def test_inputs_of_one_part_that_were_too_large_are_not_held_against_another() -> None:
    share = share_of(60_000)
    step(share, Use(50_000, elements=10, whole_bytes=70_000, called="judge"))
    assert step(share, Use(50_000, elements=20, called="maker")) is None
    assert step(share, Use(50_000, elements=10, called="judge")) == 70_000


def test_an_evaluation_is_learned_apart_and_the_step_around_it_goes_on() -> None:
    share = share_of(400_000)
    for _ in range(3):
        step(share, Use(100_000))
    share.enter(StepPhase.OPTIMIZER, PhasePeak())
    begin(share, StepPhase.EVALUATION, Use(0))
    assert share.around_evaluation is StepPhase.OPTIMIZER
    assert share.learns_from(StepPhase.EVALUATION)
    assert not share.learns_from(StepPhase.MODEL)
    assert share.end_evaluation(PhasePeak(300_000), EvaluationEnd.WHOLE)
    assert not share.is_learning
    share.enter(share.around_evaluation, PhasePeak())
    own = _own(share, Use(100_000))
    assert own[StepPhase.MODEL] == 400_000 - 110_000


def test_leases_that_need_more_than_the_stores_own_are_given_it_and_the_program_is_measured_again() -> None:
    share, use = share_of(100_000), Use(90_000)
    for _ in range(4):
        assert share.is_to_prepare == (_ < 3)
        step(share, use)
    assert not share.is_learning
    share.enter(StepPhase.MODEL, PhasePeak())
    assert share.own_bytes == 1000
    assert share.grow(5000, 0, 90_000) == 5120  # as allocators round
    assert share.is_to_prepare
    step(share, use)
    assert share.is_learning


@given(st.integers(1, 200_000), st.integers(0, 100_000), st.integers(0, 100_000), st.integers(0, 200_000))
def test_what_is_given_for_leases_is_never_more_than_the_program_leaves(
    needed_bytes: int, leased_bytes: int, live_bytes: int, quota_bytes: int
) -> None:
    share = share_of(200_000)
    share.quota_bytes = quota_bytes
    given_bytes = share.grow(needed_bytes, leased_bytes, live_bytes)
    rounded_bytes = -(-needed_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    if leased_bytes + rounded_bytes + live_bytes > 200_000:
        assert given_bytes is None
    else:
        assert given_bytes == max(quota_bytes, leased_bytes + rounded_bytes)


def test_what_was_given_goes_back_as_far_as_it_is_not_leased() -> None:
    share = share_of(200_000)
    own_bytes = share.own_bytes
    for quota_bytes in (own_bytes, 50_000):
        share.quota_bytes = quota_bytes
        assert share.has_more_than_own == (quota_bytes > own_bytes)
    assert (share.settled_bytes(0), share.settled_bytes(20_000)) == (0, 20_000)
    assert (share.is_in_the_way(150_000), share.is_in_the_way(150_001)) == (False, True)


@pytest.mark.parametrize("phase", [StepPhase.MODEL, StepPhase.EVALUATION])
@pytest.mark.parametrize("is_stopped", [False, True])
def test_nothing_is_measured_of_a_run_that_ends(phase: StepPhase, *, is_stopped: bool) -> None:
    share = share_of(200_000)
    begin(share, phase, Use(0))
    if is_stopped:
        share.stop_learning()
    assert (share.is_learning, share.is_measuring) == (not is_stopped, not is_stopped)
    is_step = phase is StepPhase.MODEL
    is_learned = share.end_step() if is_step else share.end_evaluation(PhasePeak(), EvaluationEnd.WHOLE)
    assert is_learned == (not is_stopped)


class ShareMachine(RuleBasedStateMachine):
    """Any order of events: the books stay right, whatever is measured."""

    @initialize(limit_bytes=st.integers(60_000, 500_000), below_bytes=st.integers(0, 500_000))
    def begin(self, limit_bytes: int, below_bytes: int) -> None:
        self.share = share_of(limit_bytes, below_bytes)
        self.limit_bytes = limit_bytes
        self.floor_bytes = self.share.own_bytes

    @rule(
        phase=st.sampled_from([StepPhase.MODEL, StepPhase.EVALUATION]),
        elements=st.integers(0, 50),
        called=st.sampled_from([None, "part"]),
    )
    def use(self, phase: StepPhase, elements: int, called: str | None) -> None:
        begin(self.share, phase, Use(0, elements=elements, standing_bytes=elements, called=called))

    @rule(
        phase=st.sampled_from(StepPhase),
        peak=st.builds(
            PhasePeak, st.integers(0, 600_000), st.booleans(), st.sampled_from([0, 0, 0, 550_000])
        ),
    )
    def enter(self, phase: StepPhase, peak: PhasePeak) -> None:
        self.share.enter(phase, peak)

    @rule(needed_bytes=st.integers(0, 300_000), live_bytes=st.integers(0, 300_000))
    def grow(self, needed_bytes: int, live_bytes: int) -> None:
        quota_bytes = self.share.grow(needed_bytes, 0, live_bytes)
        if quota_bytes is not None:
            self.share.quota_bytes = quota_bytes
            assert needed_bytes <= quota_bytes <= self.limit_bytes

    @precondition(lambda self: self.share.has_more_than_own)
    @rule()
    def settle(self) -> None:
        self.share.quota_bytes = self.share.settled_bytes(0)
        assert self.share.quota_bytes == self.share.own_bytes

    @rule(live_bytes=st.integers(0, 600_000))
    def end_step(self, live_bytes: int) -> None:
        self.share.note_at_gradients(live_bytes)
        if self.share.end_step():
            assert not self.share.is_measuring

    @rule(peak=st.builds(PhasePeak, st.integers(0, 600_000)), how=st.sampled_from(EvaluationEnd))
    def end_evaluation(self, peak: PhasePeak, how: EvaluationEnd) -> None:
        if self.share.end_evaluation(peak, how):
            assert not self.share.is_learning

    @invariant()
    def own_is_between_the_floor_and_the_budget(self) -> None:
        if hasattr(self, "share"):
            assert self.floor_bytes <= self.share.own_bytes <= self.limit_bytes
            if self.share.has_room_for_gradients:
                assert self.limit_bytes >= TRAINED.all_bytes


TestShareMachine = ShareMachine.TestCase
