"""How many numbers the widest layer of a model makes of each that it is given, as its weights tell."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator

import torch
from torch import nn

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_KERNELS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)


def widening_of(model: nn.Module, elsewhere: Container[torch.Tensor]) -> float:
    """Return the most numbers that a matrix, or a kernel, of a model makes of each that it is given.

    It counts whoever has the matrix: a buffer, or what no store touches, makes outputs as any other.  Of
    several in one tensor, as experts have them, all may be given the same.

    Args:
        model: whose; of sharded tensors the whole counts, as that is computed with.
        elsewhere: tensors that make nothing on the device.
    """
    return max((each for module in model.modules() for each in _widenings(module, elsewhere)), default=1.0)


def _widenings(module: nn.Module, elsewhere: Container[torch.Tensor]) -> Iterator[float]:
    yield 1.0
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    matrices = [tensor for tensor in own if tensor.ndim > 1 and tensor not in elsewhere]
    for tensor in matrices:
        is_kernel = isinstance(module, _KERNELS)
        sides = tensor.shape[:2] if is_kernel else tensor.shape[-2:]  # of inputs and outputs, in either order
        several = 1 if is_kernel else math.prod(tensor.shape[:-2])
        if min(sides):
            yield several * max(sides) / min(sides)
    if matrices and isinstance(module, _TRANSPOSED):
        yield math.prod(module.stride) * module.out_channels / module.in_channels
