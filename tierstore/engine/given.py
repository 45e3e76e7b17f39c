"""Memory that a caller gives to a tier as it lies."""

from __future__ import annotations

import contextlib
from typing import NamedTuple, Self

import torch

from tierstore.spi import AdoptingBackend, Slot


class Given(NamedTuple):
    """Memory with its bytes, which a stream of its device has written.

    Attributes:
        memory: that.
        stream: that is current in the caller's thread: another thread may be the one that tells the backend.
            ``None``: its device has none.
    """

    memory: torch.Tensor
    stream: torch.Stream | None

    @classmethod
    def by_caller(cls, memory: torch.Tensor) -> Self:
        """Return memory that this thread's stream has written."""
        if memory.device.type == "cpu":
            return cls(memory, None)
        return cls(memory, torch.accelerator.current_stream(memory.device))

    def to(self, backend: AdoptingBackend) -> Slot:
        """Let a backend adopt it; raises as that does."""
        with contextlib.nullcontext() if self.stream is None else self.stream:
            return backend.adopt(self.memory)
