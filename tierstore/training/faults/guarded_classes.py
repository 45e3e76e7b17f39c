"""The classes that tensors wear: a guard's while their bytes are away, an open one in a module's window.

A guard's ``__torch_function__`` sees what is done with a tensor (`tierstore.training.faults.guard`); what
PyTorch asks nobody about (``p.data``, ``p.grad``, ``set_``, copies) is a member of the class.  Inside a
module's window a parameter wears an *open* class: PyTorch's own but for ``data`` and ``grad``, which are
looked after.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, cast

import torch
from torch import nn

from tierstore.errors import UsageError
from tierstore.torch_private import (
    RecursiveScriptModule,
    are_subclasses_seen,
    foreach_types_of_optimizers,
    foreach_types_of_utilities,
    tree_map_only,
)
from tierstore.training.bundles.bindings import natively
from tierstore.training.bundles.layout import place_of, raw_bytes
from tierstore.training.bundles.tensor_slots import LOCAL, is_sharded_kind, memory_of
from tierstore.training.bundles.tensor_uses import Function, get_data
from tierstore.training.faults.guard import (
    fault,
    guarded_tensor_of,
    guarded_tensors_in,
    in_memory_of_its_own,
    needed_by,
    of_its_own_class,
    plain_classes,
    take_off_in,
    torch_function,
    with_windows,
)
from tierstore.training.faults.state_dict_entries import in_place_of
from tierstore.training.pytorch.calling_functions import is_for_a_parameter
from tierstore.training.pytorch.function_modes import are_function_modes_on, show
from tierstore.training.pytorch.own_work import ordinary_mode
from tierstore.uncompiled import uncompiled

_Tensor: Any = torch.Tensor  # its properties, seen as the descriptors that they are
_set_data: Function = _Tensor.data.__set__
_get_grad: Function = _Tensor.grad.__get__
_set_grad: Function = _Tensor.grad.__set__
_delete_grad: Function = _Tensor.grad.__delete__


def _data(self: torch.Tensor) -> torch.Tensor:
    """Return an alias of the bytes, which stay while it lives."""
    if are_function_modes_on():
        return cast("torch.Tensor", show(get_data, _data, self))
    guarded_tensor = guarded_tensor_of(self)
    if guarded_tensor is None:
        take_off_in([self])
        with natively():
            return cast("torch.Tensor", get_data(self))
    return cast("torch.Tensor", with_windows(needed_by([guarded_tensor]), get_data, (self,), {}))


def _data_in_window(self: torch.Tensor) -> torch.Tensor:
    """Return an alias of the bytes; what it writes is not counted, so they count as written."""
    if (guarded_tensor := guarded_tensor_of(self)) is not None:
        guarded_tensor.binding.is_dirty = True
    return cast("torch.Tensor", get_data(self))


def _point(self: torch.Tensor, value: torch.Tensor) -> None:
    """Do what ``p.data = value`` means: from then on it has that memory, and whatever is written there.

    Raises:
        UsageError: the memory is on another device.
    """
    if are_function_modes_on():
        show(_set_data, _point, self, value)
        return
    if value is self:
        return
    value = in_place_of(value)
    guarded_tensor = guarded_tensor_of(self)
    if guarded_tensor is None:
        with natively():
            _set_data(self, value)
        return
    if value.device != guarded_tensor.binding.device:
        raise UsageError(
            f"cannot point {guarded_tensor.place.name!r} at memory of {value.device}: it is offloaded, to "
            f"compute on {guarded_tensor.binding.device}. Move it before offload(...) "
            "or after the run.",
            key=guarded_tensor.binding.key,
        )
    with_windows(needed_by(guarded_tensors_in((self, value))), _set_data, (self, value), {})


def _set(self: torch.Tensor, *source: Any, **named: Any) -> torch.Tensor:  # noqa: ANN401 - PyTorch's own signature
    """Do what ``p.set_(source)`` means; PyTorch asks no guard about it."""
    given, by_name = tree_map_only(torch.Tensor, in_place_of, (source, named))
    return cast("torch.Tensor", torch_function(type(self), torch.Tensor.set_, (), (self, *given), by_name))


def _as_subclass(self: torch.Tensor, kind: type) -> torch.Tensor:
    """Do what ``p.as_subclass(kind)`` means; PyTorch asks no guard about it."""
    return cast("torch.Tensor", torch_function(type(self), torch.Tensor.as_subclass, (), (self, kind)))


def _resize(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401 - PyTorch's own
    return cast("torch.Tensor", in_memory_of_its_own(torch.Tensor.resize_)(self, *args, **kwargs))


def _detach_in_window(self: torch.Tensor) -> torch.Tensor:
    """Return an alias; of the same class for ``nn.Parameter(p)``, which wants that."""
    alias = torch.Tensor.detach(self)
    if is_for_a_parameter():
        alias.__class__ = type(self)
    return alias


def _become_plain(kind: type, self: torch.Tensor, _: object) -> None:
    """PyTorch has made a parameter of an alias, and marks it: it is one of its own class from here on."""
    self.__class__ = kind


def _resize_as(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401 - PyTorch's own
    return cast("torch.Tensor", in_memory_of_its_own(torch.Tensor.resize_as_)(self, *args, **kwargs))


def _refuse_to_be_swapped(self: torch.Tensor) -> int:
    """PyTorch asks for this count before it swaps tensors, and for nothing else."""
    guarded_tensor = guarded_tensor_of(self)
    name = "a tensor of an offloaded model" if guarded_tensor is None else repr(guarded_tensor.place.name)
    raise UsageError(
        f"cannot swap {name} with another tensor while it is offloaded: torch.utils.swap_tensors is seen by "
        "nobody. Use p.data = other, or swap before offload(...)."
    )


def _grad(self: torch.Tensor) -> torch.Tensor | None:
    if are_function_modes_on():
        return cast("torch.Tensor | None", show(_get_grad, _grad, self))
    guarded_tensor = guarded_tensor_of(self)
    if guarded_tensor is None:
        take_off_in([self])
        with natively():
            return cast("torch.Tensor | None", _get_grad(self))
    return guarded_tensor.fault_handler.gradient_of(self)


def _store_grad(self: torch.Tensor, value: torch.Tensor | None) -> None:
    if are_function_modes_on():
        show(_set_grad, _store_grad, self, value)
        return
    guarded_tensor = guarded_tensor_of(self)
    if guarded_tensor is None:
        take_off_in([self])
        with natively():
            _set_grad(self, value)
        return
    guarded_tensor.fault_handler.set_gradient(self, value)


def _drop_grad(self: torch.Tensor) -> None:
    if are_function_modes_on():
        show(_delete_grad, _drop_grad, self)
        return
    _store_grad(self, None)


def _is_param(self: torch.Tensor) -> object:
    if "_is_param" not in vars(self):
        raise AttributeError("_is_param")
    return vars(self)["_is_param"]


def _become_param(self: torch.Tensor, value: object) -> None:
    """PyTorch has made a parameter of an alias, and marks it as it does all of other classes."""
    if guarded_tensor_of(self) is None:
        take_off_in([self])
    if type(self) is not torch.nn.Parameter:
        vars(self)["_is_param"] = value


def _independent(self: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor with the same bytes, unknown to any store."""
    guarded_tensor = guarded_tensor_of(self)
    assert guarded_tensor is not None
    with guarded_tensor.fault_handler.bindings.window([guarded_tensor.binding]):
        return copy.deepcopy(of_its_own_class(self), {})


