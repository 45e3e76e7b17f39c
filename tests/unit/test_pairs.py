"""A grid that is covered has every pair of values, and few cases."""

from __future__ import annotations

import itertools

from tests.pairs import covering, pairs_of


def test_every_pair_that_there_is_comes() -> None:
    factors = ["ab", "cde", "fghi", "jkl"]
    rows = [row for row in itertools.product(*factors) if (row[0], row[1]) != ("a", "c")]
    chosen = covering(*factors, is_there=lambda row: (row[0], row[1]) != ("a", "c"))
    assert set().union(*map(pairs_of, chosen)) == set().union(*map(pairs_of, rows))
    assert set(chosen) <= set(rows)
    assert 12 <= len(chosen) <= 16 < len(rows)
