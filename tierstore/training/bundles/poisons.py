"""What stands in for bytes that are away: looks, and nothing that could be read.

Whatever asks PyTorch for the address of a poison's bytes gets a ``RuntimeError`` ("Cannot access data pointer
of Storage that is invalid"): kernels, copies, extensions, ``torch.tensor(p)``.  PyTorch has a flag in a
storage for that, and no function that sets it from Python.  Where the flag is in memory is found out by
means of its two neighbours, which have such functions, and tried out.  With a PyTorch where that fails a
poison is read as NaN.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from tierstore.torch_private import throw_on_write, warn_on_write
from tierstore.training.bundles.layout import TensorLayout


def poison_for(place: TensorLayout, device: torch.device) -> torch.Tensor:
    """Return one element that cannot be read and that looks like the tensor."""
    return _unreadable(_single(place.dtype, device)).expand(place.shape)


def _single(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return one NaN, or the largest number where there is none."""
    is_inexact = dtype.is_floating_point or dtype.is_complex
    value = float("nan") if is_inexact else True if dtype is torch.bool else torch.iinfo(dtype).max
    try:
        return torch.full((), value, dtype=dtype, device=device)
    except NotImplementedError:  # the fp8 kinds without a NaN, or without a fill
        return torch.full((dtype.itemsize,), 0xFF, dtype=torch.uint8, device=device).view(dtype)[0]


class Poisons:
    """What parameters look like while their bytes are away, as those see it who pass every guard by.

    Autograd gives a gradient the strides of its parameter, if these are dense, and gradients in order else.
    So a parameter whose dense strides are not the usual ones keeps them: it is a view of memory that all such
    parameters share, as large as the largest of them.  All others are one element.

    Args:
        device: where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shared: dict[torch.dtype, torch.Tensor] = {}

    def like(self, place: TensorLayout) -> torch.Tensor:
        """Return what looks like the parameter at ``place``."""
        if place.shape.numel() == 0:  # for which autograd goes by strides as well
            return poison_for(place, self._device).as_strided(place.shape, place.stride)
        if not _needs_strides(place):
            return poison_for(place, self._device)
        elements = place.shape.numel()
        shared = self._shared.get(place.dtype)
        if shared is None or shared.numel() < elements:
            several = _single(place.dtype, self._device).expand(elements).contiguous()
            shared = self._shared[place.dtype] = _unreadable(several)
        return shared.as_strided(place.shape, place.stride)


def _needs_strides(place: TensorLayout) -> bool:
    """Whether autograd would take a parameter of other strides for another one."""
    usual = torch.empty(place.shape, device="meta").stride()
    return place.stride != usual and _is_dense(place)


def _is_dense(place: TensorLayout) -> bool:
    """Whether every byte between the first element and the last is one element's."""
    expected = 1
    for step, size in sorted(zip(place.stride, place.shape, strict=True)):
        if size > 1:
            if step != expected:
                return False
            expected *= size
    return True


# ---------------------------------------------------------------------- what cannot be read

_STORAGE_BYTES = 96  # what is looked at of a storage: less than it takes


class _Flags(NamedTuple):
    """Where two flags of a storage are, in bytes from its beginning."""

    are_there_checks: int  # whether flags are looked at before something is written
    must_not_be_read: int


def _unreadable(tensor: torch.Tensor) -> torch.Tensor:
    """Let every access to the bytes of a tensor, and of its views, raise ``RuntimeError``."""
    flags = _flags()
    if flags is not None:
        _set(tensor, flags)
    return tensor


def _set(tensor: torch.Tensor, flags: _Flags) -> None:
    begin: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - where the storage itself is
    for flag in flags:
        ctypes.memset(begin + flag, 1, 1)


@functools.cache
def _flags() -> _Flags | None:
    """Return where the flags are; ``None``: they are not where they are looked for."""
    if throw_on_write is None or warn_on_write is None:
        return None
    thrown, warned = _changed_by(throw_on_write), _changed_by(warn_on_write)
    # The flag lies between these two: [are there checks] [throw on write] [throw on read] [warn on write].
    if len(thrown) != 2 or warned != [thrown[0], thrown[1] + 2] or thrown[1] != thrown[0] + 1:
        return None
    flags = _Flags(thrown[0], thrown[1] + 1)
    tensor = torch.zeros(1)
    _set(tensor, flags)
    return flags if _raises(tensor.tolist) and _raises(tensor.zero_) else None


def _changed_by(change: Callable[[torch.Tensor], object]) -> list[int]:
    """Return which bytes of a fresh storage go from 0 to 1 by a change; none, if others change as well."""
    tensor = torch.zeros(1)
    begin: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - where the storage itself is
    before = ctypes.string_at(begin, _STORAGE_BYTES)
    change(tensor)
    after = ctypes.string_at(begin, _STORAGE_BYTES)
    changed = [number for number in range(_STORAGE_BYTES) if before[number] != after[number]]
    return changed if all((before[number], after[number]) == (0, 1) for number in changed) else []


def _raises(act: Callable[[], object]) -> bool:
    try:
        act()
    except RuntimeError:
        return True
    return False
