"""The net whose matrix products and additions compute on the host: three layers, each of two modules.

A layer holds its weight and bias; what computes with them are modules without parameters, so that each can be
placed by itself, as the operators of the original are.  (MindSpore's tutorial on host and device.)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

PIXELS = 28  # a side
INITIAL_DEVIATION = 0.01

PLACEMENT = {
    r"layer1\.matmul": "cpu",
    r"layer1\.add": "cpu",
    r"layer2\.matmul": "cpu",
    r"layer2\.add": "cpu",
    r"layer3\.matmul": "cpu",
    r"layer3\.add": "cpu",
}
"""What computes on the host; the rest computes on the device."""


class MatMul(nn.Module):
    """A matrix product."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Map ``(batch, inputs)`` and ``(inputs, outputs)`` to ``(batch, outputs)``."""
        return x @ weight


class Add(nn.Module):
    """An addition."""

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Add a bias to each row."""
        return x + bias


class Dense(nn.Module):
    """A layer made of its operators.

    Args:
        inputs: values in.
        outputs: values out.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs).normal_(std=INITIAL_DEVIATION))
        self.bias = nn.Parameter(torch.empty(outputs).normal_(std=INITIAL_DEVIATION))
        self.matmul = MatMul()
        self.add = Add()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, inputs)`` to ``(batch, outputs)``."""
        product = self.matmul(x, self.weight)
        total: Tensor = self.add(product, self.bias)
        return total


class Network(nn.Module):
    """Grey images of 28x28 pixels to the logits of ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.layer1 = Dense(PIXELS * PIXELS, 512)
        self.relu1 = nn.ReLU()
        self.layer2 = Dense(512, 512)
        self.relu2 = nn.ReLU()
        self.layer3 = Dense(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, 1, 28, 28)`` to ``(batch, 10)``."""
        x = self.flatten(x)
        x = self.layer1(x)
        x = self.relu1(x)
        x = self.layer2(x)
        x = self.relu2(x)
        logits: Tensor = self.layer3(x)
        return logits
