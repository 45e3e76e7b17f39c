"""What tables rely on of PyTorch's sparse kernels: run these first with a new version.

A table looks up and steps compact rows by inverse ids, and says that these are the bits of the whole
table.  That rests on what is tested here, which PyTorch does not promise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# Short ones, and those that are sorted by another algorithm (a radix sort, from 32768 elements).
lengths = st.one_of(st.integers(0, 40), st.sampled_from([1000, 32767, 32768, 40000]))
spreads = st.sampled_from([1, 3, 50, 10**4, 2**40])


def _sparse(ids: Tensor, values: Tensor, rows: int) -> Tensor:
    return torch.sparse_coo_tensor(
        ids[None], values, (rows, *values.shape[1:]), check_invariants=True, is_coalesced=False
    )


def _case(seed: int, length: int, spread: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, spread, (length,), generator=chance)
    return ids, torch.randn(length, 3, dtype=torch.float64, generator=chance).to(dtype)


def _same(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors have the same bits: the signs of zeros, too."""
    return torch.equal(found, expected) and torch.equal(found.signbit(), expected.signbit())


@every_dtype
@given(seed=st.integers(0, 1000), length=lengths, spread=spreads)
@settings(deadline=None, max_examples=30)
def test_repeats_are_summed_by_inverse_ids_as_by_ids(
    dtype: torch.dtype, seed: int, length: int, spread: int
) -> None:
    ids, values = _case(seed, length, spread, dtype)
    distinct, inverse = torch.unique(ids, return_inverse=True)
    whole = _sparse(ids, values, spread).coalesce()
    compact = _sparse(inverse, values, max(len(distinct), 1)).coalesce()
    assert torch.equal(whole.indices()[0], distinct)
    assert torch.equal(compact.indices()[0], torch.arange(len(distinct)))
    assert _same(compact.values(), whole.values())


@every_dtype
@given(seed=st.integers(0, 1000), length=st.integers(0, 40), spread=st.integers(1, 9))
@settings(deadline=None, max_examples=30)
def test_the_first_of_repeats_is_copied_and_the_others_are_added_in_the_order_of_a_sort(
    dtype: torch.dtype, seed: int, length: int, spread: int
) -> None:
    """Of one that is not stable: from 17 elements on, positions of one id are not in order."""
    ids, values = _case(seed, length, spread, dtype)
    values[::3] = -0.0
    sums: dict[int, Tensor] = {}
    for place in ids.sort().indices.tolist():
        row, value = int(ids[place]), values[place]
        sums[row] = sums[row] + value if row in sums else value
    summed = _sparse(ids, values, spread).coalesce()
    expected = [sums[row] for row in sorted(sums)]
    assert _same(summed.values(), torch.stack(expected) if expected else values[:0])


@every_dtype
@pytest.mark.parametrize("is_coalesced", [False, True])
@pytest.mark.parametrize("alpha", [1.0, -0.1, -1e-3])
@pytest.mark.parametrize("width", [1, 3, 16, 67])
def test_a_sparse_tensor_is_added_to_some_rows_as_to_all(
    dtype: torch.dtype, is_coalesced: bool, alpha: float, width: int
) -> None:
    """Adding goes through a routine of BLAS, which may round a product or not: never by where a row lies."""
    chance = torch.Generator().manual_seed(0)
    rows = torch.randn(500, width, dtype=torch.float64, generator=chance).to(dtype)
    ids = torch.randperm(500, generator=chance)[:100].sort().values
    if not is_coalesced:
        ids = ids[torch.randint(0, 100, (300,), generator=chance)]
    values = torch.randn(len(ids), width, dtype=torch.float64, generator=chance).to(dtype)
    distinct, inverse = torch.unique(ids, return_inverse=True)
    compact = rows[distinct]

    def sparse(index: Tensor, size: int) -> Tensor:
        return torch.sparse_coo_tensor(
            index[None], values, (size, width), is_coalesced=is_coalesced, check_invariants=True
        )

    whole = rows.clone().add_(sparse(ids, 500), alpha=alpha)
    assert _same(compact.add_(sparse(inverse, len(distinct)), alpha=alpha), whole[distinct])


@every_dtype
@pytest.mark.parametrize("alpha", [1.0, -0.1, -1e-3])
@pytest.mark.parametrize("width", [64, 128, 192])
def test_rows_without_remainder_are_added_several_at_once_as_one_at_a_time(
    dtype: torch.dtype, alpha: float, width: int
) -> None:
    chance = torch.Generator().manual_seed(0)
    rows, values = torch.randn(2, 320, width, dtype=torch.float64, generator=chance).to(dtype)
    one, several = rows.clone(), rows.clone()
    one.add_(_sparse(torch.arange(320), values, 320), alpha=alpha)
    several.view(20, -1).add_(_sparse(torch.arange(20), values.view(20, -1), 20), alpha=alpha)
    assert _same(several, one)


@every_dtype
def test_adding_a_sparse_tensor_once_is_adding_its_values(dtype: torch.dtype) -> None:
    rows, values = torch.randn(2, 100, 7, dtype=torch.float64).to(dtype)
    added = rows.clone().add_(_sparse(torch.arange(100), values, 100))
    assert _same(added, rows + values)


LOOKUPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "none": lambda rows, ids, _: functional.embedding(ids, rows, sparse=True),
    "sum": lambda rows, ids, _: functional.embedding_bag(ids, rows, mode="sum", sparse=True),
    "mean": lambda rows, ids, _: functional.embedding_bag(ids, rows, mode="mean", sparse=True),
    "weighted": lambda rows, ids, by: functional.embedding_bag(
        ids, rows, mode="sum", sparse=True, per_sample_weights=by
    ),
}


@every_dtype
@pytest.mark.parametrize("lookup", LOOKUPS)
@pytest.mark.parametrize("width", [1, 3, 32, 67])
def test_compact_rows_are_looked_up_by_inverse_ids_as_the_table_by_ids(
    dtype: torch.dtype, lookup: str, width: int
) -> None:
    chance = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 300, (20, 30), generator=chance)
    table, cotangent, by = (
        torch.randn(*shape, dtype=torch.float64, generator=chance).to(dtype)
        for shape in ((300, width), (20, 30, width), (20, 30))
    )
    distinct, inverse = torch.unique(ids, return_inverse=True)
    found: list[tuple[Any, ...]] = []
    for rows, index in ((table, ids), (table[distinct], inverse)):
        leaf, weights = rows.clone().requires_grad_(), by.clone().requires_grad_()
        out = LOOKUPS[lookup](leaf, index, weights)
        (out * (cotangent if out.ndim == 3 else cotangent[:, 0])).sum().backward()
        found.append((out.detach(), leaf.grad, weights.grad))
    (out, sparse, by_whole), (compact_out, compact_sparse, by_compact) = found
    assert _same(compact_out, out)
    assert compact_sparse.is_coalesced() == sparse.is_coalesced()
    assert torch.equal(distinct[compact_sparse._indices()[0]], sparse._indices()[0])
    assert torch.equal(sparse._indices()[0], ids.flatten()), "positions are in order"
    assert _same(compact_sparse._values(), sparse._values())
    if lookup == "weighted" and width * dtype.itemsize % 64 == 0:
        assert _same(by_compact, by_whole)
    elif lookup == "weighted":  # a dot product for each, whose order of summing is that of addresses
        torch.testing.assert_close(by_compact, by_whole)
