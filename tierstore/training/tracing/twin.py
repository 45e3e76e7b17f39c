"""A copy of a model and its optimizers that takes no memory: all its tensors are on the meta device.

It is made before the model is changed for a run, and used when the model is called first: `ModelTwin.is_like`
says whether the model is still what was copied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MethodType

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from tierstore.errors import UsageError
from tierstore.torch_private import tree_map_only
from tierstore.training.bundles.grouping import Group
from tierstore.training.modules.hooks import do_nothing

LARGEST_BYTES = 1024**2
"""Of one attribute that is copied; a copy that would be larger is given up."""

MOST_COPIED = 100_000
"""Objects; a model that has more of them hanging on it is not copied."""

_SIMPLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_ALIVE = (torch.Tensor, torch.Generator)
_OURS = "tierstore."
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ModelTwin:
    """A model and its optimizers without bytes.

    Args:
        model: that is copied; nothing of it is changed.
        optimizers: that train it.

    Attributes:
        model: the copy.
        optimizers: the copies, in the same order.

    Raises:
        UsageError: it is not to be copied: it says why.
        Exception: whatever a part of it raises that cannot be copied.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        refuse_hooks(model)
        memo = _Memo()
        for each in _tensors_of(model, optimizers):
            memo.keep(each)
        self._original = model
        self.model: nn.Module = copy.deepcopy(model, memo)
        self.optimizers = tuple(copy.deepcopy(each, memo) for each in optimizers)
        self._pairs: dict[int, nn.Module] = {}
        for module in model.modules():
            twin = memo[id(module)]
            if not isinstance(twin, nn.Module):
                raise UsageError(f"a {type(module).__name__} is not copied as a module")
            self._pairs[id(module)] = twin
        self._memo = memo

    def groups(self, groups: Sequence[Group]) -> list[Group]:
        """Return groups of the model as those of the copy.

        Args:
            groups: made before the model was changed.
        """
        return [
            replace(
                group,
                tensors=[self._memo.tensor(each) for each in group.tensors],
                modules=[self._pairs[id(each)] for each in group.modules],
            )
            for group in groups
        ]

    def follow(self) -> bool:
        """Take over what trains and which modules are in training; say whether all else is as it was copied.

        What a run itself does to the model does not count.
        """
        modules = list(self._original.modules())
        if len(modules) != len(self._pairs) or any(id(each) not in self._pairs for each in modules):
            return False
        for module in modules:
            twin = self._pairs[id(module)]
            if not self._is_same(module, twin):
                return False
            twin.training = module.training
            _take_over_training(module, twin)
        return True

    def _is_same(self, module: nn.Module, twin: nn.Module) -> bool:
        if type(module) is not type(twin) or _names(module) != _names(twin):
            return False
        children = zip(module.children(), twin.children(), strict=True)
        if any(self._pairs.get(id(each)) is not other for each, other in children):
            return False
        return _is_like(_plain_attributes(module), _plain_attributes(twin), set())


class _Memo(dict[int, object]):
    """What `copy.deepcopy` finds copied already.  It gives up where copies become large."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: list[object] = []

    def keep(self, tensor: torch.Tensor) -> None:
        """Let a tensor's copy have no bytes."""
        if id(tensor) not in self:
            self[id(tensor)] = _without_bytes(tensor)
            self._alive.append(tensor)

    def tensor(self, original: torch.Tensor) -> torch.Tensor:
        """Return the copy of a tensor."""
        made = self[id(original)]
        assert isinstance(made, torch.Tensor)
        return made

    def __setitem__(self, key: int, made: object) -> None:
        """Take in a copy.

        Raises:
            UsageError: it is too large, or one too many.
        """
        if len(self) > MOST_COPIED:
            raise UsageError(f"more than {MOST_COPIED} objects hang on it")
        nbytes = 0 if isinstance(made, torch.Tensor) and made.is_meta else getattr(made, "nbytes", 0)
        if isinstance(nbytes, int) and nbytes > LARGEST_BYTES:
            raise UsageError(f"a {type(made).__name__} of {nbytes} bytes hangs on it")
        super().__setitem__(key, made)


def _tensors_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
        yield from (each for each in _tensors_in(optimizer.state.values()) if each.dim())
    for module in model.modules():
        yield from _tensors_in(_plain_attributes(module).values())


