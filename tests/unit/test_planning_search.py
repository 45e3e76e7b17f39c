"""The choice among placements: never predicted to be slower than today's, the same for the same question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from tests.planned import Layer, machine_of, machines, placements, program_of, programs
from tierstore.errors import CapacityError
from tierstore.planning import (
    BundleHomes,
    ByteKind,
    Does,
    Home,
    Machine,
    Moment,
    Phase,
    PlacedMark,
    Placement,
    Program,
    Stashing,
    TierMedium,
    Timeline,
    Treatment,
)
from tierstore.planning.coarsening import Coarsening, coarsen
from tierstore.planning.homes import CPU
from tierstore.planning.rules import AHEAD
from tierstore.planning.searching.alternatives import Levers, differences, neighbours, ranges, todays
from tierstore.planning.searching.choosing import Effort, bounded_by, copies_s, grid_of, search
from tierstore.planning.searching.estimate import Estimate, Estimator
from tierstore.planning.searching.variants import marked_layers, with_marks, with_steps_on_host
from tierstore.planning.simulating import simulate

MIB = 1 << 20
LAYER = Layer(MIB, 2 * MIB, (MIB,), MIB // 4, 0, 0.005, 0.01, 0.002, 0.004)
PROGRAM = program_of([LAYER] * 6)
KEPT = (ByteKind.PARAMETERS, ByteKind.BUFFER, ByteKind.STATE)
HOMES = 2  # placements with state that goes down
WAYS = 2  # to make room: what becomes of each is simulated
FIELDS = ("high", "ahead", "shares", "stashing", "residents", "bundles", "marks")


def machine(device: int, host: int = 512, link: float = 1e8) -> Machine:
    return machine_of([device * MIB, host * MIB, 4096 * MIB], [link, link / 5], alignment_bytes=512)


def step_s(program: Program, on: Machine, placement: Placement) -> float:
    try:
        return simulate(program, on, placement).step_s
    except CapacityError:
        return float("inf")


@settings(max_examples=12)
@given(st.data())
def test_the_choice_is_never_predicted_to_be_slower(data: st.DataObject) -> None:
    program, on = data.draw(programs(most_layers=3)), data.draw(machines())
    before = data.draw(placements(program, on))
    bars = [step_s(program, on, before), step_s(program, on, todays(program, on))]
    try:
        found = search(program, on, given=before)
    except CapacityError:
        reject()
    assert found.timeline.step_s <= min(bars)
    assert found.timeline == simulate(program, on, found.placement)
    assert all(each.step_s is None or each.step_s >= found.timeline.step_s for each in found.rejected)


@settings(max_examples=12)
@given(st.data(), st.sampled_from([0.01, 0.1, 0.5]))
def test_what_spares_bytes_is_little_slower_than_the_fastest_and_never_than_what_was_given(
    data: st.DataObject, spare: float
) -> None:
    program, on = data.draw(programs(most_layers=3)), data.draw(machines())
    before = data.draw(placements(program, on))
    bars = [step_s(program, on, before), step_s(program, on, todays(program, on))]
    try:
        fastest, found = search(program, on, given=before), search(program, on, given=before, spare=spare)
    except CapacityError:
        reject()
    limit_s = min(*bars, fastest.timeline.step_s * (1 + spare))
    assert fastest.timeline.step_s <= found.timeline.step_s <= limit_s

    def with_copies_s(placement: Placement) -> float:
        timeline = simulate(program, on, placement)
        return timeline.step_s + copies_s(on, timeline.moved_bytes)

    near = [each.placement for each in found.rejected if each.step_s is not None and each.step_s <= limit_s]
    assert with_copies_s(found.placement) <= min(map(with_copies_s, [*near, fastest.placement]))


def test_copies_take_what_their_links_do_and_what_skips_a_tier_takes_both() -> None:
    on = machine(8, link=1e8)  # and a fifth of it below
    assert copies_s(on, {"device->host": 1e8, "disk->host": 1e8}) == pytest.approx(1 + 5)
    assert copies_s(on, {"device->disk": 1e8}) == copies_s(on, {"disk->device": 1e8}) == pytest.approx(6)
    assert copies_s(on, {}) == 0


def test_of_two_that_are_about_as_fast_the_one_that_moves_less_is_chosen() -> None:
    on, levers = machine(12, host=16), Levers.HIGH | Levers.AHEAD
    given = replace(todays(PROGRAM, on), high={"device": 1.0})
    fastest, sparing = (search(PROGRAM, on, given=given, levers=levers, spare=spare) for spare in (0.0, 0.1))
    assert fastest.timeline.step_s < sparing.timeline.step_s < 1.1 * fastest.timeline.step_s
    assert sum(sparing.timeline.moved_bytes.values()) < sum(fastest.timeline.moved_bytes.values())


def test_the_same_question_has_the_same_answer() -> None:
    first, second = search(PROGRAM, machine(8)), search(PROGRAM, machine(8))
    assert first == second


def test_a_step_gets_shorter_and_the_reason_has_numbers() -> None:
    today = simulate(PROGRAM, machine(8), todays(PROGRAM, machine(8)))
    found = search(PROGRAM, machine(8))
    assert found.timeline.step_s < 0.8 * today.step_s
    assert f"predicted {found.timeline.step_s:.4g} s a step" in found.why
    assert f"{today.step_s:.4g} as given" in found.why
    assert "what bounds it: " in found.why
    assert "\n" not in found.why


def test_no_lever_means_what_was_given() -> None:
    before = replace(todays(PROGRAM, machine(8)), high={"device": 0.8})
    found = search(PROGRAM, machine(8), given=before, levers=Levers(0))
    simulated = {repr(found.placement), *(repr(each.placement) for each in found.rejected)}
    assert simulated == {repr(before), repr(todays(PROGRAM, machine(8)))}


@pytest.mark.parametrize("lever", list(Levers))
def test_a_lever_changes_one_thing_alone(lever: Levers) -> None:
    base = todays(PROGRAM, machine(8))
    for found in neighbours(PROGRAM, machine(8), base, lever):
        assert found.options
        for option in found.options:
            assert option != base
            assert differences(option, base)
            changed = [name for name in FIELDS if str(getattr(option, name)) != str(getattr(base, name))]
            assert len(changed) == 1


def test_how_many_are_simulated_is_bounded_by_the_programs_size(monkeypatch: pytest.MonkeyPatch) -> None:
    found = search(PROGRAM, machine(8))
    assert len(found.rejected) + 1 <= 1 + 2 * Effort.USUAL.value + HOMES + WAYS
    monkeypatch.setattr("tierstore.planning.searching.choosing._SIMULATED_USES", 1)  # as if it were large
    found = search(PROGRAM, machine(8))
    assert len(found.rejected) + 1 <= 1 + 2 + 2 + 1 + WAYS


def test_a_large_program_is_looked_at_joined_and_the_best_simulated_in_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []

    def counted(program: Program, *args: object, **more: object) -> Timeline:
        seen.append(len(program.moments))
        return simulate(program, *args, **more)  # type: ignore[arg-type]

    split = [each for moment in PROGRAM.moments for each in halves(moment)]
    program = replace(PROGRAM, moments=tuple(split))
    monkeypatch.setattr("tierstore.planning.searching.choosing.simulate", counted)
    monkeypatch.setattr("tierstore.planning.searching.choosing._MOST_MOMENTS", 10)
    found = search(program, machine(8))
    assert seen.count(len(program.moments)) <= 1 + 2
    assert len(seen) > 6
    assert found.timeline == simulate(program, machine(8), found.placement)
    assert found.timeline.step_s < step_s(program, machine(8), todays(program, machine(8)))
    # What is said of single bundles is not lost.
    homes = {**todays(program, machine(8)).bundles, "param/0": BundleHomes(is_pinned=True)}
    pinned = replace(todays(program, machine(8)), bundles=homes)
    assert search(program, machine(8), given=pinned).placement.bundles["param/0"].is_pinned


def test_where_joined_layers_do_not_fit_less_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[bool] = []

    def seen(program: Program, most: int, *, in_layers: bool) -> Coarsening:
        joined.append(in_layers)
        return coarsen(program, most, in_layers=in_layers)

    monkeypatch.setattr("tierstore.planning.searching.choosing.coarsen", seen)
    monkeypatch.setattr("tierstore.planning.searching.choosing._MOST_MOMENTS", 10)
    long = program_of([LAYER] * 12)
    moments = [replace(moment, layer=None if (moment.layer or 0) % 2 else 0) for moment in long.moments]
    program = replace(long, moments=tuple(moments))
    found = search(program, machine(8))
    assert joined == [True, False]
    assert found.timeline.step_s < step_s(program, machine(8), todays(program, machine(8)))
    joined.clear()
    search(PROGRAM, machine(8))
    assert joined == [True]
    joined.clear()  # a mark of one operator would mean nothing where they are one
    marks = [PlacedMark(0, "attention", Treatment.SWAP, 1)]
    search(PROGRAM, machine(8), given=replace(todays(PROGRAM, machine(8)), marks=marks))
    assert joined == [False]
    joined.clear()
    search(PROGRAM, machine(8), levers=Levers.HIGH | Levers.AHEAD)
    assert joined == [False]


def test_shares_that_were_given_are_tried_where_the_full_program_takes_another_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on, slow = machine(8), machine(8, link=1e6)
    program = replace(PROGRAM, moments=tuple(half for each in PROGRAM.moments for half in halves(each)))
    before = replace(todays(program, on), high={"device": 1.0})
    in_full: list[Placement] = []

    def slower(simulated: Program, where: Machine, placement: Placement, **more: object) -> Timeline:
        is_full = len(simulated.moments) == len(program.moments)
        in_full.extend([placement] if is_full else [])
        is_slow = is_full and (placement.high, placement.ahead) != (before.high, before.ahead)
        return simulate(simulated, slow if is_slow else where, placement, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("tierstore.planning.searching.choosing.simulate", slower)
    monkeypatch.setattr("tierstore.planning.searching.choosing.todays", lambda *_: before)
    monkeypatch.setattr("tierstore.planning.searching.choosing._MOST_MOMENTS", 10)
    found = search(program, on)
    assert len(in_full) == 3, "what was given, what was best joined, and that with the shares that were given"
    assert in_full[1].ahead != before.ahead or in_full[1].high != before.high
    assert found.placement == in_full[2] == replace(in_full[1], high=before.high, ahead=before.ahead)


@pytest.mark.parametrize(
    ("treatment", "other"),
    [(Treatment.SWAP, Treatment.RECOMPUTE), (Treatment.RECOMPUTE, Treatment.SWAP)],
)
def test_each_way_to_make_room_is_followed_however_the_estimate_likes_it(
    treatment: Treatment, other: Treatment, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimated = Estimator.estimate

    def disliked(self: Estimator, placement: Placement) -> Estimate:
        found = estimated(self, placement)
        return replace(found, step_s=found.step_s * (2 if marked_layers(placement, treatment) else 1))

    monkeypatch.setattr(Estimator, "estimate", disliked)
    wide = program_of([replace(LAYER, activation_bytes=2 * MIB)] * 8)
    found = search(wide, machine(16))
    simulated = [found.placement, *(each.placement for each in found.rejected)]
    alone = [each for each in simulated if marked_layers(each, treatment) and not marked_layers(each, other)]
    assert any(homes.state.device == CPU for each in alone for homes in each.bundles.values())


def halves(moment: Moment) -> list[Moment]:
    """Return a moment of forward as two."""
    if moment.phase is not Phase.FORWARD:
        return [moment]
    reads = tuple(use for use in moment.uses if use.does is Does.READ)
    return [
        replace(moment, uses=reads, compute_s=moment.compute_s / 2),
        replace(moment, compute_s=moment.compute_s / 2),
    ]


def test_what_fits_is_found_where_what_was_given_does_not() -> None:
    wide = program_of([Layer(MIB, 0, (), 2 * MIB, 0, 0.005, 0.01)] * 8)
    with pytest.raises(CapacityError):
        simulate(wide, machine(16), todays(wide, machine(16)))
    found = search(wide, machine(16))
    layers = {
        *marked_layers(found.placement, Treatment.SWAP),
        *marked_layers(found.placement, Treatment.RECOMPUTE),
    }
    assert layers
    assert "and what was given does not fit" in found.why
    assert any(each.step_s is None and "does not fit" in each.why for each in found.rejected)


def test_where_nothing_fits_the_error_is_that_of_what_was_given() -> None:
    with pytest.raises(CapacityError, match=r"device"):
        search(PROGRAM, machine(2))


def test_where_all_tiers_together_are_too_small_only_what_was_given_is_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = sum(datum.nbytes for datum in PROGRAM.data.values() if datum.kind in KEPT)
    on = machine_of([8 * MIB, kept - 9 * MIB], [1e8], alignment_bytes=512)
    simulated: list[Placement] = []

    def counted(program: Program, machine: Machine, placement: Placement, **others: object) -> Timeline:
        del others
        simulated.append(placement)
        return simulate(program, machine, placement)

    monkeypatch.setattr("tierstore.planning.searching.choosing.simulate", counted)
    with pytest.raises(CapacityError):
        search(PROGRAM, on, given=Placement(high={"device": 0.5}))
    assert len(simulated) == 1
    simulated.clear()
    search(PROGRAM, machine_of([8 * MIB, kept], [1e8], alignment_bytes=512))
    assert len(simulated) > 1


def test_marks_and_pins_that_were_given_stay() -> None:
    before = with_marks(todays(PROGRAM, machine(8)), [5], Treatment.KEEP)
    homes = {**before.bundles, "param/0": BundleHomes(is_pinned=True)}
    found = search(PROGRAM, machine(8), given=replace(before, bundles=homes))
    assert found.placement.bundles["param/0"].is_pinned
    assert found.placement.bundles["param/0"].state.device == "device"
    assert 5 not in marked_layers(found.placement, Treatment.SWAP)
    assert 5 not in marked_layers(found.placement, Treatment.RECOMPUTE)


def test_the_host_is_asked_to_step_only_what_it_can() -> None:
    program = program_of([LAYER, replace(LAYER, host_step_s=None), LAYER])
    base = todays(program, machine(8))
    for lever in neighbours(program, machine(8), base, Levers.HOST_STEPS):
        assert all(option.bundles["param/1"].state.device == "device" for option in lever.options)
    in_host_memory = machine_of([8 * MIB, 99 * MIB])
    tiers = [
        replace(in_host_memory.tiers[0], medium=TierMedium.HOST),
        replace(in_host_memory.tiers[1], medium=TierMedium.STORAGE),
    ]
    on_host = replace(in_host_memory, tiers=tuple(tiers))
    assert not list(neighbours(program, on_host, base, Levers.HOST_STEPS))
    assert list(neighbours(program, on_host, base, Levers.RESIDENTS))
    assert not list(neighbours(program, machine(8), base, Levers.RESIDENTS))


def homes_of_state(base: Placement) -> Sequence[Placement]:
    (lever,) = neighbours(PROGRAM, machine(18), base, Levers.HOMES)
    return lever.options


def test_state_that_would_leave_anyway_goes_down_after_its_step() -> None:
    base = replace(todays(PROGRAM, machine(18)), high={"device": 1.0})  # or it goes early as it is
    pinned = replace(base, bundles={**base.bundles, "param/0": BundleHomes(is_pinned=True)})
    for before, count in ((base, 6), (pinned, 5)):
        some, all_of_it = (
            {key for key, homes in option.bundles.items() if homes.state == Home("host", returns=True)}
            for option in homes_of_state(before)
        )
        assert some < all_of_it
        assert len(all_of_it) == count
    found = search(PROGRAM, machine(18), given=base, levers=Levers.HOMES)
    assert found.timeline.step_s < step_s(PROGRAM, machine(18), base)
    assert "down after each step" in found.why
    # What would stay is better left where it is: with all of it down a step is longer than with some.
    some_s, all_s = (step_s(PROGRAM, machine(18), each) for each in homes_of_state(base))
    assert some_s < all_s
    # Where all has room nothing leaves by itself.
    (lever,) = neighbours(PROGRAM, machine(64), todays(PROGRAM, machine(64)), Levers.HOMES)
    assert len(lever.options) == 1


def test_todays_rules_are_the_rules() -> None:
    placement = todays(PROGRAM, machine(8))
    assert placement.ahead == {"device": AHEAD, "host": AHEAD}
    assert placement.stashing is Stashing.WITHOUT_ROOM
    assert list(placement.bundles) == [f"param/{number}" for number in range(6)]


@given(st.integers(1, 10**12), st.integers(1, 10**12))
def test_the_grid_of_a_smaller_quota_is_a_part_of_that_of_a_larger_one(first: int, second: int) -> None:
    small, large = sorted((first, second))
    assert grid_of(large)[0] == large
    assert grid_of(large) == sorted(set(grid_of(large)), reverse=True)
    lowest = grid_of(large)[-1]
    assert {point for point in grid_of(small)[1:] if point >= lowest} <= set(grid_of(large))


def test_more_room_on_the_grid_is_never_predicted_to_be_slower() -> None:
    program = program_of([Layer(1000, 2000, (1000,), 0, 0, 0.005, 0.01, 0.002)] * 3)
    former = float("inf")
    # The first one is not on the grid, so that it has to be refused; 2 ** 12.5 and so on are.
    for quota in (3_900, 4_096, 5_792, 6_888):
        on = machine_of([quota, 10**6, 10**7], [4e5, 1e5])
        try:
            found = search(program, on, effort=Effort.EXHAUSTIVE, levers=Levers.HIGH | Levers.SHARES)
        except CapacityError:
            assert former == float("inf")
            continue
        assert found.timeline.step_s <= former
        former = found.timeline.step_s
    assert former < float("inf")


def test_numbers_of_layers_are_told_as_ranges() -> None:
    assert ranges([3, 1, 2, 7, 9, 10]) == "layers 1-3, 7, 9-10"
    assert ranges([4]) == "layer 4"


def test_what_differs_is_told() -> None:
    base = Placement({"a": BundleHomes()}, high={"host": 0.5})
    other = with_steps_on_host(with_marks(base, [0, 1], Treatment.RECOMPUTE), ["a"])
    other = replace(
        other,
        high={"device": 0.75},
        stashing=Stashing.ALWAYS,
        residents=frozenset("a"),
        shares={"device": 0.5},
    )
    assert differences(other, base) == [
        "high 0.75 of device",
        "high of host as configured",
        "1 bundle stepped on the host",
        "layers 0-1 recomputed",
        "gradients stashed: always",
        "1 resident",
        "0.5 of device used",
    ]
    assert differences(base, base) == []
    assert differences(replace(base, bundles={"a": BundleHomes(Home("host"))}), base) == []


def test_what_bounds_a_step_is_computing_or_a_link() -> None:
    fast = machine(64, link=1e12)
    assert bounded_by(simulate(PROGRAM, fast, todays(PROGRAM, fast))) == "compute"
    found = bounded_by(simulate(PROGRAM, machine(8), todays(PROGRAM, machine(8))))
    assert found.startswith(("host->device", "device->host"))
