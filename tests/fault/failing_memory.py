"""Host memory that runs out at a chosen moment: the one place where outputs allocate fails.

Everything that is handed out as ordinary tensors in host memory comes from `tierstore.output_buffers`: fresh
arrays of numpy, and maps.  Here the n-th of them fails, or each from the n-th on, as SQLite's tests do with
``malloc``.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np

from tierstore import output_buffers

Raise = Callable[[], BaseException]


def no_memory() -> BaseException:
    """Return what numpy raises."""
    return MemoryError("Unable to allocate")


def no_map() -> BaseException:
    """Return what the system raises for a map."""
    return OSError(errno.ENOMEM, "Cannot allocate memory")


def no_accelerator_memory() -> BaseException:
    """Return what allocators of PyTorch raise."""
    return RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")


class MemoryOut:
    """Lets allocations of outputs fail, inside the context.

    Args:
        number: of the first that fails; 0: none.
        count: how many fail.
        error: returns what they raise.

    Attributes:
        allocations: how many there were.
        failures: how many failed.
        largest_bytes: the largest of them.
        nbytes: of all of them together.
    """

    def __init__(self, number: int, count: int = 1, error: Raise = no_memory) -> None:
        self._number = number
        self._count = count
        self._error = error
        self.allocations = 0
        self.failures = 0
        self.largest_bytes = 0
        self.nbytes = 0

    def _pass_by(self, nbytes: int) -> None:
        self.allocations += 1
        if self._number and self._number <= self.allocations < self._number + self._count:
            self.failures += 1
            raise self._error()
        self.largest_bytes = max(self.largest_bytes, nbytes)
        self.nbytes += nbytes

    def empty(self, shape: int, **named: Any) -> Any:  # noqa: ANN401 - numpy's
        """Do what ``numpy.empty`` does."""
        self._pass_by(shape)
        return np.empty(shape, **named)

    def mmap(self, fileno: int, length: int, **named: Any) -> mmap.mmap:  # noqa: ANN401 - mmap's
        """Do what ``mmap.mmap`` does."""
        self._pass_by(length)
        return mmap.mmap(fileno, length, **named)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the rest of both modules
        return getattr(np, name) if hasattr(np, name) else getattr(mmap, name)

    def __enter__(self) -> MemoryOut:
        """Take both modules' place in `tierstore.output_buffers`."""
        module: Any = output_buffers
        module.np, module.mmap = self, self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let memory be there again."""
        module: Any = output_buffers
        module.np, module.mmap = np, mmap
