"""What 1,000 steps leave behind whose graphs never run backward in whole."""

from __future__ import annotations

import gc

import psutil
import torch
from torch import nn

import tierstore as ts
from bench.command import Settings
from bench.record import Better, Figure
from tierstore.testing.memory import DeviceBudget
from tierstore.training import swap

STEPS = 1000
SETTLED = 100  # steps before bytes are counted for the first time
DIM, ROWS = 64, 64
MIB = 1024**2


class Forked(nn.Module):
    """Four layers and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM), nn.GELU()) for _ in range(4)
        )
        self.first = nn.Linear(DIM, 1)
        self.second = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map ``(batch, dim)`` to what two branches make of it; the second's layers are its own."""
        for layer in self.layers[:2]:
            x = layer(x)
        first, second = self.layers[2](x), self.layers[3](x)
        return self.first(first).mean(), self.second(second).mean()


class _Count:
    """What a run holds at one moment."""

    def __init__(self, budget: DeviceBudget, store: ts.Store) -> None:
        gc.collect()
        self.live_bytes = budget.live_bytes
        stats = store.stats()
        self.tier_bytes = sum(tier.charged_bytes for tier in stats.tiers.values())
        self.keys = len(store.keys())
        self.resident_bytes = psutil.Process().memory_info().rss


def swap_leaks(settings: Settings) -> Figure:
    """Train on one branch of two; in every third step on none; count bytes early and late."""
    steps = settings.scaled(STEPS, least=12)
    settled = max(6, SETTLED * steps // STEPS)
    torch.manual_seed(0)
    config = ts.OffloadConfig(
        device="emulated", max_device_memory="64MB", offload_cpu_size="256MB", offload_disk_size=0
    )
    marks = {"swap": True, "layer_swap": {"layers": True, "backward_prefetch": 1}}
    with DeviceBudget("1GB") as budget, ts.Store(config.store_config()) as store:
        model = Forked()
        with swap(model, marks, layers="layers", store=store) as run:
            for step in range(steps):
                first, _ = model(torch.randn(ROWS, DIM))
                if step % 3:
                    first.backward()
                del first, _
                model.zero_grad()
                if step == settled - 1:
                    run.stats()  # it sweeps, as the next forward would
                    early = _Count(budget, store)
            offloaded = run.stats().activations
            late = _Count(budget, store)
    grown_bytes = max(0, late.live_bytes - early.live_bytes) + max(0, late.tier_bytes - early.tier_bytes)
    details = {
        "device bytes": f"{early.live_bytes} B after {settled} steps, {late.live_bytes} B after {steps}",
        "bytes in tiers": f"{early.tier_bytes} B, {late.tier_bytes} B",
        "keys": f"{early.keys}, {late.keys}",
        "kept": f"{offloaded.kept} activations of {offloaded.kept_bytes / MIB:.1f} MiB",
        "still offloaded at the end": f"{offloaded.offloaded}",
        "brought or handed over": f"{offloaded.brought + offloaded.handed_over} of them",
        "resident memory of the process grew by": (
            f"{(late.resident_bytes - early.resident_bytes) / MIB:.1f} MiB"
        ),
    }
    what = (
        f"bytes on the device and in tiers that {steps} steps leave behind, of two branches that are swapped "
        "one never runs backward, and in every third step none"
    )
    return Figure("swap-leaks", what, float(grown_bytes), "B", 0, 0, Better.LOWER, details)
