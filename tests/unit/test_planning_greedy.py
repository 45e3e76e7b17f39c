"""Idle spans of programs, and which of them stay: against sums done one by one, and against the original."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planned import Layer, machine_of, machines, program_of, programs
from tierstore.planning import ByteKind, Datum, Does, KeyUse, Machine, Moment, Phase, Program
from tierstore.planning.searching.greedy import _Room, keep, keep_greedily
from tierstore.planning.searching.original import GraphTensor, plan_graph
from tierstore.planning.searching.spans import IdleSpan, usage_of

LAYER = Layer(100, 200, (100,), 50, 10, 0.1, 0.2, 0.1)


def reads(*moments: str, nbytes: int = 10) -> Program:
    """Return a program whose moments read keys of one letter each."""
    data = {key: Datum(key, nbytes, ByteKind.PARAMETERS) for key in sorted(set("".join(moments)))}
    return Program(
        "reads",
        "hand",
        data,
        tuple(Moment(Phase.FORWARD, keys, tuple(KeyUse(key, Does.READ) for key in keys)) for keys in moments),
    )


def test_a_key_is_idle_between_uses_and_over_the_end_of_a_step() -> None:
    usage = usage_of(reads("a", "b", "b", "a", "b"))
    assert usage.spans == (
        IdleSpan("a", 10, 0, 3, is_changed=False),
        IdleSpan("a", 10, 3, 5, is_changed=False),
        IdleSpan("b", 10, 2, 4, is_changed=False),
        IdleSpan("b", 10, 4, 6, is_changed=False),
    )
    assert usage.used_bytes == (10,) * 5


def test_a_window_over_several_moments_is_no_idle_time() -> None:
    data = {key: Datum(key, 10, ByteKind.PARAMETERS) for key in "ab"}
    parent = Moment(Phase.FORWARD, "parent", (KeyUse("a", Does.READ, 3),))
    child = Moment(Phase.FORWARD, "child", (KeyUse("b", Does.READ),))
    usage = usage_of(Program("windows", "hand", data, (parent, child, child, child)))
    assert usage.leased_bytes == (10, 20, 20, 10)
    assert [span for span in usage.spans if span.key == "a"] == [IdleSpan("a", 10, 2, 4, is_changed=False)]


def test_what_is_made_in_each_step_is_idle_in_the_step_alone() -> None:
    usage = usage_of(program_of([LAYER, LAYER]))
    # forward 0 1, backward 1 0, step 0 1, zero
    gradients = [span for span in usage.spans if span.key.startswith("grad")]
    assert gradients == [IdleSpan("grad/1.0", 100, 2, 5, is_changed=True)]
    assert IdleSpan("state/0", 200, 4, 11, is_changed=True) in usage.spans


def test_activations_are_the_programs_own_unless_they_may_leave() -> None:
    program = program_of([LAYER, LAYER])
    assert usage_of(program).own_bytes == (60, 110, 110, 60, 0, 0, 0)
    usage = usage_of(program, swapped=["act/0"])
    assert usage.own_bytes == (10, 60, 60, 10, 0, 0, 0)
    assert IdleSpan("act/0", 50, 0, 3, is_changed=True) in usage.spans


def test_all_of_a_step_is_counted_once() -> None:
    usage = usage_of(program_of([LAYER], standing_bytes=7))
    assert usage.used_bytes == (100 + 50 + 10 + 7, 100 + 100 + 50 + 10 + 7, 100 + 100 + 200 + 7, 7)


@given(programs(), machines(tiers=3))
def test_no_tier_but_the_last_is_filled_over_its_room(program: Program, machine: Machine) -> None:
    swapped = [key for key, datum in program.data.items() if datum.kind is ByteKind.ACTIVATION]
    usage = usage_of(program, swapped=swapped)
    kept = keep_greedily(program, machine, swapped=swapped)
    moments = len(program.moments)
    for place, tier in enumerate(machine.tiers[:-1]):
        for moment in range(moments):
            held = sum(
                span.nbytes
                for span, found in zip(kept.spans, kept.places, strict=True)
                if found == place and any(first <= moment < end for first, end in span.inside(moments))
            )
            assert not held or held + (0 if place else usage.used_bytes[moment]) <= tier.capacity_bytes


@given(
    st.lists(st.text("abcdef", min_size=1, max_size=3), min_size=1, max_size=12),
    st.integers(3, 9),
    st.integers(0, 5),
)
def test_weights_of_the_original_give_its_plan(moments: list[str], device: int, host: int) -> None:
    program = reads(*moments)
    kernels = [tuple(dict.fromkeys(keys)) for keys in moments]
    tensors = {key: GraphTensor(10, persists=True) for key in program.data}
    # Ties are by the order in which spans are found: that of the first uses.
    usage = usage_of(program)
    kept = keep(usage, [device * 10, host * 10, 0], lambda span: (span.end - span.begin - 1) * span.nbytes)
    plan = plan_graph(kernels, tensors, device * 10, host * 10)
    assert [
        (span.key, span.begin, span.end, place) for span, place in zip(kept.spans, kept.places, strict=True)
    ] == [(span.tensor, span.begin, span.end, level.value) for span, level in plan.levels.items()]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=17), st.data())
def test_room_of_ranges_is_what_lists_say(free: list[int], data: st.DataObject) -> None:
    room, oracle = _Room(free), list(free)
    for _ in range(8):
        first = data.draw(st.integers(0, len(free) - 1))
        end = data.draw(st.integers(first + 1, len(free)))
        nbytes = data.draw(st.integers(0, 9))
        room.take(first, end, nbytes)
        oracle[first:end] = [each - nbytes for each in oracle[first:end]]
        first = data.draw(st.integers(0, len(free) - 1))
        end = data.draw(st.integers(first + 1, len(free)))
        assert room.least(first, end) == min(oracle[first:end])


def test_what_stays_leaves_and_is_swapped_is_told_by_key_and_layer() -> None:
    program = program_of([LAYER] * 4)
    activations = [f"act/{number}" for number in range(4)]
    largest = max(usage_of(program, swapped=activations).used_bytes)
    tight = keep_greedily(program, machine_of([largest, 600, 10_000]), swapped=activations)
    assert set(tight.homes().values()) == {1, 2}
    assert tight.residents().isdisjoint(tight.homes())
    assert tight.swapped_layers(program)
    roomy = keep_greedily(program, machine_of([10_000, 10_000, 10_000]), swapped=activations)
    assert roomy.homes() == {}
    assert roomy.swapped_layers(program) == ()
    assert "param/0" in roomy.residents()


def test_time_decides_before_moments_do() -> None:
    program = reads("a", "b", "c", "a", "a", "a", "b")
    slow = replace(program.moments[1], compute_s=10.0)
    timed = replace(program, moments=(program.moments[0], slow, *program.moments[2:]))
    # At moment 2 there is room for one: a is idle for ten seconds, b over more moments and no time at all.
    a, b = IdleSpan("a", 10, 0, 3, is_changed=False), IdleSpan("b", 10, 1, 6, is_changed=False)
    machine = machine_of([20, 1000], [1.0])
    for each, stays in ((program, a), (timed, b)):
        kept = keep_greedily(each, machine)
        places = dict(zip(kept.spans, kept.places, strict=True))
        assert (places[a], places[b]) == ((0, 1) if stays is a else (1, 0))


@pytest.mark.parametrize("count", [20_000])
def test_many_data_are_no_trouble(count: int) -> None:
    program = program_of([Layer(100, forward_s=0.1)] * count)
    kept = keep_greedily(program, machine_of([100 * count // 2, 10**9]))
    held = kept.places.count(0)
    assert 0 < held < len(kept.places)
