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
from tierstore_backends.files.addressing.drives import reach
from tierstore_backends.files.addressing.segments import Files
from tierstore_backends.files.durability.claims import number_fault, place_fault
from tierstore_backends.files.durability.meta import Meta
from tierstore_backends.files.durability.record_codec import (
    NOWHERE,
    RecordLocation,
    RecordLocationError,
    Row,
    Sums,
    decode_place,
    decode_text,
)
from tierstore_backends.files.extents import Extent
from tierstore_backends.files.io.io_request import FileSlot, FileSlotState

_LONGEST_TOLD = 200  # characters of a name, in a message


@dataclass(slots=True)
class RecoveredRecords:
    """What a manifest's rows stand for.

    Attributes:
        rows: as they were read.
        slots: one for each row; they belong to no backend yet.
        lost: why bytes are not there, for the slots of which they are not.
        live: the extents of all slots, sorted; no two overlap.
        block_bytes: the largest block of a slot.
        untold: the positions of slots that are lost although nothing would show it another time.
    """

    rows: Sequence[Row]
    slots: list[FileSlot] = field(default_factory=list)
    lost: dict[FileSlot, IntegrityError] = field(default_factory=dict)
    live: list[Extent] = field(default_factory=list)
    block_bytes: int = 0
    untold: list[int] = field(default_factory=list)

    def lose(self, slot: FileSlot, why: str) -> None:
        """Say that the bytes of ``slot`` are not there."""
        slot.state = FileSlotState.RESERVED
        self.lost[slot] = IntegrityError(why)

    def fit(self, capacity_bytes: int) -> None:
        """Let what is lost and larger than the capacity take nothing of it: nothing kept is so large."""
        larger = [slot for slot in self.lost if slot.nbytes > capacity_bytes]
        for slot in larger:
            slot.nbytes, slot.extents = 0, ()
        if larger:
            self.live = sorted(extent for slot in self.slots for extent in slot.extents)


def recover(rows: Sequence[Row], meta: Meta, manifest: str, *, is_older: bool = False) -> RecoveredRecords:
    """Make the slots of ``rows``, which are whole.

    Args:
        rows: of a manifest.
        meta: what it says of itself.
        manifest: its name, for messages.
        is_older: whether the files were written since, so that only checksums tell what is still there.
    """
    recovered = RecoveredRecords(rows)
    for row in rows:
        nbytes, place, fault = _told(row, meta)
        slot = FileSlot(nbytes, place.extents, None, place.block_bytes)
        slot.sums = place.sums
        slot.state = FileSlotState.WRITTEN
        recovered.slots.append(slot)
        if place.kind is Sums.LOST and fault is None:
            recovered.lose(slot, f"the bytes of {_name(row)} were lost: {manifest} says so")
        elif fault is not None:
            recovered.lose(slot, f"{manifest} says of {_name(row)} what cannot be: {fault}")
        elif is_older and nbytes and place.kind is Sums.NONE:
            recovered.untold.append(len(recovered.slots) - 1)
            recovered.lose(
                slot,
                f"{manifest} is older than the files, and {_name(row)} was written without checksums: nobody "
                f"can tell whether its bytes are still there",
            )
        elif place.block_bytes > recovered.block_bytes:
            recovered.block_bytes = place.block_bytes
    _find_live_extents(recovered, manifest)
    return recovered


def _told(row: Row, meta: Meta) -> tuple[int, RecordLocation, str | None]:
    """Return how many bytes a row's record has, and where; without what cannot be, and why it cannot."""
    nbytes = row[4]
    fault = number_fault(nbytes, meta)
    if fault is not None:
        return 0, NOWHERE, fault
    try:
        place = decode_place(row[5])
    except RecordLocationError as error:
        return nbytes, NOWHERE, str(error)
    if place == NOWHERE:
        return nbytes, place, None
    fault = place_fault(place, nbytes, meta)
    return nbytes, place if fault is None else NOWHERE, fault


def _name(row: Row) -> str:
    """Name a row's record, for messages."""
    name = decode_text(row[2])
    return repr(name) if len(name) <= _LONGEST_TOLD else f"{name[:_LONGEST_TOLD]!r}..."


def find_missing(recovered: RecoveredRecords, segments: Files) -> list[int]:
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
        recovered.lose(
            slot,
            f"the bytes of {_name(recovered.rows[position])} at {segments.where(missing)} "
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


def _find_live_extents(recovered: RecoveredRecords, manifest: str) -> None:
    """Find the live extents; where two slots have an address, the older one loses its own."""
    owned = sorted(
        (start, end, position) for position, slot in enumerate(recovered.slots) for start, end in slot.extents
    )
    if all(this[1] <= following[0] for this, following in itertools.pairwise(owned)):
        recovered.live = [(start, end) for start, end, _ in owned]
        return
    last: tuple[int, int] | None = (
        None  # the end of the extent that has the highest addresses so far, and whose
    )
    for start, end, position in owned:
        if not recovered.slots[position].extents:
            continue  # it has lost them all
        if last is None or start >= last[0]:
            last = end, position
        elif _age(recovered, position) > _age(recovered, last[1]):
            _displace(recovered, last[1], position, manifest)
            last = end, position
        else:
            _displace(recovered, position, last[1], manifest)
    recovered.live = sorted(extent for slot in recovered.slots for extent in slot.extents)


def _age(recovered: RecoveredRecords, position: int) -> tuple[int, int]:
    """Return what is greater for the newer of two slots."""
    return recovered.rows[position][1], position


def _displace(recovered: RecoveredRecords, older: int, newer: int, manifest: str) -> None:
    """Let one slot lose its addresses to another, or to itself."""
    slot = recovered.slots[older]
    slot.extents = ()
    names = [_name(recovered.rows[position]) for position in (older, newer)]
    recovered.lose(
        slot, f"{manifest} says that {names[1]} is where {names[0]} was: the latter's bytes are lost"
    )
