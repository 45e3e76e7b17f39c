"""The normalisation against an allocation that hands out layers one by one, and junk against its errors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.training import RecomputeConfig, SwapConfig
from tierstore.training.activations import plan_layers, sections_of
from tierstore.training.activations.config.geometry import lay_out

Cells = list[list[int]]
Given = bool | Sequence[Any]
Mapped = Mapping[str, object]

_COUNTS = st.booleans() | st.integers(0, 12)


@st.composite
def _cells(draw: st.DrawFn) -> Cells:
    """Return how many layers each cell has: rows are interleaves, columns stages."""
    stages, interleaves = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    row = st.lists(st.integers(0, 5), min_size=stages, max_size=stages)
    cells = draw(st.lists(row, min_size=interleaves, max_size=interleaves))
    cells[0][0] += 1  # a model has a layer
    return cells


def _geometry(cells: Cells) -> dict[str, Any]:
    """Return arguments that lay layers out so."""
    total, places = sum(map(sum, cells)), len(cells) * len(cells[0])
    return {
        "num_layers": total,
        "pipeline_stage": len(cells[0]),
        "pp_interleave_num": len(cells),
        "offset": [[count - total // places for count in row] for row in cells],
    }


def _spelled(draw: st.DrawFn, values: list[Any]) -> list[Any] | tuple[Any, ...]:
    return tuple(values) if draw(st.booleans()) else values


@st.composite
def _by_stage(draw: st.DrawFn, cells: Cells) -> Sequence[Any]:
    return _spelled(draw, draw(st.lists(_COUNTS, max_size=len(cells[0]))))


@st.composite
def _by_cell(draw: st.DrawFn, cells: Cells) -> Sequence[Any]:
    stages = len(cells[0])
    row = st.booleans() | st.lists(_COUNTS, max_size=stages).map(tuple) | st.lists(_COUNTS, max_size=stages)
    rows = draw(st.lists(row, min_size=1, max_size=len(cells)))
    if not any(isinstance(each, list | tuple) for each in rows):
        rows[0] = []  # bools alone are counts of stages
    return _spelled(draw, rows)


def _wanted(value: int | bool, capacity: int) -> int:
    return capacity if value is True else min(int(value), capacity)


def _first_come(value: Sequence[Any], cells: Cells) -> Cells:
    """Hand out each stage's layers one by one: the first of every interleave, then the second, and so on."""
    table = [[0] * len(row) for row in cells]
    for stage, count in enumerate(value):
        places = [(turn, i) for i, row in enumerate(cells) for turn in range(row[stage])]
        for _, i in sorted(places)[: _wanted(count, len(places))]:
            table[i][stage] += 1
    return table


def _clipped(value: Sequence[Any], cells: Cells) -> Cells:
    """Fill each cell one by one."""
    table = [[0] * len(row) for row in cells]
    for i, row in enumerate(value):
        for stage, capacity in enumerate(cells[i]):
            if isinstance(row, bool):
                table[i][stage] = capacity if row else 0
            elif stage < len(row):
                table[i][stage] = _wanted(row[stage], capacity)
    return table


def _table(value: Given, cells: Cells) -> Cells:
    tables = RecomputeConfig.from_mapping({"recompute": value}).tables(**_geometry(cells))
    return cast("Cells", tables["recompute"])


def _check(value: Sequence[Any], cells: Cells, oracle: Callable[[Sequence[Any], Cells], Cells]) -> None:
    before = copy.deepcopy(value)
    table = _table(value, cells)
    assert table == oracle(value, cells)
    assert value == before
    assert {type(count) for row in table for count in row} == {int}
    assert all(
        count <= most
        for row, full in zip(table, cells, strict=True)
        for count, most in zip(row, full, strict=True)
    )
    assert _table(table, cells) == table


@given(st.data())
def test_a_list_of_stages_is_handed_out_over_interleaves_in_turn(data: st.DataObject) -> None:
    cells = data.draw(_cells())
    _check(data.draw(_by_stage(cells)), cells, _first_come)


@given(st.data())
def test_a_list_of_interleaves_is_clipped_cell_by_cell(data: st.DataObject) -> None:
    cells = data.draw(_cells())
    _check(data.draw(_by_cell(cells)), cells, _clipped)


@given(_cells(), st.booleans())
def test_a_bool_is_all_or_none(cells: Cells, value: bool) -> None:
    assert _table(value, cells) == [[count if value else 0 for count in row] for row in cells]


@given(st.data())
def test_a_stage_never_gets_more_than_it_has_or_than_was_said(data: st.DataObject) -> None:
    cells = data.draw(_cells())
    value = data.draw(_by_stage(cells))
    sums = [sum(column) for column in zip(*_table(value, cells), strict=True)]
    full = [sum(column) for column in zip(*cells, strict=True)]
    said = [*value, *[0] * (len(full) - len(value))]
    assert sums == [_wanted(count, most) for count, most in zip(said, full, strict=True)]


