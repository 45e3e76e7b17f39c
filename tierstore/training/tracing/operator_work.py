"""What one operator does: floating-point operations, and bytes that it reads and writes.

Operations are counted as ``torch.utils.flop_counter`` counts them; what it does not know of counts none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from tierstore.torch_private import OpOverload
from tierstore.training.tracing import grouped_products

_MATMUL = frozenset(
    {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm", grouped_products.NAME}
)
_NO_BYTES = frozenset(
    {
        *("aten::detach", "aten::lift_fresh", "aten::_local_scalar_dense", "aten::_unsafe_view"),
        *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::resize_"),
        *("aten::new_empty_strided", "aten::set_"),
    }
)
_FORWARD_PRODUCTS = 2
_BACKWARD_PRODUCTS = 5

_sorts: dict[OpOverload, str | None] = {}
"""What an operator is, of those that were seen; ``None``: it only looks at memory, or names it."""


def tensors_in(values: Sequence[object], into: list[torch.Tensor]) -> None:
    """Append the tensors in nested sequences."""
    for value in values:
        if isinstance(value, torch.Tensor):
            into.append(value)
        elif isinstance(value, list | tuple):
            tensors_in(value, into)


def sort_of(operator: OpOverload) -> str | None:
    """Return by which name the efficiency of an operator is known; ``None``: it moves no bytes."""
    if operator not in _sorts:
        _sorts[operator] = _sort_of(operator)
    return _sorts[operator]


def _sort_of(operator: OpOverload) -> str | None:
    name = operator.name().partition(".")[0]
    if operator.is_view or name in _NO_BYTES:
        return None
    if name in _MATMUL:
        return "matmul"
    if "_attention" in name:
        return "attention"
    return "convolution" if "conv" in name else "other"


def flops_of(
    operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: object, sort: str | None
) -> float:
    """Return the floating-point operations of a call.

    Args:
        operator: which.
        args: that it was given.
        kwargs: likewise.
        result: what it returned.
        sort: of the operator.
    """
    if sort == "attention":
        return _of_attention(operator.name(), args)
    if operator.name() == grouped_products.NAME:
        return grouped_products.flops_of_product(args)
    count: Callable[..., float] | None = flop_registry.get(operator.overloadpacket)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=result))


def _of_attention(name: str, args: Sequence[object]) -> float:
    """Count products of matrices: heads of keys that several heads of queries share count for each."""
    shapes = [each.shape for each in args if isinstance(each, torch.Tensor) and each.dim() == 4]
    is_backward = name.partition(".")[0].endswith("_backward")
    if is_backward:
        shapes = shapes[1:]  # the gradient comes first
    if len(shapes) < 2:
        return 0.0
    (batch, heads, queries, width), keys = shapes[0], shapes[1][2]
    products = _BACKWARD_PRODUCTS if is_backward else _FORWARD_PRODUCTS
    return 2.0 * products * batch * heads * queries * keys * width


def moved_bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of the elements that are read or written."""
    return sum(each.numel() * each.element_size() for each in tensors if each.layout is torch.strided)


def dtype_of(tensors: Sequence[torch.Tensor]) -> str:
    """Return the name of the type that an operator computes in."""
    floating = next((each.dtype for each in tensors if each.dtype.is_floating_point), None)
    dtype = floating or (tensors[0].dtype if tensors else torch.get_default_dtype())
    return str(dtype).removeprefix("torch.")
