"""How bytes get out of slots: read from the backend within, and unpacked if they are packed.

What is stored as it is goes straight into the caller's buffer.  Packed chunks are read into pads, several at
a time, and unpacked from there.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import torch

from tierstore.codec.blocks import Bytes
from tierstore.codec.chunks import PAGE, ChunkPart, grouped, unpack_chunk
from tierstore.codec.counters import CodecCounters, CodecStats
from tierstore.codec.inner_backend import InnerBackend
from tierstore.codec.slots import Chunk, CodecSlot, PackedShape
from tierstore.codec.workers import CodecWorkers, PadUse
from tierstore.errors import IntegrityError, UsageError
from tierstore.spi import Buffer, Completion, Slot
from tierstore.units import align_up
from tierstore.wrappers.fan_in import Errors, FanIn


class SlotReader:
    """Reads slots.  Thread-safe.

    Args:
        within: the backend within.
        pad_bytes: the size of a pad.
        workers: who unpacks.
        counts: what was done.
    """

    def __init__(
        self, within: InnerBackend, pad_bytes: int, workers: CodecWorkers, counts: CodecCounters
    ) -> None:
        self.within = within
        self.pad_bytes = pad_bytes
        self.workers = workers
        self.counts = counts

    def begin(self, slots: Sequence[CodecSlot], into: Sequence[Buffer]) -> Completion:
        """Fill each buffer with a slot's bytes.  See `tierstore.spi.BatchBackend`.

        Raises:
            StoreClosed: too late.
        """
        read = _SlotRead(self, slots, into)
        self.workers.begin(read.start)
        return read.operation.completion


class _SlotRead:
    """One read under way."""

    def __init__(self, reader: SlotReader, slots: Sequence[CodecSlot], into: Sequence[Buffer]) -> None:
        self._reader = reader
        self._slots = slots
        self.operation = FanIn(into, self._finish)

    def start(self) -> None:
        """Begin with everything."""
        refusals = [_refusal(slot, self._reader.pad_bytes) for slot in self._slots]
        good = [position for position, refusal in enumerate(refusals) if refusal is None]
        self._read_whole([p for p in good if self._slots[p].shape is None])
        self._read_packed([p for p in good if self._slots[p].shape is not None])
        self.operation.note(range(len(refusals)), refusals)

    def _read_whole(self, positions: Sequence[int]) -> None:
        if not positions:
            return
        slots = [slot for p in positions if (slot := self._slots[p].whole) is not None]
        into = [self.operation.buffers[position] for position in positions]
        self.operation.expect()
        self._reader.within.read(slots, into, functools.partial(self.operation.note, positions))

    def _read_packed(self, positions: Sequence[int]) -> None:
        parts = [
            ChunkPart(position, chunk, start, stop)
            for position in positions
            for chunk, (start, stop) in enumerate(self._slots[position].cuts(self._shape(position)))
        ]
        groups = list(grouped(parts, self._reader.pad_bytes))
        self.operation.expect(len(groups))
        for group in groups:
            self._reader.workers.submit_with_pad(PadUse.READ, functools.partial(self._read_group, group))

    def _read_group(self, group: Sequence[ChunkPart], pad: Bytes) -> None:
        """Begin to read chunks into a pad."""
        slots: list[Slot] = []
        rooms: list[Buffer] = []
        at = 0
        for part in group:
            slots.append(self._chunk(part).slot)
            rooms.append(torch.from_numpy(pad[at : at + slots[-1].nbytes]))
            at += align_up(part.stop - part.start, PAGE)
        self._reader.within.read(
            slots,
            rooms,
            # Not in the thread that completes it, which is the medium's.
            lambda errors: self._reader.workers.submit(
                functools.partial(self._unpack_group, group, pad, errors)
            ),
        )

    def _unpack_group(self, group: Sequence[ChunkPart], pad: Bytes, errors: Errors) -> None:
        began = time.perf_counter()
        at = 0
        ends: list[BaseException | None] = []
        for part, error in zip(group, errors, strict=True):
            stored = pad[at : at + self._chunk(part).slot.nbytes]
            at += align_up(part.stop - part.start, PAGE)
            ends.append(error if error is not None else self._unpack_part(part, stored))
        self._reader.counts.add(CodecStats(unpack_seconds=time.perf_counter() - began))
        self._reader.workers.give_back(PadUse.READ, pad)
        self.operation.note([part.position for part in group], ends)

    def _unpack_part(self, part: ChunkPart, stored: Bytes) -> BaseException | None:
        try:
            unpack_chunk(
                stored,
                self._chunk(part),
                part,
                self._shape(part.position),
                self.operation.buffers[part.position].numpy(),
            )
        except Exception as error:  # noqa: BLE001 - whoever waits for the read must be told
            return error.with_traceback(None)
        return None

    def _chunk(self, part: ChunkPart) -> Chunk:
        chunk = self._slots[part.position].chunks[part.chunk]
        assert chunk is not None  # a slot that is packed has all of them
        return chunk

    def _shape(self, position: int) -> PackedShape:
        shape = self._slots[position].shape
        assert shape is not None  # asked of packed ones only
        return shape

    def _finish(self, errors: Errors) -> None:
        del errors
        self._reader.workers.end()


def _refusal(slot: CodecSlot, pad_bytes: int) -> BaseException | None:
    """Say why nothing can be read from a slot, if so."""
    largest = max((chunk.slot.nbytes for chunk in slot.chunks if chunk is not None), default=0)
    if slot.damage is not None:
        return slot.damage.error
    if slot.shape is None and slot.whole is None:
        return UsageError(f"{slot} holds no bytes: writing them failed")
    if largest > pad_bytes:
        return IntegrityError(
            f"{slot} has a compressed chunk of {largest} bytes, and there is room to unpack one of "
            f"{pad_bytes}: what is noted of it was not written here"
        )
    return None
