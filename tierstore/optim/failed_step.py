"""What a step that has failed had changed already: the next one goes on from there.

A step of several parameters can fail in its midst, as a table's pages find no room on a full disk.  Whoever
makes room and steps again means the same step: what was stepped with the gradient that it has still is not
stepped twice.  A gradient that has come, gone or changed since belongs to another step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.utils.weak import TensorWeakRef


class GradientMark:
    """A gradient as it is now, which is not kept alive.

    Args:
        gradient: which; ``None``: there is none.
    """

    __slots__ = ("_gradient", "_version")

    def __init__(self, gradient: torch.Tensor | None) -> None:
        self._gradient = None if gradient is None else TensorWeakRef(gradient)
        self._version = 0 if gradient is None else gradient._version  # noqa: SLF001 - nobody else tells

    def is_of(self, gradient: torch.Tensor | None) -> bool:
        """Whether this is that gradient, and nobody has written to it since."""
        if self._gradient is None or gradient is None:
            return self._gradient is None and gradient is None
        return self._gradient() is gradient and gradient._version == self._version  # noqa: SLF001


class FailedStep:
    """See the module.

    Args:
        optimizer: whose; a double of it that shares this has a step of its own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._owner = id(optimizer)
        self._stepped: dict[torch.Tensor, GradientMark] = {}

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is that optimizer's own."""
        return self._owner == id(optimizer)

    @property
    def is_partial(self) -> bool:
        """Whether a step has failed that had stepped a parameter."""
        return bool(self._stepped)

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter has been stepped with the gradient that it has."""
        mark = self._stepped.get(parameter)
        return mark is not None and mark.is_of(parameter.grad)

    def note(self, parameter: torch.Tensor) -> None:
        """A parameter has been stepped."""
        self._stepped[parameter] = GradientMark(parameter.grad)

    @contextmanager
    def step_of(self, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
        """Forget these parameters if the context ends, and not if it raises."""
        yield
        for parameter in parameters:
            self._stepped.pop(parameter, None)
