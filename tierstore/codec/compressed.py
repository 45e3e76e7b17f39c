"""A backend that compresses what another one holds.

Bytes that repeat are packed (see `blocks`) by threads of its own and take less of the medium, for which the
tier is then charged less; bytes that do not are stored as they are, straight from the caller's buffer, and
cost a look at a few samples.  Room for all of a slot is taken when it is reserved, and exchanged for what the
packed bytes need once they are known: so the medium never holds more than its tier is charged.

Rule 1: packed bytes are summed, so that what is unpacked is what was packed, or an `IntegrityError`.
Rule 2: what fails in a batch fails alone.
Rule 3: memory for packing is bounded, whatever the tensors' sizes (see `workers`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from tierstore.codec.chunks import PAGE
from tierstore.codec.counters import CodecCounters, CodecStats
from tierstore.codec.inner_backend import InnerBackend
from tierstore.codec.reading import SlotReader
from tierstore.codec.slots import CHUNK_BYTES, CodecSlot
from tierstore.codec.workers import CodecWorkers
from tierstore.codec.writing import SlotWriter
from tierstore.errors import ConfigError, UsageError
from tierstore.spi import Backend, Buffer, Capabilities, Completion, Slot
from tierstore.units import KIB, align_up
from tierstore.wrappers.fan_in import Errors, first_error
from tierstore.wrappers.forwarding import ForwardingBackend
from tierstore.wrappers.kinds import require_storage

SMALLEST_BYTES: Final = 4 * KIB
"""Shorter tensors are stored as they are."""

THREADS: Final = 2


class Compressed(ForwardingBackend):
    """A `tierstore.spi.BatchBackend` around a backend behind I/O, which it then owns.  Thread-safe.

    It is no `tierstore.spi.DirectBackend`, even where the one within is: bytes are looked at, packed and
    unpacked in host memory, and whether those of a slot will be is not known when ``accepts`` is asked.  Nor
    is it a `tierstore.spi.PartBackend`: parts of a slot are no parts of what it was packed into.

    Args:
        backend: what holds the bytes.
        codec: how they are packed: ``"lz4"``; None: they are not, but what was is unpacked.
        chunk_bytes: how much is packed into one slot of the backend.
        threads: how many pack and unpack.

    Raises:
        ConfigError: no such codec, or the backend is not behind I/O.
    """

    def __init__(
        self, backend: Backend, codec: str | None, *, chunk_bytes: int = CHUNK_BYTES, threads: int = THREADS
    ) -> None:
        if codec not in ("lz4", None):
            raise ConfigError(f"codec={codec!r}: accepted: 'lz4' or None")
        require_storage(backend, f"codec={codec!r}")
        super().__init__(backend)
        self._medium = backend.capabilities
        self._capabilities = replace(
            self._medium,
            is_durable=False,
            has_batches=True,
            has_parts=False,  # where a part is among packed bytes nobody knows before they are unpacked
            has_direct_paths=False,
            has_shrinking_slots=True,
        )
        self._many = InnerBackend(backend)
        self._counts = CodecCounters()
        chunk_bytes = align_up(chunk_bytes, math.lcm(PAGE, self._medium.alignment_bytes))
        self._workers = CodecWorkers(threads, chunk_bytes)
        self._reader = SlotReader(self._many, chunk_bytes, self._workers, self._counts)
        self._writer = SlotWriter(
            self._many,
            chunk_bytes,
            None if codec is None else SMALLEST_BYTES,
            self._workers,
            self._counts,
        )
        # Also when it is forgotten: its threads must not wait for ever.
        weakref.finalize(self, self._workers.abandon).atexit = False

    @property
    def capabilities(self) -> Capabilities:
        """Those of the backend within, but for what a codec adds and takes away."""
        return self._capabilities

    @property
    def codec_stats(self) -> CodecStats:
        """What was packed, what was not, and what it came to."""
        return self._counts.stats

    def reserve(self, nbytes: int) -> CodecSlot:
        """Take room for all of ``nbytes``.  See `tierstore.spi.Backend`."""
        whole = self.within.reserve(nbytes)
        return CodecSlot(nbytes, self, whole, self._medium)

    def read(self, slot: Slot, into: Buffer) -> Completion:
        """Fill ``into``.  Completes with ``IntegrityError`` where the bytes are not those written."""
        own = self._own(slot)
        if own.whole is not None:
            return self.within.read(own.whole, into)
        return self.read_many([own], [into])

    def write(self, slot: Slot, source: Buffer) -> Completion:
        """Write ``source``, packed if that pays; see `tierstore.spi.Backend`."""
        own = self._own(slot)
        if own.whole is not None and not self._writer.may_be_packed(own):
            return self.within.write(own.whole, source)
        return self.write_many([own], [source])

    def read_many(self, slots: Sequence[Slot], into: Sequence[Buffer]) -> Completion:
        """Fill each buffer; see `read` and `tierstore.spi.BatchBackend`."""
        own = [self._own(slot) for slot in slots]
        for slot, buffer in zip(own, into, strict=True):
            if slot.damage is None:  # such a one has the bytes that its note says, or any
                _check_buffer(buffer, slot.nbytes)
        return self._reader.begin(own, into)

    def write_many(self, slots: Sequence[Slot], sources: Sequence[Buffer]) -> Completion:
        """Write each buffer; see `write` and `tierstore.spi.BatchBackend`."""
        own = [self._own(slot) for slot in slots]
        for slot, buffer in zip(own, sources, strict=True):
            _check_buffer(buffer, slot.nbytes)
        return self._writer.begin(own, sources)

    def free(self, slot: Slot) -> Completion:
        """Give back all that the slot has of the medium."""
        own = self._own(slot)
        own.is_freed = True
        if own.whole is not None and not own.chunks:
            return self.within.free(own.whole)
        completion = Completion()

        def done(errors: Errors) -> None:
            completion.complete(first_error(errors))

        self._many.free(own.within, done)
        return completion

    def close(self) -> None:
        """Let what is under way end, then close the backend within.  Idempotent."""
        self._workers.close()
        super().close()

    def _own(self, slot: Slot) -> CodecSlot:
        if not isinstance(slot, CodecSlot) or slot.home is not self:
            raise UsageError(f"{slot!r} is not a slot of this backend")
        if slot.is_freed:
            raise UsageError(f"{slot!r} was freed before")
        return slot


def _check_buffer(buffer: Buffer, nbytes: int) -> None:
    if (
        buffer.dtype is not torch.uint8
        or buffer.dim() != 1
        or buffer.numel() != nbytes
        or not buffer.is_cpu
        or not buffer.is_contiguous()
    ):
        raise UsageError(
            f"a buffer of {nbytes} contiguous torch.uint8 in host memory is needed, "
            f"not {tuple(buffer.shape)} {buffer.dtype} on {buffer.device}"
        )
