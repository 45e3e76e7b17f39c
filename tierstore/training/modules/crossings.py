"""Where values cross between a device and modules that compute on the host: hooks at borders.

The graph is that of a program that brings its values itself (``x.to("cpu", copy=True)`` before a module on
the host, ``y.to(device, copy=True)`` after it): one node at each border, whose derivative goes the other way.

1. Before a module at a border each tensor among its arguments is brought to the module's side, after it each
   tensor that it returns is brought back: once in a call, however often it is there.  Tensors in fields of
   dataclasses are brought, too, and packed sequences as their ``to`` does.  Numbers, ``None`` and other
   objects that PyTorch does not look into stay as they are.
2. What is on the right side already is passed as it is.  Whose call it is counts, not where a module is
   kept: one that the other side calls is at a border, by whatever reference, and one that its own side calls
   is not.
3. Users' own hooks on the module are inside: they see what the module sees.  So is a region that is
   recomputed: it keeps what has crossed.
4. Nothing is cast, added up or put into another order by a crossing.
5. Inside a transform of ``torch.func``, and where derivatives go along with a value, it is copied by
   ``Tensor.to``, which has a rule for each of them.
6. What bytes need not travel do not (`tierstore.training.modules.neighbours`); the graph is the same.

What a crossing does is the library's own work: no mode sees it, and no meter counts it as the program's.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.hooks import RemovableHandle

from tierstore.errors import UsageError
from tierstore.planning.homes import CPU, DEVICE
from tierstore.quoting import quoted
from tierstore.torch_private import innermost_transform, tree_flatten
from tierstore.training.autograd.accumulation import is_in_backward
from tierstore.training.faults import guard
from tierstore.training.modules.hooks import Hook
from tierstore.training.modules.host_modules import PlacedModules
from tierstore.training.modules.neighbours import (
    exchanged,
    is_exchangeable,
    next_on_host,
    spares_its_input,
)
from tierstore.training.modules.nested_values import are_same, brought, content_of, made_anew
from tierstore.training.modules.plain_attributes import note_mixture
from tierstore.training.pytorch.function_modes import out_of_sight
from tierstore.uncompiled import uncompiled


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
        link: Carrier,
        side: str,
    ) -> torch.Tensor:
        """Carry a value."""
        ctx.link, ctx.side = link, side
        ctx.set_materialize_grads(False)
        return link.carry(_with_bytes(value), side)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:  # noqa: ANN401
        """Carry its gradient."""
        if gradient is None:
            return None, None, None
        with out_of_sight():
            return cross(gradient, ctx.link, _other(ctx.side)), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor | None, *_: object) -> torch.Tensor | None:  # noqa: ANN401
        """Carry a tangent."""
        return None if tangent is None else ctx.link.carry(tangent, ctx.side)


def _other(side: str) -> str:
    return DEVICE if side == CPU else CPU


def cross(value: torch.Tensor, link: Carrier, side: str) -> torch.Tensor:
    """Return a value on a side, with a node in its graph if it has one.

    Args:
        value: on the other side.
        link: that carries.
        side: ``"cpu"`` or ``"device"``.

    Raises:
        CapacityError: a tier has no room for it beside what is in use.
        BackendError: a medium failed.
    """
    if innermost_transform() is not None or _has_tangent(value):
        return value.to(link.device_of(side), copy=True)
    if torch.is_grad_enabled() and value.requires_grad:
        crossed: torch.Tensor = _Cross.apply(value, link, side)  # type: ignore[no-untyped-call]
        return crossed
    return link.carry(_with_bytes(value), side)


def _has_tangent(value: torch.Tensor) -> bool:
    """Whether derivatives go along with a value (``torch.autograd.forward_ad``)."""
    return forward_ad.unpack_dual(value).tangent is not None


def _with_bytes(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its bytes: a parameter's that is guarded come, and stay while this lives."""
    return value if guard.guarded_tensor_of(value) is None else value.detach()


# ---------------------------------------------------------------------- where a thread is


class _Entered(NamedTuple):
    """A module that runs.

    Attributes:
        border: whose hooks have said so: a run inside `place` has its own on the same module.
        module: which.
        side: where.
        is_crossing: whether values cross as it is called.
        given: containers that were made for it, as values in them have crossed, with what was in each.
    """

    border: _Border
    module: nn.Module
    side: str
    is_crossing: bool
    given: Sequence[tuple[Any, Sequence[object]]]


class _Sides(threading.local):
    """The modules that run in this thread, outermost first: from the first on that is on the host."""

    def __init__(self) -> None:
        self.entered: list[_Entered] = []


_here = _Sides()


def _innermost(border: _Border) -> _Entered | None:
    """Return the innermost module that runs around the one that a hook is of; forget what was interrupted."""
    for index in reversed(range(len(_here.entered))):
        entered = _here.entered[index]
        if _is_running(entered.module):
            return entered
        if entered.border is border or entered.module is not border.module:  # else of this very call
            del _here.entered[index]
    return None


