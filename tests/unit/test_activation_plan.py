"""Plans: which operators a layer's plan means, conflicts, and the lines of the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest

from tierstore.errors import ConfigError
from tierstore.training import RecomputeConfig, SwapConfig
from tierstore.training.activations import ActivationPlan, LayerMatches, LayerPlan, Pattern, plan_layers
from tierstore.training.activations.config import config_log
from tierstore.training.activations.config.conflicts import overlaps

_OFF = {"recompute": False, "select_recompute": False, "select_comm_recompute": False}
_LLAMA = (
    "attention",
    "attention.wq",
    "attention.flash_attention",
    "feed_forward",
    "feed_forward.w1",
    "feed_forward.mul",
    "attention_norm",
    "attention_norm.norm",
    "ffn_norm",
    "ffn_norm.norm",
)
_PATHS = [tuple(name.split(".")) for name in _LLAMA]


def _plan(recompute: Mapping[str, object], swap: Mapping[str, object], num_layers: int = 4) -> ActivationPlan:
    on = SwapConfig.from_mapping(swap)
    return plan_layers(RecomputeConfig.from_mapping(recompute, swap=on.swap), on, num_layers=num_layers)


def _layer(recompute: Mapping[str, object], swap: Mapping[str, object]) -> LayerPlan:
    return _plan(recompute, swap, num_layers=1).layers[0]


def _said(plan: ActivationPlan, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what the log says about a model of llama layers."""
    with caplog.at_level(logging.INFO, logger="tierstore"):
        config_log.say(plan, [layer.match(_PATHS) for layer in plan.layers])
    return [f"{record.levelname} - {record.getMessage()}" for record in caplog.records]


# What is meant


def test_a_plan_means_the_operators_that_its_patterns_match_in_their_order() -> None:
    op_swap = {"op_name": [r"ffn.*\.norm", r".*\.norm", "attention"], "backward_prefetch": 3, "layers": True}
    swap = {"swap": True, "op_swap": op_swap}
    matches = _layer({"select_recompute": {"feed_.*": True, r"feed_forward\..*": [0]}}, swap).match(_PATHS)
    assert matches.operators == (("feed_forward",), ("feed_forward", "w1"), ("feed_forward", "mul"))
    assert [".".join(match.path) for match in matches.swap] == [
        "ffn_norm.norm",
        "attention_norm.norm",
        "ffn_norm.norm",
        "attention",
    ]


def test_an_operator_matched_twice_is_recomputed_once_and_swapped_as_the_last_pattern_says() -> None:
    swap = {
        "swap": True,
        "op_swap": [
            {"op_name": "att.*n", "backward_prefetch": 3, "layers": True},
            {"op_name": "attention", "backward_prefetch": 8, "layers": True},
        ],
    }
    matches = _layer({"select_recompute": {"feed_forward": True, "feed.*": True}}, swap).match(_PATHS)
    assert matches.operators == (("feed_forward",),)
    assert [(match.path, match.prefetch) for match in matches.swap] == [
        (("attention",), 3),
        (("attention",), 8),
    ]


def test_communication_and_exclusions_are_matched_too() -> None:
    again = {
        "select_comm_recompute": True,
        "select_recompute_exclude": ["attention"],
        "select_comm_recompute_exclude": [r"none\.such"],
    }
    matches = _layer(again, {}).match(_PATHS)
    assert matches.comm == (("attention_norm", "norm"), ("ffn_norm", "norm"))
    assert (matches.exclude, matches.comm_exclude) == ((("attention",),), ())


def test_a_pattern_of_aten_operators_stands_for_itself() -> None:
    swap = {"swap": True, "op_swap": {"op_name": "aten.mm", "backward_prefetch": 3, "layers": True}}
    matches = _layer({"select_recompute": {r"aten\.silu": True}}, swap).match(_PATHS)
    assert matches.operators == ((r"aten\.silu",),)
    (swapped,) = matches.swap
    assert (swapped.path, swapped.pattern, swapped.prefetch) == (("aten.mm",), Pattern("aten.mm"), 3)


def test_nothing_configured_is_nothing_meant() -> None:
    plan = plan_layers(num_layers=2)
    assert [layer.match(_PATHS) for layer in plan.layers] == [LayerMatches()] * 2
    assert plan.warnings == ()


def test_a_recompute_that_counts_stages_is_refused_where_swap_is_on() -> None:
    counted = RecomputeConfig.from_mapping({"recompute": [[1]]})
    with pytest.raises(ConfigError, match="because swap is on"):
        plan_layers(counted, SwapConfig(swap=True), num_layers=4)


# The document's four examples, whole

