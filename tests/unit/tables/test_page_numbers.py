"""Numbers of pages against a dict."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tierstore.tables.page_numbers import MOST_DENSE, HashedNumbers, OwnNumbers, numbers_for

# Few and near, so that pages come again; or anywhere.
_pages = st.integers(0, 40) | st.integers(0, 2**40)


@given(st.lists(st.lists(_pages, unique=True, max_size=400), max_size=12), st.lists(_pages, max_size=50))
def test_a_number_once_given_stays(batches: list[list[int]], others: list[int]) -> None:
    numbers, expected = HashedNumbers(), dict[int, int]()
    for batch in batches:
        given_now = numbers.give(np.array(batch, dtype=np.int64)).tolist()
        for page, number in zip(batch, given_now, strict=True):
            assert expected.setdefault(page, number) == number
        asked = [*batch, *others, *expected]
        found = numbers.find(np.array(asked, dtype=np.int64)).tolist()
        assert found == [expected.get(page, -1) for page in asked]
    assert sorted(expected.values()) == list(range(len(expected)))
    assert numbers.size == len(expected)
    assert numbers.pages_of(np.array([*expected.values()], dtype=np.int64)).tolist() == [*expected]


def test_pages_that_hash_alike_have_numbers_of_their_own() -> None:
    every = np.arange(0, 2**62, 2**50)  # multiples of a power of two share what is hashed least
    numbers = HashedNumbers()
    assert sorted(numbers.give(every).tolist()) == list(range(len(every)))
    assert np.array_equal(numbers.find(every), numbers.give(every))


def test_pages_of_a_small_table_are_their_own_numbers() -> None:
    assert isinstance(numbers_for(MOST_DENSE), OwnNumbers)
    assert isinstance(numbers_for(MOST_DENSE + 1), HashedNumbers)
    own = OwnNumbers(5)
    assert own.give(np.array([3, 1])).tolist() == own.pages_of(np.array([3, 1])).tolist() == [3, 1]
