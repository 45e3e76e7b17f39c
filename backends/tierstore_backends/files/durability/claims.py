"""What a manifest may say, whoever wrote it: nothing of one is believed that was not looked at here.

A checksum tells damage from what was written; it does not tell who wrote it.  So a database may be anything:
views that never end, triggers, numbers that no file has room for.

Rule 1: a database has the two tables that are made here, letter by letter, and nothing else: so no statement
of ours runs anything of its author's.  One flipped bit is damage and is told apart.
Rule 2: a row has a number and a name that can be told apart from all others, or `scan` does without it.
Rule 3: a place is one where so many bytes can be, with as many sums as there are fragments, or the bytes are
lost: that costs one key.
Rule 4: looking takes time and memory in proportion to what there is, whatever it says of itself.

What a manifest says of itself is looked at in `meta`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from tierstore.units import GIB, align_up
from tierstore_backends.files.addressing.drives import SPAN_BYTES
from tierstore_backends.files.durability.meta import LARGEST_NUMBER, Meta
from tierstore_backends.files.durability.record_codec import RecordLocation, Row, Sums, decode_text
from tierstore_backends.files.io.io_request import parts

LONGEST_NAME_BYTES: Final = 1 << 20
"""Of a key, as UTF-8: a commit refuses a longer one."""

LARGEST_BLOCK_BYTES: Final = 2 * GIB

SCHEMA: Final = (
    "CREATE TABLE meta (id INTEGER PRIMARY KEY, body TEXT NOT NULL, sum BLOB NOT NULL)",
    """CREATE TABLE records (
    id INTEGER PRIMARY KEY,
    version INTEGER NOT NULL,
    name TEXT NOT NULL,
    note TEXT NOT NULL,
    nbytes INTEGER NOT NULL,
    place BLOB NOT NULL
)""",
)
"""The statements that make a manifest.  SQLite keeps them as they are written."""

_TABLES: Final = {
    name: b"\0".join((b"table", name, name, sql.encode()))
    for name, sql in zip((b"meta", b"records"), SCHEMA, strict=True)
}


class ClaimError(ValueError):
    """A database is none that is made here; the message says what it has."""


def check_schema(connection: sqlite3.Connection) -> bool:
    """Look at what a database has; return whether it is ours but for one flipped bit.

    Raises:
        ClaimError: it is not ours.
        sqlite3.Error: it cannot be read.
    """
    texts: list[bytes] = []
    for text, told, rootpage in _schema(connection):
        if not rootpage or all(_flips_between(text, table) > 1 for table in _TABLES.values()):
            raise ClaimError(_described(told))
        texts.append(text)
    flips = [min(_flips_between(text, table) for text in (*texts, b"")) for table in _TABLES.values()]
    for name, count in zip(_TABLES, flips, strict=True):
        if count > 1:
            raise ClaimError(f"it has no table {name.decode()!r}")
    return any(flips)


def check_meta_table(connection: sqlite3.Connection) -> None:
    """See to it that ``meta``, which every format has, can be read; whatever else there is.

    Raises:
        ClaimError: it is not ours.
        sqlite3.Error: it cannot be read.
    """
    for text, told, rootpage in _schema(connection):
        if told[1] == b"meta" and (not rootpage or _flips_between(text, _TABLES[b"meta"]) > 1):
            raise ClaimError(_described(told))


def _schema(connection: sqlite3.Connection) -> Iterator[tuple[bytes, Sequence[object], object]]:
    """Yield each entry of a schema: as one text, in its parts, and whether it has pages of its own."""
    found = connection.execute("SELECT type, name, tbl_name, sql, rootpage FROM sqlite_master LIMIT 1000")
    for *told, rootpage in found:
        yield b"\0".join(each if isinstance(each, bytes) else b"" for each in told), told, rootpage


_FAR: Final = 1 << 30


def _flips_between(one: bytes, other: bytes) -> int:
    """Return how many bits differ; of texts of different lengths more than any."""
    if len(one) != len(other):
        return _FAR
    count = (int.from_bytes(one, "little") ^ int.from_bytes(other, "little")).bit_count()
    return count if count <= 1 else _FAR


def _described(told: Iterable[object]) -> str:
    """Name an entry of a schema, and what is different of it if its name is ours."""
    kind, name, _, sql = (_brief(each) for each in told)
    return f"it has the {kind} {name!r} ({sql!r}), which is none of tierstore's"


def _brief(given: object) -> str:
    text = given.decode("utf-8", "replace") if isinstance(given, bytes) else str(given)
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:80]}..."


def head_fault(row: Row, meta: Meta) -> str | None:
    """Say what a whole row cannot say of its record; ``None``: its head can be believed."""
    id_, version, name, *_ = row
    if not 0 < id_ < meta.next_id:
        return f"its number is not between 0 and {meta.next_id}"
    if not 0 <= version <= LARGEST_NUMBER:
        return f"its version is {version}"
    if len(name) > LONGEST_NAME_BYTES:
        return f"its name has {len(name)} bytes, of at most {LONGEST_NAME_BYTES}: {name[:20]!r}..."
    try:
        decode_text(name)
    except UnicodeDecodeError:
        return f"its name is no text: {name[:80]!r}"
    return None


def number_fault(nbytes: int, meta: Meta) -> str | None:
    """Say why a record cannot have so many bytes; ``None``: it can."""
    return None if 0 <= nbytes <= meta.drives * SPAN_BYTES else f"it has {nbytes} bytes"


def place_fault(place: RecordLocation, nbytes: int, meta: Meta) -> str | None:
    """Say why ``nbytes`` cannot be at a place; ``None``: they can."""
    if not _have_room(place, nbytes, meta):
        return f"{nbytes} bytes are in blocks of {place.block_bytes} at {place.extents!s:.200}"
    count = len(place.sums)
    match place.kind:
        case Sums.KEPT if nbytes:
            fragments = islice(parts(place.extents, place.block_bytes, meta.segment_bytes), count + 1)
            found = sum(1 for _ in fragments)
            if found != count:
                return f"{count} checksums were kept of {found if found <= count else 'more'} fragments"
        case Sums.KEPT | Sums.NONE if count:
            return f"{count} checksums were kept where there are none"
        case _:
            pass
    return None


def _have_room(place: RecordLocation, nbytes: int, meta: Meta) -> bool:
    alignment_bytes, highest = meta.alignment_bytes, meta.drives * SPAN_BYTES
    room_bytes = 0
    for start, end in place.extents:
        if not start < end <= highest or start % alignment_bytes or end % alignment_bytes:
            return False
        if start ^ (end - 1) >= SPAN_BYTES:  # not on one drive
            return False
        room_bytes += end - start
    block_bytes = place.block_bytes
    is_block = 0 < block_bytes <= LARGEST_BLOCK_BYTES and block_bytes % alignment_bytes == 0
    return room_bytes == align_up(nbytes, alignment_bytes) and (is_block or not nbytes)