_HEAD = [
    "INFO - num_layers per stage: [[4]]",
    "INFO - Accumulated num_layers per stage: [[4]]",
    "INFO - Pipeline id list with start_stage: [0, 0, 0, 0]",
    "INFO - Interleave id list: [0, 0, 0, 0]",
    "INFO - Formative layer_recompute: []",
]
_NO_OPERATORS = (
    r"INFO - Formative select_recompute: {'feed_forward\.mul': [], 'feed_forward\.w1\.activation\.silu': []}"
)
_NO_COMM = r"INFO - Formative select_comm_recompute: {'.*\.norm': []}"
_MIXED_SWAP = [
    {"op_name": "attention", "backward_prefetch": 20, "layers": [0, 1, 2]},
    {"op_name": "attention", "backward_prefetch": 10, "layers": [3]},
    {"op_name": "feed_forward", "backward_prefetch": 15, "layers": [1, 2]},
]
_MIXED_FORMATIVE = [
    "INFO - Formative layer swap: []",
    (
        "INFO - Formative op swap: {'attention': [{'backward_prefetch': 20, 'layers': [0, 1, 2]}, "
        "{'backward_prefetch': 10, 'layers': [3]}], "
        "'feed_forward': [{'backward_prefetch': 15, 'layers': [1, 2]}]}"
    ),
]


def test_the_lines_of_the_document_s_first_example(caplog: pytest.LogCaptureFixture) -> None:
    assert _said(_plan(_OFF, {"swap": True, "default_prefetch": 10}), caplog) == [
        *_HEAD,
        _NO_OPERATORS,
        _NO_COMM,
        "INFO - Formative layer swap: []",
        r"INFO - Formative op swap: {'.*\.flash_attention': [{'backward_prefetch': 10, 'layers': True}]}",
        "INFO - Set op_swap at layer 0: attention.flash_attention, value=10",
        "INFO - Set op_swap at layer 1: attention.flash_attention, value=10",
        "INFO - Set op_swap at layer 2: attention.flash_attention, value=10",
        "INFO - Set op_swap at layer 3: attention.flash_attention, value=10",
    ]


def test_the_lines_of_the_document_s_second_example(caplog: pytest.LogCaptureFixture) -> None:
    swap = {"swap": True, "layer_swap": [{"backward_prefetch": 20, "layers": [0, 3]}]}
    assert _said(_plan(_OFF, swap), caplog) == [
        *_HEAD,
        _NO_OPERATORS,
        _NO_COMM,
        "INFO - Formative layer swap: [{'backward_prefetch': 20, 'layers': [0, 3]}]",
        "INFO - Formative op swap: {}",
        "INFO - Set layer swap at layer 0 and value is: 20",
        "INFO - Set layer swap at layer 3 and value is: 20",
    ]


def test_the_lines_of_the_document_s_third_example(caplog: pytest.LogCaptureFixture) -> None:
    assert _said(_plan(_OFF, {"swap": True, "op_swap": _MIXED_SWAP}), caplog) == [
        *_HEAD,
        _NO_OPERATORS,
        _NO_COMM,
        *_MIXED_FORMATIVE,
        "INFO - Set op_swap at layer 0: .attention, value=20",
        "INFO - Set op_swap at layer 1: .attention, value=20, .feed_forward, value=15",
        "INFO - Set op_swap at layer 2: .attention, value=20, .feed_forward, value=15",
        "INFO - Set op_swap at layer 3: .attention, value=10",
    ]


def test_the_lines_of_the_document_s_fourth_example(caplog: pytest.LogCaptureFixture) -> None:
    again = {**_OFF, "select_recompute": {"feed_forward": [0, 3]}}
    assert _said(_plan(again, {"swap": True, "op_swap": _MIXED_SWAP}), caplog) == [
        *_HEAD,
        "INFO - Formative select_recompute: {'feed_forward': [0, 3]}",
        _NO_COMM,
        *_MIXED_FORMATIVE,
        "INFO - Set select recompute at layer 0: feed_forward",
        "INFO - Set op_swap at layer 0: .attention, value=20",
        "INFO - Set op_swap at layer 1: .attention, value=20, .feed_forward, value=15",
        "INFO - Set op_swap at layer 2: .attention, value=20, .feed_forward, value=15",
        "INFO - Set select recompute at layer 3: feed_forward",
        "INFO - Set op_swap at layer 3: .attention, value=10",
    ]


