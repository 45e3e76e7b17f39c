"""Products of groups of rows with a matrix each, as experts are computed: their form, and their work.

PyTorch's own rule for tensors that are nowhere takes bfloat16 alone; in host memory other types are computed,
too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

NAME = "aten::_grouped_mm"


def product_of(args: Sequence[Any]) -> torch.Tensor:
    """Return a tensor of the form of the product.

    Args:
        args: of the operator: two tensors, and where each group ends.
    """
    left, right, ends = args[0], args[1], args[2] if len(args) > 2 else None
    shape: tuple[int, ...] = (left.shape[-2], right.shape[-1])
    if left.dim() == right.dim():
        groups = left.shape[0] if left.dim() == 3 or ends is None else ends.shape[0]
        shape = (groups, *shape)
    return torch.empty(shape, dtype=left.dtype, device=left.device)


def flops_of_product(args: Sequence[Any]) -> float:
    """Return its floating-point operations; rows of groups are counted once, in whichever group they are."""
    left, right = args[0], args[1]
    groups: int = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return 2.0 * groups * int(left.shape[-2]) * int(left.shape[-1]) * int(right.shape[-1])
