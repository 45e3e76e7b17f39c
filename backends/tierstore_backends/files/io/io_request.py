"""What moves: slots, transfers of their bytes, and the fragments that transfers are cut into.

A fragment is contiguous in one file and in the caller's buffer, and at most one block long.  The cut
of a slot is a function of its extents and of the block that it was written with, so the fragments of a
read are those of the write, and each has its own checksum: fragments need no order.  Parts of slots are cut
where they begin and end, so theirs have none (``is_whole``).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

from tierstore.spi import Buffer, Completion, PartialError
from tierstore.units import align_up
from tierstore_backends.files.extents import Extent

_LEAST_IN_RUN = 4  # a run costs as much Python as a fragment does
_MOST_IN_RUN = 32
_MOST_IN_PIECE = 512  # Linux takes 1,024 pieces of memory in one call


class FileSlotState(enum.Enum):
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
        block_bytes: the most bytes of a fragment.
    """

    __slots__ = ("block_bytes", "extents", "failed_syncs", "home", "nbytes", "state", "sums")

    def __init__(self, nbytes: int, extents: Sequence[Extent], home: object, block_bytes: int) -> None:
        self.nbytes = nbytes
        self.extents = extents
        self.home = home
        self.block_bytes = block_bytes
        self.failed_syncs = 0  # how many there had been when it was written
        self.state = FileSlotState.RESERVED
        self.sums: tuple[int, ...] = ()  # of each fragment, once written; none if none are kept

    @property
    def held_bytes(self) -> int:
        """What it takes of the files: a slot that was found and has no addresses takes nothing."""
        return sum(end - start for start, end in self.extents)

    def __repr__(self) -> str:
        """Show where the bytes are."""
        where = ", ".join(f"[{start}, {end})" for start, end in self.extents)
        return f"<slot of {self.nbytes} bytes at {where or 'no address'}, {self.state.name}>"


class Direction(enum.Enum):
    """Which way bytes go."""

    READ = enum.auto()
    WRITE = enum.auto()


class FragmentOwner(Protocol):
    """What a fragment belongs to, and who is to be told when the last of its fragments has ended."""

    direction: Direction
    slots: Sequence[FileSlot]
    buffers: Sequence[Buffer]
    is_whole: bool
    ready: Callable[[], None] | None
    remaining: int

    def note(self) -> bool:
        """Count a fragment that has moved or failed; return whether it was the last.  Under a lock."""
        ...

    def finish(self) -> None:
        """Let go of everything and tell whoever waits.  Once, with no fragment left; outside every lock."""
        ...


class IoRequest:
    """One ``read`` or ``write``, of one slot or of a batch of them or of parts, under way.

    Small on purpose: every object that lives as long as a transfer makes the garbage collector
    look at everything else more often, and that can cost more than the transfer.

    Args:
        direction: which way bytes go.
        slots: where from, or where to.
        buffers: the caller's bytes, one for each slot.
        is_whole: whether slots move whole, so that their checksums say something.
    """

    __slots__ = ("buffers", "completion", "direction", "fragments", "is_whole", "ready", "remaining", "slots")

    def __init__(
        self,
        direction: Direction,
        slots: Sequence[FileSlot],
        buffers: Sequence[Buffer],
        *,
        is_whole: bool = True,
    ) -> None:
        self.direction = direction
        self.is_whole = is_whole
        self.slots = slots
        self.buffers = buffers  # until it has ended
        self.completion = Completion()
        self.fragments: Sequence[Fragment] = ()  # until it has ended
        self.ready: Callable[[], None] | None = None  # buffers on a device: waits until they may be used
        self.remaining = 0  # fragments not yet moved; guarded by the engine

    def note(self) -> bool:
        """Count a fragment that has moved or failed; return whether it was the last.  Under a lock."""
        self.remaining -= 1
        return not self.remaining

    def finish(self) -> None:
        """Tell the slots and whoever waits.  Once, when no fragment remains; outside every lock."""
        fragments = self.fragments
        # The caller may reuse the buffers' memory once nothing refers to it: let go first.
        self.buffers = self.fragments = ()
        errors: dict[int, BaseException] = {}
        for fragment in fragments:
            if isinstance(fragment, PartsRun):
                errors.update(fragment.errors)
            elif fragment.error is not None:
                errors.setdefault(fragment.part, fragment.error)
        if self.direction is Direction.WRITE:
            self._keep(fragments, errors)
        if errors and len(self.slots) > 1:
            self.completion.complete(PartialError(errors))
        else:
            self.completion.complete(errors.get(0))

    def _keep(self, fragments: Sequence[Fragment], errors: Mapping[int, BaseException]) -> None:
        """Note at the slots what was written there."""
        # As many as slots, and each its slot's first: one fragment a slot, and none without.
        if (
            len(fragments) == len(self.slots)
            and not errors
            and not any(fragment.index for fragment in fragments)
        ):
            for slot, fragment in zip(self.slots, fragments, strict=True):
                slot.sums = () if fragment.sum is None else (fragment.sum,)
                slot.state = FileSlotState.WRITTEN
            return
        sums: list[list[int]] = [[] for _ in self.slots]
        for fragment in fragments:
            if fragment.sum is not None:
                sums[fragment.part].append(fragment.sum)
        for part, slot in enumerate(self.slots):
            if part not in errors:
                slot.sums = tuple(sums[part])
                slot.state = FileSlotState.WRITTEN