def _deepcopy(self: torch.Tensor, memo: dict[int, object]) -> object:
    if id(self) not in memo:
        memo[id(self)] = _independent(self)
    return memo[id(self)]


def _reduce_ex(self: torch.Tensor, protocol: int) -> object:
    alone = _independent(self)
    if memory_of(alone) is not alone:
        return alone.__reduce_ex__(protocol)
    guarded_tensor = guarded_tensor_of(self)
    assert guarded_tensor is not None
    with guarded_tensor.fault_handler.bindings.window([guarded_tensor.binding]), ordinary_mode():
        place = place_of("", self.detach(), 0)
        if not guarded_tensor.is_abroad and guarded_tensor.binding.has_company(guarded_tensor.number):
            _set_data(
                alone, guarded_tensor.place.view(*guarded_tensor.binding.copied_region(guarded_tensor.number))
            )
        elif not place.is_of(alone):  # it has gaps, say: a copy has none, and what is pickled has
            _set_data(alone, place.view(raw_bytes(self.detach()).clone()))
    return alone.__reduce_ex__(protocol)


def _alias_of_memory(tensor: torch.Tensor) -> torch.Tensor:
    return memory_of(tensor).detach()


def _local(self: torch.Tensor) -> torch.Tensor:
    """Return an alias of this process's part, which stays while it lives: ``to_local`` reads it."""
    guarded_tensor = guarded_tensor_of(self) if are_subclasses_seen() else None
    if guarded_tensor is None:
        return memory_of(self)
    return cast("torch.Tensor", with_windows(needed_by([guarded_tensor]), _alias_of_memory, (self,), {}))


def _keep_local(self: torch.Tensor, value: torch.Tensor) -> None:
    """Do what ``p._local_tensor += value`` means in the end: the alias that was written to is put back.

    Raises:
        UsageError: it is another tensor.
    """
    guarded_tensor = guarded_tensor_of(self)
    binding = None if guarded_tensor is None else guarded_tensor.binding
    shown = None if binding is None else binding.storages
    with natively():
        if binding is not None and shown is not None and value.untyped_storage()._cdata in shown.keys:  # noqa: SLF001
            binding.is_dirty = True
            return
    name = "a sharded tensor" if guarded_tensor is None else repr(guarded_tensor.place.name)
    raise UsageError(
        f"cannot give {name} another local tensor while it is offloaded: its bytes come and go. Write to it "
        "(p.to_local().copy_(values)), or do so before offload(...)."
    )


