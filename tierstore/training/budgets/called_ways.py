"""In which ways a program calls a model, or a part of it: one way may take much more than another.

1. Calls are alike if they run the same module in the same mode, of training and of autocast, and give it the
   same arguments: tensors of the same types, and the same switches (truth values, strings, enums, ``None``).
   How large tensors are is for others to look at; numbers tell nothing, as positions change with every call.
2. Of each module so many ways are told apart.  All others are one, as a string may be a switch or a text.

3. What evaluations of a module have made, and it is given again, is no larger input: keys and values of
   former tokens.

What a module reads elsewhere, such as an attribute that somebody changed, is not seen.
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from tierstore.training.budgets.memory_meters import storages_in, tensors_in

MOST_WAYS = 16
"""Ways to call a module that are told apart."""

_SWITCHES = (bool, str, bytes, type(None))


class _Made(NamedTuple):
    """What evaluations of a module have made."""

    storage: weakref.ref[torch.UntypedStorage]
    module: nn.Module | None


class CalledWays:
    """Tells the ways apart in which a program calls the modules of a model.

    Args:
        device_type: of the device that they compute on, for which autocast may be on.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._known: dict[nn.Module, set[Hashable]] = {}
        self._made: dict[int, _Made] = {}  # by the id of the storage
        self._called: nn.Module | None = None  # that has begun
        self._inputs: Sequence[object] = ()  # of it
        self._given: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by id: the storages among them then

    def way_of(self, module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> Hashable:
        """Return what is the same for calls of a module that are alike, and for no others.

        Args:
            module: that is called.
            args: what it is given without a name.
            kwargs: what it is given by name.
        """
        is_autocast = torch.is_autocast_enabled(self._device_type)
        given = (tuple(map(_look, args)), _look(kwargs))
        way: Hashable = (module.training, is_autocast, given)
        known = self._known.setdefault(module, set())
        if way not in known and len(known) >= MOST_WAYS:
            return module, None
        known.add(way)
        return module, way

    def elements_of(self, module: nn.Module, inputs: Sequence[object]) -> int:
        """A module is called: return the number of elements of its inputs that it has not made itself."""
        self._called, self._inputs = module, inputs
        self._given = {id(storage): weakref.ref(storage) for storage in storages_in(inputs)}
        own = {key for key in self._given if key in self._made and self._made[key].module is module}
        return sum(
            each.numel()
            for each in tensors_in(inputs)
            if not own or own.isdisjoint(id(storage) for storage in storages_in([each]))
        )

    def note_made(self, output: object) -> None:
        """An evaluation has ended: take in what it has returned, or put into what it was given."""
        for storage in storages_in([output, *self._inputs]):
            key = id(storage)
            given = self._given.get(key)
            if given is None or given() is not storage:  # such as one that died meanwhile
                known = weakref.ref(storage, functools.partial(self._forget, key))
                self._made[key] = _Made(known, self._called)
        self.forget_call()

    def forget_call(self) -> None:
        """A call has ended of which nothing is to be known."""
        self._called, self._inputs, self._given = None, (), {}

    def _forget(self, key: int, _: object) -> None:
        self._made.pop(key, None)


def _look(value: object) -> Hashable:
    """Return what of an argument tells ways apart."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return kind, value.dtype
    if isinstance(value, enum.Enum):
        return kind, value.name
    if kind in _SWITCHES:
        return kind, repr(value)
    if isinstance(value, Mapping):
        return kind, frozenset((str(name), _look(each)) for name, each in value.items())
    if isinstance(value, list | tuple):
        return kind, frozenset(map(_look, value))
    return kind, None
