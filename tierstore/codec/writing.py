"""How bytes get into slots: looked at, packed where it pays, and written to the backend within.

A write goes through these steps, each when the one before has ended: samples of the bytes are *looked at*;
the room that was reserved for a slot is *released*, if its bytes are to be packed; its chunks are packed and
written, several at a time.  A slot whose bytes are not worth it goes straight from the caller's buffer to the
room that was reserved for it.

A slot keeps whatever it has of the backend within, also after a failure, until it is freed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import torch

from tierstore.codec.blocks import WORTHWHILE, Bytes, best_width
from tierstore.codec.chunks import PAGE, ChunkPart, grouped, pack_chunk
from tierstore.codec.counters import CodecCounters, CodecStats
from tierstore.codec.inner_backend import InnerBackend
from tierstore.codec.slots import Chunk, CodecSlot, PackedShape
from tierstore.codec.workers import CodecWorkers, PadUse
from tierstore.errors import BackendError
from tierstore.spi import Buffer, Completion, Slot
from tierstore.units import align_up
from tierstore.wrappers.fan_in import Errors, FanIn


class SlotWriter:
    """Writes slots.  Thread-safe.

    Args:
        within: the backend within.
        chunk_bytes: how slots are cut; also the size of a pad.
        smallest_bytes: shorter ones are never packed; None: nothing is.
        workers: who packs.
        counts: what was done.
    """

    def __init__(
        self,
        within: InnerBackend,
        chunk_bytes: int,
        smallest_bytes: int | None,
        workers: CodecWorkers,
        counts: CodecCounters,
    ) -> None:
        self.within = within
        self.chunk_bytes = chunk_bytes
        self.smallest_bytes = smallest_bytes
        self.workers = workers
        self.counts = counts

    def may_be_packed(self, slot: CodecSlot) -> bool:
        """Whether a slot's bytes are worth a look: packed well, they would take less of the medium."""
        if self.smallest_bytes is None or slot.nbytes < self.smallest_bytes:
            return False
        return slot.nbytes * WORTHWHILE > slot.medium.alignment_bytes

    def begin(self, slots: Sequence[CodecSlot], sources: Sequence[Buffer]) -> Completion:
        """Write each slot.  See `tierstore.spi.BatchBackend`.

        Raises:
            StoreClosed: too late.
        """
        write = _SlotWrite(self, slots, sources)
        self.workers.begin(write.look)
        return write.operation.completion