@given(st.data())
def test_a_table_s_layers_are_the_first_of_their_cell(data: st.DataObject) -> None:
    cells = data.draw(_cells())
    value = data.draw(_by_stage(cells) | _by_cell(cells))
    config = RecomputeConfig.from_mapping({"recompute": value, "select_recompute": {"x": value}})
    arguments = _geometry(cells)
    table = config.tables(**arguments)["recompute"]
    assert isinstance(table, list)
    expected = [
        place < count
        for counts, row in zip(table, cells, strict=True)
        for count, full in zip(counts, row, strict=True)
        for place in range(full)
    ]
    assert [each.is_whole for each in config.decide_all(lay_out(**arguments))] == expected
    selecting = RecomputeConfig.from_mapping({"select_recompute": {"x": value}})
    assert [bool(each.operators) for each in selecting.decide_all(lay_out(**arguments))] == expected


# Swap: the first entry that has a layer, found entry by entry


_LAYERS = st.booleans() | st.lists(st.integers(0, 5), max_size=4)
_ENTRIES = st.lists(
    st.fixed_dictionaries({"layers": _LAYERS, "backward_prefetch": st.integers(1, 3)}), max_size=4
)


def _has(layers: bool | list[int], layer_id: int) -> bool:
    return layers if isinstance(layers, bool) else layer_id in layers


@given(_ENTRIES)
def test_the_first_entry_wins_or_all_agree(entries: list[dict[str, Any]]) -> None:
    agree = len({entry["backward_prefetch"] for entry in entries}) <= 1
    everywhere = any(entry["layers"] is True for entry in entries)
    mapping = {
        "swap": True,
        "layer_swap": entries,
        "op_swap": [{**entry, "op_name": "x"} for entry in entries],
    }
    try:
        config = SwapConfig.from_mapping(mapping)
    except ConfigError:
        assert everywhere
        assert not agree
        return
    assert agree or not everywhere
    for layer_id in range(7):
        ahead = [entry["backward_prefetch"] for entry in entries if _has(entry["layers"], layer_id)]
        decided = config.decide(layer_id)
        assert decided.prefetch == (ahead[0] if ahead else None)
        assert [prefetch for _, prefetch in decided.operators] == ahead[:1]


# Junk: a typed error, or a configuration that works


_PATTERNS = st.sampled_from(
    ["a", r"a\.b", r".*\.norm", "(", "", r"\.", "[[a]", "a{9999999999}", "aten.mm", "*"]
)
_TEXT = _PATTERNS | st.text(max_size=6)
_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.integers()
    | st.floats()
    | _TEXT
    | st.binary(max_size=3)
)
_SWAP_KEYS = ["swap", "default_prefetch", "layer_swap", "op_swap"]
_ENTRY_KEYS = ["layers", "backward_prefetch", "op_name"]
_RECOMPUTE_KEYS = list(vars(RecomputeConfig()))
_KEYS = st.sampled_from([*_SWAP_KEYS, *_ENTRY_KEYS, *_RECOMPUTE_KEYS]) | _TEXT
_JUNK = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(_KEYS | _LEAVES, inner, max_size=4)
    ),
    max_leaves=12,
)


def _junk_under(keys: list[str]) -> st.SearchStrategy[Any]:
    """Return mappings that have some of the keys, with whatever behind them."""
    return st.fixed_dictionaries({}, optional=dict.fromkeys(keys, _JUNK)) | _JUNK


def _refusal(call: Callable[[], object]) -> str | None:
    """Return what a configuration is refused with; ``None``: it works.  Other errors are not caught."""
    try:
        call()
    except ConfigError as fault:
        return str(fault)
    return None


def _use_recompute(mapping: Mapped, swap: bool, offset: Sequence[int]) -> None:
    config = RecomputeConfig.from_mapping(mapping, swap=swap)
    config.tables(num_layers=5, pipeline_stage=2, offset=[1, 0])
    config.decide(4, num_layers=5, pipeline_stage=5)
    config.tables(num_layers=5, pipeline_stage=2, offset=offset)


def _use_swap(mapping: Mapped) -> None:
    config = SwapConfig.from_mapping(mapping)
    assert plan_layers(None, config, num_layers=3).layers[2].swap == config.decide(2)


@given(_junk_under(_RECOMPUTE_KEYS), st.booleans(), _JUNK)
def test_junk_for_recompute_is_refused_with_a_hint_or_works(
    mapping: Mapped, swap: bool, offset: Sequence[int]
) -> None:
    before = repr(mapping)
    refusal = _refusal(lambda: _use_recompute(mapping, swap, offset))
    assert refusal is None or any(hint in refusal for hint in ("accepted", "did you mean", "pattern"))
    assert repr(mapping) == before


@given(_junk_under(_SWAP_KEYS))
def test_junk_for_swap_is_refused_with_a_hint_or_works(mapping: Mapped) -> None:
    before = repr(mapping)
    refusal = _refusal(lambda: _use_swap(mapping))
    assert refusal is None or any(
        hint in refusal for hint in ("accepted", "did you mean", "pattern", "missing")
    )
    assert repr(mapping) == before


@given(
    st.fixed_dictionaries(
        {"recompute_config": _junk_under(_RECOMPUTE_KEYS), "swap_config": _junk_under(_SWAP_KEYS)}
    )
)
def test_junk_in_a_document_is_refused_by_section_or_works(document: Mapped) -> None:
    refusal = _refusal(lambda: sections_of(document))
    assert refusal is None or "_config in the mapping" in refusal
