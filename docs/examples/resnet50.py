"""ResNet-50 for ten classes in plain PyTorch, as the reference example of memory offload has it.

The first version (arXiv:1512.03385): the stride is in a bottleneck's first 1x1 convolution, and the
first bottleneck of each stage has a projection.  Convolutions and the pool pad as "same" does, after
more than before where that is odd.  Nothing in here knows of tierstore.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 10
EXPANSION = 4  # a bottleneck's output channels over its inner ones
STAGES = (3, 4, 6, 3)  # bottlenecks with 256, 512, 1024 and 2048 output channels
STEM_CHANNELS = 64
UNIFORM_SCALE = 0.07  # of the reference's "Uniform" initialiser: from -0.07 to 0.07


def pad_same(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """Pad height and width of ``x`` so that a window gives ``ceil(size / stride)`` outputs."""
    pads: list[int] = []
    for size in (x.shape[-1], x.shape[-2]):  # in the order of functional.pad: the last dimension first
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        pads += [total // 2, total - total // 2]
    return functional.pad(x, pads, value=value) if any(pads) else x


class SameConv2d(nn.Conv2d):
    """A square convolution without bias that pads as "same" does."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, bias=False)
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, inputs, height, width)``."""
        return super().forward(pad_same(x, self.kernel_size[0], self.stride[0]))


def batch_norm(channels: int) -> nn.BatchNorm2d:
    """Return a batch norm whose running statistics keep 0.99 of themselves."""
    norm = nn.BatchNorm2d(channels, eps=1e-5, momentum=0.01)
    nn.init.uniform_(norm.weight, -UNIFORM_SCALE, UNIFORM_SCALE)
    return norm


class Stem(nn.Module):
    """What comes before the bottlenecks: a quarter of the height and width, 64 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = SameConv2d(3, STEM_CHANNELS, 7, 2)
        self.bn1 = batch_norm(STEM_CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, 3, height, width)``."""
        x = functional.relu(self.bn1(self.conv1(x)))
        return functional.max_pool2d(pad_same(x, 3, 2, float("-inf")), 3, 2)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, *, is_projected: bool) -> None:
        super().__init__()
        inner = outputs // EXPANSION
        self.conv1 = SameConv2d(inputs, inner, 1, stride)
        self.bn1 = batch_norm(inner)
        self.conv2 = SameConv2d(inner, inner, 3)
        self.bn2 = batch_norm(inner)
        self.conv3 = SameConv2d(inner, outputs, 1)
        self.bn3 = batch_norm(outputs)
        self.downsample = (
            nn.Sequential(SameConv2d(inputs, outputs, 1, stride), batch_norm(outputs))
            if is_projected
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, inputs, height, width)``."""
        out = functional.relu(self.bn1(self.conv1(x)))
        out = functional.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return functional.relu(out + self.downsample(x))


def _bottlenecks(stages: Sequence[int]) -> Iterator[Bottleneck]:
    inputs = STEM_CHANNELS
    for stage, count in enumerate(stages):
        outputs = STEM_CHANNELS * EXPANSION * 2**stage
        for index in range(count):
            stride = 2 if stage and not index else 1
            yield Bottleneck(inputs, outputs, stride, is_projected=index == 0)
            inputs = outputs


class ResNet(nn.Module):
    """Images in, the logits of ten classes out.

    ``layers`` are the stem and then every bottleneck, in the order in which they run.

    Args:
        stages: how many bottlenecks each stage has.
    """

    def __init__(self, stages: Sequence[int] = STAGES) -> None:
        super().__init__()
        self.layers = nn.Sequential(Stem(), *_bottlenecks(stages))
        self.end_point = nn.Linear(STEM_CHANNELS * EXPANSION * 2 ** (len(stages) - 1), CLASSES)
        nn.init.xavier_uniform_(self.end_point.weight)
        nn.init.uniform_(self.end_point.bias, -UNIFORM_SCALE, UNIFORM_SCALE)

    def forward(self, images: Tensor) -> Tensor:
        """Map ``(batch, 3, height, width)`` to ``(batch, 10)``."""
        features: Tensor = self.layers(images)
        logits: Tensor = self.end_point(torch.mean(features, dim=(2, 3)))
        return logits
