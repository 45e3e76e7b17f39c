"""What stands in for bytes that are away."""

from __future__ import annotations

import torch

from tierstore.training.layout import Place


def poison_for(place: Place, device: torch.device) -> torch.Tensor:
    """Return one NaN (or the largest number, where there is none) that looks like the tensor."""
    dtype = place.dtype
    is_inexact = dtype.is_floating_point or dtype.is_complex
    value = float("nan") if is_inexact else True if dtype is torch.bool else torch.iinfo(dtype).max
    try:
        single = torch.full((), value, dtype=dtype, device=device)
    except NotImplementedError:  # the fp8 kinds without a NaN, or without a fill
        single = torch.full((dtype.itemsize,), 0xFF, dtype=torch.uint8, device=device).view(dtype)[0]
    return single.expand(place.shape)


class Poisons:
    """What parameters look like while their bytes are away, as those see it who pass every guard by.

    Autograd gives a gradient the strides of its parameter, if these are dense, and gradients in order else.
    So a parameter whose dense strides are not the usual ones keeps them: it is a view of NaNs that all such
    parameters share, as large as the largest of them.  All others are one NaN.

    Args:
        device: where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shared: dict[torch.dtype, torch.Tensor] = {}

    def like(self, place: Place) -> torch.Tensor:
        """Return what looks like the parameter at ``place``."""
        if not _needs_strides(place):
            return poison_for(place, self._device)
        elements = place.shape.numel()
        shared = self._shared.get(place.dtype)
        if shared is None or shared.numel() < elements:
            single = poison_for(place, self._device)[(0,) * len(place.shape)]
            shared = self._shared[place.dtype] = single.expand(elements).contiguous()
        return shared.as_strided(place.shape, place.stride)


def _needs_strides(place: Place) -> bool:
    """Whether autograd would take a parameter of other strides for another one."""
    usual = torch.empty(place.shape, device="meta").stride()
    return place.stride != usual and place.shape.numel() > 0 and _is_dense(place)


def _is_dense(place: Place) -> bool:
    """Whether every byte between the first element and the last is one element's."""
    expected = 1
    for step, size in sorted(zip(place.stride, place.shape, strict=True)):
        if size > 1:
            if step != expected:
                return False
            expected *= size
    return True
