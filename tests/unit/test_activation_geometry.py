"""Layers in stages and interleaves."""

from __future__ import annotations

import pytest

from tierstore.errors import ConfigError
from tierstore.training.activations.config.geometry import Offset, lay_out

_OFFSET = [[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]


def test_the_reference_s_48_layers_lie_as_it_says() -> None:
    geometry = lay_out(48, 5, 2, _OFFSET)
    assert geometry.layers == ((4, 5, 5, 5, 5), (5, 5, 5, 5, 4))
    assert geometry.starts == [[0, 4, 9, 14, 19], [24, 29, 34, 39, 44]]
    assert geometry.ends == [[4, 9, 14, 19, 24], [29, 34, 39, 44, 48]]
    assert geometry.num_layers == 48


def test_a_model_without_stages_is_one_cell() -> None:
    assert lay_out(4).layers == ((4,),)
    assert lay_out(4).starts == [[0]]


def test_an_offset_of_one_row_is_for_every_interleave() -> None:
    assert lay_out(10, 2, 2, [1, 0]).layers == ((3, 2), (3, 2))
    assert lay_out(10, 2, 2, ((1, 0), (0, 1))).layers == ((3, 2), (2, 3))


def test_an_offset_may_move_layers_between_stages() -> None:
    assert lay_out(8, 4, 1, [-1, 0, 0, 1]).layers == ((1, 2, 2, 3),)


def test_a_cell_may_have_no_layer() -> None:
    geometry = lay_out(2, 2, 1, [-1, 1])
    assert geometry.layers == ((0, 2),)
    assert [geometry.cell_of(layer_id) for layer_id in range(2)] == [(0, 1), (0, 1)]


@pytest.mark.parametrize(
    ("offset", "why"),
    [
        (0, "a sum of 8"),
        ([1, 1, 1, 1], "a list of 5 ints"),
        ([[1, 1, 1, 1, 1]], "2 of those"),
        ([[0, 1, 1, 1, 1]] * 3, "2 of those"),
        ([[0, 1, 1, 1], [1, 1, 1, 1]], "a list of 5 ints"),
        ([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]], "is 9; accepted: a sum of 8"),
        ([1, 1, 1, 1, 1], "is 10; accepted: a sum of 8"),
        ([[-5, 9, 1, 1, 1], [1, 0, 0, 0, 0]], "at least -4"),
        (True, "an int"),
        ("1", "an int"),
        ([True, 1, 1, 1, 0], "a list of 5 ints"),
        (None, "an int"),
    ],
)
def test_an_offset_that_does_not_fit_is_refused_with_what_would(offset: Offset, why: str) -> None:
    with pytest.raises(ConfigError, match=r"offset=") as refusal:
        lay_out(48, 5, 2, offset)
    assert why in str(refusal.value)


def test_counts_that_are_none_are_refused_together() -> None:
    with pytest.raises(ConfigError, match=r"3 faults"):
        lay_out(0, -1, pp_interleave_num=True)


@pytest.mark.parametrize("layer_id", [-1, 48])
def test_a_layer_that_is_not_there_is_in_no_cell(layer_id: int) -> None:
    with pytest.raises(IndexError, match=r"there are 48"):
        lay_out(48, 5, 2, _OFFSET).cell_of(layer_id)
