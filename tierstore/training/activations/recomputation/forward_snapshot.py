"""What a module's forward saw besides its arguments: it has to see the same when it is run again.

1. Buffers have the values that they had, and nothing is left behind: running statistics would be updated
   twice, and a step that is counted would be counted twice.
2. Modules train if they did, and parameters want gradients if they did.
3. Random numbers are those that it drew, whether from Python's, numpy's or a generator that is a module's own
   or an argument.  PyTorch sees to its own default generators.
4. Parameters are the objects that they were, as where ``torch.func.functional_call`` lends others; not so
   DTensors, which FSDP puts into place itself.  They must not have changed since; then PyTorch's error is
   raised.  Those that the forward itself changes it changes again.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tierstore.torch_private import is_traceable_wrapper_subclass, preserve_versions
from tierstore.training.autograd.saved_tensors import refuse_if_changed
from tierstore.training.bundles.bindings import natively


def has_lazy(module: nn.Module) -> bool:
    """Say whether the first forward of a module is still to make parameters or buffers."""
    return any(map(is_lazy, itertools.chain(module.parameters(), module.buffers())))


class _Buffer(NamedTuple):
    """A buffer at the beginning.

    Attributes:
        owner: the module that it is registered with.
        name: there.
        tensor: the very object; ``None``: there was none.
        version: of its counter.
        values: a copy.
    """

    owner: nn.Module
    name: str
    tensor: torch.Tensor | None
    version: int
    values: torch.Tensor | None

    @property
    def is_changed(self) -> bool:
        """Whether it may hold something else now, or be another object."""
        if self.owner._buffers.get(self.name) is not self.tensor:  # noqa: SLF001 - also where it is None
            return True
        if self.tensor is None:
            return False
        is_counted = not self.tensor.is_inference()
        return not is_counted or _version(self.tensor) != self.version or self._is_running_statistic

    @property
    def _is_running_statistic(self) -> bool:
        """Whether a norm updates it: the functions that do that do not tell the version counter."""
        return self.owner.training and self.name.startswith("running_")


class BufferSnapshot:
    """The buffers of a module and of all under it, taken when its forward begins.

    A context manager, as often as wanted: inside, the changed ones are as they were; afterwards they are
    again as they were before, objects, values and versions.  One thread at a time.

    Args:
        module: whose.
    """

    def __init__(self, module: nn.Module) -> None:
        with torch.no_grad():
            self._taken = [
                _Buffer(owner, name, tensor, _version(tensor), None if tensor is None else tensor.clone())
                for owner in module.modules()
                for name, tensor in owner._buffers.items()  # noqa: SLF001 - `buffers()` leaves None out
            ]
        self._present: list[tuple[_Buffer, torch.Tensor | None]] = []
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._versions = contextlib.ExitStack()

    def keep_changed(self) -> None:
        """Forget all that the forward left as it was."""
        self._taken = [each for each in self._taken if each.is_changed]

    def __enter__(self) -> None:
        self._present = [(each, each.owner._buffers.get(each.name)) for each in self._taken]  # noqa: SLF001
        tensors = [each.tensor for each in self._taken if each.tensor is not None]
        counted = tuple(tensor for tensor in tensors if not tensor.is_inference())
        self._versions.enter_context(_same_versions(counted))
        with torch.no_grad():
            for each in self._taken:
                if each.tensor is not None and each.values is not None:
                    self._values.append((each.tensor, each.tensor.clone()))
                    each.tensor.copy_(each.values)
                each.owner._buffers[each.name] = each.tensor  # noqa: SLF001

    def __exit__(self, *error: object) -> None:
        with torch.no_grad():
            for tensor, values in reversed(self._values):
                tensor.copy_(values)
        self._versions.close()
        for each, present in reversed(self._present):
            each.owner._buffers[each.name] = present  # noqa: SLF001
        self._present, self._values = [], []


class _Parameter(NamedTuple):
    """A parameter at the beginning."""

    owner: nn.Module
    name: str
    tensor: torch.Tensor
    is_wanted: bool
    version: int


class ForwardSnapshot:
    """Everything that a forward saw besides its arguments, taken when it begins.

    A context manager, as often as wanted: inside, it is as it was, and afterwards as it is now.  One thread
    at a time.

    Args:
        module: whose forward.
        values: its arguments.
    """

    def __init__(self, module: nn.Module, values: Iterable[object]) -> None:
        self._buffers = BufferSnapshot(module)
        self._modes = [(each, each.training) for each in module.modules()]
        owned = (each for owner, _ in self._modes for each in vars(owner).values())
        numpy_random = _of_numpy()
        kinds = (torch.Generator, random.Random, numpy_random.Generator, numpy_random.RandomState)
        found = {id(each): each for each in (*owned, *values) if isinstance(each, kinds)}
        self._states = [(each, _state_of(each)) for each in (random, numpy_random, *found.values())]
        with natively():
            self._parameters = [
                _Parameter(owner, name, each, each.requires_grad, _version(each))
                for owner, _ in self._modes
                for name, each in owner._parameters.items()  # noqa: SLF001 - where `functional_call` lends
                if each is not None
            ]
        self._constant: list[_Parameter] = []
        self._inside = contextlib.ExitStack()

    def end(self) -> None:
        """The forward has run."""
        self._buffers.keep_changed()
        with natively():  # what the forward itself changes, others may change by running it, too
            self._constant = [each for each in self._parameters if _version(each.tensor) == each.version]

    def __enter__(self) -> None:
        """Let everything be as it was.

        Raises:
            RuntimeError: a parameter was changed in place since; the text is PyTorch's.
        """
        with natively():
            for each in self._constant:
                refuse_if_changed(each.tensor.dtype, each.tensor.shape, _version(each.tensor), each.version)
        with contextlib.ExitStack() as inside:
            inside.enter_context(self._buffers)
            inside.enter_context(self._in_their_places())
            inside.enter_context(self._in_their_modes())
            inside.enter_context(self._in_their_states())
            self._inside = inside.pop_all()

    def __exit__(self, *error: object) -> None:
        self._inside.close()

    @contextlib.contextmanager
    def _in_their_places(self) -> Iterator[None]:
        moved: list[tuple[dict[str, Any], str, torch.Tensor, object]] = []
        for owner, name, then, _, _ in self._parameters:
            held: dict[str, Any] = owner._parameters  # noqa: SLF001
            if name in held and held[name] is not then and not _is_wrapper(then):
                moved.append((held, name, then, held[name]))
                held[name] = then
        try:
            yield
        finally:
            for held, name, _, now in moved:
                held[name] = now

    @contextlib.contextmanager
    def _in_their_modes(self) -> Iterator[None]:
        modes = [(module, module.training) for module, then in self._modes if module.training != then]
        with natively():
            wishes = [each for each in self._parameters if each.tensor.requires_grad != each.is_wanted]
            wished = [(each.tensor, each.tensor.requires_grad) for each in wishes if each.tensor.is_leaf]
        _turn(modes, wished)
        try:
            yield
        finally:
            _turn([(each, not now) for each, now in modes], [(each, not now) for each, now in wished])

    @contextlib.contextmanager
    def _in_their_states(self) -> Iterator[None]:
        now = [(generator, _state_of(generator)) for generator, _ in self._states]
        for generator, state in self._states:
            _set_state(generator, state)
        try:
            yield
        finally:
            for generator, state in now:
                _set_state(generator, state)


_is_wrapper: Callable[[torch.Tensor], bool] = is_traceable_wrapper_subclass


def _of_numpy() -> Any:  # noqa: ANN401 - a module
    """Return ``numpy.random``, which nobody else may have imported yet: a forward may be the first."""
    import numpy.random

    return numpy.random


def _state_of(generator: Any) -> Any:  # noqa: ANN401 - a generator, or the module that has one
    if isinstance(generator, _of_numpy().Generator):
        return generator.bit_generator.state
    return generator.getstate() if hasattr(generator, "getstate") else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:  # noqa: ANN401 - see `_state_of`
    if isinstance(generator, _of_numpy().Generator):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _turn(modes: Iterable[tuple[nn.Module, bool]], wishes: Iterable[tuple[torch.Tensor, bool]]) -> None:
    """Let modules train that do not, and parameters want gradients that do not, and the other way round."""
    for module, now in modes:
        module.training = not now
    with natively():
        for parameter, now in wishes:
            parameter.requires_grad_(not now)


def _version(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version  # noqa: SLF001


def _same_versions(tensors: tuple[torch.Tensor, ...]) -> contextlib.AbstractContextManager[None]:
    """Let tensors have the version afterwards that they had before, as nothing has changed for good."""
    if not tensors:
        return contextlib.nullcontext()
    return preserve_versions(tensors)
