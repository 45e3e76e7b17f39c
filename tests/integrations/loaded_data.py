"""Data sets whose items are read by workers, also by such as import this module anew."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.training.twins import WIDTH


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """Random inputs and classes, the same ones each time.

    Args:
        fails_at: the item that cannot be read; ``None``: all can.
    """

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at

    def __len__(self) -> int:
        """Return how many items there are."""
        return 24

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """Return an item."""
        if number == self.fails_at:
            raise OSError(f"item {number} cannot be read")
        generator = torch.Generator().manual_seed(number)
        return torch.randn(WIDTH, generator=generator), torch.tensor(number % 5)


class ByTheModel(Numbers):
    """Data that somebody computes with the model, in the worker.

    Args:
        model: which.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """Return an item."""
        inputs, label = super().__getitem__(number)
        with torch.no_grad():
            self._model(inputs[None])
        return inputs, label
