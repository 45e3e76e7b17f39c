"""Values between modules on the host whose bytes need not travel.

1. A child of a plain ``nn.Sequential`` whose next child computes on the host, too, hands it its output as it
   is.  Nobody else is given that, so that nothing is added up in another order.
2. Anything else travels, however often it has: that nobody has written to a value since cannot be known
   (``.data``, NumPy, DLPack and collectives write without being counted).
3. Two modules have one memory only if neither writes to it, nor keeps it for somebody who might: PyTorch's
   own modules without submodules, unless they are told ``inplace``.  Any other gets a copy in host memory.
4. The graph is that of values that travel, node by node, and a gradient is as dense as one that has: sums
   come in the order of nodes, kernels look at strides, and last bits may depend on both.

Knows nothing of stores.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType

import torch
from torch import nn

from tierstore.planning.homes import CPU
from tierstore.torch_private import global_forward_hooks, global_forward_pre_hooks
from tierstore.training.bundles.unseen_writes import is_pytorchs_own
from tierstore.training.pytorch.own_work import ordinary_mode


def spares_its_input(module: nn.Module) -> bool:
    """Whether a module certainly writes neither to what it is given nor to what it has returned."""
    return (
        is_pytorchs_own(module)
        and next(module.children(), None) is None
        and not getattr(module, "inplace", False)
    )


# ---------------------------------------------------------------------- from one to the next


def next_on_host(module: nn.Module, borders: Mapping[nn.Module, str]) -> nn.Module | None:
    """Return the module on the host that is given next, and alone, what this one returns; ``None``: none is.

    To be called in a hook of the module.
    """
    parent = _sequential_around(sys._getframe())  # noqa: SLF001 - there is no other way to know who calls
    if parent is None:
        return None
    children = list(parent)
    places = [place for place, child in enumerate(children) if child is module]
    if len(places) != 1 or places[0] + 1 == len(children):
        return None
    then = children[places[0] + 1]
    hooks = (then._forward_pre_hooks, module._forward_hooks)  # noqa: SLF001 - who else would see the value
    is_seen = any(
        not type(each).__module__.startswith("tierstore.") for some in hooks for each in some.values()
    )
    is_seen = is_seen or bool(global_forward_hooks or global_forward_pre_hooks)
    return then if borders.get(then) == CPU and not is_seen else None


def _sequential_around(frame: FrameType | None) -> nn.Sequential | None:
    """Return the plain ``nn.Sequential`` whose forward has made the call that a hook is in."""
    call = nn.Module._call_impl.__code__  # noqa: SLF001
    while frame is not None and frame.f_code is not call:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename == call.co_filename:
        frame = frame.f_back
    if frame is None or frame.f_code is not nn.Sequential.forward.__code__:
        return None
    parent = frame.f_locals.get("self")
    return parent if type(parent) is nn.Sequential else None


def is_exchangeable(output: object) -> bool:
    """Whether an output is one plain tensor, which a neighbour can be handed."""
    return isinstance(output, torch.Tensor) and _is_plain(output)


def exchanged(value: torch.Tensor, *, may_share: bool) -> torch.Tensor:
    """Return a value for a neighbour, in its graph.

    Args:
        value: that a module on the host has returned.
        may_share: whether both spare it.
    """
    if not torch.is_grad_enabled() or not value.requires_grad:
        return value if may_share and _is_dense(value) else _copied(value)
    # Twice: a value that travels goes there and back, and sums of derivatives come in the order of nodes.
    handed: torch.Tensor = _HandOn.apply(value, may_share)  # type: ignore[no-untyped-call]
    again: torch.Tensor = _HandOn.apply(handed, True)  # type: ignore[no-untyped-call]  # noqa: FBT003
    return again


class _HandOn(torch.autograd.Function):
    """A value that stays on the host, where the graph of one that travels has a node."""

    @staticmethod
    def forward(ctx: object, value: torch.Tensor, may_share: bool) -> torch.Tensor:
        """Return it in the same memory, or a copy."""
        del ctx
        return _alias(value) if may_share and _is_dense(value) else _copied(value)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Hand its gradient on, as dense as one that has travelled."""
        del ctx
        if torch.is_grad_enabled() and gradient.requires_grad:
            return _HandOn.apply(gradient, True), None  # type: ignore[no-untyped-call]  # noqa: FBT003
        return _dense(gradient), None

    @staticmethod
    def jvp(ctx: object, tangent: torch.Tensor, _: object) -> torch.Tensor:
        """Copy a tangent."""
        del ctx
        return _copied(tangent)


def _copied(value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), ordinary_mode():
        return value.detach().clone()


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as dense as a copy of it would be."""
    if gradient.layout is not torch.strided or _is_dense(gradient):
        return gradient
    return gradient.clone()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a copy of a tensor would have the same strides."""
    with ordinary_mode():
        return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _alias(value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), ordinary_mode():
        return value.detach()


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized)
        and not (tensor.is_conj() or tensor.is_neg())
        and not tensor.is_inference()
    )
