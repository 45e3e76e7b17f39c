"""MindSpore's planner against the table of what the original gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tierstore.errors import CapacityError, ConfigError
from tierstore.planning.searching.original import (
    GraphLevel,
    GraphSpan,
    GraphTensor,
    plan_graph,
    plan_graph_one_level,
)

DEVICE, HOST, DISK = GraphLevel

# s1=x1+x2, s2=s1+x3, s3=s2+x4, s4=s3+x5, r=s4+s1
KERNELS = (("x1", "x2", "s1"), ("s1", "x3", "s2"), ("s2", "x4", "s3"), ("s3", "x5", "s4"), ("s4", "s1", "r"))
WEIGHTS = ("x1", "x2", "x3", "x4", "x5")


def tensors(forced: GraphLevel | None = None) -> dict[str, GraphTensor]:
    weights = {name: GraphTensor(32, persists=True, forced=forced) for name in WEIGHTS}
    return {
        **weights,
        **{name: GraphTensor(32) for name in ("s1", "s2", "s3", "s4")},
        "r": GraphTensor(32, is_output=True),
    }


@pytest.mark.parametrize(
    ("device_bytes", "host_bytes", "forced", "host", "disk", "moves", "slots", "links"),
    [
        (10_000, 10_000, None, (), (), 0, 0, 5),
        (136, 10_000, None, WEIGHTS, (), 10, 5, 15),
        (136, 100, None, ("x1", "x2", "x3"), ("x4", "x5"), 10, 5, 15),
        (10_000, 10_000, HOST, WEIGHTS, (), 10, 5, 15),
        (10_000, 10_000, DISK, (), WEIGHTS, 10, 5, 15),
    ],
)
def test_the_plan_is_the_originals(
    device_bytes: int,
    host_bytes: int,
    forced: GraphLevel | None,
    host: tuple[str, ...],
    disk: tuple[str, ...],
    moves: int,
    slots: int,
    links: int,
) -> None:
    plan = plan_graph(KERNELS, tensors(forced), device_bytes, host_bytes)
    assert plan.tensors_in(HOST) == set(host)
    assert plan.tensors_in(DISK) == set(disk)
    assert (plan.moves, plan.slots, plan.links) == (moves, slots, links)
    assert plan.levels[GraphSpan("s1", 1, 4)] is DEVICE


def test_a_span_stays_as_long_as_there_is_room_at_every_kernel_strictly_inside() -> None:
    # s1 is idle at kernels 2 and 3, where 96 bytes are used: 127 leave no room for it, 128 do.
    assert plan_graph(KERNELS, tensors(), 128, 10_000).levels[GraphSpan("s1", 1, 4)] is DEVICE
    assert plan_graph(KERNELS, tensors(), 127, 10_000).levels[GraphSpan("s1", 1, 4)] is HOST


def test_the_smaller_product_of_kernels_and_bytes_stays() -> None:
    kernels = (("a", "b"), ("c",), ("b",), ("a",))
    sizes = {"a": GraphTensor(10), "b": GraphTensor(30), "c": GraphTensor(1)}
    # a is idle over kernels 1 and 2 (20), b over 1 (30): together they do not fit at kernel 1.
    plan = plan_graph(kernels, sizes, 40, 1000)
    assert plan.levels == {GraphSpan("a", 0, 3): DEVICE, GraphSpan("b", 0, 2): HOST}
    plan = plan_graph(kernels, {**sizes, "a": GraphTensor(16), "b": GraphTensor(24)}, 40, 1000)
    assert plan.levels == {GraphSpan("a", 0, 3): HOST, GraphSpan("b", 0, 2): DEVICE}


def test_an_output_leaves_and_does_not_come_back() -> None:
    kernels = (("out",), ("big",), ("big",))
    sizes = {"out": GraphTensor(10, is_output=True), "big": GraphTensor(95)}
    plan = plan_graph(kernels, sizes, 100, 1000)
    assert plan.levels == {GraphSpan("out", 0, 3, returns=False): HOST}
    assert (plan.moves, plan.slots, plan.links) == (1, 1, 5)


def test_a_kernel_that_needs_more_than_the_device_has_is_refused_with_both_numbers() -> None:
    with pytest.raises(CapacityError, match=r"touches 96 bytes at once; the device has 95"):
        plan_graph(KERNELS, tensors(), 95, 10_000)
    with pytest.raises(CapacityError, match=r"touches 96 bytes at once; the device has 95"):
        plan_graph_one_level(KERNELS, tensors(), 95)


def test_an_unknown_tensor_is_named() -> None:
    with pytest.raises(ConfigError, match=r"kernel 0 touches 'x', which"):
        plan_graph([["x"]], {}, 10, 10)


def test_the_second_generation_moves_nothing_where_weights_and_all_that_lives_fit() -> None:
    # 5 weights and at most 3 others (s1 beside two of s2, s3, s4; s1, s4 and r at the end).
    assert plan_graph_one_level(KERNELS, tensors(), 8 * 32).moves == 0
    assert plan_graph_one_level(KERNELS, tensors(), 8 * 32 - 1).moves > 0


def test_the_second_generation_has_one_level_to_move_to() -> None:
    plan = plan_graph_one_level(KERNELS, tensors(), 136)
    assert plan.tensors_in(HOST) == set(WEIGHTS)
    assert (plan.moves, plan.slots, plan.links) == (10, 5, 15)


def test_what_was_named_by_hand_moves_though_it_would_fit() -> None:
    plan = plan_graph_one_level(KERNELS, tensors(), 10_000, {"x2", "s1"})
    assert [span.tensor for span in plan.moved] == ["x2", "s1"]
    assert plan.levels[GraphSpan("s1", 1, 4)] is HOST


def test_forced_spans_take_host_memory_before_all_others() -> None:
    sizes = {**tensors(), "x5": replace(tensors()["x5"], forced=HOST)}
    plan = plan_graph(KERNELS, sizes, 136, 100)
    assert plan.tensors_in(HOST) == {"x1", "x2", "x5"}
    assert plan.tensors_in(DISK) == {"x3", "x4"}
