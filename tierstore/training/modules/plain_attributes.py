"""Tensors that a module keeps beside its parameters and buffers: nobody moves them, so they may be elsewhere.

A plain attribute is where the program made it, as after ``module.to("cpu")`` in plain PyTorch: to move it
would part it from whatever else of the program refers to it. A computation with what is on two devices is
PyTorch's error, which says neither whose the tensor is nor why the module is where it is; `note_mixture`
adds that.

Looked into are lists, tuples, sets, dicts and objects of classes written in Python, as deep as `_DEPTH`.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator

import torch
from torch import nn

from tierstore.quoting import listed, quoted

_DEPTH = 4
_MOST_VALUES = 2000  # that are looked at: a module may keep a data set
_OF_A_MODULE = frozenset(vars(nn.Module()))
_MIXED = re.compile(
    r"same device|two devices|different devices?\b|expected device|on the expected device", re.IGNORECASE
)
_BEGINNING = "placement: "
_CLOSED = (type, nn.Module, torch.Tensor, types.ModuleType, types.FunctionType, types.MethodType)


def tensors_kept_by(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in plain attributes of a module, with how they are reached from it."""
    seen: set[int] = set()
    stack = [(name, value, 0) for name, value in reversed(vars(module).items()) if name not in _OF_A_MODULE]
    while stack and len(seen) < _MOST_VALUES:
        name, value, depth = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if not isinstance(
                value, nn.Parameter
            ):  # those are moved, whoever lists them, as an `nn.LSTM` does
                yield name, value
        elif depth < _DEPTH:
            stack += [(inner, each, depth + 1) for inner, each in reversed(_parts(name, value))]


def _parts(name: str, value: object) -> list[tuple[str, object]]:
    """Return what is in a value, by how it is reached."""
    if isinstance(value, dict):
        return [
            (f"{name}[{key!r}]" if isinstance(key, str | int) else name, each) for key, each in value.items()
        ]
    if isinstance(value, list | tuple):
        return [(f"{name}[{number}]", each) for number, each in enumerate(value)]
    if isinstance(value, set | frozenset):
        return [(name, each) for each in value]
    if isinstance(value, _CLOSED) or type(value).__module__.startswith("tierstore."):
        return []
    try:  # none of its own code is to run
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return []
    return [(f"{name}.{key}", each) for key, each in own.items()]


def note_mixture(
    error: BaseException,
    module: nn.Module,
    name: str,
    device: torch.device,
    is_elsewhere: Callable[[torch.Tensor], bool],
) -> None:
    """Add to PyTorch's error about tensors on two devices whose module they are of; to others nothing.

    Args:
        error: that the module's forward has raised.
        module: the innermost one that it has come out of.
        name: of the module in its model.
        device: that the module computes on.
        is_elsewhere: says whether a tensor is on the other side.
    """
    is_noted = any(each.startswith(_BEGINNING) for each in getattr(error, "__notes__", ()))
    if is_noted or not isinstance(error, RuntimeError) or not _MIXED.search(str(error)):
        return
    kept = [each for each, tensor in tensors_kept_by(module) if is_elsewhere(tensor)]
    what = f"{quoted(name)} (a {type(module).__name__}) computes on {device.type!r}"
    if kept:
        error.add_note(
            f"{_BEGINNING}{what}, and keeps {listed(kept, show=str)} elsewhere, in plain attributes: these "
            "are where the program has made them. Register them as buffers, which are where the module is, "
            "give them to the module as arguments, which are brought, or make them with device=x.device."
        )
    else:
        error.add_note(
            f"{_BEGINNING}{what}. What it is given as arguments is brought there; what it takes from a "
            "closure, a global or somebody else's object is where the program has made it. Give it as an "
            "argument, or make it with device=x.device."
        )
