"""Demand faults: every use of a tensor whose bytes are away brings them first.

Outside its window a tensor wears a guard's class, whose ``__torch_function__`` sees every use of it:

1. What asks only for its looks (shape, dtype, hooks) passes.
2. Everything else opens windows on all bundles involved, in one go, and runs under plain classes.
3. Functions over lists (``torch._foreach_*``, ``torch._amp_foreach_*``) work on each tensor by itself:
   they are run bundle by bundle, and give the same bits.
4. What leaves with an alias of the bytes (``p.data``, ``p.detach()``) keeps them here for as long as it
   lives, and they count as written.

Inside a module's window a parameter wears an *open* class: PyTorch's own but for ``data`` and
``grad``, which are looked after.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, cast

import torch

from tierstore.errors import UsageError
from tierstore.training.binding import Binding, Bindings, natively
from tierstore.training.groups import Place

Function = Callable[..., Any]

_Tensor: Any = torch.Tensor  # its properties, seen as the descriptors that they are
_get_data: Function = _Tensor.data.__get__
_get_grad: Function = _Tensor.grad.__get__
_set_grad: Function = _Tensor.grad.__set__


class Warden(Protocol):
    """Who looks after guarded tensors: one for each offloaded model."""

    bindings: Bindings

    def watch_saved(self) -> AbstractContextManager[None]:
        """Turn saved aliases of bundles into references, inside the context."""
        ...

    def gradient_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return what ``tensor.grad`` is."""
        ...

    def set_gradient(self, tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Do what ``tensor.grad = gradient`` means."""
        ...

    def copy_for_state_dict(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return an independent copy while a ``state_dict`` is being made, else ``None``."""
        ...

    def requires_grad_changed(self, tensor: torch.Tensor) -> None:
        """Take in that ``requires_grad`` was set."""
        ...


class Tenant(NamedTuple):
    """What is known of one guarded tensor."""

    tensor: torch.Tensor  # keeps its id taken
    binding: Binding
    place: Place
    warden: Warden
    twin: torch.Tensor  # on the meta device, with the true strides


_tenants: dict[int, Tenant] = {}
"""By the tensor's id.  Nothing is set on users' objects."""


def enrol(binding: Binding, warden: Warden) -> None:
    """Let the guard know whom to ask about a binding's tensors."""
    for tensor, place in zip(binding.tensors, binding.places, strict=True):
        twin = torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device="meta")
        _tenants[id(tensor)] = Tenant(tensor, binding, place, warden, twin)


def dismiss(binding: Binding) -> None:
    """Forget a binding's tensors."""
    for tensor in binding.tensors:
        _tenants.pop(id(tensor), None)


def tenant_of(tensor: object) -> Tenant | None:
    """Return what is known of a tensor; ``None`` if nobody guards it."""
    tenant = _tenants.get(id(tensor))
    return tenant if tenant is not None and tenant.tensor is tensor else None


# ---------------------------------------------------------------------- what passes


def _members(names: Iterable[str]) -> set[Function]:
    """Return the functions by which ``__torch_function__`` knows attributes and methods of tensors."""
    found: set[Function] = set()
    for name in names:
        member = getattr(torch.Tensor, name, None)
        if member is None:
            continue
        if callable(member):
            found.add(member)
        else:
            found |= {member.__get__, member.__set__} if hasattr(member, "__set__") else {member.__get__}
    return found


_PASSING = _members(
    """_backward_hooks _has_symbolic_sizes_strides _is_view _post_accumulate_grad_hooks _version __len__
    dim dtype device element_size get_device grad_dtype grad_fn is_complex is_cpu is_cuda
    is_floating_point is_inference is_leaf is_meta is_mkldnn is_nested is_quantized is_signed is_sparse
    is_sparse_csr is_xpu itemsize layout name names nbytes ndim ndimension nelement numel output_nr
    register_hook register_post_accumulate_grad_hook retain_grad retains_grad shape size sym_numel
    __dlpack_device__""".split()  # noqa: SIM905 - a table of sixty names
) | {torch.numel, torch.is_floating_point, torch.is_complex, torch.is_same_size, torch.Tensor.is_same_size}
_LAYOUT = _members(["stride", "is_contiguous", "storage_offset", "sym_stride"])
_CHANGES_REQUIRES_GRAD = {_Tensor.requires_grad.__set__, _Tensor.requires_grad_}
_PASSING |= {_Tensor.requires_grad.__get__} | _CHANGES_REQUIRES_GRAD
_ESCAPES = _members(
    ["data_ptr", "untyped_storage", "storage", "_typed_storage", "numpy", "__array__", "__dlpack__"]
)
_LISTWISE = ("_foreach_", "_amp_foreach_")
_WRITES_UNSEEN = ("_fused_", "_amp_")


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
    if func in _PASSING:
        with natively():
            result = func(*args, **kwargs)
        if func in _CHANGES_REQUIRES_GRAD and (tenant := tenant_of(args[0])) is not None:
            tenant.warden.requires_grad_changed(args[0])
        return result
    if func in _LAYOUT and (tenant := tenant_of(args[0])) is not None:
        return func(tenant.twin, *args[1:], **kwargs)
    return _fault(func, args, kwargs)


# ---------------------------------------------------------------------- faults


def _tensors_in(values: Iterable[object]) -> Iterator[Tenant]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if (tenant := tenant_of(value)) is not None:
                yield tenant
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)
        elif isinstance(value, dict):
            yield from _tensors_in(value.values())


