"""Tables that are looked up from a device: rows and their gradients stay in host memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.gpu.accelerators import ACCELERATOR
from tierstore.nn import EmbeddingTable
from tierstore.optim import SparseAdam

pytestmark = pytest.mark.gpu


def test_a_table_in_host_memory_feeds_a_net_on_the_device() -> None:
    """As one on the CPU does, whose twin it is, up to rounding of the net."""
    losses: list[list[float]] = []
    for device in (torch.device("cpu"), ACCELERATOR):
        torch.manual_seed(0)
        table, net = EmbeddingTable(100, 8, mode="sum"), nn.Linear(8, 1).to(device)
        model = nn.ModuleList([table, net]).to(device)
        optimizer = SparseAdam([*model.parameters()], lr=0.1)
        weights = torch.rand(4, 3, generator=torch.Generator().manual_seed(1)).to(device)
        found = []
        for step in range(3):
            optimizer.zero_grad()
            ids = torch.arange(12).view(4, 3).mul(step + 1).remainder(100).to(device)
            out = table(ids, per_sample_weights=weights)
            assert out.device.type == device.type
            loss = net(out).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
            assert table.weight.grad is not None
            assert table.weight.grad.device.type == "cpu"
        losses.append(found)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert table.rows(torch.tensor([1], device=ACCELERATOR)).device.type == "cpu"


def test_rows_are_set_from_the_device() -> None:
    table = EmbeddingTable(10, 2)
    table.set_rows(
        torch.tensor([3, 3], device=ACCELERATOR), torch.tensor([[1.0, 2], [3, 4]], device=ACCELERATOR)
    )
    assert table.rows(torch.tensor([3])).tolist() == [[3.0, 4.0]]
    table.prefetch(torch.tensor([3], device=ACCELERATOR))
