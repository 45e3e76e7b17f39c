"""What the allocator hands out is within ``max_device_memory`` in every step, or the loop is refused.

What an operator allocates the first time that it runs cannot be known: the first two steps may tell that a
limit is too small.  Then there is no third one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.accelerator import DEVICE, late
from tests.training.twins import WIDTH, Optimizer, Trial, assert_equal_lists, blocks, step
from tierstore.errors import CapacityError
from tierstore.training import offload
from tierstore.units import KIB, MIB, align_up

STEPS = 4


class Attention(nn.Module):
    """Reads two bundles in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Classify ``(batch, WIDTH)``."""
        found: Tensor = self.head(x + self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0])
        return found


class Table(nn.Module):
    """Has a parameter of its own around all others."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(100, WIDTH))
        self.inner = blocks(3)

    def forward(self, x: Tensor) -> Tensor:
        """Classify ``(batch, WIDTH)``."""
        found: Tensor = self.inner(x + self.table.mean(0))
        return found


def uneven() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, n), nn.Tanh(), nn.Linear(n, WIDTH)) for n in (64, 200, 30)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 5))


class Unknown(torch.optim.AdamW):
    """Is not known to treat each parameter by itself."""


MODELS: dict[str, Callable[[], nn.Module]] = {
    "blocks": lambda: blocks(4),
    "attention": Attention,
    "table": Table,
    "uneven": uneven,
}
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2),
    "Adamax": lambda model: torch.optim.Adamax(model.parameters()),  # its kernels allocate for themselves
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "one by one": lambda model: torch.optim.AdamW(model.parameters(), foreach=False),
    "unknown": lambda model: Unknown(model.parameters()),
}


@dataclass
class Loop:
    """What came of a loop.

    Attributes:
        trial: with its losses.
        peaks: what the allocator had at most in each step beside what it had before, in bytes.
        refusal: that ended it.
    """

    trial: Trial
    peaks: Sequence[int]
    refusal: CapacityError | None = None


def made(model: str, optimizer: str) -> Trial:
    torch.manual_seed(0)
    built = MODELS[model]()
    return Trial(built, [OPTIMIZERS[optimizer](built)])


def made_modules(model: str) -> Sequence[nn.Module]:
    return list(MODELS[model]().modules())


def ran(trial: Trial, limit_bytes: int, path: Path) -> Loop:
    """Train within a limit beside what there is."""
    own_bytes = sum(align_up(each.nbytes, 512) for each in trial.model.parameters())
    before_bytes = torch.accelerator.memory_allocated() - own_bytes
    config = {
        "device": "openreg",
        "max_device_memory": before_bytes + limit_bytes,
        "offload_cpu_size": "16MB",
        "offload_disk_size": 0,
        "host_mem_block_size": "16MB",
        "offload_path": str(path),
    }
    peaks: list[int] = []
    torch.manual_seed(1)
    torch.accelerator.reset_peak_memory_stats()
    try:
        with offload(trial.model, list(trial.optimizers), config) as run:
            for _ in range(STEPS):
                torch.accelerator.reset_peak_memory_stats()
                try:
                    step(trial)
                finally:
                    peaks.append(torch.accelerator.max_memory_allocated() - before_bytes)
            run.store.check()
    except CapacityError as error:
        return Loop(trial, peaks, error)
    return Loop(trial, peaks)


@pytest.mark.parametrize("beside", [0, 3 * MIB], ids=["alone", "beside 3 MiB"])
@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        ("blocks", "Adam"),
        ("attention", "Adam"),
        ("uneven", "Adamax"),
        ("table", "Adamax"),
        ("table", "momentum"),
        ("uneven", "one by one"),
        ("blocks", "unknown"),
    ],
)
def test_the_allocator_s_peak_is_within_the_limit_in_every_step(
    model: str, optimizer: str, beside: int, tmp_path: Path
) -> None:
    gc.collect()
    with DEVICE, late(copy_us=100, seed=beside):
        kept = torch.empty(beside, dtype=torch.uint8)
        plain = made(model, optimizer)
        torch.manual_seed(1)
        for _ in range(STEPS):
            step(plain)
        expected, plain.model, plain.optimizers = plain.logged, nn.Identity(), []
        most_bytes = max(
            sum(p.nbytes for p in each.parameters(recurse=False)) for each in made_modules(model)
        )
        for share in (1.1, 1.5, 2.2, 4, 7):
            limit_bytes = align_up(int(share * 4 * most_bytes), 512)
            loop = ran(made(model, optimizer), limit_bytes, tmp_path / str(share))
            too_many = [peak for peak in loop.peaks if peak > limit_bytes]
            assert not too_many or loop.refusal is not None, (share, limit_bytes / KIB, loop.peaks)
            assert len(too_many) <= 2, share
            if loop.refusal is None:
                assert_equal_lists(expected, loop.trial.logged)
        assert loop.refusal is None, "the last limit is enough for any of them"
        assert len(kept) == beside


def test_what_stands_beside_the_store_leaves_it_what_it_would_have_alone(tmp_path: Path) -> None:
    """A tenth is spared of what varies, and not of what is there all the time."""

    def stayed(beside_bytes: int) -> int:
        gc.collect()
        kept = torch.empty(beside_bytes, dtype=torch.uint8)
        loop = ran(made("blocks", "Adam"), 400 * KIB, tmp_path / str(beside_bytes))
        assert loop.refusal is None
        assert len(kept) == beside_bytes
        return loop.peaks[-1]

    with DEVICE:
        assert stayed(4 * MIB) >= 0.9 * stayed(0) > 300 * KIB
