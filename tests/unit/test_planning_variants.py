"""What levers make of programs and placements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planned import Layer, program_of, programs
from tierstore.planning import BundleHomes, Home, PlacedMark, Placement, Program, Treatment
from tierstore.planning.searching.spans import usage_of
from tierstore.planning.searching.variants import (
    as_placed,
    marked_keys,
    marked_layers,
    with_marks,
    with_steps_on_host,
)

LAYER = Layer(100, 200, (100,), 50, 10, 0.1, 0.2, 0.3)


def recomputed(program: Program, layers: set[int]) -> Program:
    """Return a program in which some layers are recomputed."""
    return as_placed(program, with_marks(Placement(), sorted(layers), Treatment.RECOMPUTE))


def test_a_layer_that_is_recomputed_keeps_nothing_between_forward_and_backward() -> None:
    program = recomputed(program_of([LAYER] * 3), {0, 1})
    # while layer 2 runs forward, only its own activations are there beside the workspace
    assert usage_of(program).own_bytes[:4] == (60, 60, 60, 60)
    assert usage_of(program_of([LAYER] * 3)).own_bytes[:4] == (60, 110, 160, 160)
    assert program.compute_s == pytest.approx(program_of([LAYER] * 3).compute_s + 2 * 0.1)


@given(programs(), st.sets(st.integers(0, 4)))
def test_to_recompute_twice_is_to_recompute_once_and_needs_no_more_room(
    program: Program, layers: set[int]
) -> None:
    once = recomputed(program, layers)
    assert recomputed(once, layers) == once
    assert once.data == program.data
    assert once.compute_s >= program.compute_s * (1 - 1e-9)
    assert max(usage_of(once).own_bytes) <= max(usage_of(program).own_bytes)
    assert as_placed(program, Placement()) is program


def test_marks_of_a_layer_override_what_was_said_of_it() -> None:
    placement = with_marks(with_marks(Placement(), [0, 1], Treatment.SWAP, 2), [1], Treatment.RECOMPUTE)
    assert marked_layers(placement, Treatment.SWAP) == (0,)
    assert marked_layers(placement, Treatment.RECOMPUTE) == (1,)
    assert placement.marks[0].ahead == 2
    program = program_of([LAYER] * 3)
    assert marked_keys(program, placement, Treatment.SWAP) == ("act/0",)
    named = Placement(
        marks=[PlacedMark(2, "attention", Treatment.SWAP), PlacedMark(1, "mlp", Treatment.SWAP)]
    )
    assert marked_keys(program, named, Treatment.SWAP) == ("act/2",)
    assert marked_layers(named, Treatment.SWAP) == ()


def test_the_host_steps_what_it_is_told_and_homes_stay() -> None:
    placement = Placement({"param/0": BundleHomes(Home("disk"), Home("disk"), Home("disk"))})
    found = with_steps_on_host(placement, ["param/0", "param/1"]).bundles
    assert found["param/0"] == BundleHomes(Home("disk"), Home("disk", "cpu"), Home("disk", "cpu"))
    assert found["param/1"] == BundleHomes(Home(), Home(None, "cpu"), Home(None, "cpu"))