def _entered_by(border: _Border) -> _Entered | None:
    """Return what the hooks of a module have noted of its call that ends now."""
    if not _here.entered:
        return None
    return next((each for each in reversed(_here.entered) if each.border is border), None)


def _is_running(module: nn.Module) -> bool:
    """Whether a module runs around the one whose hook this is called in."""
    call = nn.Module._call_impl.__code__  # noqa: SLF001 - there is no other way to know who calls
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - likewise
    is_own = True
    while frame is not None:
        if frame.f_code is call:
            if not is_own and frame.f_locals.get("self") is module:
                return True
            is_own = False
        frame = frame.f_back
    return False


def _has_come_out_of(error: BaseException, frame: FrameType | None) -> bool:
    """Whether an error has ended the call that a hook is called for: not one that is handled around it."""
    call = nn.Module._call_impl.__code__  # noqa: SLF001
    while frame is not None and frame.f_code is not call:
        frame = frame.f_back
    traceback = error.__traceback__
    while traceback is not None:
        if frame is not None and traceback.tb_frame is frame:
            return True
        traceback = traceback.tb_next
    return False


def is_inside_host_module() -> bool:
    """Whether this thread runs a module that computes on the host."""
    return bool(_here.entered) and _here.entered[-1].side == CPU


# ---------------------------------------------------------------------- hooks


class Crossings:
    """The crossings of one model.

    Args:
        link: that carries.
        model: whose.
        placed: where its modules compute.
    """

    def __init__(self, link: Carrier, model: nn.Module, placed: PlacedModules) -> None:
        self.link = link
        self._sides = placed.sides(model)
        self._borders = placed.borders(model)
        self._names = {module: name for name, module in model.named_modules()} if self._sides else {}

    def register(self, chosen: Callable[[nn.Module], bool]) -> Iterator[RemovableHandle]:
        """Hook some of the modules, before all hooks that they have and after them."""
        for module, side in self._sides.items():
            if chosen(module):
                border = _Border(self.link, module, side, self._borders, self._names[module])
                last = module.register_forward_hook(_CrossOut(border))
                yield last
                left = module.register_forward_hook(_Leave(border), always_call=True)
                yield left
                first = _CrossIn(border, (last.id, left.id))
                yield module.register_forward_pre_hook(first, prepend=True, with_kwargs=True)

    def begin_forward(self, called: nn.Module) -> None:
        """The program calls the model or a part of it: forget what an interrupt has left in this thread.

        A part's own values have crossed already.
        """
        _here.entered = [each for each in _here.entered if each.module is called or _is_running(each.module)]
        self.link.sweep()


class _Border:
    """One module that both sides may call, and what brings its values.

    Args:
        link: that carries.
        module: whose.
        side: of the module.
        borders: of the model.
        name: of the module in it.
    """

    def __init__(
        self, link: Carrier, module: nn.Module, side: str, borders: Mapping[nn.Module, str], name: str
    ) -> None:
        self.name = name
        self.link = link
        self.module = module
        self.side = side
        self._borders = borders
        self._known: set[bool] = set()  # what `is_crossed` has said in forward passes

    @property
    def is_at_home(self) -> bool:
        """Whether nothing around the module, as it is called now, is on the host, and it is not either."""
        return self.side == DEVICE and not _here.entered and not is_in_backward()

    def is_crossed(self, given: object) -> bool:
        """Whether values cross as the module is called now, in a hook of it.

        They do where the innermost module around it is on the other side; where there is none, the program
        calls it, which is on the device.  But as a region is computed again in backward, nobody is around
        what was called in it: then it is as in forward, and if that was now so and now so, what is given
        tells.
        """
        around = _innermost(self)
        if around is not None:
            return around.side != self.side
        if not is_in_backward():
            return self.side == CPU
        if len(self._known) == 1:
            return next(iter(self._known))
        given = [each for each in tree_flatten(given)[0] if isinstance(each, torch.Tensor)]
        is_from_elsewhere = any(_is_there(each, self.link, _other(self.side)) for each in given)
        return is_from_elsewhere and not any(_is_there(each, self.link, self.side) for each in given)

    def note_forward(self, *, is_crossing: bool) -> None:
        """Take in whether values cross in a call, unless it is made again in backward."""
        if not is_in_backward():
            self._known.add(is_crossing)

    def is_crossing(self) -> bool:
        """Whether values cross in the call of the module that ends now, in a hook of it."""
        entered = _entered_by(self)
        if entered is None:  # at home, or another call of the model has begun inside
            return self.side == CPU
        return entered.is_crossing

    def bring_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an argument on the module's side."""
        if _is_there(tensor, self.link, self.side):
            return tensor
        return cross(tensor, self.link, self.side)

    def bring_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an output on the side around the module."""
        around = _other(self.side)
        if _is_there(tensor, self.link, around):
            return tensor
        return cross(tensor, self.link, around)

    def explain(self, error: BaseException) -> None:
        """Say whose tensors an error is about, if the module's call has ended with it."""
        if _has_come_out_of(error, sys._getframe()):  # noqa: SLF001 - the hook is called in that frame
            there = _other(self.side)
            device = self.link.device_of(self.side)
            note_mixture(error, self.module, self.name, device, lambda t: _is_there(t, self.link, there))

    def exchange(self, output: object) -> torch.Tensor | None:
        """Return the output for a neighbour on the host, which is given it next; ``None``: none is."""
        if self.side != CPU or innermost_transform() is not None or not is_exchangeable(output):
            return None
        assert isinstance(output, torch.Tensor)
        if _has_tangent(output):
            return None
        then = next_on_host(self.module, self._borders)
        if then is None or _is_there(output, self.link, DEVICE):
            return None
        value = exchanged(output, may_share=spares_its_input(then) and spares_its_input(self.module))
        self.link.note_on_host(value)
        return value


