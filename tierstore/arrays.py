"""Tensors as numpy arrays of the same bytes, also those of dtypes that numpy does not have.

bfloat16 and the 8-bit floats have no numpy dtype, so their elements are shown as unsigned integers of the
same width, and the name of the real dtype travels beside them, in the array's attribute ``torch_dtype``.
Whoever reads such an array without tierstore views it again:
``torch.from_numpy(array).view(getattr(torch, name))``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tierstore.errors import UsageError

ATTRIBUTE = "torch_dtype"
"""The attribute that names the torch dtype of an array's elements."""

_CARRIERS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def to_array(tensor: torch.Tensor) -> tuple[npt.NDArray[Any], dict[str, str]]:
    """Show a dense CPU tensor's elements as an array, without a copy, and name their dtype.

    Raises:
        UsageError: no numpy dtype has elements as wide as the tensor's.
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    attributes = {ATTRIBUTE: str(plain.dtype).removeprefix("torch.")}
    try:
        return plain.numpy(), attributes
    except TypeError:
        pass
    try:
        carrier = _CARRIERS[plain.dtype.itemsize]
    except KeyError:
        raise UsageError(f"an array cannot hold elements of {plain.dtype}.") from None
    return plain.view(carrier).numpy(), attributes


def to_tensor(array: npt.NDArray[Any], attributes: Mapping[str, object]) -> torch.Tensor:
    """Return a tensor with an array's elements, of the dtype that its attributes name, if they do.

    Raises:
        UsageError: torch has no such dtype, or its elements are of another width.
    """
    try:
        tensor = torch.from_numpy(np.require(array, requirements="W"))
    except TypeError:
        raise UsageError(f"a tensor cannot hold elements of {array.dtype}.") from None
    name = attributes.get(ATTRIBUTE)
    if name is None:
        return tensor
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != tensor.dtype.itemsize:
        raise UsageError(f"elements of {array.dtype} are not {ATTRIBUTE}={name!r}.")
    return tensor if dtype == tensor.dtype else tensor.view(dtype)