def _tensors_in(values: Iterable[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple | set | frozenset):
            yield from _tensors_in(value)
        elif isinstance(value, Mapping):
            yield from _tensors_in(value.values())


def _without_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same look on the meta device.

    Raises:
        UsageError: it is of a class of its own, not dense, or no leaf of its graph.
    """
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
    if not is_plain or tensor.layout is not torch.strided or not tensor.is_leaf:
        raise UsageError(f"it has a tensor of another sort: {type(tensor).__name__}, {tensor.layout}")
    made = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def inputs_without_bytes(inputs: object) -> object:
    """Return what a model is called with, with tensors that have no bytes, in containers of their own.

    Raises:
        UsageError: there is something in it that a copy might share.
    """
    made: dict[int, torch.Tensor] = {}

    def of(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = _without_bytes(tensor)
        return made[id(tensor)]

    _require_simple(inputs)
    found: object = tree_map_only(torch.Tensor, of, inputs)
    return found


def _require_simple(value: object) -> None:
    if isinstance(value, Mapping) and type(value) is dict:
        for each in value.values():
            _require_simple(each)
    elif type(value) in (list, tuple):
        for each in value:  # type: ignore[attr-defined]
            _require_simple(each)
    elif not isinstance(value, (*_SIMPLE, torch.Tensor)):
        raise UsageError(f"it is called with a {type(value).__name__}")


# ---------------------------------------------------------------------- what must not be there, or change


def refuse_hooks(model: nn.Module) -> None:
    """Raise if a copy that runs would call something of the program's beside forwards.

    Raises:
        UsageError: there are hooks, also such for all modules or optimizers, compiled or scripted modules.
    """
    for register in _EVERYWHERE:
        if has_others(register):
            raise UsageError("all modules, or all optimizers, have hooks")
    for name, module in model.named_modules():
        tables: list[dict[int, object]] = [vars(module)[table] for table in _HOOKS]
        if any(not _is_ours(hook) for table in tables for hook in table.values()):
            raise UsageError(f"{name!r} has hooks")
        is_compiled = getattr(module, "_compiled_call_impl", None) is not None
        is_compiled |= type(module).__module__.startswith("torch._dynamo")
        if is_compiled or isinstance(module, torch.jit.ScriptModule):
            raise UsageError(f"{name!r} is compiled")


_EVERYWHERE: tuple[Callable[[Callable[..., None]], RemovableHandle], ...] = (
    register_module_forward_pre_hook,
    register_module_forward_hook,
    register_module_full_backward_pre_hook,
    register_module_full_backward_hook,
    register_optimizer_step_pre_hook,
    register_optimizer_step_post_hook,
)
"""What registers hooks for everything in the process."""


def has_others(register: Callable[[Callable[..., None]], RemovableHandle]) -> bool:
    """Whether the program has hooks where one would be registered."""
    handle = register(do_nothing)
    try:
        return any(not _is_ours(hook) for hook in (handle.hooks_dict_ref() or {}).values())
    finally:
        handle.remove()


def _is_ours(hook: object) -> bool:
    return type(hook).__module__.startswith(_OURS) or getattr(hook, "__module__", "").startswith(_OURS)


_TORCHS = frozenset(vars(nn.Module()))


def _plain_attributes(module: nn.Module) -> dict[str, object]:
    return {name: value for name, value in vars(module).items() if name not in _TORCHS}


def _names(module: nn.Module) -> tuple[list[str], ...]:
    named = (
        module.named_children(),
        module.named_parameters(recurse=False),
        module.named_buffers(recurse=False),
    )
    return tuple([name for name, _ in each] for each in named)


def _take_over_training(module: nn.Module, twin: nn.Module) -> None:
    pairs = zip(module.parameters(recurse=False), twin.parameters(recurse=False), strict=True)
    for parameter, other in pairs:
        other.requires_grad_(parameter.requires_grad)


def _is_like(left: object, right: object, seen: set[int]) -> bool:
    """Say whether something is as its copy is; what is looked at elsewhere is taken to be."""
    if left is right or id(left) in seen or isinstance(left, (nn.Module, *_ALIVE)):
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, _SIMPLE):
        return bool(left == right) or left != left  # noqa: PLR0124 - NaN
    seen.add(id(left))
    pairs = _parts(left, right)
    return pairs is not None and all(_is_like(*pair, seen) for pair in pairs)


def _parts(left: object, right: object) -> list[tuple[object, object]] | None:
    """Return what two objects of one class have, in pairs; ``None``: not as many."""
    if isinstance(left, MethodType) and isinstance(right, MethodType):
        return [(left.__func__, right.__func__), (left.__self__, right.__self__)]
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        if list(map(repr, map(type, left))) != list(map(repr, map(type, right))):
            return None
        return [*zip(left, right, strict=True), *zip(left.values(), right.values(), strict=True)]
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return list(zip(left, right, strict=True)) if len(left) == len(right) else None
    mine, other = getattr(left, "__dict__", None), getattr(right, "__dict__", None)
    return [] if mine is None else [(mine, other)]
