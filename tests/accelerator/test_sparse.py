"""Sparse tensors of the simulated accelerator: what the CPU's kernels make of them, on the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tests.accelerator import DEVICE


def _sparse(device: torch.device) -> torch.Tensor:
    index = torch.tensor([[4, 0, 4, 2]], device=device)
    values = torch.arange(12.0, device=device).view(4, 3)
    return torch.sparse_coo_tensor(index, values, (5, 3), device=device, check_invariants=False)


def _added(sparse: torch.Tensor) -> torch.Tensor:
    sum_ = torch.ones(5, 3, device=sparse.device)
    return sum_.add_(sparse, alpha=0.5)


def _accumulated(sparse: torch.Tensor) -> torch.Tensor:
    sparse = sparse.clone()
    sparse += sparse
    return sparse


@pytest.mark.parametrize(
    "compute",
    [
        lambda each: each,
        lambda each: each.coalesce(),
        lambda each: -each,
        lambda each: each / 3,
        lambda each: each + each,
        lambda each: each.to_dense(),
        lambda each: each.detach().clone(),
        lambda each: each.coalesce().values(),
        _added,
        _accumulated,
    ],
)
def test_an_operator_gives_what_it_gives_on_the_cpu(compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found, expected = compute(_sparse(DEVICE)), compute(_sparse(torch.device("cpu")))
    assert found.device == DEVICE
    assert found.layout == expected.layout
    if expected.is_sparse:
        assert found.is_coalesced() == expected.is_coalesced()
        assert torch.equal(found._indices().cpu(), expected._indices())
        found, expected = found._values(), expected._values()
    assert found.device == DEVICE
    assert torch.equal(found.cpu(), expected)


def test_they_are_copied_to_the_device_and_back() -> None:
    there = _sparse(torch.device("cpu")).to(DEVICE)
    assert there.device == DEVICE
    assert torch.equal(there.cpu().to_dense(), _sparse(torch.device("cpu")).to_dense())


@pytest.mark.parametrize("mode", [None, "sum", "mean"])
def test_embeddings_have_sparse_gradients(mode: str | None) -> None:
    gradients = []
    for device in (DEVICE, torch.device("cpu")):
        rows = torch.arange(15.0).view(5, 3).to(device).requires_grad_()
        index = torch.tensor([3, 1, 3, 0]).to(device)
        for _ in range(2):  # the second one is added to the first
            if mode is None:
                found = functional.embedding(index, rows, sparse=True)
            else:
                begins = torch.tensor([0, 1]).to(device)
                found = functional.embedding_bag(index, rows, begins, mode=mode, sparse=True)
            found.square().sum().backward()
        assert rows.grad is not None
        assert rows.grad.device == device
        gradients.append(rows.grad)
    found, expected = gradients
    assert torch.equal(found._indices().cpu(), expected._indices())
    assert torch.equal(found._values().cpu(), expected._values())


def test_an_empty_result_has_the_shape_that_it_has_to_have() -> None:
    assert torch.empty(0, 6, device=DEVICE).abs().shape == (0, 6)
