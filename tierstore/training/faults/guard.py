"""Demand faults: every use of a tensor whose bytes are away brings them first.

Outside its window a tensor wears a guard's class, whose ``__torch_function__`` sees every use of it:

1. What asks only for its looks (shape, dtype, hooks) passes.
2. Everything else opens windows on all bundles involved, in one go, and runs under plain classes.
3. Functions over lists (``torch._foreach_*``, ``torch._amp_foreach_*``) work on each tensor by itself:
   they are run bundle by bundle, and give the same bits.
4. What leaves with an alias of the bytes (``p.data``, ``p.detach()``) keeps them here for as long as it
   lives, and they count as written.  What leaves as a bare address, which refers to nothing, keeps them
   until the model is called or an optimizer steps.

The classes themselves stand in `tierstore.training.faults.guarded_classes`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.optim.swa_utils import AveragedModel

from tierstore.errors import UsageError
from tierstore.torch_private import disabled_torch_function, make_subclass
from tierstore.training.bundles.bindings import Binding, natively
from tierstore.training.bundles.tensor_slots import memory_of
from tierstore.training.bundles.tensor_uses import (
    ADDRESSES,
    CHANGES_REQUIRES_GRAD,
    EXPORTS,
    LAYOUT,
    LISTWISE,
    PASSING,
    RESIZES,
    Function,
    may_write_unseen,
)
from tierstore.training.bundles.unseen_writes import is_foreign_operator
from tierstore.training.faults.guarded_tensors import (
    FaultHandler,
    GuardedTensor,
    Needed,
    dismiss,
    enrol,
    guarded_tensor_of,
    is_poisoned,
)
from tierstore.training.faults.torn_uses import explained
from tierstore.training.pytorch.calling_functions import is_asked_by, is_for_a_parameter
from tierstore.training.pytorch.own_work import has_hands_on_tensors

_Tensor: Any = torch.Tensor  # its properties, seen as the descriptors that they are
_set_data: Function = _Tensor.data.__set__


__all__ = [
    "FaultHandler",
    "GuardedTensor",
    "Needed",
    "dismiss",
    "enrol",
    "fault",
    "guarded_tensor_of",
    "guarded_tensors_in",
    "in_memory_of_its_own",
    "is_poisoned",
    "needed_by",
    "of_its_own_class",
    "plain_classes",
    "take_off_in",
    "torch_function",
    "with_windows",
]

plain_classes: dict[type, type] = {}
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
            if func in CHANGES_REQUIRES_GRAD and is_for_a_parameter():
                _require_that_it_may_be_trained(args[0].dtype, *args[1:], **kwargs)
            result = func(*args, **kwargs)
        if func in CHANGES_REQUIRES_GRAD and (guarded_tensor := guarded_tensor_of(args[0])) is not None:
            guarded_tensor.fault_handler.requires_grad_changed(args[0])
        return result
    if func in LAYOUT and (guarded_tensor := guarded_tensor_of(args[0])) is not None:
        with natively():
            has_looks = guarded_tensor.is_abroad or memory_of(args[0]) is not args[0]
            looks = args[0] if has_looks else guarded_tensor.binding.twins[guarded_tensor.number]
            return func(looks, *args[1:], **kwargs)
    return fault(func, args, kwargs)


# ---------------------------------------------------------------------- faults


def guarded_tensors_in(values: Iterable[object]) -> Iterator[GuardedTensor]:
    """Yield what is known of each guarded tensor in arguments, also in lists and dicts."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if (guarded_tensor := guarded_tensor_of(value)) is not None:
                yield guarded_tensor
            else:
                take_off_in([value])
        elif isinstance(value, list | tuple):
            yield from guarded_tensors_in(value)
        elif isinstance(value, dict):
            yield from guarded_tensors_in(value.values())


