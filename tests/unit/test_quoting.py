"""What messages show of values: what ``repr`` shows, bounded, and without running a value's code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.hostile_yaml import Hostile, python_mappings
from tierstore.quoting import SHOWN_CHARS, listed, named, quoted

_SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text() | st.binary()
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.sets(st.integers(), min_size=1)
    ),
)


@given(_VALUES)
def test_a_value_is_shown_as_repr_shows_it_up_to_a_length(value: object) -> None:
    plain = repr(value)
    assert quoted(value) == (plain if len(plain) <= SHOWN_CHARS else f"{plain[:SHOWN_CHARS]}...")


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in python_mappings()])
def test_no_value_is_too_large_deep_or_hostile_to_be_shown(make: object) -> None:
    assert callable(make)
    assert len(quoted(make())) <= SHOWN_CHARS + len("...")


@pytest.mark.parametrize(
    "value", [Path("a"), torch.device("cpu"), torch.float32, int, np.int64(3), np.float32(0.5)]
)
def test_paths_devices_dtypes_classes_and_numbers_are_shown_as_they_print(value: object) -> None:
    assert quoted(value) == repr(value)


def test_of_anything_else_the_type_is_shown() -> None:
    assert (
        quoted([Hostile(), torch.zeros(2)]) == "[<tests.hostile_yaml.Hostile object>, <torch.Tensor object>]"
    )


@pytest.mark.parametrize(
    ("key", "shown"), [("a.b", "a.b"), ("", "''"), ("a\nb", r"'a\nb'"), (3, "3"), ("\ud800", r"'\ud800'")]
)
def test_a_key_is_named_as_it_is_where_that_can_be_read(key: object, shown: str) -> None:
    assert named(key) == shown


def test_of_many_values_the_first_are_listed_and_the_others_counted() -> None:
    assert listed(range(5), 2) == "0, 1, and 3 more"
    assert listed("ab", 2) == "'a', 'b'"
