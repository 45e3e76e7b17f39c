"""The pinned block pool: host memory in large blocks that devices and disks use directly.

Memory comes in blocks of ``host_mem_block_size``, page-locked once each where an accelerator is there that
a registrar speaks to (`tierstore_backends.pinned.registrars`); slots of exact size are cut out of them.

1. The memory in use never exceeds the capacity, nor do the bytes of the blocks, but for rule 5.
   After a ``resize`` below what the blocks hold, the slots fit in the new capacity, blocks are given
   back as soon as they are empty, and the free pages of blocks that are not page-locked at once.
2. Slots take multiples of 512 bytes; slots of 64 KiB and more begin on a page, so that a disk can
   use them without a bounce buffer.
3. A block that becomes empty is kept for the next slot: memory that was touched before is several
   times faster than fresh memory.  It goes when a larger block needs its room.
4. Free memory that the pool can do without goes back to the system: stretches of 8 MiB and more
   that no slot had while slots took as many bytes as the pool keeps.  Bytes handed out are the clock,
   so giving back stays in proportion to the traffic.  Shorter stretches are holes between slots, the
   next to be filled.  Page-locked memory stays.
5. Free bytes in pieces are no reason to refuse a slot: their pages go back to the system, those of long
   pieces first, and an *extra* block of the slot's size, for it alone, is mapped in their stead.  Then
   there are more addresses than the capacity, twice as many at most, and memory in use stays within it.
   So a slot is refused only if, in whole pages, it and those that are held exceed the capacity: where
   none can be moved, nothing less than other addresses for the same memory makes that true (without,
   best fit may need as many times the bytes held as the longest slot has granules: TAOCP 2.5, exercise
   42; Mesh, PLDI 2019, gave the idea).
   Not where blocks are page-locked, as that memory cannot be given back in parts.  What the system does
   on its own (``khugepaged`` makes huge pages whole again) is not seen here.
6. A slot is freed at once.  Nobody guards the events of a device that still reads it, and nobody
   needs to: the engine frees a slot after every copy and lease on it has ended.

Options:
    host_mem_block_size: the size of a block (default "1GB"); a larger slot gets a larger block.
    enable_pinned_mem: whether to page-lock blocks (default True; done only where a registrar is).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from tierstore.errors import BackendError, CapacityError
from tierstore.spi import Buffer, Capabilities, Completion, Medium, Slot
from tierstore.units import GIB, KIB, MIB, align_up, format_bytes
from tierstore_backends import host
from tierstore_backends.options import Options
from tierstore_backends.pinned.blocks import PAGE_BYTES, Block
from tierstore_backends.pinned.pages import HUGE_PAGE_BYTES
from tierstore_backends.pinned.ranges import FreeRanges
from tierstore_backends.pinned.registrars import Registrar, find_registrar
from tierstore_backends.quota import Quota

__all__ = ["PinnedPool", "open_backend"]

GRANULE_BYTES = 512  # a slot takes a multiple: what CUDA's own allocator uses, and a disk's sector
PAGED_FROM_BYTES = 64 * KIB  # slots from here on begin on a page
_IDLE_BYTES = 8 * MIB  # shorter stretches are not given back, but for a block that is shorter
_WORTH_BYTES = 256 * KIB  # shorter ranges keep their pages unless a slot were refused for it
_SPAN_BITS = 48  # block number << 48 is where its addresses begin: the gap between blocks
_CLOSED = "the 'pinned' backend is closed"
_OFFSET_MASK = (1 << _SPAN_BITS) - 1

_log = logging.getLogger("tierstore")


class _SlotRange(NamedTuple):
    """Where a slot lies.  A slot without bytes has none."""

    start: int
    nbytes: int


class PinnedPool:
    """Host memory in blocks.  See the module for its rules.

    Args:
        capacity_bytes: the most that all blocks together hold.
        block_bytes: the size of a block.
        registrar: page-locks the blocks; ``None``: they stay pageable.
    """

    def __init__(
        self, capacity_bytes: int, *, block_bytes: int = GIB, registrar: Registrar | None = None
    ) -> None:
        self.capabilities = Capabilities(
            medium=Medium.HOST, alignment_bytes=GRANULE_BYTES, has_parts=True, has_reserved_bytes=True
        )
        self._block_bytes = align_up(block_bytes, PAGE_BYTES)
        self._quota = Quota("pinned", capacity_bytes, GRANULE_BYTES)
        self._growing = threading.Lock()  # held by the one thread that makes a block: page-locking is slow
        self._registrar = registrar  # guarded by _growing
        self._lock = threading.Lock()  # guards all below; never held while memory is mapped or locked
        self._free = FreeRanges()
        self._blocks: dict[int, Block] = {}
        self._next_number = 1
        self._blocks_bytes = 0
        self._extra: dict[int, Block] = {}  # beyond the capacity, of one slot each
        self._extra_bytes = 0
        self._until_sweep_bytes = 0  # to be handed out before the next block in turn is swept
        self._swept_number = 0
        self._is_closed = False

    @property
    def mapped_bytes(self) -> int:
        """The bytes of all blocks: address space, and memory where it was touched or page-locked."""
        return self._blocks_bytes + self._extra_bytes

    @property
    def reserved_bytes(self) -> int:
        """At most this much memory is in use: page-locked blocks, and the huge pages touched of others."""
        with self._lock:
            return self._resident_bytes()

    @property
    def used_bytes(self) -> int:
        """The bytes of all slots."""
        return self._quota.held_bytes

    @property
    def pinned_bytes(self) -> int:
        """The bytes of the blocks that are page-locked."""
        with self._lock:
            blocks = (*self._blocks.values(), *self._extra.values())
            return sum(block.nbytes for block in blocks if block.is_pinned)

    def reserve(self, nbytes: int) -> Slot:
        """Take room for ``nbytes``.  Makes, and page-locks, a new block when the others are full.

        Raises:
            CapacityError: more than what is free, or no free range is that long.
            BackendError: the pool is closed.
        """
        if self._is_closed:
            raise BackendError(_CLOSED)
        self._quota.take(nbytes)
        if nbytes == 0:
            with host.plain_tensors():
                return host.HostSlot(torch.empty(0, dtype=torch.uint8, device="cpu"), place=None)
        room_bytes = align_up(nbytes, GRANULE_BYTES)
        try:
            with host.plain_tensors():
                start, memory = self._cut(room_bytes, nbytes) or self._grow(room_bytes, nbytes)
        except (CapacityError, BackendError):
            self._quota.give(nbytes)
            raise
        return host.HostSlot(memory, place=_SlotRange(start, room_bytes))

    def read(self, slot: Slot, into: Buffer) -> Completion:
        """Copy the slot's bytes into ``into`` before returning."""
        return Completion.done(BackendError(_CLOSED)) if self._is_closed else host.read(slot, into)

    def read_parts(
        self, slots: Sequence[Slot], begins: Sequence[int], nbytes: int, into: Buffer
    ) -> Completion:
        """Copy the parts into ``into`` before returning."""
        if self._is_closed:
            return Completion.done(BackendError(_CLOSED))
        return host.read_parts(slots, begins, nbytes, into, GRANULE_BYTES)

    def write(self, slot: Slot, source: Buffer) -> Completion:
        """Copy ``source`` into the slot before returning."""
        return Completion.done(BackendError(_CLOSED)) if self._is_closed else host.write(slot, source)

    def free(self, slot: Slot) -> Completion:
        """Give the slot's bytes back to the pool before returning."""
        try:
            owned = host.own(slot)
            owned.vacate()
        except BackendError as error:
            return Completion.done(error)
        try:
            if isinstance(owned.place, _SlotRange) and not self._is_closed:
                self._give(owned.place)
        except BackendError as error:
            return Completion.done(error)
        finally:
            self._quota.give(slot.nbytes)
        return Completion.done()

    def resize(self, capacity_bytes: int) -> None:
        """Hold at most ``capacity_bytes`` from now on; give back what is free beyond it.

        Raises:
            BackendError: the device does not unlock a block.
        """
        self._quota.resize(capacity_bytes)
        with self._lock:
            empty = self._withdraw_empty(self._blocks_bytes - capacity_bytes)
            if self._blocks_bytes > capacity_bytes:
                for start, nbytes in self._free:
                    self._hollow_out(start, nbytes)
            self._stay_within()
        _release(empty)

    def close(self) -> None:
        """Unlock and give back every block.  A tensor still in use keeps its memory.  Idempotent.

        Raises:
            BackendError: the device does not unlock a block.
        """
        with self._growing, self._lock:
            self._is_closed = True
            blocks = [*self._blocks.values(), *self._extra.values()]
            self._blocks.clear()
            self._free = FreeRanges()
            self._extra.clear()
            self._blocks_bytes = self._extra_bytes = 0
        _release(blocks)

    def _cut(self, room_bytes: int, nbytes: int) -> tuple[int, torch.Tensor] | None:
        """Take a range out of the blocks there are; ``None`` if none is free that fits."""
        with self._lock:
            return self._take(room_bytes, nbytes)

    def _take(self, room_bytes: int, nbytes: int) -> tuple[int, torch.Tensor] | None:
        """Take a range.  Under the lock."""
        alignment_bytes = PAGE_BYTES if room_bytes >= PAGED_FROM_BYTES else GRANULE_BYTES
        start = self._free.take(room_bytes, alignment_bytes)
        if start is None:
            return None
        block = self._blocks[start >> _SPAN_BITS]
        memory = block.memory(start & _OFFSET_MASK, nbytes)
        if self._extra and not self._give_pages_back(0):
            self._discard(start, room_bytes)
            self._free.give(start, room_bytes)
            self._stay_within()
            return None
        block.used_bytes += room_bytes
        self._until_sweep_bytes -= room_bytes
        if self._until_sweep_bytes <= 0:
            self._sweep()
        return start, memory

    def _sweep(self) -> None:
        """Give back what the next block in turn has free and did not use since its last turn.

        Under the lock.  One block at a time, so that the others wait for milliseconds at most.
        """
        self._swept_number = min(
            (number for number in self._blocks if number > self._swept_number), default=min(self._blocks)
        )
        block = self._blocks[self._swept_number]
        least_bytes = min(_IDLE_BYTES, block.nbytes)
        for start, nbytes in self._free.of_at_least(least_bytes):
            if start >> _SPAN_BITS == self._swept_number:
                block.discard_idle(start & _OFFSET_MASK, nbytes, least_bytes)
        block.age()
        self._until_sweep_bytes = self._resident_bytes() // len(self._blocks)

    def _give_pages_back(self, nbytes: int) -> bool:
        """Give free pages back until there is memory for ``nbytes`` more; return whether there is.

        Short ranges first, as they are of the least use; those within a huge page later, as it comes apart
        then, and the shortest last.  Under the lock.
        """
        excess_bytes = self._resident_bytes() + nbytes - self._quota.capacity_bytes
        for least_bytes in (HUGE_PAGE_BYTES, _WORTH_BYTES, PAGE_BYTES):
            if excess_bytes > self._free.free_bytes - self._free.marked_bytes:
                return False  # whatever goes back
            for start, range_bytes in self._free.of_at_least(least_bytes) if excess_bytes > 0 else ():
                excess_bytes -= self._hollow_out(start, range_bytes)
                if excess_bytes <= 0:
                    break
        return excess_bytes <= 0

    def _stay_within(self) -> None:
        """Keep memory in use within the capacity where there are more addresses.  Under the lock."""
        if self._extra:
            self._give_pages_back(0)

    def _hollow_out(self, start: int, nbytes: int) -> int:
        """Give the pages of a free range back, parts of huge pages too; return how many bytes those were.

        The range is marked with how much of it its block counts nevertheless.  Under the lock.
        """
        if self._free.is_marked(start):
            return 0
        block = self._blocks[start >> _SPAN_BITS]
        before_bytes = block.resident_bytes
        edge_bytes = self._discard(start, nbytes)
        self._free.mark(start, edge_bytes)
        return before_bytes - block.resident_bytes + edge_bytes

    def _resident_bytes(self) -> int:
        """Return how much memory is in use at most.  Under the lock."""
        in_blocks_bytes = sum(block.resident_bytes for block in self._blocks.values())
        return in_blocks_bytes - self._free.marked_bytes + self._extra_bytes

    def _grow(self, room_bytes: int, nbytes: int) -> tuple[int, torch.Tensor]:
        """Make a block and take a range out of it.

        Raises:
            CapacityError: the capacity, or the system, has no room for one that is large enough.
            BackendError: the device does not unlock a block that has to make room.
        """
        with self._growing:
            cut = self._cut(room_bytes, nbytes)  # another thread may have made a block meanwhile
            while cut is None:
                block_bytes = self._plan_block(room_bytes)
                block = self._map(block_bytes or align_up(room_bytes, PAGE_BYTES))
                with self._lock:
                    if block_bytes is None:
                        cut = self._take_whole(block, nbytes)
                    else:
                        self._add(block)
                        cut = self._take(room_bytes, nbytes)  # a best fit: it may lie in another block
                if cut is None and block_bytes is None:
                    block.release()
            return cut

    def _add(self, block: Block) -> None:
        """Make a block part of the pool.  Under the lock."""
        self._blocks[self._next_number] = block
        self._blocks_bytes += block.nbytes
        self._free.give(self._next_number << _SPAN_BITS, block.nbytes)
        self._next_number += 1

    def _take_whole(self, block: Block, nbytes: int) -> tuple[int, torch.Tensor] | None:
        """Take a block beyond the capacity for one slot; ``None`` if memory was used up meanwhile.

        Under the lock.
        """
        if not self._give_pages_back(block.nbytes):
            return None
        number = self._next_number
        self._next_number += 1
        self._extra[number] = block
        self._extra_bytes += block.nbytes
        return number << _SPAN_BITS, block.memory(0, nbytes)

    def _let_go(self, number: int) -> Block:
        """Take the block of a slot that is freed out of the pool.  Under the lock."""
        block = self._extra.pop(number)
        self._extra_bytes -= block.nbytes
        return block

    def _plan_block(self, nbytes: int) -> int | None:
        """Return how large a block may be that holds ``nbytes``; give empty blocks back if it needs that.

        ``None``: it has to be an extra one, for which there is memory now.

        Raises:
            CapacityError: nothing large enough fits in the capacity.
        """
        with self._lock:
            empty: list[Block] = []
            if not self._extra:  # else there may be no memory for what an ordinary block has room for
                room_bytes = self._quota.capacity_bytes - self._blocks_bytes
                empty = self._withdraw_empty(nbytes - room_bytes, or_none=True)
            room_bytes = (self._quota.capacity_bytes - self._blocks_bytes) // GRANULE_BYTES * GRANULE_BYTES
            free_bytes, largest_bytes = self._free.free_bytes, self._free.largest_bytes
            is_ordinary = room_bytes >= nbytes and not self._extra
            is_extra = not is_ordinary and self._give_pages_back(align_up(nbytes, PAGE_BYTES))
        _release(empty)
        if is_extra:
            return None
        if not is_ordinary:
            trouble = f"no free range of the 'pinned' backend has {format_bytes(nbytes)}"
            if max(largest_bytes, room_bytes) >= nbytes:  # and yet it was not taken
                trouble = (
                    f"{format_bytes(nbytes)} more, with the pages that they end in, would bring the "
                    "memory that the 'pinned' backend uses above its capacity"
                )
            raise CapacityError(
                f"{trouble}: {format_bytes(free_bytes)} are free in pieces of "
                f"{format_bytes(largest_bytes)} and less, and {format_bytes(max(room_bytes, 0))} are not in "
                "blocks yet. Free neighbouring slots or raise the capacity.",
                needed_bytes=nbytes,
                free_bytes=free_bytes + max(room_bytes, 0),
            )
        return min(align_up(max(self._block_bytes, nbytes), PAGE_BYTES), room_bytes)

    def _map(self, nbytes: int) -> Block:
        try:
            block = Block(nbytes)
        except OSError as error:
            raise CapacityError(
                f"the system has no host memory for a block of {format_bytes(nbytes)}", needed_bytes=nbytes
            ) from error
        if self._registrar is not None:
            try:
                block.pin(self._registrar)
            except BackendError as error:
                # One refusal is enough: the limit is the system's, and asking again is slow.
                self._registrar = None
                _log.warning(
                    "a host block of %s cannot be pinned (%s): it and all later ones are pageable, and "
                    "copies to the device slower. Lower the host quota or host_mem_block_size, or set "
                    "enable_pinned_mem to False.",
                    format_bytes(nbytes),
                    error,
                )
        return block

    def _give(self, place: _SlotRange) -> None:
        number = place.start >> _SPAN_BITS
        with self._lock:
            if number in self._extra:
                empty = [self._let_go(number)]
            else:
                block = self._blocks[number]
                block.used_bytes -= place.nbytes
                block.note_use(place.start & _OFFSET_MASK, place.nbytes)
                freed = self._free.give(place.start, place.nbytes)
                if self._is_over():
                    self._discard(*freed)
                empty = self._withdraw_empty(self._blocks_bytes - self._quota.capacity_bytes)
            self._stay_within()  # what merged counts as in memory with its edges
        _release(empty)

    def _is_over(self) -> bool:
        """Whether blocks hold more than the capacity because it was lowered.  Under the lock."""
        return self._blocks_bytes > self._quota.capacity_bytes

    def _discard(self, start: int, nbytes: int) -> int:
        return self._blocks[start >> _SPAN_BITS].discard(start & _OFFSET_MASK, nbytes)

    def _withdraw_empty(self, excess_bytes: int, *, or_none: bool = False) -> list[Block]:
        """Take empty blocks of ``excess_bytes`` or more out of the pool.  Under the lock.

        With ``or_none``, take none if all of them together are less.
        """
        if excess_bytes <= 0:
            return []
        empty = sorted((n for n, block in self._blocks.items() if block.used_bytes == 0), reverse=True)
        if or_none and sum(self._blocks[number].nbytes for number in empty) < excess_bytes:
            return []
        withdrawn: list[Block] = []
        for number in empty:
            if excess_bytes <= 0:
                break
            block = self._blocks.pop(number)
            self._free.remove(number << _SPAN_BITS, block.nbytes)
            self._blocks_bytes -= block.nbytes
            excess_bytes -= block.nbytes
            withdrawn.append(block)
        return withdrawn


def _release(blocks: list[Block]) -> None:
    for block in blocks:
        block.release()


def open_backend(*, capacity_bytes: int, options: Mapping[str, object]) -> PinnedPool:
    """Open the pinned block pool.

    Raises:
        ConfigError: an unknown option or a bad value.
    """
    known = Options("pinned", options, ("host_mem_block_size", "enable_pinned_mem"))
    is_pinning = known.flag("enable_pinned_mem", default=True)
    return PinnedPool(
        capacity_bytes,
        block_bytes=known.nbytes("host_mem_block_size") or GIB,
        registrar=find_registrar() if is_pinning else None,
    )
