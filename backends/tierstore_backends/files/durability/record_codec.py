"""What a manifest says of one record, as bytes: encoded, decoded, and checked.

A row is ``(id, version, name, note, nbytes, place)``.  ``place`` is little-endian binary:

======  ====================================================================================
bytes   meaning
======  ====================================================================================
8       xxh3_64 of the whole row: of ``id``, ``version``, ``nbytes``, ``name``, ``note`` and
        everything in ``place`` after these eight bytes
8       xxh3_64 of the *head* alone: of ``id``, ``version``, ``nbytes``, ``name`` and ``note``
4       the block that the bytes were cut by
2       `Sums`
2       zero
4       how many extents there are
16 each the extents: the first address and one past the last
8 each  the xxh3_64 of each fragment, as the cut of the extents by the block has them
======  ====================================================================================

Rule 1: what is decoded is what was encoded, or is said to be damaged: no bit counts without its check.
Rule 2: one flipped bit anywhere in a row of at most 4 KiB is put right, where somebody has the time.
Rule 3: where more is wrong but the head is right, the name, the note and the length are still told.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import xxhash

from tierstore_backends.files.bit_flips import flips
from tierstore_backends.files.extents import Extent

Row = tuple[int, int, bytes, bytes, int, bytes]
"""``(id, version, name, note, nbytes, place)`` with the types that they have if nothing is damaged."""

_HEAD = struct.Struct("<qqqq")  # id, version, nbytes, length of the name
_PLACE = struct.Struct("<QQIHHI")  # both checks, block, kind of sums, zero, number of extents
_SIMPLE = struct.Struct("<QQIHHIQQQ")  # one extent and one sum, as nearly all have
_ONE_EXTENT = struct.pack("<HHI", 1, 0, 1)  # and sums that were kept
MENDED_BYTES: Final = 4096
"""The longest row, or text, that is searched for a flipped bit: a hash for each bit, so quadratic."""


class Sums(enum.Enum):
    """What is known of a record's bytes."""

    NONE = 0  # they were written without checksums
    KEPT = 1
    LOST = 2  # an earlier opening found that they are not there


class RecordLocation(NamedTuple):
    """Where a record's bytes are, and what tells that they are right."""

    extents: tuple[Extent, ...]
    sums: tuple[int, ...]
    kind: Sums
    block_bytes: int


_KINDS = tuple(Sums)
NOWHERE = RecordLocation((), (), Sums.LOST, 0)


class RowDamage(enum.Enum):
    """What is left of a row."""

    NONE = enum.auto()
    REPAIRED = enum.auto()  # everything: one bit was put right
    PLACE = enum.auto()  # its head: where the bytes are is not known any more
    ALL = enum.auto()  # nothing


def encode_text(text: str) -> bytes:
    """Return any text as bytes, also one that is no proper Unicode."""
    return text.encode("utf-8", "surrogatepass")


def decode_text(encoded: bytes) -> str:
    """Return what `encode_text` was given."""
    return encoded.decode("utf-8", "surrogatepass")


def decode_note(encoded: bytes) -> str:
    """Return a note, with marks in the place of what is no text: what it says is another's affair."""
    try:
        return decode_text(encoded)
    except UnicodeDecodeError:
        return encoded.decode("utf-8", "replace")


def encode(id_: int, version: int, name: bytes, note: bytes, nbytes: int, place: RecordLocation) -> Row:
    """Return the row of a record."""
    head = b"".join((_HEAD.pack(id_, version, nbytes, len(name)), name, note))
    numbers = [address for extent in place.extents for address in extent]
    rest = struct.pack(
        f"<QIHHI{len(numbers) + len(place.sums)}Q",
        xxhash.xxh3_64_intdigest(head),
        place.block_bytes,
        place.kind.value,
        0,
        len(place.extents),
        *numbers,
        *place.sums,
    )
    check = xxhash.xxh3_64_digest(head + rest)[::-1]
    return id_, version, name, note, nbytes, check + rest


