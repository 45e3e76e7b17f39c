"""An accelerator writes back early where its program leaves no room for everything, and only there."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.accelerator import DEVICE
from tierstore.store import Store
from tierstore.training import offload
from tierstore.units import KIB

LIMIT_BYTES = 1300 * KIB
"""Of 12 layers 800 KiB are trained: what is left beside that decides."""


@pytest.mark.parametrize(
    ("rows", "more", "high"),
    [
        (2, {}, 1.0),  # all of it fits
        (256, {}, 0.75),
        (256, {"hbm_ratio": 0.9}, 0.9),  # it is said already
        (256, {"placement": {"high": {"device": 1.0}}}, 1.0),
    ],
)
def test_what_the_program_leaves_decides_where_nobody_says_it(
    rows: int, more: dict[str, object], high: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = [float(str(more.get("hbm_ratio", 1.0)))]
    resize = Store.resize

    def watched(self: Store, tier: str, capacity: int | str, **given: float | None) -> None:
        share = given.get("high")
        shares.extend([share] if tier == "device" and share is not None else [])
        resize(self, tier, capacity, **given)

    monkeypatch.setattr(Store, "resize", watched)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(12)]).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters())
    gc.collect()
    beside = torch.accelerator.memory_allocated() - sum(each.nbytes for each in model.parameters())
    config = {
        "device": DEVICE.type,
        "max_device_memory": LIMIT_BYTES + beside,
        "offload_cpu_size": "64MB",
        "offload_path": str(tmp_path / "files"),
        **more,
    }
    with offload(model, optimizer, config):
        for _ in range(5):
            model(torch.ones(rows, 64, device=DEVICE)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert shares[-1] == high
