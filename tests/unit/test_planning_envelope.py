"""More memory, or faster links, never make the predicted optimum worse, over what is on the grids."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.planned import Layer, machine_of, program_of
from tierstore.errors import CapacityError
from tierstore.planning import Machine, Program
from tierstore.planning.searching import Choice, Effort, Levers, Optimum, envelope, optimum, search
from tierstore.planning.simulating import simulate

PROGRAM = program_of([Layer(1000, 0, (1000,), 0, 0, 0.005, 0.01, 0.002)] * 2)


def machine(quota: int, rate: float) -> Machine:
    return machine_of([quota, 10**6], [rate], has_streams=False)


def optimum_s(on: Machine) -> float:
    try:
        return optimum(PROGRAM, on, levers=Levers(0)).choice.timeline.step_s
    except CapacityError:
        return math.inf


def test_more_memory_and_faster_links_are_never_predicted_to_be_slower() -> None:
    grid = {
        (quota, power): optimum_s(machine(quota, 4.0**power))
        for quota in (1_722, 2_048, 3_444)
        for power in (8, 9)
    }
    for less, slower in grid.items():
        for more, faster in grid.items():
            if less[0] <= more[0] and less[1] <= more[1]:
                assert faster <= slower * (1 + 1e-9)
    assert len(set(grid.values())) > 4
    assert math.inf in grid.values()


def test_links_between_two_pairs_of_tiers_get_slower_each_on_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[float, float]] = []

    def found(program: Program, on: Machine, **more: object) -> Choice:
        asked.append((on.links[0].bytes_per_s, on.links[2].bytes_per_s))
        return search(program, on, levers=Levers(0))

    monkeypatch.setattr(envelope, "search", found)

    def step_s(up: float, down: float) -> float:
        on = machine_of([2_048, 3_000, 10**6], [4.0**up, 4.0**down], has_streams=False)
        return optimum(PROGRAM, on, levers=Levers(0)).choice.timeline.step_s

    both, one, other, none = step_s(5, 5), step_s(4, 5), step_s(5, 4), step_s(4, 4)
    assert both < min(one, other) <= max(one, other) < none
    assert asked[:3] == [(4.0**5, 4.0**5), (4.0**5, 4.0**4), (4.0**4, 4.0**5)]


def worse_when_faster(monkeypatch: pytest.MonkeyPatch, limit: float) -> list[float]:
    """Let searches find one second more where the first link is faster than it should be."""
    seen: list[float] = []

    def found(program: object, on: Machine, **more: object) -> Choice:
        seen.append(on.links[0].bytes_per_s)
        choice = search(PROGRAM, on, effort=Effort.USUAL, levers=Levers(0))
        if on.links[0].bytes_per_s <= limit:
            return choice
        late = tuple(replace(step, end_s=step.begin_s + 9.0) for step in choice.timeline.steps)
        return replace(choice, timeline=replace(choice.timeline, steps=late))

    monkeypatch.setattr(envelope, "search", found)
    return seen


def test_where_a_faster_link_makes_a_step_longer_a_slower_one_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = worse_when_faster(monkeypatch, 4.0**8)
    on = machine(2_896, 4.0**9)
    found = optimum(PROGRAM, on)
    assert isinstance(found, Optimum)
    assert {link.bytes_per_s for link in found.machine.links} == {4.0**8}
    assert found.choice.timeline == simulate(PROGRAM, found.machine, found.choice.placement)
    assert found.choice.timeline.step_s < 9.0
    # Two rates a grid step apart or more are left out: they cannot be faster.
    assert seen[0] == 4.0**9
    assert min(seen) >= 4.0**5


def test_where_nothing_fits_the_error_is_that_of_the_machine_itself() -> None:
    with pytest.raises(CapacityError, match="device"):
        optimum(PROGRAM, machine(1_500, 16.0), levers=Levers(0))
