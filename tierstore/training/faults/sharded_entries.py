"""Entries of state dicts for sharded tensors: each shows its original, and has no bytes of its own.

In plain PyTorch the entry of a ``DTensor`` is another one with the same local tensor.  So it is here:

1. What is done with an entry is done with its original, whose bytes come for it and may go afterwards: who
   reads entries one after another, as ``torch.distributed.checkpoint`` does, has one bundle at a time.
2. What is written to an entry is written to the original, also in place, as that loads.
3. It needs no gradient, whatever its original does.
4. Its looks are its own.  After the run it goes on as an alias.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from tierstore.errors import CapacityError
from tierstore.torch_private import tree_map_only
from tierstore.training.bundles.bindings import natively
from tierstore.training.bundles.layout import place_of
from tierstore.training.bundles.poisons import poison_for
from tierstore.training.bundles.tensor_slots import LOCAL, slot_of
from tierstore.training.bundles.tensor_uses import LAYOUT, PASSING, Function
from tierstore.training.faults.guarded_classes import guard_of

_LOOKS = PASSING | LAYOUT

_originals = WeakTensorKeyDictionary()
"""Of each entry; not among its attributes, which stagers of ``async_save`` copy with it."""


def sharded_entry_of(original: torch.Tensor) -> torch.Tensor:
    """Return an entry for a guarded tensor that has its bytes in a local one."""
    with natively():
        entry = original.detach()
        kind, slot = type(entry), slot_of(type(entry))
        local = slot.local(entry)
        slot.detach(entry, poison_for(place_of("", entry), local.device))
    _originals[entry] = original
    entry.__class__ = _entry_class(kind)
    return entry


def original_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what an entry shows; ``None``: it is none."""
    original: torch.Tensor | None = _originals.get(tensor)
    return original


_HELD = (
    "It was read through a state dict, by who keeps what was read before, as async_save(state, "
    "checkpoint_id=...) does until it has all shards. Give it storage_writer=FileSystemWriter(path, "
    "single_file_per_rank=False), which copies one after another, or use save(...) or run.checkpoint()."
)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Say in errors for lack of room what may take it."""
    try:
        yield
    except CapacityError as error:
        if _HELD not in getattr(error, "__notes__", ()):
            error.add_note(_HELD)
        raise


def _shown(tensor: torch.Tensor) -> torch.Tensor:
    original = original_of(tensor)
    return tensor if original is None else original


def _torch_function(
    cls: type,
    func: Function,
    types: Sequence[type],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> object:
    """Do with originals what is done with entries.  The class's ``__torch_function__``."""
    del cls, types
    kwargs = kwargs or {}
    if func in _LOOKS:
        with natively():
            return func(*args, **kwargs)
    given, named = tree_map_only(torch.Tensor, _shown, (args, kwargs))
    with _explained(), torch.no_grad():
        result = func(*given, **named)
    return args[0] if given and result is given[0] else result


def _local(self: torch.Tensor) -> torch.Tensor:
    with _explained(), torch.no_grad():
        return cast("torch.Tensor", getattr(_shown(self), LOCAL))


def _keep_local(self: torch.Tensor, value: torch.Tensor) -> None:
    setattr(_shown(self), LOCAL, value)


def _data(self: torch.Tensor) -> torch.Tensor:
    return _shown(self).data


def _point(self: torch.Tensor, value: torch.Tensor) -> None:
    _shown(self).data = value


def _deepcopy(self: torch.Tensor, memo: dict[int, object]) -> object:
    if id(self) not in memo:
        memo[id(self)] = copy.deepcopy(_shown(self), {}).detach()
    return memo[id(self)]


def _reduce_ex(self: torch.Tensor, protocol: int) -> object:
    return copy.deepcopy(self).__reduce_ex__(protocol)


@functools.cache
def _entry_class(kind: type) -> type:
    """Return the class of entries for tensors of a class.

    PyTorch asks the class that is derived from the other one first: entries before guards.
    """
    members = {
        "__doc__": f"An entry of a state dict that shows a {kind.__name__} whose bytes are in a store.",
        "__module__": __name__,
        "__torch_function__": classmethod(_torch_function),
        "__deepcopy__": _deepcopy,
        "__reduce_ex__": _reduce_ex,
        "data": property(_data, _point),
        "grad": None,
        LOCAL: property(_local, _keep_local),
    }
    return type(kind)("ShardedEntry", (guard_of(kind),), members)
