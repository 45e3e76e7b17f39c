r"""Which storages are outputs of operators that are marked.

1. A mark is a `MarkScope` of a module: all operators that run while the module does, or those of some names.
   Where several count, the one with the highest rank does.
2. An operator's output is what its ATen operator returns in a storage that it was not given.  A view is not
   one: it is as its storage is.
3. Who wrote a storage last decides: a marked operator marks what it changes in place, and one that is not
   marked takes the mark away.
4. Parameters, buffers, and what was computed from these alone, as autocast's casts of weights, are never
   marked.
5. Nothing is marked in backward, or where others' hooks would get what is saved: what is recomputed is not
   swapped.

Storages are told by the live object, never by an address.  One thread, one forward pass.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tierstore.torch_private import (
    OpOverload,
    is_traceable_wrapper_subclass,
)
from tierstore.training.activations.runtime.forward_conditions import refuse_forward_mode
from tierstore.training.activations.runtime.operators import (
    Arguments,
    Named,
    OperatorFacts,
    facts_of,
    written,
)
from tierstore.training.autograd.accumulation import is_in_backward
from tierstore.training.bundles.bindings import natively
from tierstore.training.pytorch.function_modes import are_function_modes_on
from tierstore.training.pytorch.live_storages import LiveStorages
from tierstore.training.pytorch.own_work import is_own_work

_PLAIN = (torch.Tensor, nn.Parameter)

Operator = OpOverload[..., Any]


class Reach(enum.Enum):
    """Which operators of a module a scope means."""

    ALL = enum.auto()  # every one that runs while the module does
    NAMED = enum.auto()  # those of some names, wherever they run while the module does
    OWN = enum.auto()  # those of some names in the module's own forward, not in its submodules'


@dataclass(frozen=True, slots=True, eq=False)
class MarkScope:
    """A mark on a module.

    Attributes:
        layer_id: the layer's number.
        prefetch: how many nodes of the backward graph ahead of their use its outputs come back.
        rank: of the scopes that count, the highest does.
        reach: which operators are meant.
        matches: says whether an operator is; for `Reach.ALL` nobody asks.
    """

    layer_id: int
    prefetch: int
    rank: int
    reach: Reach = Reach.ALL
    matches: Callable[[Operator], bool] = lambda _: True


# ---------------------------------------------------------------------- which operators


@dataclass(slots=True, eq=False)
class MarkedCall:
    """A call of a module, and what the operators in it are marked by."""

    whole: MarkScope | None = None
    named: tuple[MarkScope, ...] = ()
    own: tuple[MarkScope, ...] = ()
    known: dict[object, MarkScope | None] = field(default_factory=dict)

    def within(self, scopes: Sequence[MarkScope]) -> MarkedCall:
        """Return a call inside this one, of a module with these scopes."""
        by = {reach: tuple(scope for scope in scopes if scope.reach is reach) for reach in Reach}
        whole = _highest([self.whole, *by[Reach.ALL]])
        return MarkedCall(whole, self.named + by[Reach.NAMED], by[Reach.OWN])

    def find(self, operator: Operator) -> MarkScope | None:
        """Return the scope that counts for an operator."""
        if not (self.named or self.own):
            return self.whole
        if operator not in self.known:
            named = [scope for scope in (*self.named, *self.own) if scope.matches(operator)]
            self.known[operator] = _highest([self.whole, *named])
        return self.known[operator]


UNMARKED = MarkedCall()
"""What is around all marked calls."""


def _highest(scopes: Iterable[MarkScope | None]) -> MarkScope | None:
    return max((scope for scope in scopes if scope is not None), key=lambda scope: scope.rank, default=None)


# ---------------------------------------------------------------------- which storages


OWN = MarkScope(-1, 0, -1)
"""Stands for what was made of parameters and buffers alone: it is the model's own, and never marked."""


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor; ``None``: it has none of its own, as wrappers and sparse tensors."""
    if type(tensor) in _PLAIN and not are_function_modes_on():
        return _storage_of(tensor)
    is_wrapper: bool = type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor)
    if is_wrapper:
        return None
    with natively():  # parameters wear other classes inside their windows and outside
        return _storage_of(tensor)


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    if tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


class OperatorWatch:
    """Sees every operator of its thread, and marks what the marked ones return: an `OperatorWatcher`.

    Args:
        own: ids of the model's parameters and buffers.
        find: says by what an operator that runs now is marked.
        note_operator: called after each operator that is not a view.
        is_asked: says whether what is saved now would be ours.
        note_change: told of each storage that an operator changes.
    """

    def __init__(
        self,
        own: frozenset[int],
        find: Callable[[Operator], MarkScope | None],
        note_operator: Callable[[], None],
        is_asked: Callable[[], bool],
        note_change: Callable[[torch.UntypedStorage], None],
    ) -> None:
        self._written: LiveStorages[MarkScope] = LiveStorages()  # who wrote a storage last, if it is marked
        self._own = own
        self._find = find
        self._note_operator = note_operator
        self._is_asked = is_asked
        self._note_change = note_change

    def scope_of(self, storage: torch.UntypedStorage) -> MarkScope | None:
        """Return what a storage is marked by."""
        scope = self._written.get(storage)
        return None if scope is OWN else scope

    def unmark(self, storage: torch.UntypedStorage) -> None:
        """Let a storage be marked no more."""
        self._written.discard(storage)

    def before(self, func: Operator, args: Arguments, kwargs: Named) -> object:
        """See `OperatorWatcher`."""
        del args, kwargs
        if is_own_work() or is_in_backward():
            return None
        refuse_forward_mode()
        return facts_of(func)

    def after(
        self, noted: OperatorFacts, func: Operator, args: Arguments, kwargs: Named, result: object
    ) -> None:
        """See `OperatorWatcher`."""
        given: dict[int, bool] = {}
        self._look(args, given)
        if kwargs:
            self._look(kwargs.values(), given)
        if noted.is_changing:
            for storage in _storages(written(func, args, kwargs)):
                self._note_change(storage)
        if not noted.is_view:
            scope = self._find(func)
            if scope is not None and not self._is_asked():
                scope = None
            is_own = bool(given) and False not in given.values()
            self._see((result,), given, scope, is_own=is_own, is_changed=noted.returns_changed)
            self._note_operator()

    def _look(self, values: Iterable[object], given: dict[int, bool]) -> None:
        """Put into ``given`` the storages in ``values``, and whether they are the model's own."""
        for value in values:
            if isinstance(value, torch.Tensor):
                storage = storage_of(value)
                if storage is not None:
                    is_own = self._written.get(storage) is OWN
                    if not is_own and id(value) in self._own:
                        self._written.put(storage, OWN)
                        is_own = True
                    given[id(storage)] = is_own
            elif isinstance(value, list | tuple):
                self._look(value, given)

    def _see(
        self,
        values: Iterable[object],
        given: Mapping[int, bool],
        scope: MarkScope | None,
        *,
        is_own: bool,
        is_changed: bool,
    ) -> None:
        """Take in what an operator that is no view returned: what was ``given`` may be what it changed."""
        for value in values:
            if isinstance(value, torch.Tensor):
                storage = storage_of(value)
                if storage is None:
                    continue
                was_own = given.get(id(storage))
                if was_own is None:
                    self._made(storage, scope, is_own=is_own)
                elif not was_own and is_changed:
                    self._made(storage, scope, is_own=False)
            elif isinstance(value, list | tuple):
                self._see(value, given, scope, is_own=is_own, is_changed=is_changed)

    def _made(self, storage: torch.UntypedStorage, scope: MarkScope | None, *, is_own: bool) -> None:
        if is_own or scope is not None:
            self._written.put(storage, OWN if is_own or scope is None else scope)
        else:
            self._written.discard(storage)


def _storages(values: Iterable[object]) -> Iterator[torch.UntypedStorage]:
    for value in values:
        if isinstance(value, torch.Tensor):
            storage = storage_of(value)
            if storage is not None:
                yield storage
        elif isinstance(value, list | tuple):
            yield from _storages(value)
