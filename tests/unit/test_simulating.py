"""Simulated runs whose seconds and bytes are counted by hand."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import pytest

from tests.planned import Layer, machine_of, program_of
from tierstore.errors import CapacityError, ConfigError
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
    StallCause,
    Stashing,
    Timeline,
    Treatment,
)
from tierstore.planning.deciding import DeviceShare
from tierstore.planning.simulating import Conditions, simulate, with_recomputation
from tierstore.planning.timeline import COMPUTE, HOST

HOME = Home("host", returns=True)
RETURNS = BundleHomes(HOME, HOME, HOME)
FREE = Conditions(is_divided=False)


def reads(keys: int, nbytes: int, compute_s: float, host_s: float = 0.0) -> Program:
    """Return a program that reads keys one after another."""
    data = {f"k{n}": Datum(f"k{n}", nbytes, ByteKind.PARAMETERS) for n in range(keys)}
    moments = tuple(Moment(Phase.FORWARD, key, (KeyUse(key, Does.READ),), compute_s, host_s) for key in data)
    return Program("reads", "hand", data, (*moments, Moment(Phase.BETWEEN, "end")))


def lanes(timeline: Timeline, lane: str, step: int = 0) -> list[tuple[str, float, float]]:
    """Return what went on in a lane in a step, from its beginning."""
    begin_s, end_s = timeline.steps[step].begin_s, timeline.steps[step].end_s
    return [
        (each.name, round(each.begin_s - begin_s, 6), round(each.end_s - begin_s, 6))
        for each in timeline.intervals
        if each.lane == lane and begin_s <= each.begin_s < end_s
    ]


# ---------------------------------------------------------------------- one link


def test_a_key_that_lives_in_host_memory_comes_at_the_links_rate_and_goes_at_once() -> None:
    machine = machine_of((1000, 10_000), (100.0,), latency_s=0.5, has_streams=False)
    timeline = simulate(reads(1, 200, 3.0), machine, Placement({"k0": RETURNS}), conditions=FREE, steps=2)
    # 200 B at 100 B/s and half a second of latency, then 3 s of computing; read only: nothing goes back.
    assert [step.seconds for step in timeline.steps] == pytest.approx([5.5, 5.5])
    assert timeline.moved_bytes == {"host->device": 200}
    assert timeline.stall_s == {StallCause.COPY_UP: pytest.approx(2.5)}
    assert lanes(timeline, "host->device") == [("k0", 0.0, 2.5)]
    assert lanes(timeline, COMPUTE) == [("k0", 2.5, 5.5)]
    assert timeline.peak_bytes == {"device": 200, "host": 200}


def test_prefetched_keys_come_while_others_are_computed_with() -> None:
    machine = machine_of((400, 10_000), (100.0,), has_streams=False)
    placement = Placement(dict.fromkeys(["k0", "k1", "k2", "k3"], RETURNS), ahead={"device": 0.5})
    timeline = simulate(reads(4, 100, 2.0), machine, placement, conditions=FREE)
    # From the second step on 200 B are ahead: only the first one is waited for, as it had to go.
    assert timeline.step_s == pytest.approx(8.0, abs=1.01)
    assert timeline.moved_bytes == {"host->device": 400}
    assert sum(timeline.stall_s.values()) == pytest.approx(timeline.step_s - 8.0)
    slow = simulate(reads(4, 100, 2.0), machine, replace(placement, ahead={}), conditions=FREE)
    assert slow.step_s == pytest.approx(12.0)


def test_both_directions_of_a_bus_that_is_not_duplex_have_its_rate_together() -> None:
    layers = [Layer(100, 0, (), 0, 0, 1.0)] * 2
    program = program_of(layers)
    writes = replace(
        program,
        moments=tuple(
            replace(each, uses=tuple(replace(use, does=Does.WRITE) for use in each.uses))
            for each in program.moments
        ),
    )
    placement = Placement(dict.fromkeys(["param/0", "param/1"], RETURNS))
    seconds = {}
    for is_half_duplex in (False, True):
        machine = machine_of((10_000, 10_000), (100.0,), has_streams=False, is_half_duplex=is_half_duplex)
        seconds[is_half_duplex] = simulate(writes, machine, placement, conditions=FREE, steps=3).steps[-1]
    # What is used again at once stays; each use is copied down, 1 s each.
    assert seconds[False].moved_bytes == {"host->device": 200, "device->host": 400}
    assert seconds[False].seconds < seconds[True].seconds <= 4.0 + 6.0


# ---------------------------------------------------------------------- three tiers


def test_bytes_on_a_disk_come_through_host_memory_one_link_after_the_other() -> None:
    machine = machine_of((1000, 1000, 10_000), (100.0, 50.0), has_streams=False)
    home = Home("disk", returns=True)
    placement = Placement({"k0": BundleHomes(home, home, home)})
    timeline = simulate(reads(1, 100, 1.0), machine, placement, conditions=FREE, steps=2)
    assert timeline.steps[-1].seconds == pytest.approx(2.0 + 1.0 + 1.0)
    assert timeline.steps[-1].stall_s == {
        StallCause.DISK: pytest.approx(2.0),
        StallCause.COPY_UP: pytest.approx(1.0),
    }
    assert timeline.steps[-1].moved_bytes == {"disk->host": 100, "host->device": 100}


def test_a_machine_of_one_tier_computes_without_a_copy() -> None:
    machine = machine_of((1000,), has_streams=False)
    timeline = simulate(reads(3, 100, 2.0, host_s=1.0), machine, Placement(), checked=True)
    assert timeline.step_s == pytest.approx(9.0)
    assert timeline.moved_bytes == {}


def test_a_limited_disk_lets_one_burst_through_at_once() -> None:
    machine = machine_of((1000, 1000), (100.0,), burst_s=1.0, has_streams=False)
    home = Home("host", returns=True)
    placement = Placement(dict.fromkeys(["k0", "k1", "k2"], BundleHomes(home, home, home)))
    timeline = simulate(reads(3, 60, 0.0), machine, placement, conditions=FREE, steps=1)
    # 100 B are full at the beginning: 60 at once, 40 of the next, and then 100 a second.
    assert lanes(timeline, "host->device") == [
        ("k0", 0.0, 0.0),
        ("k1", 0.0, 0.2),
        ("k2", 0.2, 0.8),
    ]


# ---------------------------------------------------------------------- streams


def test_beside_streams_the_host_goes_on_while_the_device_computes() -> None:
    program = reads(3, 100, 2.0, host_s=1.0)
    serial = simulate(program, machine_of((1000,), has_streams=False), Placement())
    beside = simulate(program, machine_of((1000,), has_streams=True), Placement())
    assert serial.step_s == pytest.approx(9.0)
    assert beside.step_s == pytest.approx(7.0)  # the first host second, then the device is always busy


# ---------------------------------------------------------------------- optimizers


def test_a_state_that_is_stepped_on_the_host_never_comes_to_the_device() -> None:
    layer = Layer(100, 400, (100,), 0, 0, 1.0, 1.0, 0.25, 2.0)
    machine = machine_of((10_000, 10_000), (100.0,), has_streams=False)
    home = Home("host", device="cpu", returns=True)
    placement = Placement({"param/0": BundleHomes(HOME, home, home)}, Stashing.ALWAYS)
    timeline = simulate(program_of([layer]), machine, placement, conditions=FREE, checked=True)
    # Parameters up for forward and for backward; the gradient is put down; the step computes for 2 s.
    assert timeline.moved_bytes == {"host->device": 200, "device->host": 100}
    assert timeline.step_s == pytest.approx(1 + 1 + 1 + 1 + 1 + 2)
    assert [each[0] for each in lanes(timeline, HOST, -1)] == ["AdamW layers.0"]
    assert timeline.stall_s[StallCause.HOST_STEP] == pytest.approx(2.0)


def test_steps_aside_go_on_while_backward_does() -> None:
    layers = [Layer(100, 400, (100,), 0, 0, 1.0, 1.0, 0.25, 2.0)] * 3
    machine = machine_of((10_000, 100_000), has_streams=False)
    home = Home("host", device="cpu")
    placement = Placement({f"param/{n}": BundleHomes(Home(), home, home) for n in range(3)}, Stashing.ALWAYS)
    program = program_of(layers, may_step_ahead=True)
    aside = simulate(program, machine, placement, conditions=FREE, checked=True)
    in_time = simulate(program, machine, placement, conditions=replace(FREE, steps_ahead=False))
    assert in_time.step_s == pytest.approx(3 + 3 + 6, rel=1e-2)
    # The first gradient lands 1 s into backward: 2 s of backward go on beside the 6 s of steps.
    assert aside.step_s == pytest.approx(3 + 1 + 6, rel=1e-2)


def test_steps_in_backward_leave_nothing_to_the_optimizers_turn() -> None:
    layers = [Layer(100, 400, (100,), 0, 0, 1.0, 1.0, 0.25)] * 3
    machine = machine_of((10_000, 10_000), has_streams=False)
    conditions = Conditions(is_divided=False, optimizer_in_backward=True)
    timeline = simulate(program_of(layers), machine, Placement(), conditions=conditions, checked=True)
    assert timeline.step_s == pytest.approx(6.75)
    # One gradient at a time: with the usual steps there are three.
    assert timeline.peak_bytes["device"] == 3 * (100 + 400) + 100


# ---------------------------------------------------------------------- activations


def test_swapped_activations_leave_after_forward_and_come_back_for_backward() -> None:
    layers = [Layer(100, 0, (), 500, 0, 1.0, 1.0)] * 4
    machine = machine_of((10_000, 10_000), (1000.0,), has_streams=False)
    marks = [PlacedMark(layer, "", Treatment.SWAP, 2) for layer in range(4)]
    kept = simulate(program_of(layers), machine, Placement())
    swapped = simulate(program_of(layers), machine, Placement(marks=marks), checked=True)
    assert kept.moved_bytes == {}
    # Every activation goes down; what was let go before forward's end comes back, a moment ahead.
    assert swapped.moved_bytes["device->host"] == 4 * 500
    assert swapped.moved_bytes["host->device"] >= 500
    assert swapped.step_s == pytest.approx(8.0)
    assert swapped.peak_bytes["device"] <= kept.peak_bytes["device"]


def test_recomputed_activations_are_made_again_before_backward_uses_them() -> None:
    layers = [Layer(100, 0, (), 500, 0, 1.0, 2.0)] * 4
    marks = [PlacedMark(layer, "attention", Treatment.RECOMPUTE) for layer in (0, 1)]
    program = program_of(layers)
    again = with_recomputation(program, marks)
    assert [moment.name for moment in again.moments[4:10]] == [
        "layers.3",
        "layers.2",
        "layers.1 again",
        "layers.1",
        "layers.0 again",
        "layers.0",
    ]
    assert with_recomputation(again, marks) is again
    machine = machine_of((10_000,), has_streams=False)
    kept = simulate(program, machine, Placement())
    remade = simulate(program, machine, Placement(marks=marks), checked=True)
    assert remade.step_s == pytest.approx(kept.step_s + 2.0)
    assert kept.peak_bytes["device"] == 4 * 100 + 4 * 500
    assert remade.peak_bytes["device"] == 4 * 100 + 2 * 500


def nested(children: int) -> Program:
    """Return a program of one layer: a parent with parameters of its own, and children with activations."""
    data = {"param/p": Datum("param/p", 100, ByteKind.PARAMETERS, layer=0)}
    forward = [Moment(Phase.FORWARD, "parent", (KeyUse("param/p", Does.READ, children + 1),), 1.0, layer=0)]
    backward: list[Moment] = []
    for n in range(children):
        act, param = f"act/{n}", f"param/{n}"
        data[act] = Datum(act, 10, ByteKind.ACTIVATION, None, 0, f"child{n}")
        data[param] = Datum(param, 1000, ByteKind.PARAMETERS, layer=0)
        read, kept = KeyUse(param, Does.READ), KeyUse(act, Does.READ)
        forward.append(Moment(Phase.FORWARD, f"child{n}", (read, KeyUse(act, Does.MAKE)), 1.0, layer=0))
        backward.insert(
            0, Moment(Phase.BACKWARD, f"child{n}", (read, kept, KeyUse(act, Does.END)), 1.0, layer=0)
        )
    head = Moment(Phase.BACKWARD, "head", (KeyUse("param/p", Does.READ, children + 1),), 1.0)
    return Program("nested", "hand", data, (*forward, head, *backward, Moment(Phase.BETWEEN, "end")))


def test_a_window_over_what_is_made_again_stays_open_until_it_closed_before() -> None:
    program = nested(2)
    again = with_recomputation(program, [PlacedMark(0, "", Treatment.RECOMPUTE)])
    assert [moment.name for moment in again.moments] == [
        *("parent", "child0", "child1", "head"),
        *("child0 again", "child1 again", "child1", "child0", "end"),
    ]
    # The head's window is over the whole backward pass of the children, and so it is over their forward now.
    assert [use.moments for moment in again.moments for use in moment.uses if use.key == "param/p"] == [3, 5]
    # Beside each child of both passes of forward the parent's bytes are there: no copy comes between.
    machine = machine_of((1000 + 100 + 10, 10_000), (100.0,), has_streams=False)
    placement = Placement(marks=[PlacedMark(0, "", Treatment.RECOMPUTE)])
    moved = simulate(program, machine, placement, conditions=FREE, checked=True).steps[-1].moved_bytes
    assert moved["host->device"] % 1000 in (0, 100)


def test_windows_of_what_is_made_again_are_over_that_alone() -> None:
    program = nested(3)
    first = program.moments[0]
    makes = replace(first, uses=(*first.uses, KeyUse("act/p", Does.MAKE)))
    read = replace(program.moments[-2], uses=(*program.moments[-2].uses, KeyUse("act/p", Does.READ)))
    data = {**program.data, "act/p": Datum("act/p", 10, ByteKind.ACTIVATION, None, 0, "parent")}
    moments = (makes, *program.moments[1:-2], read, program.moments[-1])
    program = replace(program, data=data, moments=moments)
    marks = [PlacedMark(0, "parent", Treatment.RECOMPUTE), PlacedMark(0, "child2", Treatment.RECOMPUTE)]
    again = {each.name: each for each in with_recomputation(program, marks).moments}
    # In forward the parent's window is over three children; one of them runs again.
    assert again["parent again"].uses[0] == KeyUse("param/p", Does.READ, 2)
    assert again["child2 again"].uses[0] == KeyUse("param/2", Does.READ)
    assert again["parent"].uses[0].moments == 4
    assert "child0 again" not in again


def test_each_of_several_passes_ends_and_makes_again_its_own() -> None:
    program = program_of([Layer(100, 0, (), 500, 0, 1.0, 1.0)] * 2, accumulations=2)
    again = with_recomputation(program, [PlacedMark(0, "", Treatment.RECOMPUTE)])
    ended = [moment.name for moment in again.moments if KeyUse("act/0", Does.END) in moment.uses]
    assert ended == ["layers.0"] * 4  # in forward and in backward of each pass
    assert [moment.name for moment in again.moments].count("layers.0 again") == 2


def test_what_another_layer_reads_is_not_made_again() -> None:
    program = program_of([Layer(100, 0, (), 500, 0, 1.0, 1.0)] * 2)
    late = replace(program.moments[1], uses=(*program.moments[1].uses, KeyUse("act/0", Does.READ)))
    program = replace(program, moments=(program.moments[0], late, *program.moments[2:]))
    assert with_recomputation(program, [PlacedMark(0, "", Treatment.RECOMPUTE)]) is program


def test_swapped_activations_leave_three_times_as_far_behind_as_they_come_back_ahead() -> None:
    layers = [Layer(100, 0, (), 500, 0, 1.0, 1.0)] * 8
    machine = machine_of((10_000, 10_000), (1e6,), has_streams=False)
    # Layers make two nodes each: with one node ahead an activation leaves after the second layer behind it.
    for ahead, kept in ((0, 1), (1, 3), (2, 4)):
        marks = [PlacedMark(layer, "", Treatment.SWAP, ahead) for layer in range(8)]
        timeline = simulate(
            program_of(layers), machine, Placement(marks=marks), conditions=FREE, checked=True
        )
        assert timeline.peak_bytes["device"] == 8 * 100 + kept * 500
        # The copy down begins as soon as an activation is there, long before its room is given up.
        assert [each[:2] for each in lanes(timeline, "device->host")[:2]] == [("act/0", 1.0), ("act/1", 2.0)]


def test_of_keys_that_are_used_together_the_last_one_is_let_go_first() -> None:
    data = {key: Datum(key, 100, ByteKind.PARAMETERS) for key in "abc"}
    both = Moment(Phase.FORWARD, "both", (KeyUse("a", Does.READ), KeyUse("b", Does.READ)), 1.0)
    moments = (both, Moment(Phase.FORWARD, "other", (KeyUse("c", Does.READ),), 1.0))
    machine = machine_of((200, 10_000), (100.0,), has_streams=False)
    program = Program("reads", "hand", data, moments)
    conditions = Conditions("lru", is_divided=False)
    timeline = simulate(program, machine, Placement(), conditions=conditions, steps=2)
    # "b" was let go first, so it is the one that is used longest ago: it makes room, and has to come again.
    assert [name for name, _, _ in lanes(timeline, "host->device", 1)] == ["b", "c"]


def test_a_layer_that_runs_in_two_parts_of_forward_keeps_its_activations_until_the_last() -> None:
    first, other, *rest = nested(1).moments
    elsewhere = Moment(Phase.FORWARD, "elsewhere", (), 1.0, layer=1)
    program = replace(nested(1), moments=(first, other, elsewhere, replace(first, name="late"), *rest))
    again = with_recomputation(program, [PlacedMark(0, "", Treatment.RECOMPUTE)])
    ended = [moment.name for moment in again.moments if KeyUse("act/0", Does.END) in moment.uses]
    assert ended == ["late", "child0"]


def test_later_marks_override_earlier_ones_and_patterns_are_of_whole_names() -> None:
    program = program_of([Layer(100, 0, (), 500, 0, 1.0, 1.0)])
    for operators, is_meant in (
        ("attention", True),
        ("atten", False),
        (r"attention\.dense", False),
        ("", True),
    ):
        mark = PlacedMark(0, operators, Treatment.RECOMPUTE)
        assert (with_recomputation(program, [mark]) is not program) is is_meant
    keeps = [PlacedMark(0, "", Treatment.RECOMPUTE), PlacedMark(0, "att.*", Treatment.KEEP)]
    assert with_recomputation(program, keeps) is program
    with pytest.raises(ConfigError, match="no regular expression"):
        with_recomputation(program, [PlacedMark(0, "(", Treatment.RECOMPUTE)])


# ---------------------------------------------------------------------- what does not fit


def test_what_does_not_fit_is_refused_with_who_held_what() -> None:
    layers = [Layer(1000, 2000, (1000,), 6000, 500)] * 3
    machine = machine_of((16_000, 2**20), alignment_bytes=512)
    with pytest.raises(CapacityError) as refused:
        simulate(program_of(layers), machine, Placement(stashing=Stashing.ALWAYS))
    text = str(refused.value)
    assert "In 'device' were" in text
    assert "activation" in text
    assert "act/0 5.9 KiB, act/1 5.9 KiB" in text
    assert "at 'layers.2'" in text
    assert refused.value.tier == "device"


@pytest.mark.parametrize(("capacity_bytes", "fits"), [(9000, False), (9100, True)])
def test_a_gradient_that_comes_to_the_store_beside_what_the_program_has_must_fit(
    capacity_bytes: int, *, fits: bool
) -> None:
    program = program_of([Layer(1, 0, (4096,), 5000)])
    machine = machine_of((capacity_bytes,), has_streams=False)
    with contextlib.nullcontext() if fits else pytest.raises(CapacityError, match="act/0"):
        simulate(program, machine, Placement(stashing=Stashing.ALWAYS), steps=4)


def test_a_bundle_that_cannot_be_trained_alone_is_refused_before_the_first_step() -> None:
    machine = machine_of((4096, 2**20))
    with pytest.raises(CapacityError, match="one bundle with its gradients and state"):
        simulate(program_of([Layer(2048, 4096, (2048,))]), machine, Placement())


def test_the_account_names_what_was_computed_at_the_peak() -> None:
    layers = [Layer(100, 0, (), 0, 50), Layer(200, 0, (), 0, 4000), Layer(100)]
    timeline = simulate(program_of(layers), machine_of((2**20,)), Placement(), conditions=FREE)
    assert timeline.account.moment == "layers.1"
    assert timeline.account.kinds == {ByteKind.PARAMETERS: 400, ByteKind.WORKSPACE: 4000}
    assert timeline.account.largest[:2] == (("workspace of operators", 4000), ("param/1", 200))
    assert timeline.account.nbytes == 4400 == timeline.peak_bytes["device"]


@pytest.mark.parametrize("share", [0, -1.0, 1.5, math.nan, True])
def test_conditions_refuse_wrong_shares(share: float) -> None:
    with pytest.raises(ConfigError, match="high"):
        Conditions(high={"device": share})


def test_conditions_refuse_an_unknown_policy() -> None:
    with pytest.raises(ConfigError, match="next-use"):
        Conditions("oldest")


def test_an_optimizer_begins_without_what_only_backward_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step takes is measured from there: less of it would let steps be made beside activations."""
    begun: list[int] = []
    monkeypatch.setattr(DeviceShare, "begin_step", lambda _, live_bytes: begun.append(live_bytes))
    program = program_of([Layer(1000, 2000, (1000,)) for _ in range(3)])
    moments = [
        replace(moment, live_bytes=500) if moment.phase is Phase.BACKWARD else moment
        for moment in program.moments
    ]
    machine = machine_of((100_000, 100_000), (math.inf,), has_streams=False)
    placement = Placement(stashing=Stashing.ALWAYS)
    simulate(replace(program, moments=tuple(moments)), machine, placement, steps=2)
    assert begun == [0, 0]
