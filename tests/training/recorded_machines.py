"""Runs whose steps are recorded, and machines like those that they have, for simulations of them."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tierstore.planning.machine import ComputeFigures, LinkFigures, Machine, TierFigures, TierMedium
from tierstore.training import Offload, offload
from tierstore.units import parse_bytes

Optimizers = list[torch.optim.Optimizer]

_MEDIA = {"device": TierMedium.DEVICE, "host": TierMedium.HOST, "disk": TierMedium.STORAGE}
_DISK = "64MB"

QUOTAS: Mapping[str, tuple[str, str]] = {
    "mlp": ("240KB", "400KB"),
    "residual": ("200KB", "300KB"),
    "convolutions": ("200KB", "250KB"),
}
"""Of the device, by model: too small for all of it, and a little larger."""

BEFORE_STEADY = 6
"""Steps after which one is as the next: nothing is learned any more."""


class Trained(NamedTuple):
    """What is trained, and on what."""

    model: nn.Module
    optimizers: Optimizers
    inputs: Tensor


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the inputs and what is made of them."""
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


def mlp() -> Trained:
    """Return layers with Adam's state."""
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(96, 96), nn.ReLU()) for _ in range(6)])
    return Trained(model, [torch.optim.AdamW(model.parameters(), 1e-3)], torch.randn(8, 96))


def residual() -> Trained:
    """Return residual blocks whose momentum is all that is kept."""
    torch.manual_seed(2)
    model = nn.Sequential(*[_Residual(64) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    return Trained(model, [optimizer], torch.randn(8, 64))


def convolutions() -> Trained:
    """Return convolutions with batch norms, whose buffers travel along, and two optimizers."""
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(5)]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(16 * 16, 64))
    first = torch.optim.Adam([p for block in blocks for p in block.parameters()], 1e-3)
    second = torch.optim.SGD(model[-1].parameters(), 1e-2)
    return Trained(model, [first, second], torch.randn(4, 16, 4, 4))


MODELS: Mapping[str, Callable[[], Trained]] = {
    "mlp": mlp,
    "residual": residual,
    "convolutions": convolutions,
}


@contextlib.contextmanager
def opened(
    trained: Trained, path: Path, device: str, host: str = "16MB", **more: object
) -> Iterator[Offload]:
    """Yield a run on an emulated device with link and disk."""
    config = {
        "device": "emulated",
        "max_device_memory": device,
        "offload_cpu_size": host,
        "offload_disk_size": _DISK,
        "offload_path": str(path),
        "host_mem_block_size": "1MB",
        **more,
    }
    with offload(trained.model, trained.optimizers, config) as run:
        yield run


def step(trained: Trained, *, passes: int = 1) -> None:
    """Make one step."""
    for _ in range(passes):
        trained.model(trained.inputs).square().mean().backward()
    for optimizer in trained.optimizers:
        optimizer.step()
        optimizer.zero_grad()


def traffic(run: Offload) -> dict[str, int]:
    """Return the bytes between tiers so far, by link."""
    moved = run.store.stats().traffic.items()
    return {
        f"{source}->{target}": each.nbytes
        for (source, target), each in moved
        if "caller" not in (source, target)
    }


def moved(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """Return what has moved between two times, by link."""
    found = {link: nbytes - before.get(link, 0) for link, nbytes in now.items()}
    return {link: nbytes for link, nbytes in found.items() if nbytes}


def machine_of(run: Offload, device: str, host: str = "16MB") -> Machine:
    """Return a machine with the tiers of a run, whose links take no time."""
    names: Sequence[str] = run.store.tier_names
    sizes = {"device": device, "host": host, "disk": _DISK}
    figures = ComputeFigures({"float32": 1e9}, 1e9)
    return Machine(
        "like the run's",
        tuple(
            TierFigures(name, parse_bytes(sizes[name]), _MEDIA[name], 512 if name == "device" else 1)
            for name in names
        ),
        tuple(LinkFigures(source, target, math.inf) for source, target in itertools.permutations(names, 2)),
        figures,
        figures,
        has_streams=False,
    )
