"""A parameter of a module on the host that the program computes with itself: told by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.accelerator import DEVICE
from tierstore.errors import UsageError
from tierstore.testing.memory import DeviceBudget
from tierstore.training import offload


class _Scaled(nn.Module):
    """Has a method beside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def apart(self, x: Tensor) -> Tensor:
        """Compute with the parameter, where nothing crosses."""
        return x * self.scale

    def forward(self, x: Tensor) -> Tensor:
        """Compute likewise."""
        return self.apart(x)


@pytest.mark.parametrize("device", ["openreg", "emulated"])
def test_a_method_beside_forward_is_told_what_to_do(device: str, tmp_path: Path) -> None:
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "inner": _Scaled()})
    used = torch.accelerator.memory_allocated() if device == "openreg" else 0
    config = {
        "device": device,
        "max_device_memory": used + 2**20,
        "offload_cpu_size": "4MB",
        "offload_disk_size": 0,
        "offload_path": str(tmp_path),
    }
    inner = model["inner"]
    assert isinstance(inner, _Scaled)
    with (
        offload(model, None, config, placement={"inner": "cpu"}),
        DeviceBudget("1GiB", mixing="raise"),
    ):
        x = model["first"](torch.ones(2, 4, device=DEVICE if device == "openreg" else "cpu"))
        with pytest.raises(UsageError, match=r"mul is given 'inner.scale' of a module that computes on"):
            inner.apart(x)
        inner(x).sum().backward()
        assert inner.scale.grad is not None
        with pytest.raises(RuntimeError, match="must match the size"):  # another error is as it was
            inner.scale + torch.ones(3)
