"""Tables against ``nn.Embedding`` and ``nn.EmbeddingBag``: the same bits, whatever batches look like."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tierstore.nn import EmbeddingTable

ROWS = 40
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_mode = pytest.mark.parametrize("mode", [None, "sum", "mean"])

widths = st.sampled_from([1, 3, 8, 16])
hot = st.sampled_from([0, 1, ROWS - 1])
ids = st.one_of(hot, st.integers(0, ROWS - 1))
batches = st.lists(st.lists(ids, max_size=60), min_size=1, max_size=4)


def twins(mode: str | None, width: int, dtype: torch.dtype, sparse: bool = True) -> tuple[Any, Any]:
    """Make a table, and PyTorch's module with the same rows."""
    target = "cpu" if sparse else "device"
    table = EmbeddingTable(ROWS, width, mode=mode, dtype=dtype, sparse=sparse, target=target)
    rows = table.rows(torch.arange(ROWS))
    if mode is None:
        return table, nn.Embedding.from_pretrained(rows, freeze=False, sparse=sparse)
    return table, nn.EmbeddingBag.from_pretrained(rows, freeze=False, sparse=sparse, mode=mode)


def same(found: Tensor, expected: Tensor) -> None:
    """Two tensors have the same bits, zeros the same signs, and sparse ones the same order."""
    assert found.layout == expected.layout
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    if expected.is_sparse:
        assert found.is_coalesced() == expected.is_coalesced()
        assert torch.equal(found._indices(), expected._indices())
        found, expected = found._values(), expected._values()
    assert torch.equal(found.isnan(), expected.isnan())
    found, expected = found[~expected.isnan()], expected[~expected.isnan()]
    assert torch.equal(found, expected)
    assert torch.equal(found.signbit(), expected.signbit())


def _cotangent(out: Tensor, seed: int) -> Tensor:
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(out.shape, generator=chance, dtype=torch.float64).to(out.dtype)


def _cut(batch: list[int], cuts: list[int]) -> Tensor:
    return torch.tensor([0, *sorted(min(cut, len(batch)) for cut in cuts)])


@every_dtype
@every_mode
@given(
    width=widths, batches=batches, cuts=st.lists(st.integers(0, 60), max_size=5), is_int32=st.booleans(),
    zero_between=st.booleans(),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_lookups_and_accumulated_gradients_are_pytorch_s(
    dtype: torch.dtype, mode: str | None, width: int, batches: list[list[int]], cuts: list[int],
    is_int32: bool, zero_between: bool,
) -> None:  # fmt: skip
    table, plain = twins(mode, width, dtype)
    for number, batch in enumerate(batches):
        index = torch.tensor(batch, dtype=torch.int32 if is_int32 else torch.int64)
        more = () if mode is None else (_cut(batch, cuts).to(index.dtype),)
        for module in (table, plain):
            out = module(index, *more)
            out.backward(_cotangent(out, number))
        same(table(index, *more), plain(index, *more))
        same(table.weight.grad, plain.weight.grad)
        if zero_between:
            table.zero_grad()
            plain.zero_grad()


@every_dtype
@every_mode
@given(width=widths, batch=st.lists(st.lists(ids, min_size=4, max_size=4), max_size=12))
@settings(deadline=None, max_examples=30)
def test_ids_in_rows_and_several_lookups_in_one_backward(
    dtype: torch.dtype, mode: str | None, width: int, batch: list[list[int]]
) -> None:
    table, plain = twins(mode, width, dtype)
    index = torch.tensor(batch, dtype=torch.int64).reshape(-1, 4)
    for module in (table, plain):
        out = module(index) + module(index.flip(0))
        out.backward(_cotangent(out, 0))
    same(table.weight.grad, plain.weight.grad)


@every_dtype
@given(width=widths, batch=st.lists(ids, max_size=60), seed=st.integers(0, 9))
@settings(deadline=None, max_examples=30)
def test_weights_of_samples(dtype: torch.dtype, width: int, batch: list[int], seed: int) -> None:
    table, plain = twins("sum", width, dtype)
    index = torch.tensor(batch, dtype=torch.int64)
    offsets = _cut(batch, [7, 7, 30])
    found = []
    for module in (table, plain):
        by = _cotangent(torch.empty(len(batch), dtype=dtype), seed).requires_grad_()
        out = module(index, offsets, per_sample_weights=by)
        out.backward(_cotangent(out, seed + 1))
        found.append((out, by.grad))
    same(found[0][0], found[1][0])
    same(table.weight.grad, plain.weight.grad)
    torch.testing.assert_close(found[0][1], found[1][1])  # a dot product, whose bits depend on addresses


@every_mode
@given(width=widths, batch=st.lists(ids, min_size=1, max_size=60))
@settings(deadline=None, max_examples=30)
def test_dense_gradients(mode: str | None, width: int, batch: list[int]) -> None:
    table, plain = twins(mode, width, torch.float32, sparse=False)
    index = torch.tensor([batch])
    for _ in range(2):
        for module in (table, plain):
            out = module(index)
            out.backward(_cotangent(out, 0))
        same(table.weight.grad, plain.weight.grad)


@every_mode
@given(
    width=widths,
    batch=st.lists(st.integers(-3, ROWS + 3), max_size=60),
    max_norm=st.sampled_from([None, 0.5, 2.0]),
)
@settings(deadline=None, max_examples=40)
def test_ids_out_of_range_are_rows_of_zeros_without_gradient(
    mode: str | None, width: int, batch: list[int], max_norm: float | None
) -> None:
    table = EmbeddingTable(
        ROWS, width, mode=mode, out_of_range="zeros", max_norm=max_norm, dtype=torch.float64
    )
    rows = table.rows(torch.arange(ROWS)).requires_grad_()
    index = torch.tensor(batch, dtype=torch.int64)
    there = (index >= 0) & (index < ROWS)
    looked_up = rows[index.where(there, 0)] * there[:, None]
    if max_norm is not None:
        norms = looked_up.norm(dim=1, keepdim=True)
        looked_up = looked_up * (max_norm / norms.clamp(min=max_norm)).where(norms > max_norm, 1.0)
    if mode is None:
        out, expected = table(index), looked_up
    else:
        out = table(index, torch.tensor([0]))
        expected = looked_up.sum(0, keepdim=True)
        expected = expected / max(len(batch), 1) if mode == "mean" else expected
    torch.testing.assert_close(out, expected)
    cotangent = _cotangent(out, 0)
    out.backward(cotangent)
    expected.backward(cotangent)
    gradient = table.weight.grad
    assert gradient is not None
    assert rows.grad is not None
    torch.testing.assert_close(gradient.to_dense(), rows.grad)
    assert set(gradient._indices()[0].tolist()) == set(index[there].tolist())


@given(
    writes=st.lists(st.tuples(st.lists(ids, min_size=1, max_size=9), st.integers(0, 99)), max_size=5),
    dtype=st.sampled_from(DTYPES),
)
@settings(deadline=None)
def test_rows_that_are_set_are_there_and_no_others(
    writes: list[tuple[list[int], int]], dtype: torch.dtype
) -> None:
    table = EmbeddingTable(ROWS, 3, dtype=dtype)
    expected = dict(enumerate(table.rows(torch.arange(ROWS))))
    for index, start in writes:
        values = (torch.arange(len(index) * 3) + start).view(-1, 3)
        table.set_rows(torch.tensor(index, dtype=torch.int32), values)
        expected |= {row: value.to(dtype) for row, value in zip(index, values, strict=True)}
    same(table.rows(torch.arange(ROWS)), torch.stack(list(expected.values())))
