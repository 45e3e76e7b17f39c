"""A group of parameters on the device and on the host: PyTorch steps one after another, and so do bundles.

The twin brings its values itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.accelerator import DEVICE
from tests.accelerator.test_whole_step_foreach import OPTIMIZERS
from tests.training.twins import same
from tierstore.training import offload

STEPS = 5


class _Net(nn.Module):
    """A layer on the host between two of the device, and one that nobody offloads."""

    def __init__(self, crosses: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.host, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.kept = nn.Linear(16, 16)
        self._crosses = crosses

    def forward(self, x: Tensor, *, past_host: bool) -> Tensor:
        """Compute, past the layer on the host at times, which has no gradient then."""
        x = self.kept(self.first(x).relu())
        if not past_host:
            x = self.host(x.to("cpu", copy=True)).to(DEVICE, copy=True) if self._crosses else self.host(x)
        return self.last(x.tanh())  # type: ignore[no-any-return]


def _train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        x = torch.randn(6, 16, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        net(x, past_host=step == 3).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _optimizer(name: str, net: nn.Module, **options: object) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.01, **options)
    return made


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bundles_take_the_path_that_pytorch_takes_for_all_of_a_group(name: str, tmp_path: Path) -> None:
    twin, ours = _Net(crosses=True), _Net(crosses=False)
    for layer in (twin.first, twin.last, twin.kept, ours.kept):
        layer.to(DEVICE)
    options = OPTIMIZERS[name]
    _train(twin, _optimizer(name, twin, **options))
    optimizer = _optimizer(name, ours, **options)
    config = {
        "device": "openreg",
        "max_device_memory": torch.accelerator.memory_allocated() + 2**20,
        "offload_cpu_size": "4MB",
        "offload_disk_size": "16MB",
        "offload_path": str(tmp_path),
    }
    with offload(ours, optimizer, config, placement={"host": "cpu"}, ignored=["kept"]):
        _train(ours, optimizer)
        assert optimizer.param_groups[0].get("foreach") is None
    for (which, expected), found in zip(twin.named_parameters(), ours.parameters(), strict=True):
        assert same(expected.detach().cpu(), found.detach().cpu()), which
