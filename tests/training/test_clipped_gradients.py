"""Gradients that are clipped: dense ones as PyTorch does, and sparse ones beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.training.twins import assert_equal_lists, config_of, every_layout
from tierstore.nn import EmbeddingTable, Normal
from tierstore.optim import SparseAdam
from tierstore.training import offload

IDS = torch.tensor([[1, 5, 1], [7, 5, 0]])


class _Net(nn.Module):
    """Rows that are named several times, and a layer."""

    def __init__(self, *, is_table: bool, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        table = EmbeddingTable(9, 4, init=Normal(1.0))
        if is_table:
            self.rows: nn.Module = table
        else:
            self.rows = nn.Embedding(9, 4, sparse=sparse)
            self.rows.weight.data.copy_(table.rows(torch.arange(9)))
        self.last = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Compute."""
        return self.last(self.rows(ids))  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_table", [False, True], ids=["embedding", "table"])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@every_layout
def test_sparse_gradients_are_clipped_as_the_dense_ones_that_they_stand_for(
    layout: str,
    norm_type: float,
    is_table: bool,
    tmp_path: Path,
) -> None:
    dense = _Net(is_table=False, sparse=False)
    ours = _Net(is_table=is_table)
    ours.last.load_state_dict(dense.last.state_dict())
    dense(IDS).square().sum().backward()
    expected = nn.utils.clip_grad_norm_(dense.parameters(), 0.5, norm_type)
    optimizers = [SparseAdam(ours.rows.parameters()), torch.optim.SGD(ours.last.parameters(), lr=0.1)]
    with offload(ours, optimizers, config_of(layout, tmp_path)) as run:
        ours(IDS).square().sum().backward()
        norm = run.clip_grad_norm_(0.5, norm_type)
        torch.testing.assert_close(norm, expected)
        found = [each.grad for each in ours.parameters()]
        for one, other in zip(found, dense.parameters(), strict=True):
            assert one is not None
            torch.testing.assert_close(one.to_dense(), other.grad)
        assert found[0] is not None
        assert found[0].is_coalesced()
        assert found[0].indices().tolist() == [[0, 1, 5, 7]]
        again = run.clip_grad_norm_(0.5, norm_type)
        torch.testing.assert_close(again, torch.tensor(0.5), rtol=1e-4, atol=0)
        del found
        for optimizer in optimizers:
            optimizer.step()


@every_layout
def test_dense_gradients_have_the_bits_of_pytorch(layout: str, tmp_path: Path) -> None:
    plain, ours = _Net(is_table=False, sparse=False), _Net(is_table=False, sparse=False)
    ours.load_state_dict(plain.state_dict())
    plain(IDS).square().sum().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    with offload(ours, torch.optim.SGD(ours.parameters(), lr=0.1), config_of(layout, tmp_path)) as run:
        ours(IDS).square().sum().backward()
        assert torch.equal(run.clip_grad_norm_(0.5), expected)
        assert_equal_lists(
            [each.grad for each in plain.parameters()], [each.grad for each in ours.parameters()]
        )
