"""What levers make of programs and placements."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planned import Layer, program_of, programs
from tierstore.planning import (
    BundleHomes,
    ByteKind,
    Datum,
    Does,
    Home,
    KeyUse,
    Moment,
    Phase,
    PlacedMark,
    Placement,
    Program,
    Treatment,
)
from tierstore.planning.searching.spans import usage_of
from tierstore.planning.searching.variants import (
    as_placed,
    marked_layers,
    recomputed,
    swapped_keys,
    with_marks,
    with_steps_on_host,
)

LAYER = Layer(100, 200, (100,), 50, 10, 0.1, 0.2, 0.3)


def test_a_layer_that_is_recomputed_keeps_nothing_between_forward_and_backward() -> None:
    program = recomputed(program_of([LAYER] * 3), [0, 1])
    assert [moment.name for moment in program.moments[3:8]] == [
        "layers.2",
        "layers.1 again",
        "layers.1",
        "layers.0 again",
        "layers.0",
    ]
    # while layer 2 runs forward, only its own activations are there beside the workspace
    assert usage_of(program).own_bytes[:4] == (60, 60, 60, 60)
    assert usage_of(program_of([LAYER] * 3)).own_bytes[:4] == (60, 110, 160, 160)
    assert program.compute_s == pytest.approx(program_of([LAYER] * 3).compute_s + 2 * 0.1)


def test_each_pass_of_an_accumulation_recomputes() -> None:
    program = recomputed(program_of([LAYER], accumulations=2), [0])
    assert [moment.name for moment in program.moments].count("layers.0 again") == 2


@given(programs(), st.sets(st.integers(0, 4)))
def test_to_recompute_twice_is_to_recompute_once_and_changes_no_other_bytes(
    program: Program, layers: set[int]
) -> None:
    once = recomputed(program, layers)
    assert recomputed(once, layers) == once
    assert once.data == program.data
    assert once.compute_s >= program.compute_s or math.isclose(once.compute_s, program.compute_s)
    assert max(usage_of(once).own_bytes) <= max(usage_of(program).own_bytes)
    assert recomputed(program, []) == program


def test_what_another_layer_reads_stays() -> None:
    data = {
        key: Datum(key, 10, ByteKind.ACTIVATION, None, layer)
        for key, layer in (("out", 0), ("in", 0), ("b", 1))
    }
    moments = (
        Moment(Phase.FORWARD, "0", (KeyUse("in", Does.MAKE), KeyUse("out", Does.MAKE)), layer=0),
        Moment(Phase.FORWARD, "1", (KeyUse("out", Does.READ), KeyUse("b", Does.MAKE)), layer=1),
        Moment(Phase.BACKWARD, "1", (KeyUse("b", Does.READ), KeyUse("b", Does.END)), layer=1),
        Moment(Phase.BACKWARD, "0", (KeyUse("in", Does.READ), KeyUse("out", Does.READ)), layer=0),
    )
    program = recomputed(Program("shared", "hand", data, moments), [0])
    again = next(moment for moment in program.moments if moment.name == "0 again")
    assert again.uses == (KeyUse("in", Does.MAKE),)
    assert KeyUse("in", Does.END) in program.moments[0].uses
    assert KeyUse("out", Does.END) not in program.moments[0].uses


def test_a_window_over_a_backward_stays_open_over_what_comes_between() -> None:
    data = {
        "p": Datum("p", 10, ByteKind.PARAMETERS),
        "a": Datum("a", 10, ByteKind.ACTIVATION, None, 0),
    }
    moments = (
        Moment(Phase.FORWARD, "0", (KeyUse("a", Does.MAKE),), layer=0),
        Moment(Phase.BACKWARD, "parent", (KeyUse("p", Does.READ, 3),)),
        Moment(Phase.BACKWARD, "0", (KeyUse("a", Does.READ), KeyUse("a", Does.END)), layer=0),
        Moment(Phase.BACKWARD, "tail"),
    )
    program = recomputed(Program("windows", "hand", data, moments), [0])
    assert program.moments[1].uses == (KeyUse("p", Does.READ, 4),)
    assert usage_of(program).leased_bytes == (0, 10, 10, 10, 10)


def test_later_marks_override_and_only_whole_layers_are_told() -> None:
    placement = with_marks(with_marks(Placement(), [0, 1], Treatment.SWAP), [1], Treatment.RECOMPUTE)
    placement = with_marks(placement, [], Treatment.KEEP)
    assert marked_layers(placement, Treatment.SWAP) == (0,)
    assert marked_layers(placement, Treatment.RECOMPUTE) == (1,)
    program = program_of([LAYER] * 3)
    assert as_placed(program, placement) == recomputed(program, [1])
    assert as_placed(program, Placement()) is program
    assert swapped_keys(program, placement) == ("act/0",)
    named = Placement(
        marks=[PlacedMark(2, "attention", Treatment.SWAP), PlacedMark(1, "mlp", Treatment.SWAP)]
    )
    assert swapped_keys(program, named) == ("act/2",)


def test_the_host_steps_what_it_is_told_and_homes_stay() -> None:
    placement = Placement({"param/0": BundleHomes(Home("disk"), Home("disk"), Home("disk"))})
    found = with_steps_on_host(placement, ["param/0", "param/1"]).bundles
    assert found["param/0"] == BundleHomes(Home("disk"), Home("disk", "cpu"), Home("disk", "cpu"))
    assert found["param/1"] == BundleHomes(Home(), Home(None, "cpu"), Home(None, "cpu"))
