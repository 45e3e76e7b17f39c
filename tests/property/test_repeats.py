"""Sums over repeated ids against PyTorch's ``coalesce``: the same bits; and sorting once for a batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tierstore.nn import EmbeddingTable
from tierstore.nn.repeats import KnownRepeats, Repeats, repeats_of
from tierstore.optim import SGD, Adagrad, LazyAdam

# Short ones, and those that are sorted by another algorithm (a radix sort, from 32768 elements).
lengths = st.one_of(st.integers(0, 40), st.sampled_from([1000, 32768]))
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    seed=st.integers(0, 1000),
    length=lengths,
    spread=st.sampled_from([1, 3, 50, 10**4, 2**40]),
    width=st.sampled_from([1, 3, 16, 67]),
    zeros=st.lists(st.sampled_from([0.0, -0.0, 1.0, None]), min_size=1, max_size=5),
)
@settings(deadline=None, max_examples=25)
def test_sums_are_those_of_coalesce_with_the_signs_of_zeros(
    dtype: torch.dtype, seed: int, length: int, spread: int, width: int, zeros: list[float | None]
) -> None:
    chance = torch.Generator().manual_seed(seed)
    index = torch.randint(0, spread, (length,), generator=chance)
    values = torch.randn(length, width, dtype=torch.float64, generator=chance).to(dtype)
    for place, value in enumerate(zeros):
        if value is not None:
            values[place :: len(zeros)] = value
    expected = torch.sparse_coo_tensor(
        index[None], values, (spread, width), check_invariants=True, is_coalesced=False
    ).coalesce()
    repeats = Repeats.of(index)
    found = repeats.sums(values)
    assert torch.equal(repeats.ids, expected.indices()[0])
    assert torch.equal(repeats.ids[repeats.inverse], index)
    assert torch.equal(found, expected.values())
    assert torch.equal(found.signbit(), expected.values().signbit())


def test_a_batch_that_is_known_is_not_sorted_again() -> None:
    index = torch.tensor([3, 1, 3])
    known = KnownRepeats(index.clone(), Repeats.of(index))
    assert repeats_of(index, known) is known.repeats
    for other in (index[:2], torch.tensor([3, 1, 2])):
        assert torch.equal(repeats_of(other, known).ids, other.unique())


@pytest.mark.parametrize("kind", [Adagrad, LazyAdam, SGD])
def test_a_step_sorts_only_what_its_lookup_has_not(
    kind: Callable[..., torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    sorted_batches: list[list[int]] = []
    of = Repeats.of.__func__  # type: ignore[attr-defined]

    def noted(cls: type[Repeats], index: Tensor) -> Repeats:
        sorted_batches.append(index.tolist())
        repeats: Repeats = of(cls, index)
        return repeats

    monkeypatch.setattr(Repeats, "of", classmethod(noted))
    table = EmbeddingTable(100, 4, init="zeros")
    optimizer = kind(table.parameters(), lr=0.1)
    first, second = torch.tensor([[5, 2], [5, 9]]), torch.tensor([2, 2, 7])
    table(first).sum().backward()
    optimizer.step()
    assert sorted_batches == [[5, 2, 5, 9]], "once: the step has that order from the lookup"
    table(second).sum().backward()  # added to the gradient that is there
    optimizer.step()
    assert sorted_batches[1:] == [[2, 2, 7], [5, 2, 5, 9, 2, 2, 7]]


def test_a_gradient_that_somebody_has_changed_is_stepped_as_it_is() -> None:
    table, plain = EmbeddingTable(10, 2, init="zeros"), torch.zeros(10, 2)
    optimizer = SGD(table.parameters(), lr=1.0)
    table(torch.tensor([4, 4, 1])).sum().backward()
    assert table.weight.grad is not None
    table.weight.grad._indices()[0, 0] = 8
    table.weight.grad._values()[1] *= 3
    optimizer.step()
    plain[8], plain[4], plain[1] = -1.0, -3.0, -1.0
    assert torch.equal(table.rows(torch.arange(10)), plain)


def test_rows_that_were_written_between_a_lookup_and_its_step_are_stepped_as_they_are() -> None:
    table, ids = EmbeddingTable(10, 2, mode="sum", init="zeros"), torch.tensor([[4, 1]])
    optimizer = SGD(table.parameters(), lr=1.0)
    out = table(ids)
    table.set_rows(torch.tensor([1, 4]), torch.tensor([[5.0, 5.0], [6.0, 6.0]]))
    out.sum().backward()
    for expected in (4.0, 3.0):  # twice: the first step has changed what the lookup had copied
        optimizer.step()
        assert table.rows(torch.tensor([1, 4]))[:, 0].tolist() == [expected, expected + 1]


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_a_step_leaves_what_another_backward_pass_needs(max_norm: float | None) -> None:
    table = EmbeddingTable(10, 2, mode="sum", init=3.0, max_norm=max_norm)
    optimizer = SGD(table.parameters(), lr=1.0)
    by = torch.ones(1, 2, requires_grad=True)
    out = table(torch.tensor([[4, 1]]), per_sample_weights=by).sum()
    gradients = []
    for _ in range(2):
        out.backward(retain_graph=True)
        assert by.grad is not None
        assert table.weight.grad is not None
        gradients.append((by.grad, table.weight.grad.to_dense()))
        by.grad = None
        optimizer.step()
        optimizer.zero_grad()
    for first, second in zip(*gradients, strict=True):
        assert torch.equal(first, second)
