"""Where values cross between a device and modules that compute on the host: hooks at borders.

The graph is that of a program that brings its values itself (``x.to("cpu", copy=True)`` before a module on
the host, ``y.to(device, copy=True)`` after it): one node at each border, whose derivative goes the other way.

1. Before a module at a border each tensor among its arguments is brought to the module's side, after it each
   tensor that it returns is brought back: once in a call, however often it is there.  Numbers, ``None`` and
   objects that PyTorch does not look into stay as they are.
2. What is on the right side already is passed as it is.
3. Users' own hooks on the module are inside: they see what the module sees.  So is a region that is
   recomputed: it keeps what has crossed.
4. Nothing is cast, added up or put into another order by a crossing.
5. Inside a transform of ``torch.func`` values are copied by ``Tensor.to``, which has a rule for each of them.
6. What bytes need not travel do not (`tierstore.training.modules.neighbours`); the graph is the same.

What a crossing does is the library's own work: no mode sees it, and no meter counts it as the program's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tierstore.planning.placement import CPU, DEVICE
from tierstore.torch_private import innermost_transform, tree_map_only
from tierstore.training.faults import guard
from tierstore.training.modules.hooks import Hook
from tierstore.training.modules.neighbours import (
    KnownValues,
    exchanged,
    is_exchangeable,
    next_on_host,
    spares_its_input,
)
from tierstore.training.pytorch.function_modes import out_of_sight


class Carrier(Protocol):
    """Carries values between the device and the host: a `tierstore.training.modules.link.Link`, say."""

    def device_of(self, side: str) -> torch.device:
        """Return what PyTorch calls a side: ``"cpu"`` or ``"device"``."""
        ...

    def is_there(self, tensor: torch.Tensor, side: str) -> bool:
        """Whether a tensor is known to be on a side."""
        ...

    def carry(self, tensor: torch.Tensor, side: str) -> torch.Tensor:
        """Return a copy of a tensor's values on a side, without a graph."""
        ...

    def note_on_host(self, value: torch.Tensor) -> None:
        """Take in that a value is on the host, and not to be brought there."""
        ...

    def sweep(self) -> None:
        """Let go of what nobody refers to any more."""
        ...


class _Cross(torch.autograd.Function):
    """A value's way to the other side; its gradient's way is the way back."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        value: torch.Tensor,
        carry: Callable[[], torch.Tensor],
        link: Carrier,
        side: str,
    ) -> torch.Tensor:
        """Carry a value."""
        del value
        ctx.link, ctx.side = link, side
        ctx.set_materialize_grads(False)
        return carry()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:  # noqa: ANN401
        """Carry its gradient."""
        if gradient is None:
            return None, None, None, None
        with out_of_sight():
            return cross(gradient, ctx.link, _other(ctx.side)), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor | None, *_: object) -> torch.Tensor | None:  # noqa: ANN401
        """Carry a tangent."""
        return None if tangent is None else ctx.link.carry(tangent, ctx.side)


def _other(side: str) -> str:
    return DEVICE if side == CPU else CPU


def cross(
    value: torch.Tensor, link: Carrier, side: str, known: Callable[[], torch.Tensor] | None = None
) -> torch.Tensor:
    """Return a value on a side, with a node in its graph if it has one.

    Args:
        value: on the other side.
        link: that carries.
        side: ``"cpu"`` or ``"device"``.
        known: returns what is there already of the value; ``None``: nothing is.

    Raises:
        CapacityError: a tier has no room for it beside what is in use.
        BackendError: a medium failed.
    """
    if innermost_transform() is not None:
        return value.to(link.device_of(side), copy=True)
    carry = known or (lambda: link.carry(_with_bytes(value), side))
    if torch.is_grad_enabled() and value.requires_grad:
        crossed: torch.Tensor = _Cross.apply(value, carry, link, side)  # type: ignore[no-untyped-call]
        return crossed
    return carry()


def _with_bytes(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its bytes: a parameter's that is guarded come, and stay while this lives."""
    return value if guard.guarded_tensor_of(value) is None else value.detach()


# ---------------------------------------------------------------------- where a thread is


class _Sides(threading.local):
    """The sides of the modules at borders that run in this thread, outermost first."""

    def __init__(self) -> None:
        self.entered: list[tuple[nn.Module, str]] = []


_here = _Sides()


def is_inside_host_module() -> bool:
    """Whether this thread runs a module that computes on the host."""
    return bool(_here.entered) and _here.entered[-1][1] == CPU


# ---------------------------------------------------------------------- hooks


