"""From the rows of a manifest to slots: which bytes are there, and which are not any more.

Rule 1: every row becomes a slot.  One whose bytes cannot be there is *lost*: reading it tells why.
Rule 2: two slots never share an address: of two rows that say so, the older one is lost.
Rule 3: what is lost keeps its addresses where they are known and nobody else has them: a file that is
put back brings its bytes back.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from tierstore.errors import IntegrityError
from tierstore.units import GIB, align_up
from tierstore_backends.files.drives import SPAN_BYTES, reach
from tierstore_backends.files.layout import Extent
from tierstore_backends.files.rows import Row, Sums, decode_place, decode_text
from tierstore_backends.files.segments import Files
from tierstore_backends.files.transfer import FileSlot, SlotState

_LARGEST_BLOCK_BYTES = 2 * GIB


@dataclass(slots=True)
class Recovered:
    """What a manifest's rows stand for.

    Attributes:
        rows: as they were read.
        slots: one for each row; they belong to no backend yet.
        lost: why bytes are not there, for the slots of which they are not.
        live: the extents of all slots, sorted; no two overlap.
        block_bytes: the largest block of a slot.
    """

    rows: Sequence[Row]
    slots: list[FileSlot] = field(default_factory=list)
    lost: dict[FileSlot, IntegrityError] = field(default_factory=dict)
    live: list[Extent] = field(default_factory=list)
    block_bytes: int = 0

    def lose(self, slot: FileSlot, why: str) -> None:
        """Say that the bytes of ``slot`` are not there."""
        slot.state = SlotState.RESERVED
        self.lost[slot] = IntegrityError(why)


def recover(rows: Sequence[Row], alignment_bytes: int, drives: int, manifest: str) -> Recovered:
    """Make the slots of ``rows``, which are whole.

    Args:
        rows: of a manifest.
        alignment_bytes: what every extent is a multiple of.
        drives: how many there are.
        manifest: its name, for messages.
    """
    recovered = Recovered(rows)
    for _, _, name, _, nbytes, encoded in rows:
        extents, sums, kind, block_bytes = decode_place(encoded)
        slot = FileSlot(nbytes, extents, None, block_bytes)
        slot.sums = sums
        slot.state = SlotState.WRITTEN
        recovered.slots.append(slot)
        if kind is Sums.LOST:
            recovered.lose(slot, f"the bytes of {decode_text(name)!r} were lost: {manifest} says so")
        elif not _is_sound(extents, block_bytes, nbytes, alignment_bytes, drives * SPAN_BYTES):
            slot.extents = ()
            recovered.lose(slot, f"{manifest} says of {decode_text(name)!r} what cannot be: {extents}")
        elif block_bytes > recovered.block_bytes:
            recovered.block_bytes = block_bytes
    _settle(recovered, manifest)
    return recovered


def find_missing(recovered: Recovered, segments: Files) -> list[int]:
    """Find slots that lie beyond the end of their file: their bytes are lost.

    Returns:
        The positions of those whose loss no checksum would show once the file is longer again.
    """
    if all(segments.first_missing(start, end) is None for start, end in reach(recovered.live)):
        return []
    silent: list[int] = []
    for position, slot in enumerate(recovered.slots):
        missing = _first_missing(slot, segments)
        if missing is None or slot in recovered.lost:
            continue
        name = decode_text(recovered.rows[position][2])
        recovered.lose(
            slot,
            f"the bytes of {name!r} at {segments.where(missing)} "
            f"are not there: the file is {segments.length(missing)} bytes long. Was it copied in part?",
        )
        if not slot.sums:
            silent.append(position)
    return silent


def _first_missing(slot: FileSlot, segments: Files) -> int | None:
    for start, end in slot.extents:
        missing = segments.first_missing(start, end)
        if missing is not None:
            return missing
    return None


def _is_sound(
    extents: Sequence[Extent], block_bytes: int, nbytes: int, alignment_bytes: int, highest: int
) -> bool:
    """Whether such a place can hold ``nbytes``."""
    room_bytes = 0
    for start, end in extents:
        if not start < end <= highest or start % alignment_bytes or end % alignment_bytes:
            return False
        if start ^ (end - 1) >= SPAN_BYTES:  # not on one drive
            return False
        room_bytes += end - start
    is_block = 0 < block_bytes <= _LARGEST_BLOCK_BYTES
    return room_bytes == align_up(nbytes, alignment_bytes) and (is_block or not nbytes)


def _settle(recovered: Recovered, manifest: str) -> None:
    """Find the live extents; where two slots have an address, the older one loses its own."""
    while True:
        owned = sorted(
            (start, end, position)
            for position, slot in enumerate(recovered.slots)
            for start, end in slot.extents
        )
        clash = next((pair for pair in itertools.pairwise(owned) if pair[1][0] < pair[0][1]), None)
        if clash is None:
            recovered.live = [(start, end) for start, end, _ in owned]
            return
        older, newer = sorted((each[2] for each in clash), key=lambda position: recovered.rows[position][1])
        slot = recovered.slots[older]
        slot.extents = ()
        names = [decode_text(recovered.rows[position][2]) for position in (older, newer)]
        recovered.lose(
            slot,
            f"{manifest} says that {names[1]!r} is where {names[0]!r} was: the latter's bytes are lost",
        )
