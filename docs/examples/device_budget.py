"""What the examples measure a device with: the emulated one's budget, and an accelerator's."""

from __future__ import annotations

import copy
import gc
import os
from typing import TypeVar

import torch
from torch import nn

from tierstore import OffloadConfig
from tierstore.testing.memory import DeviceBudget

ModelT = TypeVar("ModelT", bound=nn.Module)


class AllocatorBudget:
    """`DeviceBudget` on CUDA, whose allocator knows the peak of live tensors by itself.

    It can enforce a limit too, but on the memory it keeps in reserve, which is more than tensors use.
    So the limit is set only for the run that exceeds it by far; the other run's peak is compared.
    """

    def __init__(self, device: torch.device, capacity_bytes: int) -> None:
        self._device = device
        self._share = min(1.0, capacity_bytes / torch.cuda.get_device_properties(device).total_memory)

    def __enter__(self) -> AllocatorBudget:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def enforce(self) -> None:
        """Make the allocator raise beyond the capacity, until this budget is left."""
        torch.cuda.set_per_process_memory_fraction(self._share, self._device)

    def __exit__(self, *exception: object) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0, self._device)

    @property
    def live_bytes(self) -> int:
        """The bytes that tensors have now."""
        return torch.cuda.memory_allocated(self._device)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that tensors had at one moment since entering."""
        return torch.cuda.max_memory_allocated(self._device)


def device_budget(device: torch.device, capacity: int | str) -> DeviceBudget | AllocatorBudget:
    """Meter a device from outside the store, and raise where the program takes more than the budget.

    Args:
        device: where the program computes; the CPU stands for the emulated one.
        capacity: bytes, or a size such as ``"64MB"``.
    """
    if device.type == "cuda":
        return AllocatorBudget(device, OffloadConfig(max_device_memory=capacity).max_device_bytes or 0)
    return DeviceBudget(capacity)


def moved_to_device(model: ModelT, device: torch.device) -> ModelT:
    """Put all of the model on the device: a copy made under an emulated device's budget is on it."""
    return copy.deepcopy(model) if device.type == "cpu" else model.to(device)


def make_deterministic(device: torch.device) -> None:
    """Ask CUDA for the same bits every time, as two plain runs differ otherwise; a CPU does so anyway."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        torch.use_deterministic_algorithms(mode=True)