class Crossings:
    """The crossings of one model.

    Args:
        link: that carries.
        borders: the modules at which values cross, with the side of each.
    """

    def __init__(self, link: Carrier, borders: Mapping[nn.Module, str]) -> None:
        self.link = link
        self._borders = borders
        self._known = KnownValues()

    def register(self, chosen: Callable[[nn.Module], bool]) -> Iterator[RemovableHandle]:
        """Hook some of the modules at borders, before all hooks that they have and after them."""
        for module, side in self._borders.items():
            if chosen(module):
                border = _Border(self.link, module, side, self._known, self._borders)
                last = module.register_forward_hook(_CrossOut(border))
                yield last
                left = module.register_forward_hook(_Leave(module), always_call=True)
                yield left
                first = _CrossIn(border, last.id)
                yield module.register_forward_pre_hook(first, prepend=True, with_kwargs=True)

    def begin_forward(self) -> None:
        """The model begins to run: no module of it does in this thread, whatever an interrupt has left."""
        _here.entered.clear()
        self.link.sweep()


class _Border:
    """One module at a border, and what brings its values.

    Args:
        link: that carries.
        module: whose.
        side: of the module.
        known: what is on the host of values that the device has.
        borders: of the model.
    """

    def __init__(
        self,
        link: Carrier,
        module: nn.Module,
        side: str,
        known: KnownValues,
        borders: Mapping[nn.Module, str],
    ) -> None:
        self.link = link
        self.module = module
        self.side = side
        self._known = known
        self._borders = borders

    def bring_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an argument on the module's side."""
        if _is_there(tensor, self.link, self.side):
            return tensor
        if self.side != CPU:
            return cross(tensor, self.link, self.side)
        spares = spares_its_input(self.module)
        found = self._known.find(tensor, may_share=spares)
        crossed = cross(tensor, self.link, self.side, found)
        if found is None and spares:
            self._known.note(tensor, self.module, crossed, may_share=True)
        return crossed

    def bring_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an output on the side around the module."""
        around = _other(self.side)
        if _is_there(tensor, self.link, around):
            return tensor
        crossed = cross(tensor, self.link, around)
        if self.side == CPU:
            self._known.note(crossed, self, tensor, may_share=spares_its_input(self.module))
        return crossed

    def exchange(self, output: object) -> torch.Tensor | None:
        """Return the output for a neighbour on the host, which is given it next; ``None``: none is."""
        if self.side != CPU or innermost_transform() is not None or not is_exchangeable(output):
            return None
        assert isinstance(output, torch.Tensor)
        then = next_on_host(self.module, self._borders)
        if then is None or _is_there(output, self.link, DEVICE):
            return None
        value = exchanged(output, may_share=spares_its_input(then) and spares_its_input(self.module))
        self.link.note_on_host(value)
        return value


class _CrossIn(Hook):
    """Brings what a module is given to its side."""

    def __init__(self, border: _Border, last: int) -> None:
        self._border = border
        self._last = last

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments on the module's side."""
        if module is not self._border.module:
            return None
        _here.entered.append((module, self._border.side))
        hooks: Any = module._forward_hooks  # noqa: SLF001 - users' own hooks come before ours
        if self._last in hooks:
            hooks.move_to_end(self._last)
        with out_of_sight():
            found = _brought((args, kwargs), self._border.bring_in)
        return None if found is None else (found[0], found[1])


class _Leave(Hook):
    """Takes in that a module has run, well or badly."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        """See above."""
        del args, output
        if module is self._module and _here.entered and _here.entered[-1][0] is module:
            _here.entered.pop()


class _CrossOut(Hook):
    """Brings what a module returns to the side around it."""

    def __init__(self, border: _Border) -> None:
        self._border = border

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: object, output: Any) -> Any:  # noqa: ANN401 - a module's own
        """Return the output on the side around the module."""
        del args
        if module is not self._border.module:
            return None
        with out_of_sight():
            given_on = self._border.exchange(output)
            return _brought(output, self._border.bring_out) if given_on is None else given_on


def _brought(values: Any, bring: Callable[[torch.Tensor], torch.Tensor]) -> Any:  # noqa: ANN401 - a module's own
    """Return nested values with each tensor brought, once; ``None``: they are as they are."""
    crossed: dict[int, torch.Tensor] = {}  # by the id of what ``values`` keeps

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in crossed:
            crossed[id(tensor)] = bring(tensor)
        return crossed[id(tensor)]

    brought = tree_map_only(torch.Tensor, once, values)
    return brought if any(id(tensor) != number for number, tensor in crossed.items()) else None


def _is_there(tensor: torch.Tensor, link: Carrier, side: str) -> bool:
    guarded_tensor = guard.guarded_tensor_of(tensor)
    if guarded_tensor is not None:
        return (guarded_tensor.binding.confined_to is not None) is (side == CPU)
    return link.is_there(tensor, side)
