"""``recompute_config``: what is accepted, the tables it becomes, and what a layer gets."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest

from tierstore.errors import ConfigError
from tierstore.training import RecomputeConfig
from tierstore.training.activations import LayerRecompute
from tierstore.training.activations.config.geometry import lay_out
from tierstore.training.activations.config.recompute_config import COMMUNICATION, OPERATORS

_FULL = [[4, 5, 5, 5, 5], [5, 5, 5, 5, 4]]
_NONE = [[0] * 5, [0] * 5]
_OFFSET = [[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
_DOCUMENT: dict[str, object] = {
    "recompute": [[2, 1, 0, 0, 0], [1, 0, 0, 0, 0]],
    "select_recompute": {
        r"feed_forward\.w1\.activation\.silu": True,
        r"feed_forward\.mul": True,
        r"feed_forward\.w1\.matmul": [[1, 0, 0, 0, 0], [2, 1, 0, 0, 0]],
        r"feed_forward\.w3\.matmul": [2, 1, 0, 0, 0],
    },
    "select_comm_recompute": [r"ffn_norm\.norm", r"attention_norm\.norm"],
}


def _tables(mapping: Mapping[str, object]) -> dict[str, object]:
    """Return the tables of the reference's 48 layers."""
    config = RecomputeConfig.from_mapping(mapping)
    return config.tables(num_layers=48, pipeline_stage=5, pp_interleave_num=2, offset=_OFFSET)


def _layers(mapping: Mapping[str, object]) -> tuple[LayerRecompute, ...]:
    return RecomputeConfig.from_mapping(mapping).decide_all(lay_out(48, 5, 2, _OFFSET))


def _tupled(value: object) -> object:
    """Return the same with tuples for lists."""
    if isinstance(value, dict):
        return {key: _tupled(each) for key, each in value.items()}
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


def _whole(layers: tuple[LayerRecompute, ...]) -> list[int]:
    return [layer.layer_id for layer in layers if layer.is_whole]


def _with(layers: tuple[LayerRecompute, ...], text: str) -> list[int]:
    """Return the layers that select an operator."""
    return [layer.layer_id for layer in layers if text in [each.text for each in layer.operators]]


@pytest.mark.parametrize("spelled", [_DOCUMENT, _tupled(_DOCUMENT)], ids=["lists", "tuples"])
def test_the_document_s_example_becomes_the_document_s_tables(spelled: dict[str, object]) -> None:
    assert _tables(spelled) == {
        "recompute": [[2, 1, 0, 0, 0], [1, 0, 0, 0, 0]],
        "select_recompute": {
            r"feed_forward\.w1\.activation\.silu": _FULL,
            r"feed_forward\.mul": _FULL,
            r"feed_forward\.w1\.matmul": [[1, 0, 0, 0, 0], [2, 1, 0, 0, 0]],
            r"feed_forward\.w3\.matmul": [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]],
        },
        "select_comm_recompute": {r"ffn_norm\.norm": _FULL, r"attention_norm\.norm": _FULL},
    }


def test_the_document_s_example_marks_the_layers_worked_out_by_hand() -> None:
    layers = _layers(_DOCUMENT)
    assert _whole(layers) == [0, 1, 4, 24]
    # Layers that are computed again as a whole select nothing, so 0, 4 and 24 are not among these.
    assert _with(layers, r"feed_forward\.w1\.matmul") == [25, 29]
    assert _with(layers, r"feed_forward\.w3\.matmul") == []
    assert _with(layers, r"feed_forward\.mul") == [each for each in range(48) if each not in {0, 1, 4, 24}]


def test_operators_alone_mark_the_layers_worked_out_by_hand() -> None:
    layers = _layers({"select_recompute": _DOCUMENT["select_recompute"]})
    assert _with(layers, r"feed_forward\.w1\.matmul") == [0, 24, 25, 29]
    assert _with(layers, r"feed_forward\.w3\.matmul") == [0, 4, 24]