class Fragment:
    """A part of a transfer that one system call can move.

    ``[start, stop)`` are bytes of the caller's buffer number ``part``, ``[address, end)`` the
    addresses that hold them: a multiple of the alignment, so ``end - address`` may exceed
    ``stop - start``.  ``index`` counts the fragments of one slot.
    """

    __slots__ = ("address", "end", "error", "index", "is_queued", "part", "start", "stop", "sum", "transfer")

    def __init__(
        self, transfer: FragmentOwner, part: int, index: int, start: int, stop: int, extent: Extent
    ) -> None:
        self.transfer = transfer
        self.part = part
        self.index = index
        self.start = start
        self.stop = stop
        self.address, self.end = extent
        self.error: BaseException | None = None
        self.is_queued = False
        self.sum: int | None = None  # of the caller's bytes, where it is written and sums are kept

    @property
    def buffer(self) -> Buffer:
        """The caller's buffer.  To be let go before the transfer ends."""
        return self.transfer.buffers[self.part]

    def view(self) -> memoryview:
        """Return the caller's bytes.  To be let go before the transfer ends."""
        whole = memoryview(self.buffer.numpy())  # type: ignore[arg-type]  # 3.11's stubs know no Buffer
        return whole if len(whole) == self.stop - self.start else whole[self.start : self.stop]


class Piece(NamedTuple):
    """Parts that lie one after another in a file: what one call reads.

    Attributes:
        address: where they begin.
        positions: which of the transfer's parts they are, in the file's order.
    """

    address: int
    positions: Sequence[int]


class PartsRun(Fragment):
    """Many parts of one read, which wait and are moved together: a call for each piece, one after another.

    So that what is done in Python is little for each of them.

    Args:
        transfer: of which all parts have one buffer.
        pieces: of one drive.
        nbytes: of a part.
    """

    __slots__ = ("failed", "nbytes", "pieces")

    def __init__(self, transfer: FragmentOwner, pieces: Sequence[Piece], nbytes: int) -> None:
        address = pieces[0].address
        count = sum(len(piece.positions) for piece in pieces)
        super().__init__(transfer, pieces[0].positions[0], 0, 0, count * nbytes, (address, address + nbytes))
        self.pieces = pieces
        self.nbytes = nbytes
        self.failed: dict[int, BaseException] = {}

    @property
    def errors(self) -> Mapping[int, BaseException]:
        """Why parts have failed, by their positions."""
        if self.error is None:
            return self.failed
        return {position: self.error for piece in self.pieces for position in piece.positions}

    def fragments_of(self, piece: Piece) -> list[Fragment]:
        """Return the parts of a piece as fragments of their own."""
        found: list[Fragment] = []
        for number, position in enumerate(piece.positions):
            address, start = piece.address + number * self.nbytes, position * self.nbytes
            extent = address, address + self.nbytes
            found.append(Fragment(self.transfer, position, 0, start, start + self.nbytes, extent))
        return found


def by_fragment(slot: FileSlot, segment_bytes: int) -> Iterator[FileSlot]:
    """Yield the fragments of a slot that has sums as slots of their own."""
    left_bytes = slot.nbytes
    extents = parts(slot.extents, slot.block_bytes, segment_bytes)
    for extent, total in zip(extents, slot.sums, strict=True):
        part = FileSlot(min(left_bytes, extent[1] - extent[0]), (extent,), slot.home, slot.block_bytes)
        part.sums = (total,)
        part.state = FileSlotState.WRITTEN
        left_bytes -= part.nbytes
        yield part


def cut(transfer: IoRequest, *, segment_bytes: int) -> list[Fragment]:
    """Cut a transfer into fragments of at most a block of their slot that lie in one file each."""
    fragments: list[Fragment] = []
    for part, slot in enumerate(transfer.slots):
        if len(slot.extents) == 1 and _is_whole(slot.extents[0], slot.block_bytes, segment_bytes):
            fragments.append(Fragment(transfer, part, 0, 0, slot.nbytes, slot.extents[0]))
            continue
        start = 0
        for index, extent in enumerate(parts(slot.extents, slot.block_bytes, segment_bytes)):
            stop = min(slot.nbytes, start + extent[1] - extent[0])
            fragments.append(Fragment(transfer, part, index, start, stop, extent))
            start = stop
    transfer.fragments = fragments
    transfer.remaining = len(fragments)
    return fragments


