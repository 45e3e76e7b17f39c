"""Tensors as arrays that programs without torch can read: a dtype that numpy and zarr know, and an attribute.

Most dtypes are the same on both sides.  The others are shown as unsigned integers with as many bits, and the
attribute ``torch_dtype`` says what the bits mean:

=====================================  ==================
torch                                  array
=====================================  ==================
bool, ints, float16 to float64,        the same
complex64, complex128
bfloat16, bits16                       uint16
all kinds of float8 and float4,        uint8
ints of less than a byte, bits8
complex32                              uint32
=====================================  ==================

Every tensor has the attribute, so that what was written comes back as it was; an array without it comes
back as the dtype that it has.  Shapes are kept.  Knows nothing of stores and files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tierstore.errors import UsageError
from tierstore.tensors import describe

Array = npt.NDArray[Any]

ATTRIBUTE = "torch_dtype"
"""The attribute that names the torch dtype, without ``torch.``."""

_SAME = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Quantised dtypes, whose names begin so, need a scale beside their bytes.
_DTYPES = {
    _name(dtype): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not _name(dtype).startswith(("q", "uq"))
}


def array_dtype(dtype: torch.dtype) -> str:
    """Return the name, to numpy and zarr, of the dtype that stands for ``dtype``.

    Raises:
        UsageError: there is none: a quantised dtype.
    """
    return _name(_shown(dtype))


def attributes(dtype: torch.dtype) -> dict[str, str]:
    """Return what an array of ``dtype`` has to say beside its own dtype."""
    return {ATTRIBUTE: _name(dtype)}


def to_array_view(tensor: torch.Tensor) -> tuple[Array, dict[str, str]]:
    """Return a tensor as an array, and the array's attributes.

    The array shares the tensor's memory where that is host memory.

    Raises:
        UsageError: it is not a tensor whose bytes can be copied; the message says why.
    """
    describe(tensor)
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    return plain.view(_shown(plain.dtype)).numpy(), attributes(tensor.dtype)


def from_array_view(array: npt.ArrayLike, attrs: Mapping[str, object]) -> torch.Tensor:
    """Return an array as the tensor that it stands for.

    The tensor shares the array's memory where torch can.

    Raises:
        UsageError: the attribute names no dtype of torch, or one that such an array does not stand for.
    """
    given = np.asarray(array)
    name = attrs.get(ATTRIBUTE, given.dtype.name)
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise UsageError(
            f"{ATTRIBUTE}={name!r} is not a dtype whose bytes can be copied. Accepted: {_accepted()}"
        )
    if given.dtype.name != array_dtype(dtype):
        raise UsageError(
            f"an array of {given.dtype.name} does not stand for torch.{name}: "
            f"that is kept as {array_dtype(dtype)}. Is {ATTRIBUTE!r} that of another array?"
        )
    return torch.from_numpy(_native(given)).view(dtype)


def _shown(dtype: torch.dtype) -> torch.dtype:
    if dtype in _SAME:
        return dtype
    if _name(dtype) not in _DTYPES:
        raise UsageError(f"{dtype} has no array that stands for it. Accepted: {_accepted()}")
    return _BITS[dtype.itemsize]


def _accepted() -> str:
    return ", ".join(sorted(_DTYPES))


def _native(array: Array) -> Array:
    """Return the array as torch takes it: this machine's byte order, no step back, not read-only."""
    if not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        return array.copy()
    return array
