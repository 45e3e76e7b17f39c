"""What is trained or stepped after the program was measured: within the budget on an accelerator, too."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.accelerator import DEVICE
from tierstore.training import offload
from tierstore.units import KIB

WIDTH, LAYERS, BATCH, STEPS = 64, 12, 4, 12
NEED_BYTES = 4 * 4 * LAYERS * WIDTH * WIDTH  # parameters, gradients and Adam's state
ALLOWED = 1.02
"""Of the budget: the allocator rounds, and what the first two steps leave is known roughly."""

Optimizers = list[torch.optim.Optimizer]


def _thawed(model: nn.Sequential) -> tuple[Optimizers, Callable[[int], Optimizers]]:
    """The last layers alone are trained at first."""
    model[:-2].requires_grad_(requires_grad=False)
    optimizers: Optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3)]

    def begin(number: int) -> Optimizers:
        if number == 4:
            model.requires_grad_(requires_grad=True)
        return optimizers

    return optimizers, begin


def _second_later(model: nn.Sequential) -> tuple[Optimizers, Callable[[int], Optimizers]]:
    """Half of the model has a light optimizer, the other one a heavy one that begins later."""
    half = LAYERS // 2
    optimizers: Optimizers = [
        torch.optim.SGD(model[:half].parameters(), lr=1e-3),
        torch.optim.Adam(model[half:].parameters(), lr=1e-3),
    ]
    return optimizers, lambda number: optimizers[: 1 + (number > 3)]


@pytest.mark.parametrize("percent", [35, 50, 70])
@pytest.mark.parametrize("later", [_thawed, _second_later])
def test_what_comes_later_stays_within_the_budget(
    later: Callable[[nn.Sequential], tuple[Optimizers, Callable[[int], Optimizers]]],
    percent: int,
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    gc.collect()
    before_bytes = torch.accelerator.memory_allocated()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(DEVICE)
    optimizers, begin = later(model)
    limit_bytes = NEED_BYTES * percent // 100
    config = {
        "device": DEVICE.type,
        "max_device_memory": before_bytes + limit_bytes,
        "offload_cpu_size": "16MB",
        "offload_disk_size": 0,
        "host_mem_block_size": "16MB",
        "offload_path": str(tmp_path),
    }
    with offload(model, optimizers, config) as run:
        torch.accelerator.reset_peak_memory_stats()
        for number in range(STEPS):
            stepped = begin(number)
            model(torch.randn(BATCH, WIDTH).to(DEVICE)).square().mean().backward()
            for optimizer in stepped:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        torch.accelerator.synchronize()
        run.store.check()
        peak_bytes = torch.accelerator.max_memory_allocated() - before_bytes
    assert limit_bytes // 3 < peak_bytes <= ALLOWED * limit_bytes + 4 * KIB
