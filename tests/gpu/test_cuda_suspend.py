"""A whole run off a real accelerator and back; its twin is tests/training/test_suspend.py."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tierstore.errors import UsageError
from tierstore.training import offload

pytestmark = pytest.mark.gpu

_DIM, _LAYERS = 128, 6


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_DIM, _DIM)
        self.norm = nn.BatchNorm1d(_DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = x + torch.tanh(self.norm(self.linear(x)))
        return output


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, away: Callable[[], None]
) -> list[torch.Tensor]:
    device = torch.accelerator.current_accelerator()
    torch.manual_seed(1)
    losses = []
    for _ in range(4):
        loss = model(torch.randn(16, _DIM).to(device)).square().mean()
        away()
        loss.backward()
        losses.append(loss.detach().cpu())
        del loss
        away()
        optimizer.step()
        away()
        optimizer.zero_grad()
        away()
    return losses


def _build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(_Block() for _ in range(_LAYERS))).to(torch.accelerator.current_accelerator())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("capacity", ["1MB", "64MB"])
@pytest.mark.parametrize("to", ["host", "disk"])
def test_nothing_of_a_suspended_run_is_on_the_device(capacity: str, to: str, tmp_path: Path) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    plain, its_optimizer = _build()
    expected = _train(plain, its_optimizer, lambda: None)
    left = {name: value.cpu() for name, value in plain.state_dict().items()}
    del plain, its_optimizer
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    model, optimizer = _build()
    config = {
        "device": str(device),
        "max_device_memory": capacity,
        "offload_cpu_size": "64MB",
        "offload_disk_size": "64MB",
        "offload_path": str(tmp_path),
    }
    with offload(model, optimizer, config, pinned=["0"]) as run:

        def away() -> None:
            run.suspend(to)
            torch.accelerator.synchronize()
            tiers = run.stats().tiers
            assert tiers["device"].charged_bytes == 0
            assert to == "host" or tiers["host"].charged_bytes == 0
            assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}
            assert torch.accelerator.memory_allocated() <= before_bytes + outside_bytes
            with pytest.raises(UsageError, match=r"run\.resume"):
                model(torch.zeros(2, _DIM, device=device))
            run.resume()
            assert all(buffer.device.type == device.type for buffer in model.buffers())

        before_bytes = torch.accelerator.memory_allocated()
        outside_bytes = 1 << 20  # a graph and small tensors of this test
        found = _train(model, optimizer, away)
        run.suspend(to)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    for name, value in model.state_dict().items():
        assert torch.equal(left[name], value.cpu()), name
