"""What a module's forward saw besides its arguments: it has to see the same when it is run again.

1. Buffers have the values that they had, and nothing is left behind: running statistics would be updated
   twice, and a step that is counted would be counted twice.
2. Modules train if they did, parameters want gradients if they did, and generators that are the modules' own
   or arguments draw what they drew.
3. Parameters must not have changed since; then PyTorch's error is raised.  Those that the forward itself
   changes it changes again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

import torch
from torch import nn

from tierstore.training.binding import natively
from tierstore.training.saved import refuse_if_changed


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


class Buffers:
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


class Before:
    """Everything that a forward saw besides its arguments, taken when it begins.

    A context manager, as often as wanted: inside, it is as it was, and afterwards as it is now.  One thread
    at a time.

    Args:
        module: whose forward.
        generators: that it was given.
    """

    def __init__(self, module: nn.Module, generators: Iterable[torch.Generator]) -> None:
        self._buffers = Buffers(module)
        self._modes = [(each, each.training) for each in module.modules()]
        owned = (each for owner, _ in self._modes for each in vars(owner).values())
        found = [each for each in owned if isinstance(each, torch.Generator)]
        self._states = [(each, each.get_state()) for each in dict.fromkeys((*found, *generators))]
        with natively():
            self._parameters = [(each, each.requires_grad, _version(each)) for each in module.parameters()]
        self._constant: list[tuple[nn.Parameter, int]] = []
        self._inside = contextlib.ExitStack()

    def end(self) -> None:
        """The forward has run."""
        self._buffers.keep_changed()
        with natively():  # what the forward itself changes, others may change by running it, too
            self._constant = [(each, then) for each, _, then in self._parameters if _version(each) == then]

    def __enter__(self) -> None:
        """Let everything be as it was.

        Raises:
            RuntimeError: a parameter was changed in place since; the text is PyTorch's.
        """
        with natively():
            for parameter, then in self._constant:
                refuse_if_changed(parameter.dtype, parameter.shape, _version(parameter), then)
        with contextlib.ExitStack() as inside:
            inside.enter_context(self._buffers)
            inside.enter_context(self._in_their_modes())
            inside.enter_context(self._in_their_states())
            self._inside = inside.pop_all()

    def __exit__(self, *error: object) -> None:
        self._inside.close()

    @contextlib.contextmanager
    def _in_their_modes(self) -> Iterator[None]:
        modes = [(module, module.training) for module, then in self._modes if module.training != then]
        with natively():
            wishes = [
                (each, each.requires_grad) for each, then, _ in self._parameters if each.requires_grad != then
            ]
        _turn(modes, wishes)
        try:
            yield
        finally:
            _turn([(each, not now) for each, now in modes], [(each, not now) for each, now in wishes])

    @contextlib.contextmanager
    def _in_their_states(self) -> Iterator[None]:
        now = [(generator, generator.get_state()) for generator, _ in self._states]
        for generator, state in self._states:
            generator.set_state(state)
        try:
            yield
        finally:
            for generator, state in now:
                generator.set_state(state)


def _turn(modes: Iterable[tuple[nn.Module, bool]], wishes: Iterable[tuple[nn.Parameter, bool]]) -> None:
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
    preserve = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]  # noqa: SLF001
    return cast("contextlib.AbstractContextManager[None]", preserve(tensors))
