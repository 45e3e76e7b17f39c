"""Whatever is simulated: the ledger's rules hold after every event, and time, bytes and quotas add up."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.planned import machine_of, machines, placements, programs
from tierstore.errors import CapacityError
from tierstore.planning import Machine, Placement, Program, Timeline
from tierstore.planning.simulating import Conditions, simulate
from tierstore.planning.timeline import COMPUTE, HOST, WAITING


@st.composite
def runs(draw: st.DrawFn) -> tuple[Program, Machine, Placement, Conditions]:
    """Draw all that a simulated run is made of."""
    program, machine = draw(programs(most_layers=3)), draw(machines())
    conditions = Conditions(
        draw(st.sampled_from(["next-use", "lru", "size-class"])),
        {"device": draw(st.sampled_from([0.5, 1.0]))},
        is_divided=draw(st.sampled_from([True, True, False])),
        optimizer_in_backward=draw(st.sampled_from([False, False, True])),
    )
    return program, machine, draw(placements(program, machine)), conditions


def simulated(run: tuple[Program, Machine, Placement, Conditions]) -> Timeline | None:
    """Return what a run does, with every rule checked; ``None``: it does not fit, and says who holds what."""
    program, machine, placement, conditions = run
    try:
        found = simulate(program, machine, placement, conditions=conditions, checked=True)
    except CapacityError as refused:
        error = refused
    else:
        event(f"repeats after {found.period}")
        return found
    event("does not fit")
    assert f"In '{machine.tiers[0].name}' were" in str(error)
    return None


@given(runs())
@settings(max_examples=15)
def test_rules_hold_after_every_event_and_time_never_runs_back(
    run: tuple[Program, Machine, Placement, Conditions],
) -> None:
    timeline = simulated(run)
    if timeline is None:
        return
    assert all(each.begin_s <= each.end_s for each in timeline.intervals)
    begins = [each.begin_s for each in timeline.intervals]
    assert begins == sorted(begins)
    assert all(one.end_s == two.begin_s for one, two in itertools.pairwise(timeline.steps))
    for lane in (COMPUTE, HOST, WAITING):
        own = [each for each in timeline.intervals if each.lane == lane]
        assert all(one.end_s <= two.begin_s + 1e-9 for one, two in itertools.pairwise(own))
    for entries in (*timeline.charges.values(), timeline.held):
        times = [entry[0] for entry in entries]
        assert times == sorted(times)


@given(runs())
@settings(max_examples=15)
def test_no_tier_holds_more_than_it_may(run: tuple[Program, Machine, Placement, Conditions]) -> None:
    timeline = simulated(run)
    if timeline is None:
        return
    _, machine, placement, conditions = run
    for tier in machine.tiers:
        quota_bytes = math.floor(placement.shares.get(tier.name, 1.0) * tier.capacity_bytes)
        assert all(0 <= nbytes <= quota_bytes for _, nbytes in timeline.charges[tier.name])
        if tier.name != machine.tiers[0].name or conditions.is_divided:
            assert timeline.peak_bytes[tier.name] <= quota_bytes
    account = timeline.account
    assert account.nbytes == timeline.peak_bytes[machine.tiers[0].name] == sum(account.kinds.values())
    assert sum(nbytes for _, nbytes in account.largest) <= account.nbytes
    assert max((sum(kinds.values()) for _, kinds in timeline.held), default=0) <= account.nbytes


@given(runs())
@settings(max_examples=15)
def test_what_moved_in_a_step_is_what_the_links_carried(
    run: tuple[Program, Machine, Placement, Conditions],
) -> None:
    timeline = simulated(run)
    if timeline is None:
        return
    carried: dict[str, int] = {}
    for each in timeline.intervals:
        if each.nbytes and each.end_s <= timeline.steps[-1].end_s:
            carried[each.lane] = carried.get(each.lane, 0) + each.nbytes
    moved: dict[str, int] = {}
    for step in timeline.steps:
        for link, nbytes in step.moved_bytes.items():
            moved[link] = moved.get(link, 0) + nbytes
    assert moved == carried


@given(runs())
@settings(max_examples=10)
def test_the_same_run_is_simulated_the_same(run: tuple[Program, Machine, Placement, Conditions]) -> None:
    assert simulated(run) == simulated(run)


@given(programs(), st.booleans(), st.sampled_from([1, 512]))
@settings(max_examples=10)
def test_nothing_moves_where_everything_fits(program: Program, has_streams: bool, alignment: int) -> None:

    machine = machine_of((2**30, 2**30), has_streams=has_streams, alignment_bytes=alignment)
    timeline = simulate(program, machine, Placement(), checked=True)
    assert timeline.moved_bytes == {}
    assert timeline.stall_s == {}
    least_s = sum(moment.compute_s for moment in program.moments)
    own_s = sum(moment.host_s for moment in program.moments)
    assert timeline.step_s == pytest.approx(least_s if has_streams else least_s + own_s, rel=0.05, abs=1e-2)


@given(runs())
@settings(max_examples=10)
def test_no_step_is_shorter_than_what_it_computes(
    run: tuple[Program, Machine, Placement, Conditions],
) -> None:
    timeline = simulated(run)
    program, _, placement, _ = run
    is_on_host = any(homes.state.device == "cpu" for homes in placement.bundles.values())
    if timeline is None or is_on_host:
        return
    assert all(step.seconds >= program.compute_s * (1 - 1e-9) for step in timeline.steps[1:])
    more = simulate(program, run[1], placement, conditions=run[3], steps=len(timeline.steps))
    assert replace(more, period=timeline.period, assumptions=timeline.assumptions) == timeline
