"""``swap_config``: what is accepted and refused, and what a layer gets."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest

from tierstore.errors import ConfigError
from tierstore.training import SwapConfig
from tierstore.training.activations import LayerSwap, Mark

_ALL = Mark(2, layers=True)
_EVERY, _NO = True, False


def _entry(layers: object, prefetch: object = 2, **more: object) -> dict[str, object]:
    return {"backward_prefetch": prefetch, "layers": layers, **more}


def _read(**keys: object) -> SwapConfig:
    return SwapConfig.from_mapping({"swap": True, **keys})


def _operators(decided: LayerSwap) -> list[tuple[str, int]]:
    return [(pattern.text, prefetch) for pattern, prefetch in decided.operators]


def test_the_defaults_are_the_reference_s() -> None:
    config = SwapConfig.from_mapping({})
    assert (config.swap, config.default_prefetch, config.layer_swap, config.op_swap) == (False, 1, None, None)


def test_with_swap_off_nothing_is_swapped() -> None:
    config = _read(layer_swap=[_entry(_EVERY)], op_swap=_entry(_EVERY, op_name="a"))
    assert config.decide(0) != LayerSwap(0)
    off = SwapConfig.from_mapping(
        {"swap": False, "layer_swap": [_entry(_EVERY)], "op_swap": _entry(_EVERY, op_name="a")}
    )
    assert off.decide(0) == LayerSwap(0)


def test_by_default_flash_attention_is_swapped_in_every_layer() -> None:
    config = _read(default_prefetch=10)
    assert _operators(config.decide(0)) == _operators(config.decide(99)) == [(r".*\.flash_attention", 10)]
    assert config.decide(0).prefetch is None
    assert config.operator_marks == {r".*\.flash_attention": (Mark(10, layers=True),)}


@pytest.mark.parametrize("given", [{"layer_swap": []}, {"op_swap": []}, {"layer_swap": [_entry([9])]}])
def test_the_default_is_off_if_either_list_is_given_even_an_empty_one(given: dict[str, object]) -> None:
    assert _read(**given).decide(0) == LayerSwap(0)


def test_null_lists_are_not_given() -> None:
    assert _operators(_read(layer_swap=None, op_swap=None).decide(0)) == [(r".*\.flash_attention", 1)]


def test_layers_are_marked_with_their_prefetch() -> None:
    config = _read(layer_swap=[_entry([0, 3], 20)])
    assert [config.decide(layer_id).prefetch for layer_id in range(4)] == [20, None, None, 20]


def test_one_entry_needs_no_list() -> None:
    assert _read(layer_swap=_entry([1])) == _read(layer_swap=[_entry([1])])
    assert _read(op_swap=_entry([1], op_name="a")) == _read(op_swap=[_entry([1], op_name="a")])


def test_tuples_are_accepted_where_lists_are() -> None:
    assert _read(layer_swap=(_entry((1, 2)),)) == _read(layer_swap=[_entry([1, 2])])
    assert _read(op_swap=(_entry((1,), op_name=("a", "b")),)) == _read(
        op_swap=[_entry([1], op_name=["a", "b"])]
    )


def test_operators_are_regrouped_by_name_in_their_order() -> None:
    config = _read(
        op_swap=[
            _entry([0, 1, 2], 20, op_name="attention"),
            _entry([1, 2], 15, op_name="feed_forward"),
            _entry([3], 10, op_name="attention"),
        ]
    )
    assert config.operator_marks == {
        "attention": (Mark(20, (0, 1, 2)), Mark(10, (3,))),
        "feed_forward": (Mark(15, (1, 2)),),
    }
    assert list(config.operator_marks) == ["attention", "feed_forward"]
    assert _operators(config.decide(1)) == [("attention", 20), ("feed_forward", 15)]
    assert _operators(config.decide(3)) == [("attention", 10)]


def test_a_list_of_names_is_an_entry_for_each() -> None:
    config = _read(op_swap=_entry([0], 5, op_name=["a", r"b\.c"]))
    assert _operators(config.decide(0)) == [("a", 5), (r"b\.c", 5)]


def test_the_first_entry_with_a_layer_wins() -> None:
    config = _read(
        layer_swap=[_entry([0, 1], 3), _entry([1, 2], 7)],
        op_swap=[_entry([1, 2], 9, op_name="a"), _entry([1], 4, op_name="a"), _entry([1], 5, op_name="b")],
    )
    assert [config.decide(layer_id).prefetch for layer_id in range(3)] == [3, 3, 7]
    assert _operators(config.decide(1)) == [("a", 9), ("b", 5)]


def test_a_layer_named_twice_in_one_entry_is_named() -> None:
    assert _read(layer_swap=_entry([1, 1])).decide(1).prefetch == 2


def test_false_selects_no_layer() -> None:
    assert _read(layer_swap=_entry(_NO)).decide(0).prefetch is None


@pytest.mark.parametrize(
    "entries",
    [
        [_entry([2]), _entry(_EVERY)],
        [_entry(_EVERY), _entry([2])],
        [_entry(_EVERY), _entry(_EVERY)],
        [_entry(_EVERY)],
    ],
)
def test_an_entry_for_all_layers_swallows_those_that_agree(entries: list[object]) -> None:
    assert _read(layer_swap=entries).layer_marks == (_ALL,)
    named = [dict(entry, op_name="a") for entry in entries if isinstance(entry, dict)]
    assert _read(op_swap=named).operator_marks == {"a": (_ALL,)}


@pytest.mark.parametrize(
    "entries",
    [
        [_entry([2], 1), _entry(_EVERY, 2)],
        [_entry(_EVERY, 1), _entry([2], 2)],
        [_entry(_EVERY, 1), _entry(_NO, 2)],
        [_entry([0], 1), _entry([1], 2), _entry(_EVERY, 1)],
    ],
)
def test_entries_beside_one_for_all_layers_have_to_agree(entries: list[object]) -> None:
    with pytest.raises(ConfigError, match=r"layer_swap has an entry for all layers.* 1 and 2"):
        _read(layer_swap=entries)
    named = [dict(entry, op_name="a") for entry in entries if isinstance(entry, dict)]
    with pytest.raises(ConfigError, match=r"'a' has an entry for all layers"):
        _read(op_swap=named)


def test_different_names_need_not_agree() -> None:
    config = _read(op_swap=[_entry(_EVERY, 1, op_name="a"), _entry(_EVERY, 2, op_name="b")])
    assert _operators(config.decide(5)) == [("a", 1), ("b", 2)]


@pytest.mark.parametrize(
    "layers",
    [
        3,
        3.0,
        [3.0],
        [[3.0]],
        [True],
        (3.0,),
        ((3.0,),),
        [[3]],
        ((3,),),
        None,
        "all",
        ["1"],
        [None],
        {1},
        [-1],
        [1, True],
    ],
)
def test_layers_are_a_list_of_ints_or_a_bool(layers: object) -> None:
    with pytest.raises(ConfigError, match=r"layers=.*accepted: a list of the layers' indices"):
        _read(layer_swap=[_entry(layers)])
    with pytest.raises(ConfigError, match=r"layers=.*accepted: a list of the layers' indices"):
        _read(op_swap=[_entry(layers, op_name="a")])


@pytest.mark.parametrize("prefetch", [0, -1, 1.0, "1", None, True, [1]])
def test_a_prefetch_is_an_int_of_at_least_1(prefetch: object) -> None:
    for keys in (
        {"default_prefetch": prefetch},
        {"layer_swap": [_entry([1], prefetch)]},
        {"op_swap": [_entry([1], prefetch, op_name="a")]},
    ):
        with pytest.raises(ConfigError, match=r"prefetch=.*accepted: an int of at least 1"):
            _read(**keys)


def test_with_swap_off_the_default_prefetch_may_be_any_int() -> None:
    assert SwapConfig.from_mapping({"default_prefetch": 0}).default_prefetch == 0
    with pytest.raises(ConfigError, match=r"default_prefetch='1'"):
        SwapConfig.from_mapping({"default_prefetch": "1"})


@pytest.mark.parametrize("swap", [1, 0, "True", None, [True], 1.0])
def test_swap_is_a_bool(swap: object) -> None:
    with pytest.raises(ConfigError, match=r"swap=.*true or false"):
        SwapConfig.from_mapping({"swap": swap})


@pytest.mark.parametrize("value", [True, 3, "a", [3], [None], [[_entry([1])]]])
def test_the_lists_are_of_mappings(value: object) -> None:
    for key in ("layer_swap", "op_swap"):
        with pytest.raises(ConfigError, match=rf"{key}=.*mapping"):
            _read(**{key: value})


@pytest.mark.parametrize("missing", ["layers", "backward_prefetch", "op_name"])
def test_an_entry_gives_all_its_keys(missing: str) -> None:
    entry = _entry([1], op_name="a")
    del entry[missing]
    with pytest.raises(ConfigError, match=rf"entry 1.*\n.*{missing}=None: missing"):
        _read(op_swap=[_entry([1], op_name="b"), entry])


def test_an_entry_has_no_other_keys() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'layers'"):
        _read(layer_swap=[_entry([1], layer=[2])])
    with pytest.raises(ConfigError, match=r"op_name='a': unknown key"):
        _read(layer_swap=[_entry([1], op_name="a")])


@pytest.mark.parametrize("name", ["", "(", [], ["a", ""], 3, None, [["a"]], {"a": 1}])
def test_an_operator_s_name_is_a_pattern_or_a_list_of_them(name: object) -> None:
    with pytest.raises(ConfigError, match=r"op_name="):
        _read(op_swap=[_entry([1], op_name=name)])


def test_every_fault_is_listed_at_once() -> None:
    with pytest.raises(ConfigError) as refusal:
        SwapConfig.from_mapping(
            {"swap": True, "default_prefetch": 0, "layerswap": [], "layer_swap": 3, "op_swap": 3}
        )
    assert "4 faults" in str(refusal.value)
    assert "did you mean 'layer_swap'" in str(refusal.value)


def test_the_faults_of_every_entry_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as refusal:
        _read(
            op_swap=[_entry([1.0], 0, op_name="("), _entry([1], op_name="a"), 3, {"op_name": "", "layer": 1}]
        )
    message = str(refusal.value)
    assert "entry 0: 3 faults" in message
    assert "entry 1" not in message
    assert "entry 2: accepted: a mapping" in message
    assert "entry 3: 4 faults" in message


@pytest.mark.parametrize("value", [None, [], True])
def test_what_is_no_mapping_is_refused(value: Mapping[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"a mapping of keys to values"):
        SwapConfig.from_mapping(value)


def test_what_the_user_gave_is_not_changed() -> None:
    given = {
        "swap": True,
        "layer_swap": [_entry([2]), _entry(_EVERY)],
        "op_swap": [_entry([1], op_name=["a", "b"])],
    }
    before = copy.deepcopy(given)
    SwapConfig.from_mapping(given).decide(1)
    assert given == before


def test_making_one_with_keywords_checks_as_well() -> None:
    config = _read(layer_swap=[_entry([1])], op_swap=[_entry([1], op_name="a")])
    assert SwapConfig(swap=True, layer_swap=config.layer_swap, op_swap=config.op_swap) == config
    with pytest.raises(ConfigError, match=r"default_prefetch"):
        SwapConfig(swap=True, default_prefetch=0)
    with pytest.raises(ConfigError, match=r"entry 0: accepted: a mapping with op_name"):
        SwapConfig(swap=True, op_swap=config.layer_swap)  # type: ignore[arg-type]