@functools.cache
def guard_of(kind: type) -> type:
    """Return the class that a tensor of class ``kind`` wears while its bytes are away."""
    members = {
        "__doc__": f"A {kind.__name__} whose bytes are in a store; using it brings them.",
        "__module__": __name__,
        "__torch_function__": classmethod(torch_function),
        "__deepcopy__": _deepcopy,
        "__reduce_ex__": _reduce_ex,
        "data": property(_data, _point),
        "set_": _set,
        "as_subclass": _as_subclass,
        "_use_count": _refuse_to_be_swapped,
        "_is_param": property(_is_param, _become_param),
    }
    if issubclass(kind, torch.nn.Parameter) or is_sharded_kind(kind):
        members["grad"] = property(_grad, _store_grad, _drop_grad)
    if is_sharded_kind(kind):
        members[LOCAL] = property(_local, _keep_local)
    guard = type(kind)(f"Guarded{kind.__name__}", (kind,), members)
    plain_classes[guard] = kind
    return guard


@functools.cache
def open_of(kind: type) -> type:
    """Return the class that a parameter of class ``kind`` wears in its module's window."""
    members = {
        "__doc__": f"A {kind.__name__} whose bytes are here for now.",
        "__module__": __name__,
        "__torch_function__": kind.__torch_function__,  # type: ignore[attr-defined]
        "data": property(_data_in_window, _point),
        "detach": _detach_in_window,
        "_is_param": property(_is_param, functools.partial(_become_plain, kind)),
        "__new__": lambda _, *args, **kwargs: kind(*args, **kwargs),  # type(p)(data), and so copy.deepcopy(p)
        "resize_": _resize,
        "resize_as_": _resize_as,
        "grad": property(_grad, _store_grad, _drop_grad),
    }
    return type(kind)(f"Open{kind.__name__}", (kind,), members)


def _let_foreach_take_handles() -> None:
    """Let PyTorch choose ``torch._foreach_*`` for guarded tensors where it would for plain ones.

    Its choice goes by exact classes, and on an accelerator the other way gives other bits.  So do utilities
    that treat lists, and optimizers that run their own ``step``.
    """
    plain: list[tuple[object, list[type]]] = [
        (foreach_types_of_utilities, [torch.Tensor]),
        (foreach_types_of_optimizers, [torch.Tensor, nn.Parameter]),
    ]
    for kinds, classes in plain:
        if isinstance(kinds, list):
            kinds += [guard for guard in map(guard_of, classes) if guard not in kinds]


def _let_scripts_take_guarded() -> None:
    """Let functions that ``torch.jit.script`` made be seen where they are given a guarded tensor.

    They are called in C++, which asks no ``__torch_function__``, and would compute with what stands in for
    bytes that are away.
    """
    in_cpp: Function = torch.jit.ScriptFunction.__call__

    def call(*args: object, **kwargs: object) -> object:
        return in_cpp(*args, **kwargs)

    @functools.wraps(in_cpp)
    def seen(*args: object, **kwargs: object) -> object:
        is_guarded = any(True for _ in guarded_tensors_in((*args, *kwargs.values())))
        return fault(call, args, kwargs) if is_guarded else in_cpp(*args, **kwargs)

    torch.jit.ScriptFunction.__call__ = seen  # type: ignore[method-assign,assignment]


def _let_scripts_be_copied() -> None:
    """Let ``copy.deepcopy`` of what ``torch.jit`` has made of a module bring its bytes: it copies in C++."""
    in_cpp: Function = RecursiveScriptModule.__deepcopy__

    @functools.wraps(in_cpp)
    def seen(self: RecursiveScriptModule, memo: dict[int, Any]) -> object:
        needed = needed_by(guarded_tensors_in([*self.parameters(), *self.buffers()]))
        return with_windows(needed, in_cpp, (self, memo), {}) if needed else in_cpp(self, memo)

    RecursiveScriptModule.__deepcopy__ = seen  # type: ignore[method-assign,assignment]


def _let_set_be_seen() -> None:
    """Let ``torch.Tensor.set_(p, source)`` be seen as ``p.set_(source)`` is; it asks for an address."""
    in_cpp: Function = torch.Tensor.set_

    @uncompiled  # it knows what is in C++
    @functools.wraps(in_cpp)
    def seen(self: torch.Tensor, *source: object, **named: object) -> object:
        is_guarded = type(self) in plain_classes
        return _set(self, *source, **named) if is_guarded else in_cpp(self, *source, **named)

    torch.Tensor.set_ = seen  # type: ignore[method-assign,assignment]


_let_foreach_take_handles()
_let_scripts_take_guarded()
_let_scripts_be_copied()
_let_set_be_seen()