def test_the_lines_of_the_document_s_tables() -> None:
    again = {
        "recompute": [[2, 1, 0, 0, 0], [1, 0, 0, 0, 0]],
        "select_recompute": {
            r"feed_forward\.w1\.activation\.silu": True,
            r"feed_forward\.mul": True,
            r"feed_forward\.w1\.matmul": [[1, 0, 0, 0, 0], [2, 1, 0, 0, 0]],
            r"feed_forward\.w3\.matmul": [2, 1, 0, 0, 0],
        },
        "select_comm_recompute": [r"ffn_norm\.norm", r"attention_norm\.norm"],
    }
    plan = plan_layers(
        RecomputeConfig.from_mapping(again),
        num_layers=48,
        pipeline_stage=5,
        pp_interleave_num=2,
        offset=[[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]],
    )
    assert config_log.plan_lines(plan)[4:] == [
        "Formative layer_recompute: [[2, 1, 0, 0, 0], [1, 0, 0, 0, 0]]",
        (
            r"Formative select_recompute: "
            r"{'feed_forward\.w1\.activation\.silu': [[4, 5, 5, 5, 5], [5, 5, 5, 5, 4]], "
            r"'feed_forward\.mul': [[4, 5, 5, 5, 5], [5, 5, 5, 5, 4]], "
            r"'feed_forward\.w1\.matmul': [[1, 0, 0, 0, 0], [2, 1, 0, 0, 0]], "
            r"'feed_forward\.w3\.matmul': [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]}"
        ),
        (
            r"Formative select_comm_recompute: {'ffn_norm\.norm': [[4, 5, 5, 5, 5], [5, 5, 5, 5, 4]], "
            r"'attention_norm\.norm': [[4, 5, 5, 5, 5], [5, 5, 5, 5, 4]]}"
        ),
    ]
    assert config_log.plan_lines(plan)[0] == "num_layers per stage: [[4, 5, 5, 5, 5], [5, 5, 5, 5, 4]]"
    assert (
        config_log.plan_lines(plan)[1]
        == "Accumulated num_layers per stage: [[4, 9, 14, 19, 24], [29, 34, 39, 44, 48]]"
    )


def test_by_stage_a_selection_is_on_and_exclusions_have_lines_of_whole_layers_too() -> None:
    again = {
        "recompute": [1],
        "select_recompute": [r"feed_forward\.(w1|mul)"],
        "select_comm_recompute": True,
        "select_recompute_exclude": ["attention"],
        "select_comm_recompute_exclude": [r"attention\.wq"],
    }
    plan = _plan(again, {}, num_layers=2)
    whole, other = (
        config_log.layer_lines(layer, layer.match(_PATHS), by_index=False) for layer in plan.layers
    )
    assert whole == [
        "Set full recompute at layer 0",
        "Set select recompute exclude at layer 0: attention",
        "Set select comm recompute exclude at layer 0: attention.wq",
    ]
    assert other == [
        "Set select recompute on at layer 1: feed_forward.w1, feed_forward.mul",
        "Set select comm recompute on at layer 1: attention_norm.norm, ffn_norm.norm",
        "Set select recompute exclude at layer 1: attention",
        "Set select comm recompute exclude at layer 1: attention.wq",
    ]
    assert [line.split(":")[0] for line in config_log.plan_lines(plan)[-2:]] == [
        "Formative select_recompute_exclude",
        "Formative select_comm_recompute_exclude",
    ]


def test_by_index_communication_has_its_line() -> None:
    plan = _plan(
        {"select_comm_recompute": True, "recompute": [1]}, {"swap": True, "op_swap": []}, num_layers=2
    )
    first, second = (
        config_log.layer_lines(layer, layer.match(_PATHS), by_index=True) for layer in plan.layers
    )
    assert first == ["Set select comm recompute at layer 0: attention_norm.norm, ffn_norm.norm"]
    assert second == ["Set full recompute at layer 1"]


def test_what_matches_nothing_has_no_line() -> None:
    layer = _layer({"select_recompute": True, "select_comm_recompute": True}, {"swap": True})
    assert config_log.layer_lines(layer, layer.match([("linear",)]), by_index=True) == []


# Conflicts


def _warnings(recompute: Mapping[str, object], **swap: object) -> list[str]:
    return list(_plan(recompute, {"swap": True, "op_swap": [], **swap}).warnings)


def _mark(layers: object, **name: object) -> dict[str, object]:
    return {"backward_prefetch": 1, "layers": layers, **name}


_EVERY = True


def test_recompute_of_everything_leaves_no_swap_an_effect() -> None:
    (warning,) = _warnings({"recompute": True}, layer_swap=_mark(_EVERY), op_swap=_mark([1], op_name="a"))
    assert warning == "recompute is true: every layer is computed again, and no swap has an effect"


def test_a_layer_that_is_recomputed_and_swapped_is_a_conflict() -> None:
    assert _warnings({"recompute": [0, 1, 3]}, layer_swap=_mark([1, 2, 3])) == [
        "layers 1, 3: in recompute and in layer_swap; recompute wins, the swap has no effect there"
    ]


