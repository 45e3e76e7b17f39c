"""Tensors as bytes: what can be stored, how it is described, and how bytes become a tensor again.

Shape, dtype and the layout of the strides are kept; a tensor that is not dense (with gaps or
overlaps) is stored contiguous.  Knows nothing of tiers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tierstore.errors import UsageError


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a stored tensor looks like.

    Attributes:
        shape: its sizes.
        dtype: its element type.
        nbytes: elements times bytes an element.
        stride: in elements; dense.
        device: where it was when it was put, and where `Store.get` returns it by default.
    """

    shape: torch.Size
    dtype: torch.dtype
    nbytes: int
    stride: tuple[int, ...] = ()
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable


def describe(tensor: torch.Tensor) -> TensorSpec:
    """Return the spec under which ``tensor`` would be stored.

    Raises:
        UsageError: it is not a tensor whose bytes can be copied; the message says why.
    """
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"not a tensor: {type(tensor).__name__}. Convert it with torch.as_tensor first.")
    reason = _why_not_storable(tensor)
    if reason is not None:
        raise UsageError(f"a {reason} cannot be stored: it has no plain storage of bytes to copy.")
    return TensorSpec(
        tensor.shape,
        tensor.dtype,
        tensor.numel() * tensor.element_size(),
        dense_stride(tensor),
        tensor.device,
    )


def _why_not_storable(tensor: torch.Tensor) -> str | None:
    kinds = {
        "meta tensor": tensor.is_meta,
        f"sparse tensor ({tensor.layout})": tensor.layout is not torch.strided,
        f"quantised tensor ({tensor.dtype})": tensor.is_quantized,
        "nested tensor": tensor.is_nested,
        f"wrapper subclass ({type(tensor).__name__})": is_traceable_wrapper_subclass(tensor),
    }
    reason = next((kind for kind, applies in kinds.items() if applies), None)
    return reason or _why_no_storage(tensor)


def _why_no_storage(tensor: torch.Tensor) -> str | None:
    try:
        storage = tensor.untyped_storage()
        storage.data_ptr()  # a wrapper that does not say that it is one has a storage without memory
    except (NotImplementedError, RuntimeError):
        return f"tensor without memory of its own ({type(tensor).__name__}), as inside torch.vmap"
    nbytes = storage.nbytes()
    if nbytes == 0 and tensor.numel() > 0:
        return f"tensor whose storage was freed ({type(tensor).__name__})"
    return None


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the tensor's strides if it is dense without overlap, else those of a contiguous one."""
    stride = tensor.stride()
    expected = 1
    order = sorted(range(tensor.dim()), key=lambda dim: (stride[dim], tensor.shape[dim]))
    for dim in order:
        if tensor.shape[dim] == 1:
            continue
        if stride[dim] != expected:
            return contiguous_stride(tensor.shape)
        expected *= tensor.shape[dim]
    return stride


def contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of ``shape``."""
    stride: list[int] = []
    step = 1
    for length in reversed(shape):
        stride.append(step)
        step *= max(length, 1)
    return tuple(reversed(stride))


def view_bytes(memory: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """View a slot's bytes (one-dimensional uint8) as the tensor they are."""
    return memory.view(spec.dtype).as_strided(spec.shape, spec.stride)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """View a dense tensor as the bytes that it consists of, in the order of its storage."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
