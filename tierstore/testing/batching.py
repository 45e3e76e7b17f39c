"""Batches on demand: a backend of single operations as one that takes many slots in one call, for tests.

Each slot of a batch, and each part of a slot, is an operation of the backend within, so that what a test
lets fail, stand still or come late there happens in the middle of a batch.  Around the other wrappers:
``Batching(Faulty(...))``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from tierstore.spi import Backend, Buffer, Capabilities, Completion, Slot
from tierstore.wrappers.fan_in import as_one, when_all
from tierstore.wrappers.forwarding import Begin, ForwardingBackend, attempt


class Batching(ForwardingBackend):
    """A `tierstore.spi.BatchBackend` over any backend.  Thread-safe.

    Args:
        backend: what does the work.

    Attributes:
        batches: the number of slots, or of parts, of every batch so far.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.batches: list[int] = []

    @property
    def capabilities(self) -> Capabilities:
        """What the wrapped backend can do, and batches."""
        return replace(super().capabilities, has_batches=True)

    def read_many(self, slots: Sequence[Slot], into: Sequence[Buffer]) -> Completion:
        """Copy each out."""
        return self._each(self.within.read, slots, into)

    def write_many(self, slots: Sequence[Slot], sources: Sequence[Buffer]) -> Completion:
        """Copy each in."""
        return self._each(self.within.write, slots, sources)

    def read_parts(
        self, slots: Sequence[Slot], begins: Sequence[int], nbytes: int, into: Buffer
    ) -> Completion:
        """Copy each part out; what is to be refused is handed on as it is."""
        if len(begins) < 2 or len(slots) != len(begins) or into.shape != (len(begins) * nbytes,):
            return super().read_parts(slots, begins, nbytes, into)
        self.batches.append(len(begins))
        ends = range(nbytes, len(begins) * nbytes + 1, nbytes)
        return _all(
            functools.partial(self.within.read_parts, [slot], [begin], nbytes, into[end - nbytes : end])
            for slot, begin, end in zip(slots, begins, ends, strict=True)
        )

    def _each(
        self, move: Callable[[Slot, Buffer], Completion], slots: Sequence[Slot], buffers: Sequence[Buffer]
    ) -> Completion:
        self.batches.append(len(slots))
        return _all(
            functools.partial(move, slot, buffer) for slot, buffer in zip(slots, buffers, strict=True)
        )


def _all(operations: Iterable[Begin]) -> Completion:
    """Begin each; return what they come to together."""
    whole = Completion()
    when_all([attempt(begin) for begin in operations], lambda errors: whole.complete(as_one(errors)))
    return whole
