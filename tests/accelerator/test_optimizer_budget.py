"""What an optimizer makes on the device is measured, whatever the peak of the pass before it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.accelerator import DEVICE
from tierstore.training import offload
from tierstore.units import MIB

WIDTH, BATCH, LAYERS, LIMIT_BYTES = 512, 512, 6, 13 * MIB


def peaks_of(path: Path, before_bytes: int, *, is_reset: bool) -> Iterator[int]:
    """Yield the peak of every phase of some steps; with or without a reset in the midst of each."""
    torch.manual_seed(0)
    layers = (layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    model = nn.Sequential(*layers).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = {
        "device": "openreg",
        "max_device_memory": before_bytes + LIMIT_BYTES,  # what other tests have left is the program's
        "offload_cpu_size": "128MB",
        "offload_disk_size": 0,
        "host_mem_block_size": "32MB",
        "offload_path": str(path),
    }
    with offload(model, optimizer, config) as run:
        for _ in range(4):
            torch.accelerator.reset_peak_memory_stats()
            model(torch.randn(BATCH, WIDTH, device=DEVICE)).square().mean().backward()
            if is_reset:
                yield torch.accelerator.max_memory_allocated()
                torch.accelerator.reset_peak_memory_stats()
            optimizer.step()
            optimizer.zero_grad()
            yield torch.accelerator.max_memory_allocated()
        run.store.check()


@pytest.mark.parametrize("is_reset", [False, True])
def test_max_device_memory_bounds_the_optimizer_s_workspace(tmp_path: Path, is_reset: bool) -> None:
    before_bytes = torch.accelerator.memory_allocated()
    peaks = [peak - before_bytes for peak in peaks_of(tmp_path, before_bytes, is_reset=is_reset)]
    assert max(peaks) <= LIMIT_BYTES
