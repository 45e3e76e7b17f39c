"""A module's buffers as they were when its forward began.

A forward that is run again has to see the values that it saw, and must leave none behind: running
statistics would be updated twice, and a step that is counted would be counted twice.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple, cast

import torch
from torch import nn


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


def _version(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version  # noqa: SLF001


def _same_versions(tensors: tuple[torch.Tensor, ...]) -> contextlib.AbstractContextManager[None]:
    """Let tensors have the version afterwards that they had before, as nothing has changed for good."""
    if not tensors:
        return contextlib.nullcontext()
    preserve = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]  # noqa: SLF001
    return cast("contextlib.AbstractContextManager[None]", preserve(tensors))