def fault(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Run ``func`` when the bytes that it needs are here."""
    guarded_tensors = list(guarded_tensors_in((*args, *kwargs.values())))
    if not guarded_tensors:
        return func(*args, **kwargs)
    if func in _BACKWARDS:
        return _backward(func, args, kwargs)
    if func in _SPECIAL and (made := _SPECIAL[func](guarded_tensors[0], *args)) is not None:
        return made
    if func in RESIZES:
        func = in_memory_of_its_own(func)
    if len({guarded_tensor.binding for guarded_tensor in guarded_tensors}) > 1 and func.__name__.startswith(
        LISTWISE
    ):
        parts = _runs_by_bundle(args, kwargs)
        if len(parts) > 1:
            return _part_by_part(func, args, kwargs, parts)
    return _with_bytes(guarded_tensors, func, args, kwargs)


def _with_bytes(
    guarded_tensors: Sequence[GuardedTensor], func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> object:
    try:
        return with_windows(needed_by(guarded_tensors), func, args, kwargs)
    except RuntimeError as error:
        told = explained(error, guarded_tensors, func.__name__)
        if told is error:
            raise
        raise told from error


def needed_by(guarded_tensors: Iterable[GuardedTensor]) -> Needed:
    """Return the bundles of some tensors, by who looks after them: each run has its own store."""
    needed: dict[FaultHandler, dict[Binding, None]] = {}
    for guarded_tensor in guarded_tensors:
        needed.setdefault(guarded_tensor.fault_handler, {})[guarded_tensor.binding] = None
    return {fault_handler: list(bindings) for fault_handler, bindings in needed.items()}


def take_off_in(values: Iterable[object]) -> None:
    """Give tensors that wear a guard's class and that nobody knows the class that they would have without."""
    for value in values:
        if isinstance(value, list | tuple):
            take_off_in(value)
        elif isinstance(value, dict):
            take_off_in(value.values())
        elif type(value) in plain_classes:
            value.__class__ = plain_classes[type(value)]


def _detach(guarded_tensor: GuardedTensor, tensor: torch.Tensor, *_: object) -> torch.Tensor | None:
    """Return an entry, as of a state dict, or an alias for a new parameter; ``None``: nobody wants either.

    An average over all parameters wants them all at once: it gets entries where these are in the same memory.
    """
    made = guarded_tensor.fault_handler.entry_of_state_dict(tensor)
    if made is None and is_for_a_parameter():
        made = _of_the_same_class(tensor)
    elif made is None and _is_on_host(guarded_tensor) and is_asked_by(AveragedModel.update_parameters):
        made = guarded_tensor.fault_handler.entry(tensor)
    return made


def _is_on_host(guarded_tensor: GuardedTensor) -> bool:
    return guarded_tensor.binding.device.type == "cpu"


def _view(guarded_tensor: GuardedTensor, tensor: torch.Tensor, *shape: Any) -> torch.Tensor | None:  # noqa: ANN401 - passed on
    """Return what `parameters_to_vector` copies from: all of it at once, so it is no alias."""
    if not is_asked_by(torch.nn.utils.parameters_to_vector):
        return None
    if not guarded_tensor.is_abroad:
        guarded_tensor.binding.twins[guarded_tensor.number].view(*shape)  # raises what PyTorch raises
    return tensor.clone().view(*shape)


def _require_that_it_may_be_trained(dtype: torch.dtype, requires_grad: bool = True) -> None:
    """Raise what PyTorch raises for a parameter of a type that has no gradients; of an alias it says less."""
    if requires_grad and not (dtype.is_floating_point or dtype.is_complex):
        torch.nn.Parameter(torch.empty(0, dtype=dtype), requires_grad)


def _refuse_to_share(guarded_tensor: GuardedTensor, *_: object) -> None:
    raise UsageError(
        f"cannot share the memory of {guarded_tensor.place.name!r} with other processes: it is offloaded, "
        "and has none of its own. Share p.detach().clone(), or share it after the run.",
        key=guarded_tensor.binding.key,
    )


_SPECIAL: dict[Function, Callable[..., torch.Tensor | None]] = {
    torch.Tensor.detach: _detach,
    torch.Tensor.view: _view,
    torch.Tensor.share_memory_: _refuse_to_share,
}


def _of_the_same_class(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias in the class that ``tensor`` wears, until a parameter is made of it."""
    guarded_tensor = guarded_tensor_of(tensor)
    assert guarded_tensor is not None
    kind = type(tensor)
    alias = cast(
        "torch.Tensor", with_windows(needed_by([guarded_tensor]), torch.Tensor.detach, (tensor,), {})
    )
    plain = plain_classes.get(kind, kind)
    if plain in (torch.Tensor, torch.nn.Parameter) or type(alias) is plain:  # else PyTorch refuses it
        alias.__class__ = kind
    return alias


def in_memory_of_its_own(func: Function) -> Function:
    """Return ``func`` for a tensor that gets a copy of its bytes first: in its bundle it has neighbours."""

    @functools.wraps(func)
    def alone(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> object:  # noqa: ANN401 - passed on
        _set_data(tensor, tensor.detach().clone())
        return func(tensor, *args, **kwargs)

    return alone


def with_windows(
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
    (fault_handler, bindings), *others = needed.items()
    fault_handler.begin_use(bindings)
    fault_handler.bindings.note_thread()
    with fault_handler.bindings.window(bindings):
        if is_foreign_operator(func) or has_hands_on_tensors():
            fault_handler.bindings.watch(bindings)
        guarded = [*guarded, *(kind for each in bindings if each.worn is each.guards for kind in each.plain)]
        with fault_handler.watch_saved():
            if others:
                result = with_windows(dict(others), func, args, kwargs, guarded)
            else:
                result = _run(guarded, func, args, kwargs)
        if func in ADDRESSES:
            fault_handler.bindings.keep_addresses(bindings)
        if may_write_unseen(func, kwargs):
            fault_handler.note_write()
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
        args = (of_its_own_class(args[0]),)
    with natively():
        return func(*_exported(func, args), **kwargs)


def of_its_own_class(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that has its bytes, or an alias in the class that it has without a guard."""
    kind = plain_classes.get(type(tensor))
    if kind is None:
        return tensor
    with natively():
        alias: Any = tensor.detach()
        if kind is not torch.Tensor and type(alias) is not kind:
            alias = make_subclass(kind, alias, tensor.requires_grad)
        else:
            alias.requires_grad_(tensor.requires_grad)
        alias.__dict__.update(tensor.__dict__)
    return cast("torch.Tensor", alias)


def _sees_uses(kind: type) -> bool:
    """Whether a class of a user's sees the uses of its tensors."""
    ask = kind.__torch_function__  # type: ignore[attr-defined]
    return kind is not torch.Tensor and ask is not disabled_torch_function


def _exported(func: Function, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of ``func``: what it makes keeps an alias, not a tensor that loses its bytes."""
    if func in EXPORTS and isinstance(args[0], torch.Tensor) and not args[0].requires_grad:
        return (args[0].detach(), *args[1:])
    return args


def _runs_by_bundle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[list[int]]:
    """Return the places of the lists, in their order, cut where other bundles are needed.

    A place may read what one before it wrote, and where one raises those before it have been changed.
    """
    length = len(args[0])
    lists = [value for value in (*args, *kwargs.values()) if _is_list(value, length)]

    def involved(index: int) -> set[Binding]:
        return {
            guarded_tensor.binding for guarded_tensor in guarded_tensors_in(each[index] for each in lists)
        }

    return [list(run) for _, run in itertools.groupby(range(length), involved)]


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
    guarded_tensors = list(guarded_tensors_in((*args, *kwargs.values())))
    if not guarded_tensors:
        return func(*args, **kwargs)
    return with_windows(needed_by(guarded_tensors), func, args, kwargs)


def _edges(given: object) -> list[object]:
    """Return inputs of a backward pass, guarded ones by their places in the graph.

    One that needs no gradient has none: it is an ordinary tensor that needs none either, so that PyTorch
    raises what it raises.
    """
    inputs: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    return [each if guarded_tensor_of(each) is None else _edge(each) for each in inputs]


def _edge(tensor: torch.Tensor) -> object:
    with natively():
        if not tensor.requires_grad:
            return torch.empty(0)
        return torch.autograd.graph.get_gradient_edge(tensor)