def row_check(place: bytes) -> int:
    """Return the check of a row that is not damaged: what the row adds to the digest of its manifest."""
    return int.from_bytes(place[:8], "little")


class RecordLocationError(ValueError):
    """What is in the column ``place`` was never encoded here, although it has its check."""


def decode_place(place: bytes) -> RecordLocation:
    """Return what `encode` was given.  Of a row that is not damaged.

    Raises:
        RecordLocationError: it was not encoded here.
    """
    if len(place) == _SIMPLE.size and place[20:28] == _ONE_EXTENT:
        _, _, block_bytes, _, _, _, start, end, total = _SIMPLE.unpack(place)
        return RecordLocation(((start, end),), (total,), Sums.KEPT, block_bytes)
    _, _, block_bytes, kind, zero, count = _PLACE.unpack_from(place)
    many, rest = divmod(len(place) - _PLACE.size, 8)
    if kind >= len(_KINDS) or zero or rest or many < 2 * count:
        raise RecordLocationError(
            f"{len(place)} bytes that say {count} extents and {kind} as the kind of sums"
        )
    numbers = struct.unpack_from(f"<{many}Q", place, _PLACE.size)
    extents = tuple(zip(numbers[: 2 * count : 2], numbers[1 : 2 * count : 2], strict=True))
    return RecordLocation(extents, numbers[2 * count :], _KINDS[kind], block_bytes)


def is_whole(*raw: object) -> bool:
    """Whether nothing in a row is damaged."""
    try:
        id_, version, name, note, nbytes, place = raw
        head = _HEAD.pack(id_, version, nbytes, len(name))  # type: ignore[arg-type]
        found = xxhash.xxh3_64_digest(b"".join((head, name, note, place[8:])))  # type: ignore[arg-type,index]
        return found[::-1] == place[:8] and len(place) >= _PLACE.size  # type: ignore[index,arg-type]
    except (TypeError, ValueError, struct.error):
        return False  # a damaged database returns anything


def as_row(raw: Sequence[object]) -> Row | None:
    """Return what a database returned if it has the types of a row, whole or not."""
    match raw:
        case (int(), int(), bytes(), bytes(), int(), bytes() as place) if len(place) >= _PLACE.size:
            return tuple(raw)  # type: ignore[return-value]  # the types are those of a row
        case _:
            return None


def mend(raw: Sequence[object], *, search: bool = True) -> tuple[Row | None, RowDamage]:
    """Return a whole row with what is left of one that is not, and what that is.

    Args:
        raw: what a database returned.
        search: whether to look for a flipped bit, which takes a hash for each.
    """
    broken = as_row(raw)
    if broken is None:
        return None, RowDamage.ALL
    id_, version, name, note, nbytes, place = broken
    if search and len(name) + len(note) + len(place) <= MENDED_BYTES:
        for row in _one_bit_away(broken):
            if is_whole(*row):
                return row, RowDamage.REPAIRED
    head = b"".join((_HEAD.pack(id_, version, nbytes, len(name)), name, note))
    if xxhash.xxh3_64_digest(head)[::-1] == place[8:16]:
        return encode(id_, version, name, note, nbytes, NOWHERE), RowDamage.PLACE
    return None, RowDamage.ALL


def _one_bit_away(row: Row) -> Iterator[Row]:
    id_, version, name, note, nbytes, place = row
    for bit in range(62):
        yield id_ ^ 1 << bit, version, name, note, nbytes, place
        yield id_, version ^ 1 << bit, name, note, nbytes, place
        yield id_, version, name, note, nbytes ^ 1 << bit, place
    for flipped in flips(name):
        yield id_, version, flipped, note, nbytes, place
    for flipped in flips(note):
        yield id_, version, name, flipped, nbytes, place
    for flipped in flips(place):
        yield id_, version, name, note, nbytes, flipped
