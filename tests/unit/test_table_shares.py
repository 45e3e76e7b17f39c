"""How host memory is divided over tables that do not fit there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import CapacityError
from tierstore.training.tables.shares import LEAST_BYTES, shares

PAGE, MIB = 4096, 1024**2


@pytest.mark.parametrize(
    ("mib", "room", "expected"),
    [
        ((1, 2), 100, (1, 2)),  # all of it fits
        ((1, 100), 12, (1, 8)),  # of 9 MiB: the small one as a whole
        ((100, 1), 12, (8, 1)),
        ((100, 10), 12, (4.5, 4.5)),  # neither fits: both have the same
        ((2, 2, 100), 12, (2, 2, 5)),
    ],
)
def test_small_tables_are_whole_and_large_ones_get_the_same(
    mib: Sequence[int], room: int, expected: Sequence[float]
) -> None:
    tables = {str(number): each * MIB for number, each in enumerate(mib)}
    found = shares(tables, [], room * MIB, "offload_cpu_size")
    assert list(found) == list(tables)
    assert [each / MIB for each in found.values()] == list(expected)


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=9), st.integers(0, 10**9))
def test_every_table_gets_its_least_and_together_they_get_what_there_is(
    sizes: Sequence[int], capacity_bytes: int
) -> None:
    tables = {str(number): each for number, each in enumerate(sizes)}
    wholes = [-(-each // PAGE) * PAGE for each in sizes]
    try:
        found = list(shares(tables, [], capacity_bytes, "offload_cpu_size").values())
    except CapacityError:
        assert sum(min(each, LEAST_BYTES) for each in wholes) > capacity_bytes
        return
    assert sum(found) <= capacity_bytes
    for share, whole in zip(found, wholes, strict=True):
        assert min(whole, LEAST_BYTES) <= share <= whole
        assert share % PAGE == 0
        assert share == whole or max(found) - share <= len(sizes) * PAGE  # the same, but for a page
