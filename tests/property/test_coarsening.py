"""A program of fewer moments has the same bytes and the same seconds, and can be run like the other one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planned import Layer, machine_of, program_of, programs
from tierstore.planning import BundleHomes, ByteKind, Home, Phase, Placement, Program
from tierstore.planning.coarsening import coarsen, coarsened
from tierstore.planning.simulating import simulate


def _in_one_layer(program: Program, layers: int) -> Program:
    """Return a program whose neighbouring layers are parts of one."""
    data = {key: replace(datum, layer=(datum.layer or 0) // layers) for key, datum in program.data.items()}
    moments = tuple(
        moment if moment.layer is None else replace(moment, layer=moment.layer // layers)
        for moment in program.moments
    )
    return replace(program, data=data, moments=moments)


def _kinds(program: Program) -> Counter[ByteKind]:
    found: Counter[ByteKind] = Counter()
    for datum in program.data.values():
        found[datum.kind] += datum.nbytes
    return found


@given(programs(), st.integers(1, 3), st.booleans())
@settings(max_examples=25)
def test_bytes_of_every_kind_seconds_and_steps_are_kept(
    program: Program, layers: int, in_layers: bool
) -> None:
    whole = _in_one_layer(program, layers)
    found = coarsen(whole, 1, in_layers=in_layers)
    coarse = found.program
    assert len(coarse.moments) <= len(whole.moments)
    assert _kinds(coarse) == _kinds(whole)
    assert coarse.compute_s == pytest.approx(whole.compute_s)
    assert sorted(key for keys in found.members.values() for key in keys) == sorted(whole.data)
    assert sum(unit.device_step_s for unit in coarse.units) == pytest.approx(
        sum(unit.device_step_s for unit in whole.units)
    )
    turns = [moment for moment in coarse.moments if moment.phase is Phase.OPTIMIZER]
    assert len(turns) == len(coarse.units)
    machine = machine_of((2**30, 2**30))
    assert simulate(coarse, machine, Placement(), checked=True).moved_bytes == {}


LAYERS = [Layer(4096, 8192, (2048, 2048), 1024, 512, 0.01, 0.02, 0.005)] * 8


def test_parts_of_a_layer_become_one_bundle_that_is_stepped_in_one_turn() -> None:
    whole = _in_one_layer(program_of(LAYERS), 2)
    found = coarsen(whole, 10)
    assert [unit.bundle for unit in found.program.units] == ["param/0", "param/2", "param/4", "param/6"]
    assert found.members["param/2"] == ("param/2", "param/3")
    assert found.program.data["state/2"].nbytes == 2 * 8192
    assert found.program.data["state/2"].owner == "param/2"
    assert len(found.program.moments) == 4 + 4 + 4 + 1


def test_what_is_between_moments_of_a_layer_is_a_part_of_it_where_layers_are_joined() -> None:
    program = _in_one_layer(program_of(LAYERS), 4)
    moments = list(program.moments)
    moments[1] = replace(moments[1], layer=None)
    moments[6] = replace(moments[6], layer=0)
    whole = replace(program, moments=tuple(moments))
    forward = [
        [each.layer for each in found.program.moments if each.phase is Phase.FORWARD]
        for found in (coarsen(whole, 10), coarsen(whole, 10, in_layers=True))
    ]
    assert forward == [[0, None, 0, 1, 0, 1], [0, 1]]
    assert coarsen(whole, 10, in_layers=True).program.compute_s == pytest.approx(whole.compute_s)


def test_activations_are_joined_whatever_makes_them_where_layers_are_joined() -> None:
    program = _in_one_layer(program_of(LAYERS), 4)
    data = {key: replace(datum, operator=f"of {key}") for key, datum in program.data.items()}
    whole = replace(program, data=data)

    def activations(found: Program) -> int:
        return sum(datum.kind is ByteKind.ACTIVATION for datum in found.data.values())

    kept, joined = coarsen(whole, 10), coarsen(whole, 10, in_layers=True)
    assert activations(kept.program) == activations(whole) == 8
    assert activations(joined.program) == 2


def test_data_may_be_named_in_another_order_than_units_step() -> None:
    program = _in_one_layer(program_of(LAYERS), 2)
    whole = replace(program, data=dict(reversed(list(program.data.items()))))
    found = coarsen(whole, 10)
    assert [unit.bundle for unit in found.program.units] == ["param/0", "param/2", "param/4", "param/6"]
    assert found.members["param/2"] == ("param/3", "param/2")
    assert found.program.data["param/2"].nbytes == 2 * 4096


def test_a_program_of_few_moments_stays() -> None:
    program = program_of(LAYERS)
    assert coarsened(program) is program


def test_bytes_that_move_are_those_of_the_whole_program() -> None:
    whole = _in_one_layer(program_of(LAYERS), 2)
    machine = machine_of((60_000, 2**20), has_streams=False)
    home = Home("host", returns=True)
    placement = Placement(dict.fromkeys([f"param/{n}" for n in range(8)], BundleHomes(home, home, home)))
    found = coarsen(whole, 10)
    fine = simulate(whole, machine, placement)
    coarse = simulate(found.program, machine, found.narrowed(placement))
    assert coarse.moved_bytes == fine.moved_bytes
    assert fine.moved_bytes["host->device"] > 0


def test_what_is_said_of_a_joint_is_said_of_all_that_it_stands_for() -> None:
    found = coarsen(_in_one_layer(program_of(LAYERS), 2), 10)
    pinned = BundleHomes(is_pinned=True)
    placement = Placement(
        {"param/2": pinned},
        residents=frozenset({"param/4", "param/6"}),
        residents_without_state=frozenset({"param/6"}),
    )
    spread = found.spread(placement)
    assert dict(spread.bundles) == {"param/2": pinned, "param/3": pinned}
    assert spread.residents == frozenset({"param/4", "param/5", "param/6", "param/7"})
    assert spread.residents_without_state == frozenset({"param/6", "param/7"})
    assert found.narrowed(spread) == placement