class RunCut(NamedTuple):
    """How parts are put together.

    Attributes:
        depth: so many runs are in flight at a time.
        span_bytes: the addresses of one drive: a run is of one.
        piece_bytes: the most bytes of a call.
    """

    depth: int
    span_bytes: int
    piece_bytes: int

    def parts_of_run(self, count: int) -> int:
        """Return how many pieces of so many are a run: enough of them to keep the drive busy."""
        return max(_LEAST_IN_RUN, min(_MOST_IN_RUN, -(-count // self.depth)))


def cut_parts(
    transfer: IoRequest,
    begins: Sequence[int],
    nbytes: int,
    *,
    segment_bytes: int,
    runs: RunCut | None = None,
) -> None:
    """Cut a read of parts into fragments: one for each part, unless that crosses from a range to another.

    Args:
        transfer: its slots are those of the parts; each has the same buffer, which is filled in their order.
        begins: where each part begins in its slot.
        nbytes: how long it is.
        segment_bytes: the length of a full file.
        runs: how parts that are in one range each are put together; ``None``: not at all.
    """
    fragments: list[Fragment] = []
    whole: list[tuple[int, int]] = []  # address and position of what can be in a run
    for part, (slot, begin) in enumerate(zip(transfer.slots, begins, strict=True)):
        first, last = slot.extents[0]
        address = first + begin
        end = address + nbytes
        is_whole = (
            end <= last
            and nbytes <= slot.block_bytes
            and address // segment_bytes == (end - 1) // segment_bytes
        )
        if runs is not None and is_whole:
            whole.append((address, part))
            continue
        start = part * nbytes
        for index, extent in enumerate(_within(slot, begin, begin + nbytes, segment_bytes)):
            stop = start + extent[1] - extent[0]
            fragments.append(Fragment(transfer, part, index, start, stop, extent))
            start = stop
    if runs is not None and whole:
        whole.sort()
        fragments += _runs_of(transfer, whole, nbytes, segment_bytes, runs)
    transfer.fragments = fragments
    transfer.remaining = len(fragments)


def _runs_of(
    transfer: IoRequest, whole: Sequence[tuple[int, int]], nbytes: int, segment_bytes: int, runs: RunCut
) -> Iterator[PartsRun]:
    """Yield runs of parts whose addresses, with their positions, ascend."""
    pieces: list[Piece] = []
    most = max(1, min(_MOST_IN_PIECE, runs.piece_bytes // nbytes))
    positions: list[int] = []
    following = -1
    for address, position in whole:
        if address != following or len(positions) == most or not address % segment_bytes:
            positions = []
            pieces.append(Piece(address, positions))
        positions.append(position)
        following = address + nbytes
    length = runs.parts_of_run(len(pieces))
    for _, group in groupby(pieces, lambda piece: piece.address // runs.span_bytes):
        of_drive = list(group)
        for begin in range(0, len(of_drive), length):
            yield PartsRun(transfer, of_drive[begin : begin + length], nbytes)


def _within(slot: FileSlot, begin: int, end: int, segment_bytes: int) -> Sequence[Extent]:
    """Return the addresses that hold ``[begin, end)`` of a slot, cut as fragments are."""
    first, last = slot.extents[0]
    if end <= last - first and _is_whole((first + begin, first + end), slot.block_bytes, segment_bytes):
        return ((first + begin, first + end),)
    found: list[Extent] = []
    passed = 0  # bytes of the slot in the extents before
    for first, last in slot.extents:
        start, stop = max(begin - passed, 0), min(end - passed, last - first)
        if start < stop:
            found.append((first + start, first + stop))
        passed += last - first
    return list(parts(found, slot.block_bytes, segment_bytes))


def _is_whole(extent: Extent, block_bytes: int, segment_bytes: int) -> bool:
    start, end = extent
    return end - start <= block_bytes and start // segment_bytes == (end - 1) // segment_bytes


def parts(extents: Sequence[Extent], block_bytes: int, segment_bytes: int) -> Iterator[Extent]:
    """Yield the addresses of each fragment of a slot: the cut that reads and writes have in common."""
    for start, end in extents:
        while start < end:
            stop = min(end, start + block_bytes, align_up(start + 1, segment_bytes))
            yield start, stop
            start = stop  # noqa: PLW2901 - the rest of the extent