def test_an_operator_swapped_in_a_recomputed_layer_is_a_conflict() -> None:
    (warning,) = _warnings({"recompute": [2]}, op_swap=_mark([1, 2], op_name="attention"))
    assert warning.startswith("layer 2: op_swap names 'attention', and recompute has the whole layer;")


def test_the_same_pattern_in_both_with_a_common_layer_is_a_conflict() -> None:
    again = {"select_recompute": {r"a\.b": [0, 1], "c": True}}
    (warning,) = _warnings(again, op_swap=_mark([1, 2], op_name=[r"a\.b", "d"]))
    assert warning.startswith(r"layer 1: 'a\.b' is in select_recompute and in op_swap;")
    assert _warnings({"select_recompute": {"a": [0]}}, op_swap=_mark([1], op_name="a")) == []
    assert _warnings({"select_recompute": {"a": [0]}}, op_swap=_mark([0], op_name="a.*")) == []


def test_an_operator_selected_in_a_swapped_layer_is_a_conflict() -> None:
    (warning,) = _warnings({"select_recompute": {"a": [0, 2]}}, layer_swap=_mark([2, 3]))
    assert warning.startswith("layer 2: 'a' is in select_recompute, and layer_swap has the whole layer;")


def test_exclusions_with_swap_on_are_a_warning() -> None:
    assert _warnings({"select_recompute_exclude": ["a"], "select_comm_recompute_exclude": False}) == [
        "select_recompute_exclude is given and swap is on: nothing is excluded then"
    ]


def test_layers_that_there_are_not_are_a_warning() -> None:
    again = {"recompute": [0, 4], "select_recompute": {"a": [9, 5]}, "select_comm_recompute": [1]}
    assert _warnings(again, layer_swap=_mark([7]), op_swap=_mark([3, 4], op_name="b")) == [
        "recompute names layer 4, and the model has 4: no effect",
        "select_recompute names layers 9, 5, and the model has 4: no effect",
        "layer_swap names layer 7, and the model has 4: no effect",
        "op_swap names layer 4, and the model has 4: no effect",
    ]


def test_without_swap_there_is_no_conflict() -> None:
    swap = {"layer_swap": _mark(_EVERY)}
    assert _plan({"recompute": True, "select_recompute_exclude": ["a"]}, swap).warnings == ()


def test_warnings_are_logged_before_the_layers(caplog: pytest.LogCaptureFixture) -> None:
    said = _said(_plan({"recompute": [0]}, {"swap": True, "layer_swap": _mark([0])}), caplog)
    kinds = [line.split(" ")[0] for line in said]
    assert kinds.count("WARNING") == 1
    assert said[kinds.index("WARNING") + 1] == "INFO - Set full recompute at layer 0"


def test_operators_in_what_is_recomputed_overlap_whatever_their_patterns() -> None:
    recomputed = {"feed_.*": True, r"attention\.wq": [1]}
    swapped = [r"feed_forward\.w1", r"feed_forward\.mul", "attention", r"attention\.w.", r"aten\.mul"]
    swap = {"swap": True, "op_swap": [{"op_name": swapped, "backward_prefetch": 1, "layers": [0, 1]}]}
    plan = _plan({"select_recompute": recomputed}, swap)
    paths = [
        ("feed_forward",),
        ("feed_forward", "w1"),
        ("attention",),
        ("attention", "wq"),
        ("attention", "wk"),
    ]
    found = []
    for layer in plan.layers:
        meant = layer.match(paths)
        operator = Pattern(r"feed_forward\.mul")  # no submodule: whoever knows the model's operators adds it
        marked = [(match.path, match.pattern) for match in meant.swap if match.pattern != operator]
        found.append((meant.operators, [*marked, ((operator.text,), operator)]))
    assert overlaps([(layer.recompute, layer.swap) for layer in plan.layers[:2]], found[:2]) == tuple(
        f"{layers}: '{name}' is swapped and recomputed; recompute wins, the swap has no effect there"
        for layers, name in [
            ("layers 0, 1", "feed_forward.w1"),
            ("layers 0, 1", r"feed_forward\.mul"),
            ("layer 1", "attention.wq"),
        ]
    )


def test_what_is_said_of_patterns_is_not_said_of_their_operators_again() -> None:
    marked = [{"op_name": "feed_forward", "backward_prefetch": 1, "layers": True}]
    plan = _plan({"select_recompute": {"feed_forward": True}}, {"swap": True, "op_swap": marked})
    pairs = [(layer.recompute, layer.swap) for layer in plan.layers]
    meant = [layer.match([("feed_forward",)]) for layer in plan.layers]
    found = [(each.operators, [(match.path, match.pattern) for match in each.swap]) for each in meant]
    assert all(operators and swapped for operators, swapped in found)
    assert len(plan.warnings) == 1
    assert overlaps(pairs, found) == ()