class _CrossIn(Hook):
    """Brings what a module is given to its side."""

    def __init__(self, border: _Border, last: Sequence[int]) -> None:
        self._border = border
        self._last = last  # of our hooks after it, in this order

    def __deepcopy__(self, memo: dict[int, object]) -> Callable[..., None]:
        return require_side_of_copy if self._border.side == CPU else super().__deepcopy__(memo)

    @uncompiled
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments on the module's side."""
        if module is not self._border.module:
            return None
        if self._border.is_at_home:
            self._border.note_forward(is_crossing=False)
            return None
        is_crossing = self._border.is_crossed((args, kwargs))
        self._border.note_forward(is_crossing=is_crossing)
        given: list[tuple[Any, Sequence[object]]] = []
        _here.entered.append(_Entered(self._border, module, self._border.side, is_crossing, given))
        if not is_crossing:
            return None
        hooks: Any = module._forward_hooks  # noqa: SLF001 - users' own hooks come before ours
        for each in self._last:
            if each in hooks:
                hooks.move_to_end(each)
        with out_of_sight():
            found = brought((args, kwargs), self._border.bring_in)
        if found is None:
            return None
        given += [(each, content_of(each)) for each in made_anew((args, kwargs), found)]
        return found[0], found[1]


def require_side_of_copy(module: nn.Module, args: object, kwargs: object) -> None:
    """The hook before a copy of a module at a border: nothing crosses there, as it is in no run.

    Raises:
        UsageError: it is on the host still, and is given values of an accelerator.
    """
    own = {each.device.type for each in module.parameters()}
    given = {each.device.type for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)}
    if own == {CPU} and given - {CPU, "meta"}:
        raise UsageError(
            f"a copy of a {type(module).__name__} that computes on the host in its run is given values of "
            f"{', '.join(sorted(given - {CPU}))}: values cross in the run's own model, and nowhere else. "
            "Move the copy as a whole, copy.to(device), or offload it as well."
        )


class _Leave(Hook):
    """Takes in that a module has run, well or badly."""

    def __init__(self, border: _Border) -> None:
        self._border = border

    @uncompiled
    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        """See above."""
        del args
        if module is not self._border.module:
            return
        if output is None and (error := sys.exception()) is not None:
            self._border.explain(error)
        entered = _entered_by(self._border)
        if entered is not None:
            _here.entered = [each for each in _here.entered if each is not entered]
            _require_unwritten(entered)


def _require_unwritten(left: _Entered) -> None:
    """Raise if a module has written to a container that was made for it: its caller would not see that."""
    for container, content in left.given:
        if not are_same(content_of(container), content):
            raise UsageError(
                f"a {type(left.module).__name__} computes on {quoted(left.side)} and writes to a "
                f"{type(container).__name__} that it was given: it has a copy, as tensors in it are on the "
                "other side. Let it return what it adds."
            )


class _CrossOut(Hook):
    """Brings what a module returns to the side around it."""

    def __init__(self, border: _Border) -> None:
        self._border = border

    @uncompiled
    def __call__(self, module: nn.Module, args: object, output: Any) -> Any:  # noqa: ANN401 - a module's own
        """Return the output on the side around the module."""
        del args
        if module is not self._border.module or not self._border.is_crossing():
            return None
        with out_of_sight():
            given_on = self._border.exchange(output)
            return brought(output, self._border.bring_out) if given_on is None else given_on


def _is_there(tensor: torch.Tensor, link: Carrier, side: str) -> bool:
    guarded_tensor = guard.guarded_tensor_of(tensor)
    if guarded_tensor is not None:
        return (guarded_tensor.binding.confined_to is not None) is (side == CPU)
    return link.is_there(tensor, side)
