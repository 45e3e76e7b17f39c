"""What would make a program fit: each remedy is tried here again, and a little less is not enough."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planned import Layer, machine_of, machines, placements, program_of, programs
from tierstore.errors import CapacityError
from tierstore.planning import Machine, PlacedMark, Placement, Program, TierMedium, Treatment
from tierstore.planning.searching.alternatives import Levers, todays
from tierstore.planning.searching.remedies import Remedy, remedies, rounded_up, told
from tierstore.planning.searching.variants import marked_layers
from tierstore.planning.simulating import Conditions, simulate
from tierstore.planning.timeline import Timeline
from tierstore.units import parse_bytes

MIB = 1 << 20
WIDE = program_of([Layer(MIB, 0, (), 2 * MIB, 0, 0.005, 0.01)] * 8)


def machine(device: int, host: int = 512) -> Machine:
    return machine_of([device * MIB, host * MIB], [1e8], alignment_bytes=512)


def fits(program: Program, on: Machine, placement: Placement) -> bool:
    try:
        simulate(program, on, placement)
    except CapacityError:
        return False
    return True


def test_a_run_that_does_not_fit_is_told_three_ways_out() -> None:
    given = todays(WIDE, machine(12))
    assert not fits(WIDE, machine(12), given)
    raised, swapped, again = remedies(WIDE, machine(12), given=given)
    assert raised.text.startswith("raise max_device_memory to 1")
    assert swapped.text == "swap `attention`"
    assert again.text.startswith("recompute layers 0-")
    assert told([raised, swapped, again]) == (f"R{raised.text[1:]}, or swap `attention`, or {again.text}.")
    for remedy in (raised, swapped, again):
        assert simulate(WIDE, remedy.machine, remedy.placement).step_s == remedy.step_s


def test_the_quota_is_the_least_and_so_are_the_layers() -> None:
    given = todays(WIDE, machine(12))
    raised, _, again = remedies(WIDE, machine(12), given=given)
    quota = raised.machine.tiers[0].capacity_bytes
    assert not fits(WIDE, machine(12).with_capacities({"device": int(quota * 0.98)}), given)
    layers = marked_layers(again.placement, Treatment.RECOMPUTE)
    assert layers == tuple(range(len(layers)))
    fewer = replace(again.placement, marks=again.placement.marks[:-1])
    assert not fits(WIDE, machine(12), fewer)


def test_where_the_model_itself_has_no_room_nothing_is_tried_with_activations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on = machine(4, host=2)
    marked: list[PlacedMark] = []

    def watched(
        program: Program, on: Machine, placement: Placement, *, conditions: Conditions, steps: int | None
    ) -> Timeline:
        marked.extend(placement.marks)
        return simulate(program, on, placement, conditions=conditions, steps=steps)

    monkeypatch.setattr(sys.modules[remedies.__module__], "simulate", watched)
    found = remedies(WIDE, on, given=todays(WIDE, on))
    assert not marked
    assert found
    assert all(remedy.text.startswith("raise ") for remedy in found)
    remedies(WIDE, machine(12), given=todays(WIDE, machine(12)))
    assert marked


def test_no_trial_but_what_is_told_runs_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int | None] = []

    def watched(
        program: Program, on: Machine, placement: Placement, *, conditions: Conditions, steps: int | None
    ) -> Timeline:
        lengths.append(steps)
        return simulate(program, on, placement, conditions=conditions, steps=steps)

    monkeypatch.setattr(sys.modules[remedies.__module__], "simulate", watched)
    found = remedies(WIDE, machine(12), given=todays(WIDE, machine(12)), levers=Levers(0))
    assert len(found) == 1
    assert lengths.count(None) == 1 + len(found)  # what was given, and each that is told


def test_levers_that_may_not_be_pulled_are_no_remedies() -> None:
    given = todays(WIDE, machine(12))
    found = remedies(WIDE, machine(12), given=given, levers=Levers(0))
    assert [remedy.text.split(" to ")[0] for remedy in found] == ["raise max_device_memory"]
    assert remedies(WIDE, machine(12), given=given, levers=Levers.RECOMPUTE)[1].text.startswith("recompute")


def test_layers_without_operators_are_swapped_as_a_whole() -> None:
    data = {key: replace(datum, operator="") for key, datum in WIDE.data.items()}
    found = remedies(replace(WIDE, data=data), machine(12), given=todays(WIDE, machine(12)))
    assert found[1].text.startswith("swap the activations of layers 0-")


def test_an_operator_is_meant_by_its_whole_path() -> None:
    data = {
        key: replace(datum, operator="attn.soft-max" if datum.operator else "")
        for key, datum in WIDE.data.items()
    }
    swapped = remedies(replace(WIDE, data=data), machine(12), given=todays(WIDE, machine(12)))[1]
    assert swapped.text == "swap `attn.soft-max`"
    assert {mark.operators for mark in swapped.placement.marks} == {r"attn\.soft[-]max"}


def test_what_lies_below_is_raised_where_that_is_too_small() -> None:
    program = program_of([Layer(MIB, 2 * MIB, (MIB,), 0, 0, 0.005, 0.01)] * 8)
    given = todays(program, machine(8, 8))
    found = remedies(program, machine(8, 8), given=given)
    assert [remedy.text.split(" to ")[0] for remedy in found] == [
        "raise max_device_memory",
        "raise offload_cpu_size",
    ]
    two = machine(8, 8)
    storage = replace(two, tiers=(two.tiers[0], replace(two.tiers[1], medium=TierMedium.STORAGE)))
    assert any("offload_disk_size" in remedy.text for remedy in remedies(program, storage, given=given))


def test_what_fits_needs_none() -> None:
    assert remedies(WIDE, machine(64), given=todays(WIDE, machine(64))) == ()
    assert told(()) == ""


@settings(max_examples=15)
@given(st.data())
def test_every_remedy_fits(data: st.DataObject) -> None:
    program, on = data.draw(programs(most_layers=2)), data.draw(machines())
    placement = data.draw(placements(program, on))
    found = remedies(program, on, given=placement)
    assert len(found) <= 3
    assert not found or not fits(program, on, placement)
    assert all(fits(program, remedy.machine, remedy.placement) for remedy in found)
    assert found == remedies(program, on, given=placement)


@pytest.mark.parametrize(
    ("nbytes", "text", "least"),
    [
        (5, "5B", 5),
        (1024, "1KB", 1024),
        (1025, "1.1KB", 1126),
        (5 << 30, "5GB", 5 << 30),
        ((5 << 30) + 1, "5.1GB", 5476083302),
    ],
)
def test_a_quota_is_told_rounded_up(nbytes: int, text: str, least: int) -> None:
    assert rounded_up(nbytes) == (text, least)
    assert parse_bytes(text) == least >= nbytes


def test_a_remedy_says_what_a_step_then_takes() -> None:
    found: tuple[Remedy, ...] = remedies(WIDE, machine(12), given=todays(WIDE, machine(12)))
    assert all(remedy.step_s >= WIDE.compute_s for remedy in found)
