"""The largest batch of ResNet-50 that a device can train, with memory offload and without."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

import tierstore as ts
from bench.command import Settings
from bench.record import Better, Figure
from device_budget import moved_to_device
from resnet50 import STAGES, ResNet
from tierstore.testing.memory import DeviceBudget
from tierstore.training import offload, swap

MIB = 1024**2
FINENESS = 16  # the largest batch is found up to one part in so many
MOST = 64  # times the batch without: the search ends there
HOST_BYTES = 16 * 1024**3


@dataclass(frozen=True)
class Case:
    """What is trained under which budget.

    Attributes:
        pixels: of an image, a side.
        budget_bytes: what the device may hold.
        stages: bottlenecks in each.
    """

    pixels: int
    budget_bytes: int
    stages: tuple[int, ...] = STAGES

    def document(self, memory_offload: str) -> Mapping[str, object]:
        """Return the example's configuration; with ``"OFF"`` nothing is swapped either."""
        swap_config = {"swap": True, "layer_swap": [{"layers": True, "backward_prefetch": 1}]}
        return {
            "context": {"memory_offload": memory_offload, "max_device_memory": self.budget_bytes},
            "offload_config": {
                "offload_param": "cpu",
                "auto_offload": False,
                "offload_cpu_size": HOST_BYTES,
                "offload_disk_size": 0,
                "device": "emulated",
            },
            **({"swap_config": swap_config} if memory_offload == "ON" else {}),
        }

    def losses(self, batch: int, memory_offload: str) -> list[float]:
        """Train two steps under the budget.

        Raises:
            torch.OutOfMemoryError: more would be needed.
            CapacityError: likewise.
        """
        torch.manual_seed(0)
        model: nn.Module = ResNet(self.stages)
        with DeviceBudget(self.budget_bytes):
            if memory_offload == "OFF":
                model = moved_to_device(model, torch.device("cpu"))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            with offload(model, optimizer, self.document(memory_offload), layers="layers"):
                return self._train(model, optimizer, batch)

    def _train(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> list[float]:
        chance = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(2):
            images = torch.randn(batch, 3, self.pixels, self.pixels, generator=chance)
            labels = torch.randint(10, (batch,), generator=chance)
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def fits(self, batch: int, memory_offload: str) -> bool:
        """Say whether two steps can be trained under the budget."""
        try:
            self.losses(batch, memory_offload)
        except (torch.OutOfMemoryError, ts.CapacityError):
            return False
        return True

    def bytes_an_image(self, batch: int, *, is_swapped: bool) -> float:
        """Return by how much an image more raises the peak where only activations are swapped."""
        few, many = (self._peak_bytes(count, is_swapped=is_swapped) for count in (batch, 2 * batch))
        return (many - few) / batch

    def _peak_bytes(self, batch: int, *, is_swapped: bool) -> int:
        with contextlib.ExitStack() as stack:
            budget = stack.enter_context(DeviceBudget(1024**4))
            torch.manual_seed(0)
            model = ResNet(self.stages)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            if is_swapped:
                config = ts.OffloadConfig(
                    device="emulated",
                    max_device_memory=1024**4,
                    offload_cpu_size=HOST_BYTES,
                    offload_disk_size=0,
                )
                store = stack.enter_context(ts.Store(config.store_config()))
                marks = self.document("ON")["swap_config"]
                assert isinstance(marks, Mapping)
                stack.enter_context(swap(model, marks, layers="layers", store=store))
            self._train(model, optimizer, batch)
            return budget.peak_bytes


def largest(fits: Callable[[int], bool], *, least: int = 1, most: int = 2**20) -> int:
    """Return the largest batch that fits, up to one part in `FINENESS`; 0: not even ``least`` does.

    It doubles until one does not fit, and halves the gap from then on.  What is smaller than a batch
    that fits is taken to fit.
    """
    if not fits(least):
        return 0
    low = least
    while low < most and fits(min(2 * low, most)):
        low = min(2 * low, most)
    if low == most:
        return most
    high = min(2 * low, most)
    while high - low > max(1, low // FINENESS):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def resnet50_batch(settings: Settings) -> Figure:
    """Search for the largest batch with ``memory_offload`` ON and OFF, under one budget."""
    is_full = settings.scale >= 1
    case = Case(32, 400 * MIB) if is_full else Case(16, 12 * MIB, (1, 1))
    several = 64 if is_full else 16
    without = largest(lambda batch: case.fits(batch, "OFF"), least=4)
    if without == 0:
        raise AssertionError(f"nothing can be trained within {case.budget_bytes} B")
    least = max(4, without)
    found = largest(lambda batch: case.fits(batch, "ON"), least=least, most=MOST * without)
    if case.losses(without, "ON") != case.losses(without, "OFF"):
        raise AssertionError(f"the losses of a batch of {without} differ")
    plain_bytes = case.bytes_an_image(several, is_swapped=False)
    swapped_bytes = case.bytes_an_image(several, is_swapped=True)
    details = {
        "device budget": f"{case.budget_bytes / MIB:.0f} MiB",
        "largest batch, OFF": str(without),
        "largest batch, ON": f"{found}{' or more' if found == MOST * without else ''}",
        "found up to": f"one part in {FINENESS}",
        "losses of the largest batch of OFF": "equal with ON, bit for bit",
        "device bytes that an image adds": (
            f"{plain_bytes / MIB:.2f} MiB, {swapped_bytes / MIB:.3f} MiB with its activations swapped: "
            f"{plain_bytes / swapped_bytes:.1f} times the batch where the model is small beside it"
        ),
    }
    what = (
        f"largest batch of ResNet-50, {case.pixels} pixels a side, momentum SGD, under a device budget of "
        f"{case.budget_bytes / MIB:.0f} MiB, memory_offload ON over OFF"
    )
    return Figure("resnet50-batch", what, found / without, "x the batch", 4, 10, Better.HIGHER, details)