class _SlotWrite:
    """One write under way."""

    def __init__(self, writer: SlotWriter, slots: Sequence[CodecSlot], sources: Sequence[Buffer]) -> None:
        self._writer = writer
        self._slots = slots
        self._shapes: dict[int, PackedShape] = {}  # of those that are packed, by position
        self.operation = FanIn(sources, self._finish)

    # --- looking --------------------------------------------------------------------------------

    def look(self) -> None:
        """Decide what is packed; begin with everything."""
        began = time.perf_counter()
        failures: list[BaseException | None] = [
            self._look_at(position) for position in range(len(self._slots))
        ]
        self._writer.counts.add(CodecStats(pack_seconds=time.perf_counter() - began))
        good = [position for position, failure in enumerate(failures) if failure is None]
        ready = [p for p in good if p not in self._shapes and self._slots[p].whole is not None]
        self._write_whole(ready)
        self._release([p for p in good if p not in ready])
        self.operation.note(range(len(failures)), failures)

    def _look_at(self, position: int) -> BaseException | None:
        slot = self._slots[position]
        try:
            if self._writer.may_be_packed(slot):
                width = best_width(self._bytes(position, 0, slot.nbytes))
                if width is not None:
                    self._shapes[position] = PackedShape(width, chunk_bytes=self._writer.chunk_bytes)
        except Exception as error:  # noqa: BLE001 - whoever waits for the write must be told
            return error.with_traceback(None)
        return None

    def _bytes(self, position: int, start: int, stop: int) -> Bytes:
        whole: Bytes = self.operation.buffers[position].numpy()
        return whole[start:stop]

    # --- as they are ------------------------------------------------------------------------------

    def _write_whole(self, positions: Sequence[int]) -> None:
        if not positions:
            return
        slots = [slot for p in positions if (slot := self._slots[p].whole) is not None]
        sources = [self.operation.buffers[position] for position in positions]
        self.operation.expect()
        self._writer.within.write(slots, sources, functools.partial(self.operation.note, positions))

    # --- room -------------------------------------------------------------------------------------

    def _release(self, positions: Sequence[int]) -> None:
        """Give back what the slots have, which is not what they need."""
        owners = [position for position in positions for _ in self._slots[position].within]
        slots = [slot for position in positions for slot in self._slots[position].within]
        if positions:
            self.operation.expect()
            self._writer.within.free(slots, functools.partial(self._released, positions, owners))

    def _released(self, positions: Sequence[int], owners: Sequence[int], errors: Errors) -> None:
        failed = {owner for owner, error in zip(owners, errors, strict=True) if error is not None}
        for position in positions:
            if position not in failed:
                self._slots[position].clear()
        self._reserve_whole([p for p in positions if p not in failed and p not in self._shapes])
        self._pack([p for p in positions if p not in failed and p in self._shapes])
        self.operation.note(owners, errors)

    def _reserve_whole(self, positions: Sequence[int]) -> None:
        """Take room for slots that were packed before and now are not."""
        ready: list[int] = []
        for position in positions:
            slot = self._slots[position]
            try:
                slot.whole = self._writer.within.backend.reserve(slot.nbytes)
            except Exception as error:  # noqa: BLE001 - a foreign backend may raise anything
                self.operation.expect()
                self.operation.note([position], [error.with_traceback(None)])
                continue
            ready.append(position)
        self._write_whole(ready)

    # --- packed -----------------------------------------------------------------------------------

    def _pack(self, positions: Sequence[int]) -> None:
        parts: list[ChunkPart] = []
        for position in positions:
            cuts = self._slots[position].cuts(self._shapes[position])
            self._slots[position].chunks = [None] * len(cuts)
            parts += [ChunkPart(position, chunk, *cut) for chunk, cut in enumerate(cuts)]
        groups = list(grouped(parts, self._writer.chunk_bytes))
        self.operation.expect(len(groups))
        for group in groups:
            self._writer.workers.submit_with_pad(PadUse.WRITE, functools.partial(self._pack_group, group))

    def _pack_group(self, group: Sequence[ChunkPart], pad: Bytes) -> None:
        """Pack chunks into a pad, and begin to write them."""
        began = time.perf_counter()
        failures: list[BaseException | None] = []
        written: list[tuple[int, Slot, Buffer]] = []
        at = 0
        for part in group:
            room = pad[at : at + part.stop - part.start]
            at += align_up(len(room), PAGE)
            try:
                slot, nbytes = self._pack_part(part, room)
            except Exception as error:  # noqa: BLE001 - whoever waits for the write must be told
                failures.append(error.with_traceback(None))
                continue
            failures.append(None)
            written.append((part.position, slot, torch.from_numpy(room[:nbytes])))
        self._writer.counts.add(CodecStats(pack_seconds=time.perf_counter() - began))

        def done(errors: Errors) -> None:
            self._writer.workers.give_back(PadUse.WRITE, pad)
            positions = [part.position for part in group] + [position for position, _, _ in written]
            self.operation.note(positions, [*failures, *errors])

        self._writer.within.write(
            [slot for _, slot, _ in written], [source for _, _, source in written], done
        )

    def _pack_part(self, part: ChunkPart, room: Bytes) -> tuple[Slot, int]:
        if self.operation.has_failed(part.position):
            raise BackendError("another part of the same bytes could not be written")
        own = self._slots[part.position]
        lengths, digest = pack_chunk(
            self._bytes(part.position, part.start, part.stop), self._shapes[part.position], room
        )
        slot = self._writer.within.backend.reserve(sum(lengths))
        own.chunks[part.chunk] = Chunk(slot, lengths, digest)
        return slot, sum(lengths)

    # --- the end ----------------------------------------------------------------------------------

    def _finish(self, errors: Errors) -> None:
        for position, error in enumerate(errors):
            if error is None:
                self._settle(position)
        self._writer.workers.end()

    def _settle(self, position: int) -> None:
        slot = self._slots[position]
        slot.shape = self._shapes.get(position)
        slot.weigh()
        if slot.shape is not None:
            self._writer.counts.add(
                CodecStats(packed_tensors=1, raw_bytes=slot.nbytes, held_bytes=slot.held_bytes)
            )
        elif self._writer.may_be_packed(slot):
            self._writer.counts.add(CodecStats(skipped_tensors=1))
