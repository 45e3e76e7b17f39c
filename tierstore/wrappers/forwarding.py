"""A backend around a backend that passes everything on: what wrappers are made of.

A wrapper overrides what it changes.  All else, its capabilities among it, is that of the backend within; so
one that cannot let something through takes it out of its `Capabilities`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch

from tierstore.spi import Backend, Buffer, Capabilities, Completion, FullBackend, Record, Slot

Operation = Literal["reserve", "read", "write", "free", "commit"]
"""What a backend does and a wrapper may change; a batch is a read or a write, and parts are a read."""

Begin = Callable[[], Completion]


class ForwardingBackend:
    """A `tierstore.spi.FullBackend`, as far as the backend within is one.

    Args:
        backend: what does the work; `close` closes it.
    """

    def __init__(self, backend: Backend) -> None:
        self.within = cast("FullBackend", backend)

    def operate(self, kind: Operation, begin: Begin, buffers: Sequence[Buffer] = ()) -> Completion:
        """Begin an operation.  To be overridden for what happens to all of them alike.

        Args:
            kind: which: not ``"reserve"``, which has no completion.
            begin: has the backend within begin it.
            buffers: what it fills or takes bytes from.
        """
        del kind, buffers
        return begin()

    @property
    def capabilities(self) -> Capabilities:
        """What the backend within can do."""
        return self.within.capabilities

    @property
    def reserved_bytes(self) -> int:
        """See `tierstore.spi.CountingBackend`."""
        return self.within.reserved_bytes

    @property
    def io_stats(self) -> object:
        """See `tierstore.spi.CountingBackend`."""
        return self.within.io_stats

    def reserve(self, nbytes: int) -> Slot:
        """See `tierstore.spi.Backend`."""
        return self.within.reserve(nbytes)

    def adopt(self, memory: torch.Tensor) -> Slot:
        """See `tierstore.spi.AdoptingBackend`."""
        return self.within.adopt(memory)

    def accepts(self, memory: torch.Tensor) -> bool:
        """See `tierstore.spi.DirectBackend`."""
        return self.within.accepts(memory)

    def read(self, slot: Slot, into: Buffer) -> Completion:
        """See `tierstore.spi.Backend`."""
        return self.operate("read", lambda: self.within.read(slot, into), [into])

    def write(self, slot: Slot, source: Buffer) -> Completion:
        """See `tierstore.spi.Backend`."""
        return self.operate("write", lambda: self.within.write(slot, source), [source])

    def read_many(self, slots: Sequence[Slot], into: Sequence[Buffer]) -> Completion:
        """See `tierstore.spi.BatchBackend`."""
        return self.operate("read", lambda: self.within.read_many(slots, into), into)

    def write_many(self, slots: Sequence[Slot], sources: Sequence[Buffer]) -> Completion:
        """See `tierstore.spi.BatchBackend`."""
        return self.operate("write", lambda: self.within.write_many(slots, sources), sources)

    def read_parts(
        self, slots: Sequence[Slot], begins: Sequence[int], nbytes: int, into: Buffer
    ) -> Completion:
        """See `tierstore.spi.PartBackend`."""
        return self.operate("read", lambda: self.within.read_parts(slots, begins, nbytes, into), [into])

    def free(self, slot: Slot) -> Completion:
        """See `tierstore.spi.Backend`."""
        return self.operate("free", lambda: self.within.free(slot))

    def recovered(self) -> Sequence[Record]:
        """See `tierstore.spi.DurableBackend`."""
        return self.within.recovered()

    def commit(self, records: Sequence[Record], gone: Collection[str] | None = None) -> Completion:
        """See `tierstore.spi.DurableBackend`."""
        return self.operate("commit", lambda: self.within.commit(records, gone))

    def resize(self, capacity_bytes: int) -> None:
        """See `tierstore.spi.Backend`."""
        self.within.resize(capacity_bytes)

    def stop_waiting(self) -> None:
        """See `tierstore.spi.WaitingBackend`: the backend within is told, if it is one."""
        if self.within.capabilities.has_waits:
            self.within.stop_waiting()

    def close(self) -> None:
        """Close the backend within."""
        self.within.close()


@dataclass(frozen=True, slots=True)
class HeldOperation:
    """An operation that was asked for and has not begun.

    Attributes:
        begin: has the backend within begin it.
        outer: the completion that whoever asked was given.
    """

    begin: Begin
    outer: Completion

    def go(self) -> None:
        """Begin it; what cannot even begin has failed."""
        attempt(self.begin).add_done_callback(self.outer.complete)


def attempt(begin: Begin) -> Completion:
    """Begin an operation; one that cannot even begin is one that has failed."""
    try:
        return begin()
    except Exception as error:  # noqa: BLE001 - a foreign backend may raise anything
        return Completion.done(error.with_traceback(None))
