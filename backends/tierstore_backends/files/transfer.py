"""What moves: slots, transfers of their bytes, and the pieces that transfers are cut into.

A piece is contiguous in one file and in the caller's buffer, and at most one block long.  The cut
of a slot is a function of its extents alone, so the pieces of a read are those of the write, and
each has its own checksum: pieces need no order.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence

from tierstore.spi import Buffer, Completion
from tierstore.units import align_up
from tierstore_backends.files.layout import Extent


class SlotState(enum.Enum):
    """What may be done with a slot."""

    RESERVED = enum.auto()  # write, free: there are no bytes, or a write of them failed
    WRITTEN = enum.auto()  # read, write, free
    FREED = enum.auto()  # nothing


class FileSlot:
    """Room for ``nbytes`` bytes in the files of one backend.

    Args:
        nbytes: what ``read`` and ``write`` move.
        extents: where.
        home: the backend it belongs to, which lives as long as any of its slots.
    """

    __slots__ = ("extents", "home", "nbytes", "state", "sums")

    def __init__(self, nbytes: int, extents: Sequence[Extent], home: object) -> None:
        self.nbytes = nbytes
        self.extents = extents
        self.home = home
        self.state = SlotState.RESERVED
        self.sums: tuple[int, ...] = ()  # of each piece, once written; of no meaning if none are kept

    def __repr__(self) -> str:
        """Show where the bytes are."""
        where = ", ".join(f"[{start}, {end})" for start, end in self.extents)
        return f"<slot of {self.nbytes} bytes at {where or 'no address'}, {self.state.name}>"


class Direction(enum.Enum):
    """Which way bytes go."""

    READ = enum.auto()
    WRITE = enum.auto()


class Transfer:
    """One ``read`` or ``write`` under way.

    Small on purpose: every object that lives as long as a transfer makes the garbage collector
    look at everything else more often, and that can cost more than the transfer.
    """

    __slots__ = ("buffer", "completion", "direction", "error", "remaining", "slot", "sums")

    def __init__(self, direction: Direction, slot: FileSlot, buffer: Buffer) -> None:
        self.direction = direction
        self.slot = slot
        self.buffer: Buffer | None = buffer  # until it has ended
        self.completion = Completion()
        self.error: BaseException | None = None  # the first piece's that failed
        self.remaining = 0  # pieces not yet moved; guarded by the engine, as is the next
        self.sums: list[int] = []  # of each piece, by index; made when the first piece has moved

    def note(self, piece: Piece) -> bool:
        """Count a piece that has moved or failed; return whether it was the last.  Under a lock."""
        if piece.error is not None and self.error is None:
            self.error = piece.error
        if not self.sums:
            self.sums = [0] * self.remaining
        self.sums[piece.index] = piece.sum
        self.remaining -= 1
        return not self.remaining

    def finish(self) -> None:
        """Tell the slot and whoever waits.  Once, when no piece remains; outside every lock."""
        # The caller may reuse the buffer's memory once nothing refers to it: let go first.
        self.buffer = None
        if self.direction is Direction.WRITE and self.error is None:
            self.slot.sums = tuple(self.sums)
            self.slot.state = SlotState.WRITTEN
        self.completion.complete(self.error)


class Piece:
    """A part of a transfer that one system call can move.

    ``[start, stop)`` are the caller's bytes, ``[address, end)`` the addresses that hold them: a
    multiple of the alignment, so ``end - address`` may exceed ``stop - start``.
    """

    __slots__ = ("address", "end", "error", "index", "is_queued", "start", "stop", "sum", "transfer")

    def __init__(self, transfer: Transfer, index: int, start: int, stop: int, extent: Extent) -> None:
        self.transfer = transfer
        self.index = index
        self.start = start
        self.stop = stop
        self.address, self.end = extent
        self.error: BaseException | None = None
        self.is_queued = False
        self.sum = 0  # of the caller's bytes, where it is written

    def view(self) -> memoryview:
        """Return the caller's bytes.  To be let go before the transfer ends."""
        buffer = self.transfer.buffer
        assert buffer is not None  # it has not ended
        whole = memoryview(buffer.numpy())  # type: ignore[arg-type]  # 3.11's stubs know no Buffer
        return whole[self.start : self.stop]


def cut(transfer: Transfer, *, block_bytes: int, segment_bytes: int) -> list[Piece]:
    """Cut a transfer into pieces of at most ``block_bytes`` that lie in one file each."""
    slot = transfer.slot
    transfer.remaining = 1
    if len(slot.extents) == 1 and _is_whole(slot.extents[0], block_bytes, segment_bytes):
        return [Piece(transfer, 0, 0, slot.nbytes, slot.extents[0])]
    pieces: list[Piece] = []
    start = 0
    for extent in _parts(slot.extents, block_bytes, segment_bytes):
        stop = min(slot.nbytes, start + extent[1] - extent[0])
        pieces.append(Piece(transfer, len(pieces), start, stop, extent))
        start = stop
    transfer.remaining = len(pieces)
    return pieces


def _is_whole(extent: Extent, block_bytes: int, segment_bytes: int) -> bool:
    start, end = extent
    return end - start <= block_bytes and start // segment_bytes == (end - 1) // segment_bytes


def _parts(extents: Sequence[Extent], block_bytes: int, segment_bytes: int) -> Iterator[Extent]:
    for start, end in extents:
        while start < end:
            stop = min(end, start + block_bytes, align_up(start + 1, segment_bytes))
            yield start, stop
            start = stop  # noqa: PLW2901 - the rest of the extent
