"""The backend within a wrapper, as one that moves any number of slots at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import cast

from tierstore.spi import Backend, BatchBackend, Buffer, Completion, Slot
from tierstore.wrappers.fan_in import Errors, each_error, when_all
from tierstore.wrappers.forwarding import attempt

Then = Callable[[Errors], None]


class InnerBackend:
    """Moves and frees slots of ``backend``; what calls raise is what their operations ended with."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._batching = cast("BatchBackend", backend) if backend.capabilities.has_batches else None

    def write(self, slots: Sequence[Slot], sources: Sequence[Buffer], then: Then) -> None:
        """Write each; tell ``then`` how each ended."""
        many = None if self._batching is None else self._batching.write_many
        self._move(self.backend.write, many, slots, sources, then)

    def read(self, slots: Sequence[Slot], into: Sequence[Buffer], then: Then) -> None:
        """Read each; tell ``then`` how each ended."""
        many = None if self._batching is None else self._batching.read_many
        self._move(self.backend.read, many, slots, into, then)

    def free(self, slots: Sequence[Slot], then: Then) -> None:
        """Free each; tell ``then`` how each ended."""
        when_all([attempt(functools.partial(self.backend.free, slot)) for slot in slots], then)

    def _move(
        self,
        one: Callable[[Slot, Buffer], Completion],
        many: Callable[[Sequence[Slot], Sequence[Buffer]], Completion] | None,
        slots: Sequence[Slot],
        buffers: Sequence[Buffer],
        then: Then,
    ) -> None:
        if many is None or len(slots) < 2:
            pairs = zip(slots, buffers, strict=True)
            when_all([attempt(functools.partial(one, slot, buffer)) for slot, buffer in pairs], then)
            return
        count = len(slots)
        attempt(lambda: many(slots, buffers)).add_done_callback(lambda error: then(each_error(error, count)))
