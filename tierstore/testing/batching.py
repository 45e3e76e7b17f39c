"""Batches on demand: a backend of single operations as one that takes many slots in one call, for tests.

Each slot of a batch is an operation of the backend within, so that what a test lets fail, stand still
or come late there happens in the middle of a batch.  Around the other wrappers: ``Batching(Faulty(...))``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tierstore.spi import Backend, Buffer, Capabilities, Completion, PartialError, Slot


class Batching:
    """A `tierstore.spi.BatchBackend` over any backend.  Thread-safe.

    Args:
        backend: what does the work.

    Attributes:
        batches: the number of slots of every batch so far.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.batches: list[int] = []

    @property
    def capabilities(self) -> Capabilities:
        """What the wrapped backend can do."""
        return self._backend.capabilities

    def reserve(self, nbytes: int) -> Slot:
        """Take room."""
        return self._backend.reserve(nbytes)

    def read(self, slot: Slot, into: Buffer) -> Completion:
        """Copy out."""
        return self._backend.read(slot, into)

    def write(self, slot: Slot, source: Buffer) -> Completion:
        """Copy in."""
        return self._backend.write(slot, source)

    def read_many(self, slots: Sequence[Slot], into: Sequence[Buffer]) -> Completion:
        """Copy each out."""
        return self._each(self._backend.read, slots, into)

    def write_many(self, slots: Sequence[Slot], sources: Sequence[Buffer]) -> Completion:
        """Copy each in."""
        return self._each(self._backend.write, slots, sources)

    def free(self, slot: Slot) -> Completion:
        """Give back."""
        return self._backend.free(slot)

    def resize(self, capacity_bytes: int) -> None:
        """Resize the wrapped backend."""
        self._backend.resize(capacity_bytes)

    def close(self) -> None:
        """Close the wrapped backend."""
        self._backend.close()

    def _each(
        self, move: Callable[[Slot, Buffer], Completion], slots: Sequence[Slot], buffers: Sequence[Buffer]
    ) -> Completion:
        self.batches.append(len(slots))
        whole = _Whole(len(slots))
        for position, (slot, buffer) in enumerate(zip(slots, buffers, strict=True)):
            try:
                part = move(slot, buffer)
            except Exception as error:  # noqa: BLE001 - the others of the batch are on their way
                part = Completion.done(error)
            whole.follow(position, part)
        return whole.completion


class _Whole:
    """Counts the ends of the parts of one batch."""

    def __init__(self, count: int) -> None:
        self.completion = Completion()
        self._lock = threading.Lock()  # guards the next two
        self._remaining = count
        self._errors: dict[int, BaseException] = {}

    def follow(self, position: int, part: Completion) -> None:
        part.add_done_callback(lambda error: self._end(position, error))

    def _end(self, position: int, error: BaseException | None) -> None:
        with self._lock:
            self._remaining -= 1
            if error is not None:
                self._errors[position] = error
            is_last = not self._remaining
        if is_last:
            self.completion.complete(PartialError(self._errors) if self._errors else None)
