"""No step is shorter than the bound: against the simulator, and against all ways to keep a few spans."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.planned import (
    Layer,
    layers_of,
    machine_of,
    machines,
    placements,
    program_of,
    programs,
    without_device,
)
from tierstore import solving
from tierstore.errors import CapacityError
from tierstore.planning import Machine, Placement, Program, TierMedium, Treatment
from tierstore.planning.searching import Levers, search, todays
from tierstore.planning.searching.bound import SparseRows, lower_bound
from tierstore.planning.searching.spans import usage_of
from tierstore.planning.searching.variants import with_marks, with_steps_on_host
from tierstore.planning.simulating import Conditions, simulate
from tierstore.solving import find_solver, solve_with_highs

MIB = 1 << 20
LAYER = Layer(MIB, 2 * MIB, (MIB,), MIB // 4, 0, 0.005, 0.01, 0.002, 0.004)
PROGRAM = program_of([LAYER] * 6)
NOTHING = Levers(0)


def machine(device: int, host: int = 512, link: float = 1e8) -> Machine:
    return machine_of([device * MIB, host * MIB, 4096 * MIB], [link, link / 5], alignment_bytes=512)


def repeats(program: Program, on: Machine, placement: Placement) -> float:
    """Return seconds of a step in a steady state; infinite: there is none, or it does not fit."""
    try:
        timeline = simulate(program, on, placement)
    except CapacityError:
        return math.inf
    return math.inf if any("no step of" in each for each in timeline.assumptions) else timeline.step_s


@settings(max_examples=40)
@given(st.data())
def test_nothing_that_is_simulated_is_faster(data: st.DataObject) -> None:
    program, on = data.draw(programs(most_layers=4)), data.draw(machines())
    if len(on.tiers) > 2 and data.draw(st.booleans()):
        on = without_device(on)
    placement = data.draw(placements(program, on))
    if data.draw(st.booleans()):
        placement = with_marks(placement, [0], Treatment.RECOMPUTE)
    step_s = repeats(program, on, placement)
    for solve in (None, solve_with_highs):
        assert lower_bound(program, on, given=placement, solve=solve) <= step_s * (1 + 1e-9)


@pytest.mark.parametrize("device", [6, 12, 24])
def test_the_choice_is_not_below_the_bound_and_the_solver_is_closer(device: int) -> None:
    found = search(PROGRAM, machine(device), solve=solve_with_highs)
    simple = lower_bound(PROGRAM, machine(device))
    assert found.bound_s is not None
    assert 0 < simple <= found.bound_s <= found.timeline.step_s
    assert f"no placement can take less than {found.bound_s:.4g}" in found.why


def test_what_does_not_fit_has_to_move() -> None:
    # Two bundles of 100 bytes and room for one: between forward and backward of the first one, and between
    # steps, each leaves.  One of them at any one moment is all that the simple bound sees.
    program = program_of([Layer(100), Layer(100)])
    on = machine_of([100, 1000], [100.0])
    assert lower_bound(program, on) == pytest.approx(1.0)
    assert lower_bound(program, on, solve=solve_with_highs) == pytest.approx(2.0, rel=1e-3)
    assert lower_bound(program_of([Layer(100)] * 3), on, solve=solve_with_highs) == pytest.approx(
        4.0, rel=1e-3
    )


def test_computing_bounds_what_fits() -> None:
    assert lower_bound(PROGRAM, machine(640), levers=NOTHING) == pytest.approx(PROGRAM.compute_s)
    on_host = lower_bound(PROGRAM, machine(640), levers=Levers.HOST_STEPS)
    assert on_host == pytest.approx(PROGRAM.compute_s - 6 * 0.002)
    solved = lower_bound(PROGRAM, machine(640), levers=Levers.HOST_STEPS, solve=solve_with_highs)
    assert PROGRAM.compute_s - 6 * 0.002 <= solved * (1 + 1e-5)


def test_what_the_host_steps_needs_no_room_on_the_device() -> None:
    program = program_of([Layer(1000, 50_000, (1000,), 0, 0, 0.01, 0.01, 0.01, 0.001)] * 2)
    on = machine_of([10_000, 10**6], [1e4])
    on_host = with_steps_on_host(todays(program, on), ["param/0", "param/1"])
    alone = Conditions(is_divided=False)  # else a bundle's state has to have room on the device
    step_s = simulate(program, on, on_host, conditions=alone).step_s
    with pytest.raises(CapacityError):
        simulate(program, on, todays(program, on), conditions=alone)  # the device cannot step them
    for solve in (None, solve_with_highs):
        assert lower_bound(program, on, solve=solve) <= step_s
        assert lower_bound(program, on, levers=NOTHING, solve=solve) > step_s


def test_what_a_limit_lets_through_at_once_is_not_waited_for() -> None:
    program = program_of([Layer(1000, forward_s=1.0, backward_s=1.0)] * 3)
    at_once, slowly = (machine_of([2000, 10**6], [1e3], burst_s=burst_s) for burst_s in (60.0, 0.0))
    step_s = simulate(program, at_once, todays(program, at_once)).step_s
    for solve in (None, solve_with_highs):
        assert lower_bound(program, at_once, solve=solve) <= step_s
    assert lower_bound(program, slowly, solve=solve_with_highs) >= lower_bound(
        program, at_once, solve=solve_with_highs
    )
    still = program_of([Layer(1000)] * 3)
    assert lower_bound(still, at_once, solve=solve_with_highs) == pytest.approx(0.0, abs=1e-3)
    assert lower_bound(still, slowly, solve=solve_with_highs) > 1.0


def test_levers_that_may_not_be_pulled_make_the_bound_higher() -> None:
    tight = machine(8)
    free = lower_bound(PROGRAM, tight, solve=solve_with_highs)
    bound = lower_bound(PROGRAM, tight, levers=NOTHING, solve=solve_with_highs)
    assert free < bound
    given_steps = with_steps_on_host(Placement(), [f"param/{number}" for number in range(6)])
    assert lower_bound(PROGRAM, tight, given=given_steps, levers=NOTHING, solve=solve_with_highs) < bound


@settings(max_examples=25)
@given(st.lists(layers_of(), min_size=1, max_size=2), st.integers(1, 4), st.sampled_from([1e3, 1e5]))
def test_no_way_to_keep_spans_is_faster(layers: list[Layer], share: int, rate: float) -> None:
    program = program_of([replace(layer, host_step_s=None, activation_bytes=0) for layer in layers])
    usage = usage_of(program)
    spans, moments = usage.spans, len(program.moments)
    assume(0 < len(spans) <= 9)
    needed = [leased + own for leased, own in zip(usage.leased_bytes, usage.own_bytes, strict=True)]
    quota = max(needed) + sum(span.nbytes for span in spans) * (share - 1) // 4
    best = math.inf
    for kept in itertools.product([False, True], repeat=len(spans)):
        held = list(needed)
        for span, stays in zip(spans, kept, strict=True):
            for first, end in span.inside(moments) if stays else ():
                for number in range(first, end):
                    held[number] += span.nbytes
        if max(held) <= quota:
            moved = [span for span, stays in zip(spans, kept, strict=True) if not stays]
            out = sum(span.nbytes for span in moved if span.is_changed)
            best = min(best, max(program.compute_s, sum(span.nbytes for span in moved) / rate, out / rate))
    on = machine_of([quota, 10**9], [rate])
    found = lower_bound(program, on, levers=NOTHING, solve=solve_with_highs)
    assert found <= best * (1 + 1e-6)
    assert lower_bound(program, on, levers=NOTHING) <= found + 1e-9


def test_without_scipy_there_is_no_solver_and_the_simple_bound_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert find_solver() is solve_with_highs
    monkeypatch.setitem(__import__("sys").modules, "scipy.optimize", None)
    assert find_solver() is None
    found = search(PROGRAM, machine(8), levers=NOTHING, solve=solving.find_solver())
    assert found.bound_s == lower_bound(
        PROGRAM, machine(8), given=todays(PROGRAM, machine(8)), levers=NOTHING
    )


def test_a_program_without_an_answer_has_none() -> None:
    rows = SparseRows()
    rows.add({0: 2.0}, -1.0)
    assert rows.limits == [-0.5]
    assert solve_with_highs([1.0], rows, [1.0]) is None
    assert lower_bound(PROGRAM, machine(8), solve=lambda costs, rows, most: None) == lower_bound(
        PROGRAM, machine(8)
    )


@pytest.mark.parametrize("own_bytes", [0, 64 * MIB, 1 << 40])
def test_without_a_device_what_the_program_has_itself_moves_nothing(own_bytes: int) -> None:
    tiers = machine_of([16 * MIB, 4096 * MIB], [1e8], alignment_bytes=512)
    host, disk = tiers.tiers
    on = replace(
        tiers,
        tiers=(replace(host, medium=TierMedium.HOST), replace(disk, medium=TierMedium.STORAGE)),
        has_streams=False,
    )
    moments = tuple(replace(each, workspace_bytes=own_bytes) for each in PROGRAM.moments)
    program = replace(PROGRAM, moments=moments)
    step_s = repeats(program, on, todays(program, on))
    assert math.isfinite(step_s)
    for solve in (None, solve_with_highs):
        assert lower_bound(program, on, solve=solve) <= step_s
