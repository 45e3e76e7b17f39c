"""Tables that are to be computed with on the device, and keep no rows there: what they look up is brought."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.twins import same
from tierstore.nn import EmbeddingTable, Normal
from tierstore.optim import SparseAdam
from tierstore.testing.memory import DeviceBudget
from tierstore.training import offload

ROWS, WIDTH, IDS = 900, 16, 500
WAYS: dict[str, tuple[Mapping[str, Any], Mapping[str, str]]] = {
    "target": ({"target": "device"}, {}),
    "placement": ({}, {"table": "device"}),
    "bags": ({"target": "device", "mode": "sum"}, {r".*": "device"}),
}


class _Net(nn.Module):
    """A table and a layer of the device."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - of the table
        super().__init__()
        torch.manual_seed(0)
        self.table = EmbeddingTable(ROWS, WIDTH, init=Normal(0.1), **options)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Compute."""
        return self.last(self.table(ids))  # type: ignore[no-any-return]


def _step(net: _Net, optimizers: list[torch.optim.Optimizer], number: int) -> None:
    ids = torch.randint(0, ROWS, (IDS, 1), generator=torch.Generator().manual_seed(number))
    net(ids).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _optimizers(net: _Net) -> list[torch.optim.Optimizer]:
    return [SparseAdam([net.table.weight]), torch.optim.SGD(net.last.parameters(), lr=0.1)]


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_are_looked_up_are_the_device_s(way: str, tmp_path: Path) -> None:
    options, placement = WAYS[way]
    alone, ours = _Net(**options), _Net(**options)
    optimizers = _optimizers(alone)
    for number in range(3):
        _step(alone, optimizers, number)
    config = {
        "device": "emulated",
        "max_device_memory": "1MB",
        "offload_cpu_size": "1MB",
        "offload_disk_size": "1MB",
        "offload_path": str(tmp_path),
    }
    optimizers = _optimizers(ours)
    with (
        offload(ours, optimizers, config, placement=placement) as run,
        DeviceBudget("1GiB", mixing="raise") as budget,
    ):
        looked_up = ours.table(torch.arange(IDS).view(IDS, 1))
        assert budget.peak_bytes >= looked_up.nbytes == IDS * WIDTH * 4
        assert run.store.stats().traffic["host", "device"].nbytes >= looked_up.nbytes
        del looked_up
        for number in range(3):
            _step(ours, optimizers, number)
    every = torch.arange(ROWS)
    assert torch.equal(ours.table.rows(every), alone.table.rows(every))
    assert all(map(same, alone.last.parameters(), ours.last.parameters()))
