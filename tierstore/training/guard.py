"""Demand faults: every use of a tensor whose bytes are away brings them first.

Outside its window a tensor wears a guard's class, whose ``__torch_function__`` sees every use of it:

1. What asks only for its looks (shape, dtype, hooks) passes.
2. Everything else opens windows on all bundles involved, in one go, and runs under plain classes.
3. Functions over lists (``torch._foreach_*``, ``torch._amp_foreach_*``) work on each tensor by itself:
   they are run bundle by bundle, and give the same bits.
4. What leaves with an alias of the bytes (``p.data``, ``p.detach()``) keeps them here for as long as it
   lives, and they count as written.  What leaves as a bare address, which refers to nothing, keeps them
   until the model is called or an optimizer steps.

Inside a module's window a parameter wears an *open* class: PyTorch's own but for ``data`` and
``grad``, which are looked after.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.optim.swa_utils import AveragedModel

from tierstore.errors import UsageError
from tierstore.training.askers import is_asked_by, is_for_a_parameter
from tierstore.training.binding import Binding, natively
from tierstore.training.layout import place_of, raw_bytes
from tierstore.training.sparse_adds import add_beside, adds_sparse
from tierstore.training.tenants import Needed, Tenant, Warden, dismiss, enrol, is_poisoned, tenant_of
from tierstore.training.unseen import is_foreign_operator
from tierstore.training.uses import (
    ADDRESSES,
    CHANGES_REQUIRES_GRAD,
    EXPORTS,
    LAYOUT,
    LISTWISE,
    PASSING,
    RESIZES,
    Function,
    get_data,
    may_write_unseen,
)

_Tensor: Any = torch.Tensor  # its properties, seen as the descriptors that they are
_set_data: Function = _Tensor.data.__set__
_get_grad: Function = _Tensor.grad.__get__
_set_grad: Function = _Tensor.grad.__set__


__all__ = [
    "Needed",
    "Tenant",
    "Warden",
    "dismiss",
    "enrol",
    "guard_of",
    "is_for_a_parameter",
    "is_poisoned",
    "open_of",
    "tenant_of",
    "torch_function",
]

_guards: dict[type, type] = {}
"""What each guard's class stands for."""


# ---------------------------------------------------------------------- what is seen


def torch_function(
    cls: type,
    func: Function,
    types: Sequence[type],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> object:
    """See a use of guarded tensors.  The guard classes' ``__torch_function__``."""
    del cls, types
    kwargs = kwargs or {}
    if func in PASSING:
        with natively():
            result = func(*args, **kwargs)
        if func in CHANGES_REQUIRES_GRAD and (tenant := tenant_of(args[0])) is not None:
            tenant.warden.requires_grad_changed(args[0])
        return result
    if func in LAYOUT and (tenant := tenant_of(args[0])) is not None:
        with natively():
            looks = args[0] if tenant.is_abroad else tenant.binding.twins[tenant.number]
            return func(looks, *args[1:], **kwargs)
    return add_beside(func, *args, **kwargs) if adds_sparse(func, args) else _fault(func, args, kwargs)


# ---------------------------------------------------------------------- faults


def _tensors_in(values: Iterable[object]) -> Iterator[Tenant]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if (tenant := tenant_of(value)) is not None:
                yield tenant
            else:
                _take_off_in([value])
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)
        elif isinstance(value, dict):
            yield from _tensors_in(value.values())


