"""A run of an operator that can be run again, and references to what it makes.

A `RecordedOp` knows the operator and what it was given; a `SavedOutput` stands for one of its outputs, as
whatever refers to it (autograd, or another call that was given the output) wants it.

1. The inputs are kept as they are until somebody saves an output; then as autograd would keep them.
2. What was made is kept until each reference that there was then has been followed, or is no more.
3. An operator runs again with the random state that it had, without autocast, which was applied before, and
   on copies of running statistics.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch

from tierstore.torch_private import (
    DisableAutocast,
    OpOverload,
)
from tierstore.training import locks
from tierstore.training.activations.runtime.operators import (
    Arguments,
    Named,
    found,
    is_plain,
    mapped,
    tensors_in,
)
from tierstore.training.activations.runtime.tensor_views import TensorView
from tierstore.training.bundles.binding import natively_in_sight
from tierstore.training.locks import Rank
from tierstore.training.pytorch.live_storages import LiveStorages
from tierstore.training.pytorch.saved_tensor_hooks import top_hooks

_UNFILLED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_RUNNING_STATISTICS = ("running_mean", "running_var")


class InputRef:
    """A tensor that an operator was given; kept as it is until somebody saves the operator's output.

    Args:
        packed: the tensor; or a reference to a bundle, or to what another call made: whose bytes others
            look after.
        unpack: follows the reference; ``None``: it is the tensor.
        is_cloned: whether the operator is given a copy when it runs again.
    """

    __slots__ = ("_is_cloned", "_packed", "_storage", "_unpack")

    def __init__(
        self, packed: object, unpack: Callable[[Any], torch.Tensor] | None, *, is_cloned: bool
    ) -> None:
        self._packed = packed
        self._unpack = unpack
        self._is_cloned = is_cloned
        self._storage = weakref.ref(packed.untyped_storage()) if isinstance(packed, torch.Tensor) else None

    @property
    def storage(self) -> torch.UntypedStorage | None:
        """The storage that it lies in, while that lives; ``None`` as well if others look after its bytes."""
        return None if self._storage is None else self._storage()

    @property
    def call(self) -> RecordedOp | None:
        """The call that made it; ``None``: it was not made by one that can be run again."""
        return self._packed.call if isinstance(self._packed, SavedOutput) else None

    def pack(self) -> None:
        """Keep it as autograd would, by the hooks that are in force."""
        top = top_hooks()
        if self._unpack is None and top is not None:
            self._packed, self._unpack = top[0](self._packed), top[1]

    def get(self) -> torch.Tensor:
        """Return it."""
        tensor = cast("torch.Tensor", self._packed if self._unpack is None else self._unpack(self._packed))
        return tensor.clone() if self._is_cloned else tensor


class RecordedOp:
    """One run of an operator, which can be run again.

    Args:
        operator: that ran.
        args: its arguments, with an `InputRef` for each tensor.
        kwargs: its named arguments, likewise.
        random: the random state that it began with.
        counts: to tell of runs.
    """

    def __init__(
        self,
        operator: OpOverload,
        args: Arguments,
        kwargs: Named,
        random: RandomState | None,
        counts: RecomputeCounts,
    ) -> None:
        self.is_packed = False
        self.is_over = False
        self._operator = operator
        self._args = args
        self._kwargs = kwargs
        self._random = random
        self._counts = counts
        self._lock = locks.new_lock(Rank.RECORDED_OP)  # guards the values while they are made
        self._values: Sequence[torch.Tensor] | None = None
        self.is_pinned = False
        self._references: set[int] = set()
        self._saved: set[int] = set()  # those of them that somebody has saved
        self._waiting: set[int] = set()
        self._numbers = itertools.count()
        self._users: list[weakref.ref[RecordedOp]] = []
        for call in self.sources():
            call.note_user(self)

    def sources(self) -> Iterator[RecordedOp]:
        """Yield the calls that made inputs."""
        for each in found((self._args, self._kwargs), InputRef):
            if each.call is not None:
                yield each.call

    def note_user(self, call: RecordedOp) -> None:
        """Take in that another call was given an output."""
        self._users.append(weakref.ref(call))

    def pack(self) -> None:
        """Keep the inputs, and those of the calls that made inputs: somebody has saved an output."""
        due = [self]
        while due:
            due += due.pop().pack_this()

    def pack_this(self) -> Sequence[RecordedOp]:
        """Keep the inputs; return the calls that made inputs, which have to do so as well."""
        if self.is_packed:
            return ()
        self.is_packed = True
        for each in found((self._args, self._kwargs), InputRef):
            each.pack()
        return list(self.sources())

    @property
    def is_made(self) -> bool:
        """Whether the outputs are there."""
        return self._values is not None

    def storages(self) -> Iterator[torch.UntypedStorage]:
        """Yield the storages of inputs: whoever changes one changes the input."""
        for each in found((self._args, self._kwargs), InputRef):
            if each.storage is not None:
                yield each.storage

    def settle(self) -> None:
        """Depend on the inputs no more: they are about to change.

        If nobody has saved an output, nor what is made from it, none of that is made again any more.
        """
        if not self._is_wanted():
            due = [self]
            while due:
                due += due.pop().give_up()
        elif not self.is_pinned:
            with self._lock:
                values = self._make()
                self.is_pinned = True
                self._values = values
                self._args, self._kwargs = (), {}

    def _is_wanted(self) -> bool:
        """Whether somebody has saved an output, or what is made from it."""
        due, seen = [self], {self}
        while due:
            call = due.pop()
            if call.is_saved:
                return True
            due += [user for user in call.users() if user not in seen]
            seen.update(due)
        return False

    @property
    def is_saved(self) -> bool:
        """Whether somebody has saved an output."""
        return bool(self._saved)

    def users(self) -> Sequence[RecordedOp]:
        """Return the calls that were given outputs, and want them if they are wanted themselves."""
        return [call for each in self._users if (call := each()) is not None and not call.is_pinned]

    def give_up(self) -> Sequence[RecordedOp]:
        """Be made again no more; return the calls that were given outputs, to which the same happens."""
        if self.is_over or self.is_pinned:
            return ()
        self.is_over = True
        self._args, self._kwargs = (), {}
        return self.users()

    def refer(self, *, is_saved: bool) -> int:
        """Count one more reference; return its number.

        Args:
            is_saved: whether it is saved; else another call was given the output.
        """
        number = next(self._numbers)
        self._references.add(number)
        if is_saved:
            self._saved.add(number)
        return number

    def forget(self, number: int) -> None:
        """One reference is no more.  From any thread, at any time."""
        self._references.discard(number)
        self._saved.discard(number)
        self._followed(number)

    def value(self, index: int, number: int) -> torch.Tensor:
        """Return an output to whoever follows a reference."""
        with self._lock:
            values = self._make()
            self._followed(number)
        return values[index]

    def _make(self) -> Sequence[torch.Tensor]:
        """Return the outputs; make them if they are not there, after those that they are made from.

        Those could be made while the operator runs, but a chain of operators may be longer than the
        interpreter's stack.
        """
        values: Sequence[torch.Tensor] = ()
        due = [self]
        while due:
            missing = due[-1].missing()
            if missing is not None:
                due.append(missing)
            else:
                values = due.pop().make_this()
        return values

    def missing(self) -> RecordedOp | None:
        """Return a call that has to be made before this one; ``None``: this one can be, or is."""
        return None if self.is_made else next((call for call in self.sources() if not call.is_made), None)

    def make_this(self) -> Sequence[torch.Tensor]:
        """Return the outputs; run the operator if they are not there."""
        with self._lock:
            values = self._values
            if values is None:
                values = self._run()
                self._waiting = set(self._references)  # before the values, which go when nobody waits
                self._values = values
            return values

    def _followed(self, number: int) -> None:
        self._waiting.discard(number)
        if not self._waiting and not self.is_pinned:
            self._values = None

    def _run(self) -> Sequence[torch.Tensor]:
        self._counts.made += 1
        random = contextlib.nullcontext() if self._random is None else self._random.again()
        # Some kernels look whether gradients are wanted.  None of the inputs asks for one.
        with torch.enable_grad(), DisableAutocast(), natively_in_sight():
            args = mapped(self._args, InputRef, InputRef.get)
            kwargs = mapped(self._kwargs, InputRef, InputRef.get)
            with random:
                result = self._operator(*args, **kwargs)
        return list(tensors_in(result))


class SavedOutput:
    """A reference to an output of a run: what is saved instead of the output."""

    __slots__ = ("_index", "_number", "_view", "call")

    def __init__(self, call: RecordedOp, index: int, tensor: torch.Tensor, *, is_saved: bool) -> None:
        self.call = call
        self._index = index
        self._view = TensorView.of(tensor)
        self._number = call.refer(is_saved=is_saved)

    def tensor(self) -> torch.Tensor:
        """Return the tensor that it stands for, or a view that is the same."""
        return self._view.over(self.call.value(self._index, self._number).untyped_storage())

    def __del__(self) -> None:
        self.call.forget(self._number)


class RandomState(NamedTuple):
    """The state of the generator of one device."""

    device: torch.device
    state: torch.Tensor

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """Return what it is."""
        if device.type == "cpu":
            return cls(device, torch.get_rng_state())
        return cls(device, torch.get_device_module(device).get_rng_state(device))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Be in that state inside, and afterwards in the one before."""
        before = self.now(self.device)
        self.set()
        try:
            yield
        finally:
            before.set()

    def set(self) -> None:
        """Put the generator into that state."""
        if self.device.type == "cpu":
            torch.set_rng_state(self.state)
        else:
            torch.get_device_module(self.device).set_rng_state(self.state, self.device)