@pytest.mark.parametrize(
    ("value", "table"),
    [
        (True, _FULL),
        (False, _NONE),
        ([], _NONE),
        ((), _NONE),
        ([True, 0, 3, 9, 8], [[4, 0, 2, 5, 4], [5, 0, 1, 4, 4]]),
        ((True, 0, 3, 9, 8), [[4, 0, 2, 5, 4], [5, 0, 1, 4, 4]]),
        ([1], [[1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]),
        ([99, 99, 99, 99, 99], _FULL),
        ([False, True], [[0, 5, 0, 0, 0], [0, 5, 0, 0, 0]]),
        ([[9, 0, 0, 0, 0], [0, 0, 0, 0, 9]], [[4, 0, 0, 0, 0], [0, 0, 0, 0, 4]]),
        ([True, [1, 0, 0, 0, 0]], [[4, 5, 5, 5, 5], [1, 0, 0, 0, 0]]),
        ([False, [1, 0, 0, 0, 0]], [[0, 0, 0, 0, 0], [1, 0, 0, 0, 0]]),
        (((True, False, 1, 0, 0), (0, 0, 0, 0, True)), [[4, 0, 1, 0, 0], [0, 0, 0, 0, 4]]),
        ([[1, 1]], [[1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]),
    ],
)
def test_a_value_becomes_a_table(value: object, table: list[list[int]]) -> None:
    tables = _tables({"recompute": value, "select_recompute": value, "select_comm_recompute": {"x": value}})
    assert tables == {
        "recompute": table,
        "select_recompute": dict.fromkeys(OPERATORS, table),
        "select_comm_recompute": {"x": table},
    }


def test_without_keys_nothing_is_computed_again() -> None:
    assert _tables({}) == {
        "recompute": _NONE,
        "select_recompute": dict.fromkeys(OPERATORS, _NONE),
        "select_comm_recompute": dict.fromkeys(COMMUNICATION, _NONE),
    }


def test_the_defaults_are_the_reference_s() -> None:
    config = RecomputeConfig.from_mapping({})
    assert (config.recompute, config.select_recompute, config.select_comm_recompute) == (False, False, False)
    assert (config.parallel_optimizer_comm_recompute, config.mp_comm_recompute) == (False, True)
    assert config.recompute_slice_activation is False
    assert OPERATORS == (r"feed_forward\.mul", r"feed_forward\.w1\.activation\.silu")
    assert COMMUNICATION == (r".*\.norm",)


def test_tables_hold_plain_ints() -> None:
    table = _tables({"recompute": [[True, 9], [False, 2]]})["recompute"]
    assert isinstance(table, list)
    assert {type(count) for row in table for count in row} == {int}


def test_what_the_user_gave_is_not_changed() -> None:
    given = {"recompute": [True, 0], "select_recompute": {"a": [[True, 9], False]}, "mp_comm_recompute": True}
    before = copy.deepcopy(given)
    _tables(given)
    assert given == before


def test_changing_a_table_does_not_change_the_configuration() -> None:
    config = RecomputeConfig.from_mapping({"recompute": [0, 1]}, swap=True)
    table = config.tables(num_layers=4)["recompute"]
    assert isinstance(table, list)
    table.append(3)
    assert config.tables(num_layers=4)["recompute"] == [0, 1]


@pytest.mark.parametrize("key", ["recompute", "select_recompute", "select_comm_recompute"])
@pytest.mark.parametrize(
    "value", [[1, 1, 1, 1, 1, 1], [[1, 1, 1, 1, 1, 1]], [[1], [1], [1]], [True, True, [1]]]
)
def test_a_list_longer_than_there_are_cells_is_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{key}=.*accepted: at most"):
        _tables({key: value})


@pytest.mark.parametrize("key", ["recompute", "select_recompute", "select_comm_recompute"])
@pytest.mark.parametrize(
    "value",
    [
        1,
        1.0,
        None,
        "all",
        [1.0],
        [-1],
        [[-1]],
        [[1.0]],
        [[[1]]],
        [1, [1]],
        [None],
        {1: True},
        [1, "a"],
        [["a"]],
    ],
)
def test_a_value_of_another_form_is_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{key}=.*accepted"):
        RecomputeConfig.from_mapping({key: value})


def test_names_are_no_whole_layers() -> None:
    with pytest.raises(ConfigError, match=r"recompute="):
        RecomputeConfig.from_mapping({"recompute": ["feed_forward"]})


def test_the_faults_of_every_operator_are_listed_with_its_name() -> None:
    with pytest.raises(ConfigError) as refusal:
        RecomputeConfig.from_mapping({"select_recompute": {"mul": "yes", "b": True, "(": 1, 3: True, "c": 1}})
    message = str(refusal.value)
    assert "'mul': accepted" in message
    assert "'c': accepted" in message
    assert "pattern '('" in message
    assert "'3': accepted: the pattern" in message
    assert "'b': accepted" not in message


def test_every_fault_is_listed_at_once() -> None:
    with pytest.raises(ConfigError) as refusal:
        RecomputeConfig.from_mapping(
            {"recomputed": True, "mp_comm_recompute": 1, "select_recompute": ["("], "recompute": "no"}
        )
    message = str(refusal.value)
    assert "4 faults" in message
    assert "did you mean 'recompute'" in message
    assert "mp_comm_recompute=1: accepted: true or false" in message
    assert "pattern '('" in message


@pytest.mark.parametrize(
    "key", ["parallel_optimizer_comm_recompute", "mp_comm_recompute", "recompute_slice_activation"]
)
def test_the_flags_are_bools(key: str) -> None:
    assert getattr(RecomputeConfig.from_mapping({key: True}), key) is True
    for value in (1, "True", None, [True]):
        with pytest.raises(ConfigError, match=key):
            RecomputeConfig.from_mapping({key: value})


@pytest.mark.parametrize("value", [None, [], "recompute: true", 3])
def test_what_is_no_mapping_is_refused(value: Mapping[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"a mapping of keys to values"):
        RecomputeConfig.from_mapping(value)


def test_slices_go_with_recompute_of_all_layers_only() -> None:
    every = RecomputeConfig.from_mapping({"recompute": True, "recompute_slice_activation": True})
    some = RecomputeConfig.from_mapping({"recompute": [2], "recompute_slice_activation": True})
    assert every.decide(0, num_layers=2) == LayerRecompute(0, is_whole=True, slice_activation=True)
    assert some.decide(0, num_layers=2) == LayerRecompute(0, is_whole=True)


def test_there_is_no_decision_about_a_layer_that_is_not_there() -> None:
    for layer_id in (-1, 2):
        with pytest.raises(IndexError):
            RecomputeConfig().decide(layer_id, num_layers=2)


# Exclusions


def test_an_exclusion_is_normalised_by_stage_and_shown_only_if_given() -> None:
    tables = _tables({"select_recompute_exclude": {"a": [1]}, "select_comm_recompute_exclude": ["b"]})
    assert tables["select_recompute_exclude"] == {"a": [[1, 0, 0, 0, 0], [0] * 5]}
    assert tables["select_comm_recompute_exclude"] == {"b": _FULL}
    assert set(_tables({"select_recompute_exclude": False})) == set(_tables({}))


def test_an_exclusion_has_no_operators_by_default() -> None:
    assert _tables({"select_recompute_exclude": True})["select_recompute_exclude"] == {}


def test_an_exclusion_takes_the_selection_that_equals_it_out() -> None:
    tables = _tables(
        {
            "select_recompute": {r"feed_forward\.mul": True, r"attention\.mul": True},
            "select_recompute_exclude": [r"feed_.*\.mul"],
            "select_comm_recompute": True,
            "select_comm_recompute_exclude": [r"ffn_norm\.norm"],
        }
    )
    assert tables["select_recompute"] == {r"attention\.mul": _FULL}
    assert tables["select_comm_recompute"] == {}


def test_an_exclusion_of_nothing_takes_nothing_out() -> None:
    tables = _tables({"select_recompute": ["a"], "select_recompute_exclude": {"a": False}})
    assert tables["select_recompute"] == {"a": _FULL}


def test_one_kind_of_exclusion_leaves_the_other_alone() -> None:
    tables = _tables({"select_comm_recompute": ["a"], "select_recompute_exclude": ["a"]})
    assert tables["select_comm_recompute"] == {"a": _FULL}


def test_exclusions_hold_for_whole_layers_too() -> None:
    config = RecomputeConfig.from_mapping(
        {
            "recompute": [1],
            "select_recompute": ["a"],
            "select_recompute_exclude": {"b": True},
            "select_comm_recompute_exclude": {"c": [1]},
        }
    )
    first, second = config.decide_all(lay_out(2))
    assert (first.is_whole, first.operators) == (True, ())
    assert [each.text for each in first.exclude + first.comm_exclude] == ["b", "c"]
    assert [each.text for each in second.operators + second.exclude + second.comm_exclude] == ["a", "b"]


# With swap on, numbers are layers


@pytest.mark.parametrize(
    ("value", "kept"), [(True, True), (False, []), ([], []), ([0, 3], [0, 3]), ((0, 3), [0, 3]), ([99], [99])]
)
def test_with_swap_on_a_list_names_layers(value: object, kept: object) -> None:
    config = RecomputeConfig.from_mapping(
        {"recompute": value, "select_recompute": value, "select_comm_recompute": {"x": value}}, swap=True
    )
    assert config.tables(num_layers=4) == {
        "recompute": kept,
        "select_recompute": dict.fromkeys(OPERATORS, kept),
        "select_comm_recompute": {"x": kept},
    }


@pytest.mark.parametrize("key", ["recompute", "select_recompute", "select_comm_recompute"])
@pytest.mark.parametrize("value", [[[1]], [True], [True, 0], ["feed_forward"], 3, "x", None, [1.0], [-1]])
def test_with_swap_on_other_forms_are_refused_and_the_message_says_why(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{key}=.*because swap is on"):
        RecomputeConfig.from_mapping({key: value}, swap=True)


def test_with_swap_on_layers_are_decided_by_index() -> None:
    mapping = {
        "recompute": [1],
        "select_recompute": {"a": [1, 2], "b": True},
        "select_comm_recompute": {"n": [0]},
    }
    layers = RecomputeConfig.from_mapping(mapping, swap=True).decide_all(lay_out(3))
    assert _whole(layers) == [1]
    assert [[each.text for each in layer.operators] for layer in layers] == [["b"], [], ["a", "b"]]
    assert [[each.text for each in layer.comm] for layer in layers] == [["n"], [], []]


def test_with_swap_on_recompute_true_is_every_layer_and_nothing_else() -> None:
    config = RecomputeConfig.from_mapping({"recompute": True, "select_recompute": True}, swap=True)
    assert config.decide_all(lay_out(2)) == (
        LayerRecompute(0, is_whole=True),
        LayerRecompute(1, is_whole=True),
    )


def test_with_swap_on_exclusions_are_normalised_by_stage_and_not_applied() -> None:
    mapping = {"select_recompute": {"a": [0]}, "select_recompute_exclude": {"a": [2]}}
    config = RecomputeConfig.from_mapping(mapping, swap=True)
    tables = config.tables(num_layers=4)
    assert tables["select_recompute_exclude"] == {"a": [[2]]}
    assert tables["select_recompute"] == {"a": [0]}
    (decided, *_) = config.decide_all(lay_out(4))
    assert [each.text for each in decided.operators] == ["a"]
    assert decided.exclude == ()


def test_the_same_configuration_can_be_read_the_other_way() -> None:
    counted = RecomputeConfig.from_mapping({"recompute": [2]})
    assert counted.tables(num_layers=3)["recompute"] == [[2]]
    assert counted.with_swap(on=True).tables(num_layers=3)["recompute"] == [2]
    with pytest.raises(ConfigError, match=r"because swap is on"):
        RecomputeConfig.from_mapping({"recompute": [[2]]}).with_swap(on=True)


def test_making_one_with_keywords_checks_as_well() -> None:
    assert RecomputeConfig(recompute=(True, 2)) == RecomputeConfig.from_mapping({"recompute": [True, 2]})
    with pytest.raises(ConfigError, match=r"mp_comm_recompute"):
        RecomputeConfig(mp_comm_recompute="yes")  # type: ignore[arg-type]
