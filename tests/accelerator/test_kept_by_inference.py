"""Inference keeps on an accelerator what fits there, from its first forward pass on."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from tests.accelerator import DEVICE
from tierstore.errors import CapacityError
from tierstore.training import offload
from tierstore.units import MIB

WIDTH, LAYERS = 256, 32


@pytest.mark.parametrize(
    ("times", "most"),
    [
        (2.5, [1, 0, 0, 0]),  # all of it is in the half that is kept in the first one
        (1.2, [1, 0.5, 0.1, 0.1]),  # what was measured there leaves room for all of it
    ],
)
@pytest.mark.parametrize("beside", [0, 8 * MIB])
def test_what_fits_is_copied_once(times: float, most: list[float], beside: int) -> None:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).to(DEVICE)
    model_bytes = sum(each.nbytes for each in model.parameters())
    x = torch.linspace(-1, 1, 4 * WIDTH, device=DEVICE).reshape(4, WIDTH)
    with torch.no_grad():
        expected = model(x)
    others = torch.ones(beside, dtype=torch.uint8, device=DEVICE)
    gc.collect()
    beside_bytes = torch.accelerator.memory_allocated() - model_bytes
    config = {
        "device": DEVICE.type,
        "max_device_memory": int(times * model_bytes) + beside_bytes,
        "offload_cpu_size": 4 * model_bytes,
        "offload_disk_size": 0,
    }
    moved, former = [], 0
    with torch.no_grad(), offload(model, None, config) as run:
        for _ in most:
            assert torch.equal(model(x), expected)
            torch.accelerator.synchronize()
            nbytes = run.store.stats().traffic["host", "device"].nbytes
            moved.append((nbytes - former) / model_bytes)
            former = nbytes
    assert all(each <= bound for each, bound in zip(moved, most, strict=True)), moved
    assert others.all()


@pytest.mark.parametrize("times", [0.3, 0.5, 1, 2])
def test_what_takes_too_much_in_its_first_forward_is_refused_in_the_second(times: float) -> None:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).to(DEVICE)
    model_bytes = sum(each.nbytes for each in model.parameters())
    x = torch.zeros(
        int(0.75 * times * LAYERS * WIDTH), WIDTH, device=DEVICE
    )  # outputs of two layers are too many
    gc.collect()
    limit_bytes = torch.accelerator.memory_allocated() + int((times - 1) * model_bytes)
    config = {
        "device": DEVICE.type,
        "max_device_memory": limit_bytes,
        "offload_cpu_size": 4 * model_bytes,
        "offload_disk_size": 0,
    }
    with torch.no_grad(), offload(model, None, config):
        torch.accelerator.reset_peak_memory_stats()
        model(x)
        torch.accelerator.synchronize()
        assert torch.accelerator.max_memory_allocated() > limit_bytes
        with pytest.raises(CapacityError, match="the last use of the model took"):
            model(x)
