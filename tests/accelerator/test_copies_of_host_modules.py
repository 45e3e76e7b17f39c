"""A deep copy of a model whose modules compute on the host: it is a model of two devices, in no run."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.accelerator import DEVICE
from tierstore.errors import UsageError
from tierstore.training import offload


def test_a_copy_is_told_to_be_moved_and_then_computes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    config = {
        "device": "openreg",
        "max_device_memory": torch.accelerator.memory_allocated() + 2**20,
        "offload_cpu_size": "4MB",
        "offload_disk_size": 0,
        "offload_path": str(tmp_path),
    }
    x = torch.ones(2, 4, device=DEVICE)
    with offload(model, None, config, placement={"1": "cpu", "2": "cpu"}):
        copied = copy.deepcopy(model)
        with pytest.raises(
            UsageError, match=r"a copy of a Linear that computes on the host .* copy.to\(device\)"
        ):
            copied(x)
        copied.to(DEVICE)
        torch.testing.assert_close(copied(x).cpu(), model(x).cpu())
        assert copied(x).device == DEVICE
        again = copy.deepcopy(copied).cpu()
        torch.testing.assert_close(again(x.cpu()), copied(x).cpu())
