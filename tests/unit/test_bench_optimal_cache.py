"""Belady's bound against every choice that a cache could make."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bench.optimal_cache import informed_hits, optimal_hits

Batch = frozenset[int]

batches = st.lists(st.frozensets(st.integers(0, 5), max_size=4), max_size=7)


def as_arrays(trace: Sequence[Batch]) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    return [np.array(sorted(batch), dtype=np.int64) for batch in trace]


def subsets(rows: Batch, most: int) -> Iterator[Batch]:
    for size in range(min(most, len(rows)) + 1):
        yield from map(frozenset, itertools.combinations(sorted(rows), size))


def hits_of_every_choice(trace: Sequence[Batch], slots: int, *, may_pass_by: bool) -> int:
    """Try whatever may be kept after each batch; return the most hits."""
    best: dict[Batch, int] = {frozenset(): 0}
    for batch in trace:
        after: dict[Batch, int] = {}
        for cached, before in best.items():
            hits = before + len(cached & batch)
            if may_pass_by:
                choices = subsets(cached | batch, slots)
            else:
                choices = (kept | batch for kept in subsets(cached - batch, slots - len(batch)))
            for choice in choices:
                after[choice] = max(after.get(choice, 0), hits)
        best = after
    return max(best.values())


@given(batches, st.integers(0, 6))
@example([frozenset({0, 1}), frozenset({2}), frozenset({0}), frozenset({1})], 2)
def test_where_rows_may_pass_by_it_is_the_best_of_all_choices(trace: list[Batch], slots: int) -> None:
    found = optimal_hits(as_arrays(trace), slots, may_pass_by=True)
    assert found.sum() == hits_of_every_choice(trace, slots, may_pass_by=True)


@given(batches, st.integers(4, 6))
@example([frozenset({0, 1, 2}), frozenset({3}), frozenset({0, 1}), frozenset({4, 5}), frozenset({2})], 4)
def test_where_a_batch_is_in_slots_it_is_the_best_of_all_choices(trace: list[Batch], slots: int) -> None:
    found = optimal_hits(as_arrays(trace), slots)
    assert found.sum() == hits_of_every_choice(trace, slots, may_pass_by=False)


def test_hits_are_told_of_each_batch() -> None:
    trace = [[5, 1], [1, 9], [7, 5], [5, 9]]
    assert optimal_hits([np.array(each) for each in trace], 3).tolist() == [0, 1, 1, 2]
    assert optimal_hits([np.array(each) for each in trace], 2).tolist() == [0, 1, 0, 1]
    assert optimal_hits([np.array(each) for each in trace], 2, may_pass_by=True).tolist() == [0, 1, 1, 2]


def test_a_batch_that_no_slots_have_room_for_is_refused() -> None:
    with pytest.raises(ValueError, match="batch 1 asks for 3 rows, and there are 2 slots"):
        optimal_hits([np.array([1]), np.array([1, 2, 3])], 2)


def test_an_id_that_a_batch_has_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="batch 0 has ids more than once"):
        optimal_hits([np.array([1, 1])], 2)


@given(batches, st.integers(4, 6))
def test_who_knows_the_counts_has_no_more_hits_than_who_knows_the_future(
    trace: list[Batch], slots: int
) -> None:
    found = informed_hits(as_arrays(trace), slots)
    assert found.sum() <= optimal_hits(as_arrays(trace), slots).sum()


def test_who_knows_the_counts_keeps_what_is_asked_for_most() -> None:
    trace = [[0, 1], [2], [0], [3], [0, 1], [4], [0]]
    assert informed_hits([np.array(each) for each in trace], 2).tolist() == [0, 0, 1, 0, 1, 0, 1]