def _fault(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    tenants = list(_tensors_in((*args, *kwargs.values())))
    if not tenants:  # a guard's class on a tensor that nobody knows any more
        with natively():
            return func(*args, **kwargs)
    if func is torch.autograd.grad:
        return _autograd_grad(args, kwargs)
    if func is torch.Tensor.detach and (made := tenants[0].warden.copy_for_state_dict(args[0])) is not None:
        return made
    bindings = list(dict.fromkeys(tenant.binding for tenant in tenants))
    if len(bindings) > 1 and func.__name__.startswith(_LISTWISE):
        parts = _parts_by_bundle(args, kwargs)
        if len(parts) > 1:
            return _part_by_part(func, args, kwargs, parts)
    return _with_windows(tenants[0].warden, bindings, func, args, kwargs)


def _with_windows(
    warden: Warden, bindings: Sequence[Binding], func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> object:
    """Run ``func`` while all ``bindings`` are here and wear plain classes."""
    with warden.bindings.window(bindings):
        with warden.watch_saved():
            result = func(*args, **kwargs)
        if _may_write_unseen(func, kwargs):
            for binding in bindings:
                binding.is_dirty = True
    for binding in bindings:
        if binding.windows == 0 and binding.is_referred_to:
            binding.is_dirty = True  # an alias got away: what it writes may not be counted
    return result


def _may_write_unseen(func: Function, kwargs: dict[str, Any]) -> bool:
    """Whether ``func`` may write without telling autograd's version counter.

    Fused functions do not tell it, and under a ``TorchDispatchMode`` those over lists do not either.
    """
    name = func.__name__
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or func in _ESCAPES or "out" in kwargs or name.startswith(_WRITES_UNSEEN)


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


def _autograd_grad(args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Ask for gradients of guarded tensors by their place in the graph: their bytes do not matter."""
    named = dict(zip(("outputs", "inputs"), args[:2], strict=False)) | kwargs
    given = named["inputs"]
    inputs = [given] if isinstance(given, torch.Tensor) else list(given)
    with natively():
        named["inputs"] = [
            torch.autograd.graph.get_gradient_edge(each) if tenant_of(each) is not None else each
            for each in inputs
        ]
    outputs = named.pop("outputs")
    return torch.autograd.grad(outputs, named.pop("inputs"), *args[2:], **named)


# ---------------------------------------------------------------------- the classes


def _data(self: torch.Tensor) -> torch.Tensor:
    """Return an alias of the bytes, which stay while it lives."""
    tenant = tenant_of(self)
    if tenant is None:
        with natively():
            return cast("torch.Tensor", _get_data(self))
    return cast("torch.Tensor", _with_windows(tenant.warden, [tenant.binding], _get_data, (self,), {}))


def _data_in_window(self: torch.Tensor) -> torch.Tensor:
    """Return an alias of the bytes; what it writes is not counted, so they count as written."""
    if (tenant := tenant_of(self)) is not None:
        tenant.binding.is_dirty = True
    return cast("torch.Tensor", _get_data(self))


def _refuse_data(self: torch.Tensor, value: torch.Tensor) -> None:
    """Allow what changes nothing, such as ``model.to()`` with the device it is on."""
    if value is self:
        return
    tenant = tenant_of(self)
    assert tenant is not None
    binding, place = tenant.binding, tenant.place
    is_same_memory = (
        binding.storage is not None
        and value.untyped_storage()._cdata == binding.storage._cdata  # noqa: SLF001
        and (value.dtype, value.shape, value.storage_offset()) == (place.dtype, place.shape, place.offset)
    )
    if not is_same_memory:
        raise UsageError(
            f"cannot point {place.name!r} at other memory while it is offloaded. Change its values in place "
            f"(with torch.no_grad(): p.copy_(values)), or do this before offload(...).",
            key=binding.key,
        )


def _grad(self: torch.Tensor) -> torch.Tensor | None:
    tenant = tenant_of(self)
    if tenant is None:
        with natively():
            return cast("torch.Tensor | None", _get_grad(self))
    return tenant.warden.gradient_of(self)


def _store_grad(self: torch.Tensor, value: torch.Tensor | None) -> None:
    tenant = tenant_of(self)
    if tenant is None:
        with natively():
            _set_grad(self, value)
        return
    tenant.warden.set_gradient(self, value)


def _drop_grad(self: torch.Tensor) -> None:
    _store_grad(self, None)


def _independent(self: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor with the same bytes, unknown to any store."""
    tenant = tenant_of(self)
    assert tenant is not None
    with tenant.warden.bindings.window([tenant.binding]):
        return copy.deepcopy(self, {})


def _deepcopy(self: torch.Tensor, memo: dict[int, object]) -> object:
    if id(self) not in memo:
        memo[id(self)] = _independent(self)
    return memo[id(self)]


def _reduce_ex(self: torch.Tensor, protocol: int) -> object:
    return _independent(self).__reduce_ex__(protocol)


@functools.cache
def guard_of(kind: type) -> type:
    """Return the class that a tensor of class ``kind`` wears while its bytes are away."""
    members = {
        "__doc__": f"A {kind.__name__} whose bytes are in a store; using it brings them.",
        "__module__": __name__,
        "__torch_function__": classmethod(torch_function),
        "__deepcopy__": _deepcopy,
        "__reduce_ex__": _reduce_ex,
        "data": property(_data, _refuse_data),
    }
    if issubclass(kind, torch.nn.Parameter):
        members["grad"] = property(_grad, _store_grad, _drop_grad)
    return type(kind)(f"Guarded{kind.__name__}", (kind,), members)


@functools.cache
def open_of(kind: type) -> type:
    """Return the class that a parameter of class ``kind`` wears in its module's window."""
    members = {
        "__doc__": f"A {kind.__name__} whose bytes are here for now.",
        "__module__": __name__,
        "__torch_function__": kind.__torch_function__,  # type: ignore[attr-defined]
        "data": property(_data_in_window, _refuse_data),
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


_let_foreach_take_handles()
