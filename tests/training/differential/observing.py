"""What is noted of a run, as values that can be compared, and the first of them that differs.

A tensor is noted as its dtype, shape, strides and bytes.  NaN is NaN, whatever its payload; a stride of a
dimension of one element says nothing and is not noted.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tierstore.training.pytorch.own_work import ordinary_mode

Note = tuple[Any, ...]


@dataclass(frozen=True)
class Entry:
    """One thing noted.

    Attributes:
        where: in the program.
        name: of what was noted.
        note: of its value.
    """

    where: str
    name: str
    note: Note


@dataclass
class Log:
    """What a run noted, in order.  Threads that are told to be quiet note nothing."""

    entries: list[Entry] = field(default_factory=list)
    where: str = "build"
    quiet: set[int] = field(default_factory=set)

    def add(self, name: str, value: object) -> None:
        """Note a value."""
        self.add_note(name, note(value))

    def add_note(self, name: str, made: Note) -> None:
        """Add a note of a value."""
        if threading.get_ident() not in self.quiet:
            self.entries.append(Entry(self.where, name, made))


def note(value: object) -> Note:
    """Return what is compared of a value."""
    if isinstance(value, Tensor):
        return note_tensor(value)
    if isinstance(value, torch.Size | list | tuple):
        return (type(value).__name__, *(note(each) for each in value))
    if isinstance(value, Mapping):
        items: list[tuple[Any, Any]] = list(value.items())
        if all(isinstance(key, int) for key in value):  # numbers of parameters: their order says nothing
            items.sort()
        return ("mapping", *((_key(key), note(each)) for key, each in items))
    if isinstance(value, Set):
        return ("set", *sorted(map(repr, value)))
    if value is None or isinstance(value, bool | int | str | torch.dtype | torch.device | float | complex):
        return (type(value).__name__, repr(value))
    return ("a", type(value).__name__)


def _key(key: object) -> str:
    return "tensor" if isinstance(key, Tensor) else repr(key)


def note_tensor(tensor: Tensor) -> Note:
    """Return what is compared of a tensor."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return ("wrapped", tuple(tensor.shape))
    with ordinary_mode(), torch.no_grad():
        looks = (str(tensor.dtype), tuple(tensor.shape), tensor.requires_grad)
        if tensor.layout is not torch.strided:
            inner = tensor.detach().coalesce()
            return ("sparse", looks, note_tensor(inner.indices()), note_tensor(inner.values()))
        strides = tuple(s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)
        return ("tensor", looks, strides if tensor.numel() else (), _bytes(tensor.detach()))


def _bytes(tensor: Tensor) -> bytes:
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    flat = tensor.clone(memory_format=torch.contiguous_format).view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.is_floating_point():
        flat[flat.isnan()] = float("nan")
    return flat.view(torch.uint8).numpy().tobytes()


# ---------------------------------------------------------------------- the whole of it


def note_parameters(model: nn.Module) -> Note:
    """Return parameters with their gradients, and buffers."""
    named = list(model.named_parameters(remove_duplicate=False))
    return (
        tuple((name, note(p.detach()), p.requires_grad, p.is_leaf) for name, p in named),
        tuple((name, note(p.grad)) for name, p in named),
        tuple((name, note(b)) for name, b in model.named_buffers()),
        _partition([id(p) for _, p in named]),
    )


def note_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> Note:
    """Return options, state and attributes."""
    return tuple(map(_note_optimizer, optimizers))


_OWN_ATTRIBUTES = ("state", "param_groups", "inner")


def _note_optimizer(optimizer: torch.optim.Optimizer) -> Note:
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    state = optimizer.state
    kept = [state.get(p, None) for p in parameters]
    everything: Mapping[Any, Any] = state
    others = {k: v for k, v in everything.items() if not isinstance(k, Tensor)}
    numbers = {id(p): number for number, p in enumerate(parameters)}
    order = [numbers.get(id(each), -1) for each in everything]
    attributes = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _OWN_ATTRIBUTES and not name.startswith("_") and not callable(value)
    }
    return (
        note(groups),
        note([len(g["params"]) for g in optimizer.param_groups]),
        note(kept),
        note(order),
        note(others),
        note(attributes),
    )


def note_sharing(model: nn.Module) -> Note:
    """Return which parameters and gradients share their storage, and where in it they lie."""
    tensors = [p.data for p in model.parameters()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None and not p.grad.is_sparse]
    storages = [t.untyped_storage()._cdata if _has_storage(t) else -n for n, t in enumerate(tensors)]
    classes = _partition(storages)
    shared = [n for n, c in enumerate(classes) if classes.count(c) > 1]
    first = {classes[n]: tensors[n].data_ptr() for n in reversed(shared)}
    return (classes, tuple(tensors[n].data_ptr() - first[classes[n]] for n in shared))