class RecomputeCounts:
    """What came of choosing operators.

    Attributes:
        saved: how many tensors autograd wanted to save that are made again instead.
        made: how many operators were run again.
    """

    def __init__(self) -> None:
        self.saved = 0
        self.made = 0


class InputIndex:
    """Which calls were given what: asked before something changes."""

    def __init__(self) -> None:
        self._calls: LiveStorages[weakref.WeakSet[RecordedOp]] = LiveStorages()

    def add(self, call: RecordedOp) -> None:
        """Take a call in."""
        for storage in call.storages():
            calls = self._calls.get(storage)
            if calls is None:
                calls = weakref.WeakSet()
                self._calls.put(storage, calls)
            calls.add(call)

    def settle(self, storage: torch.UntypedStorage) -> None:
        """Let every call that was given a storage depend on it no more: it is about to change."""
        for call in list(self._calls.get(storage) or ()):
            call.settle()


# ---------------------------------------------------------------------- arguments


def can_repeat(args: Arguments, kwargs: Named) -> bool:
    """Whether the same arguments give the same result later."""
    generators = found((args, kwargs), torch.Generator)
    return next(generators, None) is None and all(map(is_plain, tensors_in((args, kwargs))))


def random_state_for(func: OpOverload, args: Arguments, kwargs: Named) -> RandomState | None:
    """Return what an operator draws its random numbers from; ``None`` if it draws none."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    first = next(tensors_in((args, kwargs)), None)
    device = kwargs.get("device") if first is None else first.device
    return RandomState.now(device if isinstance(device, torch.device) else torch.device("cpu"))


@functools.cache
def updated_unsaid(func: OpOverload) -> frozenset[int | str]:
    """Return which arguments of an operator it updates without saying so, by position and by name."""
    names = [argument.name for argument in func._schema.arguments]  # noqa: SLF001 - the one place that says it
    return frozenset(
        key for place, name in enumerate(names) if name in _RUNNING_STATISTICS for key in (place, name)
    )


@functools.cache
def is_unfilled(func: OpOverload) -> bool:
    """Say whether what an operator returns has no values until somebody writes them, unseen perhaps."""
    return func._schema.name.split("::")[-1] in _UNFILLED  # noqa: SLF001
