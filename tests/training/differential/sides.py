"""Parts of a program's model that compute on the host beside a device, offloaded and in plain PyTorch.

Plain PyTorch copies what such a part is given and returns, and the gradients of both: what a program would do
with ``Tensor.to``.  No mode sees that, as none sees a crossing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from tierstore.training.pytorch.function_modes import out_of_sight
from tierstore.training.pytorch.own_work import ordinary_mode

_innermost: Callable[[], object | None] = torch._C._functorch.peek_interpreter_stack


def parts_of(side: int, model: nn.Module) -> list[str]:
    """Return the names of the parts whose bits are set."""
    return [name for number, (name, _) in enumerate(model.named_children()) if side >> number & 1]


def placement_of(side: int, model: nn.Module) -> Mapping[str, str]:
    """Return the patterns that place them."""
    return dict.fromkeys(parts_of(side, model), "cpu")


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        del ctx
        with ordinary_mode():
            return value.detach().clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        del ctx
        return _copied(gradient)

    @staticmethod
    def jvp(ctx: object, tangent: Tensor) -> Tensor:
        del ctx
        return tangent.clone()


_copy: Callable[[Tensor], Tensor] = _Copy.apply


def _copied(value: Tensor) -> Tensor:
    if _innermost() is not None or forward_ad.unpack_dual(value).tangent is not None:
        return value.clone()  # a tangent goes along, as with ``Tensor.to``; ``detach`` would drop it
    if torch.is_grad_enabled() and value.requires_grad:
        return _copy(value)
    with ordinary_mode(), torch.no_grad():
        return value.detach().clone()


def _all_copied(values: Any) -> Any:  # noqa: ANN401 - a module's own
    with out_of_sight():
        return pytree.tree_map_only(Tensor, _copied, values)


class _Before:
    """Copies what a part is given, and lets the copy of what it returns be the last thing."""

    def __init__(self, last: RemovableHandle) -> None:
        self.last = last.id

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
        hooks: Any = module._forward_hooks
        if self.last in hooks:
            hooks.move_to_end(self.last)
        return _all_copied((args, kwargs))


def _after(_: nn.Module, __: object, output: Any) -> Any:  # noqa: ANN401 - a module's own
    return _all_copied(output)


def place_plainly(side: int, model: nn.Module) -> list[RemovableHandle]:
    """Let parts of a model copy what they are given and return; or all of it, if all of them do."""
    names = parts_of(side, model)
    borders = [model.get_submodule(name) for name in names]
    if names and len(names) == len(list(model.children())):
        borders = [model]
    handles: list[RemovableHandle] = []
    for module in borders:
        last = module.register_forward_hook(_after)
        first = module.register_forward_pre_hook(_Before(last), prepend=True, with_kwargs=True)
        handles += [first, last]
    return handles