def _has_storage(tensor: Tensor) -> bool:
    """Say whether a tensor has bytes: ``functional_call`` may leave one of a transform in a model."""
    return tensor.numel() > 0 and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _partition(values: Sequence[int]) -> tuple[int, ...]:
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(value, len(numbers)) for value in values)


def note_objects(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> Note:
    """Return the classes, attributes and hooks of everything: what a run must not leave its traces on."""
    return (
        tuple((name, _looks(module)) for name, module in model.named_modules(remove_duplicate=False)),
        tuple((name, _looks(p)) for name, p in model.named_parameters(remove_duplicate=False)),
        tuple((name, _looks(b)) for name, b in model.named_buffers(remove_duplicate=False)),
        tuple(_looks(optimizer) for optimizer in optimizers),
    )


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _looks(thing: object) -> Note:
    attributes = vars(thing) if hasattr(thing, "__dict__") else {}
    hooks = {
        name: value for name, value in attributes.items() if name.endswith(("hooks", "hooks_always_called"))
    }
    hooks |= {name: getattr(thing, name, None) for name in _HOOKS if isinstance(thing, Tensor)}
    counts = tuple((name, len(value) if value else 0) for name, value in sorted(hooks.items()))
    return (
        type(thing).__name__,
        tuple(sorted(name for name in attributes if not name.startswith("_dynamo"))),
        counts,
    )


# ---------------------------------------------------------------------- errors and differences


def note_error(error: BaseException) -> Note:
    """Return the kind of an error and what it says, to the first colon: addresses and versions follow.

    PyTorch says the class that a tensor has, which may be a guard's; scripts have a number each.
    """
    said = str(error).partition(":")[0].partition("\n")[0]
    said = re.sub(r"\.___torch_mangle_\d+", "", said)
    return ("error", type(error).__name__, said.replace("of type Guarded", "of type "))


@dataclass(frozen=True)
class Difference:
    """The first thing in which two runs differ.

    Attributes:
        aspect: in what, in few words: what tells one difference from another.
        detail: for a reader.
    """

    aspect: str
    detail: str


def first_difference(plain: Log, ours: Log) -> Difference | None:
    """Compare what two runs noted."""
    for expected, found in zip(plain.entries, ours.entries, strict=False):
        if (expected.where, expected.name) != (found.where, found.name):
            what = f"{expected.where}: noted {expected.name!r}, offloaded: {found.where}: {found.name!r}"
            return Difference(
                f"{_action(expected.where)}: {expected.name} or {found.name}",
                f"{what} {found.note if found.name == 'raised' else ''}",
            )
        if expected.note != found.note:
            path, a, b = _unlike(expected.note, found.note)
            return Difference(
                f"{_action(expected.where)}: {expected.name}: {_aspect(a, b)}",
                f"{expected.where}: {expected.name}{path}: {_shown(a)}, offloaded {_shown(b)}",
            )
    if len(plain.entries) == len(ours.entries):
        return None
    longer = max(plain, ours, key=lambda log: len(log.entries))
    entry = longer.entries[min(len(plain.entries), len(ours.entries))]
    return Difference(f"{_action(entry.where)}: {entry.name}: one more", f"{entry} is noted by one alone")


def _action(where: str) -> str:
    return where.split(" ", 1)[-1]


def _unlike(a: object, b: object) -> tuple[str, object, object]:
    """Return the innermost pair that differs, and the way to it."""
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) and a[:1] != ("tensor",):
        for n, (x, y) in enumerate(zip(a, b, strict=True)):
            if x != y:
                path, p, q = _unlike(x, y)
                name = f"[{a[0]}]" if n and isinstance(a[0], str) else f"[{n}]"
                return name + path, p, q
    return "", a, b


def _aspect(a: object, b: object) -> str:
    if not (isinstance(a, tuple) and isinstance(b, tuple) and a and b):
        return f"{str(a)[:40]} or {str(b)[:40]}" if not isinstance(a, bytes) else "values"
    if a[0] == b[0] == "tensor":
        names = ("kind", "dtype, shape or requires_grad", "strides", "values")
        return next(name for name, x, y in zip(names, a, b, strict=True) if x != y)
    return f"{str(a[0])[:40]} or {str(b[0])[:40]}" if a[0] != b[0] else f"{a[0]}"


def _shown(value: object) -> str:
    if isinstance(value, tuple) and value and value[0] == "tensor":
        _, looks, strides, content = value
        return f"{looks} strides {strides} {_values(looks[0], content)}"
    return repr(value)[:300]


def _values(dtype: str, content: bytes) -> str:
    kind = getattr(torch, dtype.removeprefix("torch."))
    return "[]" if not content else str(torch.frombuffer(bytearray(content), dtype=kind)[:6].tolist())