def _fault(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    tenants = list(_tensors_in((*args, *kwargs.values())))
    if not tenants:
        return func(*args, **kwargs)
    if func in _BACKWARDS:
        return _backward(func, args, kwargs)
    if func in _SPECIAL and (made := _SPECIAL[func](tenants[0], *args)) is not None:
        return made
    if func in RESIZES:
        func = _in_memory_of_its_own(func)
    if len({tenant.binding for tenant in tenants}) > 1 and func.__name__.startswith(LISTWISE):
        parts = _parts_by_bundle(args, kwargs)
        if len(parts) > 1:
            return _part_by_part(func, args, kwargs, parts)
    return _with_windows(_needed(tenants), func, args, kwargs)


def _needed(tenants: Iterable[Tenant]) -> Needed:
    """Return the bundles of some tensors, by who looks after them: each run has its own store."""
    needed: dict[Warden, dict[Binding, None]] = {}
    for tenant in tenants:
        needed.setdefault(tenant.warden, {})[tenant.binding] = None
    return {warden: list(bindings) for warden, bindings in needed.items()}


def _take_off_in(values: Iterable[object]) -> None:
    """Give tensors that wear a guard's class and that nobody knows the class that they would have without."""
    for value in values:
        if isinstance(value, list | tuple):
            _take_off_in(value)
        elif isinstance(value, dict):
            _take_off_in(value.values())
        elif type(value) in _guards:
            value.__class__ = _guards[type(value)]


def _detach(tenant: Tenant, tensor: torch.Tensor, *_: object) -> torch.Tensor | None:
    """Return an entry, as of a state dict, or an alias for a new parameter; ``None``: nobody wants either.

    An average over all parameters wants them all at once: it gets entries where these are in the same memory.
    """
    made = tenant.warden.entry_of_state_dict(tensor)
    if made is None and is_for_a_parameter():
        made = _of_the_same_class(tensor)
    elif made is None and _is_on_host(tenant) and is_asked_by(AveragedModel.update_parameters):
        made = tenant.warden.entry(tensor)
    return made


def _is_on_host(tenant: Tenant) -> bool:
    return tenant.warden.bindings.store.device.type == "cpu"


def _view(tenant: Tenant, tensor: torch.Tensor, *shape: Any) -> torch.Tensor | None:  # noqa: ANN401 - passed on
    """Return what `parameters_to_vector` copies from: all of it at once, so it is no alias."""
    if not is_asked_by(torch.nn.utils.parameters_to_vector):
        return None
    if not tenant.is_abroad:
        tenant.binding.twins[tenant.number].view(*shape)  # raises what PyTorch raises
    return tensor.clone().view(*shape)


def _refuse_to_share(tenant: Tenant, *_: object) -> None:
    raise UsageError(
        f"cannot share the memory of {tenant.place.name!r} with other processes: it is offloaded, and has "
        "none of its own. Share p.detach().clone(), or share it after the run.",
        key=tenant.binding.key,
    )


_SPECIAL: dict[Function, Callable[..., torch.Tensor | None]] = {
    torch.Tensor.detach: _detach,
    torch.Tensor.view: _view,
    torch.Tensor.share_memory_: _refuse_to_share,
}


def _of_the_same_class(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias in the class that ``tensor`` wears, until a parameter is made of it."""
    tenant = tenant_of(tensor)
    assert tenant is not None
    kind = type(tensor)
    alias = cast("torch.Tensor", _with_windows(_needed([tenant]), torch.Tensor.detach, (tensor,), {}))
    plain = _guards.get(kind, kind)
    if plain in (torch.Tensor, torch.nn.Parameter) or type(alias) is plain:  # else PyTorch refuses it
        alias.__class__ = kind
    return alias


def _in_memory_of_its_own(func: Function) -> Function:
    """Return ``func`` for a tensor that gets a copy of its bytes first: in its bundle it has neighbours."""

    @functools.wraps(func)
    def alone(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> object:  # noqa: ANN401 - passed on
        _set_data(tensor, tensor.detach().clone())
        return func(tensor, *args, **kwargs)

    return alone


def _with_windows(
    needed: Needed,
    func: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    guarded: Sequence[type] = (),
) -> object:
    """Run ``func`` while all bundles that it needs are here and wear plain classes, or are not asked.

    Args:
        needed: the bundles.
        func: the function.
        args: that it is given.
        kwargs: likewise.
        guarded: the plain classes of what is here and wears a guard's class, as several threads use it.
    """
    (warden, bindings), *others = needed.items()
    warden.begin_use(bindings)
    warden.bindings.note_thread()
    with warden.bindings.window(bindings):
        if is_foreign_operator(func):
            warden.bindings.watch(bindings)
        guarded = [*guarded, *(kind for each in bindings if each.worn is each.guards for kind in each.plain)]
        with warden.watch_saved():
            if others:
                result = _with_windows(dict(others), func, args, kwargs, guarded)
            else:
                result = _run(guarded, func, args, kwargs)
        if func in ADDRESSES:
            warden.bindings.keep_addresses(bindings)
        if may_write_unseen(func, kwargs):
            warden.note_write()
            for binding in bindings:
                binding.is_dirty = True
    for binding in bindings:
        if binding.windows == 0 and binding.is_referred_to:
            binding.is_dirty = True  # an alias got away: what it writes may not be counted
    return result


def _run(kinds: Sequence[type], func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Run ``func``; guards of tensors that have their bytes are not asked, and users' classes are.

    Args:
        kinds: the plain classes of those that wear a guard's.
        func: the function.
        args: that it is given.
        kwargs: likewise.
    """
    if not kinds:
        return func(*_exported(func, args), **kwargs)
    seeing = [kind for kind in dict.fromkeys(kinds) if _sees_uses(kind)]
    if seeing:
        ask: Function = seeing[0].__torch_function__  # type: ignore[attr-defined]
        return ask(func, tuple(seeing), args, kwargs)
    if func is torch.Tensor.__repr__:  # which tells the class
        args = (_of_its_own_class(args[0]),)
    with natively():
        return func(*_exported(func, args), **kwargs)


def _of_its_own_class(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that has its bytes, or an alias in the class that it has without a guard."""
    kind = _guards.get(type(tensor))
    if kind is None:
        return tensor
    with natively():
        alias: Any = tensor.detach()
        if kind is not torch.Tensor:
            alias = torch.Tensor._make_subclass(kind, alias, tensor.requires_grad)  # noqa: SLF001
        else:
            alias.requires_grad_(tensor.requires_grad)
        alias.__dict__.update(tensor.__dict__)
    return cast("torch.Tensor", alias)


def _sees_uses(kind: type) -> bool:
    """Whether a class of a user's sees the uses of its tensors."""
    ask = kind.__torch_function__  # type: ignore[attr-defined]
    return kind is not torch.Tensor and ask is not torch._C._disabled_torch_function_impl  # noqa: SLF001


def _exported(func: Function, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of ``func``: what it makes keeps an alias, not a tensor that loses its bytes."""
    if func in EXPORTS and isinstance(args[0], torch.Tensor) and not args[0].requires_grad:
        return (args[0].detach(), *args[1:])
    return args


def _parts_by_bundle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[list[int]]:
    """Return which places of the lists need the same bundles."""
    length = len(args[0])
    lists = [value for value in (*args, *kwargs.values()) if _is_list(value, length)]
    parts: dict[frozenset[Binding], list[int]] = {}
    for index in range(length):
        involved = frozenset(tenant.binding for tenant in _tensors_in(each[index] for each in lists))
        parts.setdefault(involved, []).append(index)
    return list(parts.values())


def _part_by_part(
    func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], parts: Sequence[Sequence[int]]
) -> object:
    """Run a function over lists on one part of them after another."""
    length = len(args[0])
    results: list[object] = [None] * length
    has_results = False
    for indices in parts:
        pick = functools.partial(_pick, indices=indices, length=length)
        result = func(*map(pick, args), **{name: pick(value) for name, value in kwargs.items()})
        if isinstance(result, list | tuple):
            has_results = True
            for index, each in zip(indices, result, strict=True):
                results[index] = each
    return results if has_results else None


def _is_list(value: object, length: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == length


def _pick(value: object, *, indices: Sequence[int], length: int) -> object:
    if not _is_list(value, length):
        return value
    return [cast("Sequence[object]", value)[index] for index in indices]


_BACKWARDS: set[Function] = {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}


def _backward(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Ask for gradients of guarded tensors by their place in the graph: their bytes do not matter."""
    if func is torch.autograd.grad:
        args = (args[0], _edges(args[1]), *args[2:])
    elif kwargs.get("inputs") is not None:
        kwargs = {**kwargs, "inputs": _edges(kwargs["inputs"])}
    tenants = list(_tensors_in((*args, *kwargs.values())))
    if not tenants:
        return func(*args, **kwargs)
    return _with_windows(_needed(tenants), func, args, kwargs)


def _edges(given: object) -> list[object]:
    """Return inputs of a backward pass, guarded ones by their places in the graph.

    Raises:
        RuntimeError: one needs no gradient; the text is PyTorch's.
    """
    inputs: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    return [each if tenant_of(each) is None else _edge(each) for each in inputs]


def _edge(tensor: torch.Tensor) -> object:
    if not tensor.requires_grad:
        raise RuntimeError("One of the differentiated Tensors does not require grad")
    with natively():
        return torch.autograd.graph.get_gradient_edge(tensor)


# ---------------------------------------------------------------------- the classes


def _data(self: torch.Tensor) -> torch.Tensor:
    """Return an alias of the bytes, which stay while it lives."""
    tenant = tenant_of(self)
    if tenant is None:
        _take_off_in([self])
        with natively():
            return cast("torch.Tensor", get_data(self))
    return cast("torch.Tensor", _with_windows(_needed([tenant]), get_data, (self,), {}))


def _data_in_window(self: torch.Tensor) -> torch.Tensor:
    """Return an alias of the bytes; what it writes is not counted, so they count as written."""
    if (tenant := tenant_of(self)) is not None:
        tenant.binding.is_dirty = True
    return cast("torch.Tensor", get_data(self))


def _point(self: torch.Tensor, value: torch.Tensor) -> None:
    """Do what ``p.data = value`` means: from then on it has that memory, and whatever is written there.

    Raises:
        UsageError: the memory is on another device.
    """
    if value is self:
        return
    tenant = tenant_of(self)
    if tenant is None:
        with natively():
            _set_data(self, value)
        return
    if value.device != tenant.warden.bindings.store.device:
        raise UsageError(
            f"cannot point {tenant.place.name!r} at memory of {value.device}: it is offloaded, to compute on "
            f"{tenant.warden.bindings.store.device}. Move it before offload(...) or after the run.",
            key=tenant.binding.key,
        )
    _with_windows(_needed(_tensors_in((self, value))), _set_data, (self, value), {})


def _set(self: torch.Tensor, *source: Any, **named: Any) -> torch.Tensor:  # noqa: ANN401 - PyTorch's own signature
    """Do what ``p.set_(source)`` means; PyTorch asks no guard about it."""
    return cast("torch.Tensor", torch_function(type(self), torch.Tensor.set_, (), (self, *source), named))


def _as_subclass(self: torch.Tensor, kind: type) -> torch.Tensor:
    """Do what ``p.as_subclass(kind)`` means; PyTorch asks no guard about it."""
    return cast("torch.Tensor", torch_function(type(self), torch.Tensor.as_subclass, (), (self, kind)))


def _resize(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401 - PyTorch's own
    return cast("torch.Tensor", _in_memory_of_its_own(torch.Tensor.resize_)(self, *args, **kwargs))


def _resize_as(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401 - PyTorch's own
    return cast("torch.Tensor", _in_memory_of_its_own(torch.Tensor.resize_as_)(self, *args, **kwargs))


def _refuse_to_be_swapped(self: torch.Tensor) -> int:
    """PyTorch asks for this count before it swaps tensors, and for nothing else."""
    tenant = tenant_of(self)
    name = "a tensor of an offloaded model" if tenant is None else repr(tenant.place.name)
    raise UsageError(
        f"cannot swap {name} with another tensor while it is offloaded: torch.utils.swap_tensors is seen by "
        "nobody. Use p.data = other, or swap before offload(...)."
    )


def _grad(self: torch.Tensor) -> torch.Tensor | None:
    tenant = tenant_of(self)
    if tenant is None:
        _take_off_in([self])
        with natively():
            return cast("torch.Tensor | None", _get_grad(self))
    return tenant.warden.gradient_of(self)


def _store_grad(self: torch.Tensor, value: torch.Tensor | None) -> None:
    tenant = tenant_of(self)
    if tenant is None:
        _take_off_in([self])
        with natively():
            _set_grad(self, value)
        return
    tenant.warden.set_gradient(self, value)


def _drop_grad(self: torch.Tensor) -> None:
    _store_grad(self, None)


def _is_param(self: torch.Tensor) -> object:
    if "_is_param" not in vars(self):
        raise AttributeError("_is_param")
    return vars(self)["_is_param"]


def _become_param(self: torch.Tensor, value: object) -> None:
    """PyTorch has made a parameter of an alias, and marks it as it does all of other classes."""
    if tenant_of(self) is None:
        _take_off_in([self])
    if type(self) is not torch.nn.Parameter:
        vars(self)["_is_param"] = value


def _independent(self: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor with the same bytes, unknown to any store."""
    tenant = tenant_of(self)
    assert tenant is not None
    with tenant.warden.bindings.window([tenant.binding]):
        return copy.deepcopy(_of_its_own_class(self), {})


def _deepcopy(self: torch.Tensor, memo: dict[int, object]) -> object:
    if id(self) not in memo:
        memo[id(self)] = _independent(self)
    return memo[id(self)]


def _reduce_ex(self: torch.Tensor, protocol: int) -> object:
    alone = _independent(self)
    tenant = tenant_of(self)
    assert tenant is not None
    with tenant.warden.bindings.window([tenant.binding]):
        place = place_of("", self.detach(), 0)
        if not place.is_of(alone):  # it has gaps, say: a copy has none, and what is pickled has
            _set_data(alone, place.view(raw_bytes(self.detach()).clone()))
    return alone.__reduce_ex__(protocol)


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
    if issubclass(kind, torch.nn.Parameter):
        members["grad"] = property(_grad, _store_grad, _drop_grad)
    guard = type(kind)(f"Guarded{kind.__name__}", (kind,), members)
    _guards[guard] = kind
    return guard


@functools.cache
def open_of(kind: type) -> type:
    """Return the class that a parameter of class ``kind`` wears in its module's window."""
    members = {
        "__doc__": f"A {kind.__name__} whose bytes are here for now.",
        "__module__": __name__,
        "__torch_function__": kind.__torch_function__,  # type: ignore[attr-defined]
        "data": property(_data_in_window, _point),
        "resize_": _resize,
        "resize_as_": _resize_as,
        "grad": property(_grad, _store_grad, _drop_grad),
    }
    return type(kind)(f"Open{kind.__name__}", (kind,), members)


def _let_foreach_take_handles() -> None:
    """Let PyTorch choose ``torch._foreach_*`` for guarded tensors where it would for plain ones.

    Its choice goes by exact classes, and on an accelerator the other way gives other bits.
    """
    kinds = getattr(torch.utils._foreach_utils, "_foreach_supported_types", None)  # noqa: SLF001
    if isinstance(kinds, list) and guard_of(torch.Tensor) not in kinds:
        kinds.append(guard_of(torch.Tensor))


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
        is_guarded = any(True for _ in _tensors_in((*args, *kwargs.values())))
        return _fault(call, args, kwargs) if is_guarded else in_cpp(*args, **kwargs)

    torch.jit.ScriptFunction.__call__ = seen  # type: ignore[method-assign,assignment]


def _let_set_be_seen() -> None:
    """Let ``torch.Tensor.set_(p, source)`` be seen as ``p.set_(source)`` is; it asks for an address."""
    in_cpp: Function = torch.Tensor.set_

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it knows what is in C++
    @functools.wraps(in_cpp)
    def seen(self: torch.Tensor, *source: object, **named: object) -> object:
        is_guarded = type(self) in _guards
        return _set(self, *source, **named) if is_guarded else in_cpp(self, *source, **named)

    torch.Tensor.set_ = seen  # type: ignore[method-assign]


_let_foreach_take_handles()
_let_scripts_take_guarded()
_let_set_be_seen()
