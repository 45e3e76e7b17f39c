"""How packed bytes are described where they are to be found again: in the notes of a backend's records.

A slot that is stored as it is is one record, under its own name and with its own note, as without a codec.
One that is packed is a record for each chunk: the first has the slot's name, those after it names of their
own; each says, in a line before the slot's own note, which chunk it is of what, so that any of them can be
missed.  So a directory can be written with a codec and read without one, and the other way round.

The line is ``RS lz4 DIGEST JSON``, where ``RS`` is the character 0x1E and ``DIGEST`` the xxh3_64 of the JSON:

    {"v": 1, "nbytes": 9000000, "chunk": 0, "chunks": 3, "width": 2,
     "block_bytes": 262144, "chunk_bytes": 4194304, "lengths": [...], "digest": "..."}

Rule 1: a record is ours if its note begins with ``RS``, and only then does its name mean anything but itself:
so a look at the notes tells whether anything was packed.
Rule 2: names and notes that look like ours but are not are escaped (the line is then empty), so that any text
can be one.
Rule 3: a line that is damaged, of a later version, or does not agree with what was found is told apart from
one that is not there: the bytes are then known to be unreadable, and never taken for something else.
Rule 4: a line is believed only within bounds, whoever wrote it: what it says there is to unpack is at most
256 times what is there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from tierstore.codec.blocks import WIDTHS

VERSION: Final = 1

_MARK: Final = "\x1e"  # "record separator": begins our lines
_NAME_MARK: Final = "\x1f"  # "unit separator": begins names that are not keys
_LATER: Final = re.compile(f"{_NAME_MARK}([1-9][0-9]{{0,8}}) (.*)", re.DOTALL | re.ASCII)
_MOST_GAIN: Final = 256  # of lz4: a byte stands for 255 at most
_NAMES: Final = ("nbytes", "chunk", "chunks", "width", "block_bytes", "chunk_bytes")


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """What is said of one packed chunk.

    Attributes:
        nbytes: of the whole slot.
        chunk: which one it is.
        chunks: how many there are.
        width: of the shuffle.
        block_bytes: how chunks are cut into blocks.
        chunk_bytes: how the slot is cut into chunks.
        lengths: of the blocks as they are stored.
        digest: xxh3_64 of the stored bytes.
    """

    nbytes: int
    chunk: int
    chunks: int
    width: int
    block_bytes: int
    chunk_bytes: int
    lengths: tuple[int, ...]
    digest: int


class DamagedNoteError(ValueError):
    """A line of ours cannot be understood."""


def is_ours(note: str) -> bool:
    """Whether a record with such a note was written here, and not by the backend within on its own."""
    return note.startswith(_MARK)


def first_name(key: str) -> str:
    """Return the name of the first record of a packed ``key``, or of one that is escaped."""
    return f"{_NAME_MARK}={key}" if key.startswith(_NAME_MARK) else key


def later_name(key: str, chunk: int) -> str:
    """Return the name of the record of a later chunk of ``key``."""
    return f"{_NAME_MARK}{chunk} {key}"


def split_name(name: str) -> tuple[str, int]:
    """Return the key of a record that is ours, and which chunk its name says it is."""
    if not name.startswith(_NAME_MARK):
        return name, 0
    if name.startswith(f"{_NAME_MARK}="):
        return name[2:], 0
    later = _LATER.fullmatch(name)
    return (later[2], int(later[1])) if later else (name, 0)


def plain_record(key: str, note: str) -> tuple[str, str]:
    """Return the name and the note of a record that is stored as it is."""
    if key.startswith(_NAME_MARK) or is_ours(note):
        return first_name(key), f"{_MARK}\n{note}"
    return key, note


def packed_note(line: ChunkRecord, note: str) -> str:
    """Return the note of a packed chunk; ``note`` is the slot's own, for the first of them."""
    body = {name: getattr(line, name) for name in _NAMES}
    told = {"v": VERSION, **body, "lengths": line.lengths, "digest": f"{line.digest:016x}"}
    text = json.dumps(told, separators=(",", ":"))
    return f"{_MARK}lz4 {_digest(text)} {text}\n{note}"


def read_note(note: str) -> tuple[ChunkRecord | None, str]:
    """Return what a record says of its chunk, None if it is stored as it is, and the slot's own note.

    Raises:
        DamagedNoteError: it says something that cannot be understood.
    """
    if not is_ours(note):
        return None, note
    head, _, own = note[1:].partition("\n")
    return (_parsed(head) if head else None), own


def own_note(note: str) -> str:
    """Return the slot's own note of a record whose line is damaged, as far as it can be told."""
    return note.partition("\n")[2]


def _parsed(head: str) -> ChunkRecord:
    codec, _, rest = head.partition(" ")
    digest, _, text = rest.partition(" ")
    if codec != "lz4" or digest != _digest(text):
        raise DamagedNoteError("what is noted of the compressed bytes is damaged")
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedNoteError(
            f"what is noted of the compressed bytes is no JSON ({type(error).__name__})"
        ) from error
    if not isinstance(told, dict) or told.get("v") != VERSION:
        version = told.get("v") if isinstance(told, dict) else None
        raise DamagedNoteError(
            f"the bytes were compressed in format {version!s:.20}, and this version of tierstore knows "
            f"{VERSION}"
        )
    line = ChunkRecord(
        **{name: _number(told.get(name)) for name in _NAMES},
        lengths=tuple(map(_number, _list(told.get("lengths")))),
        digest=int(str(told.get("digest")), 16),
    )
    if not _can_be(line):
        raise DamagedNoteError("what is noted of the compressed bytes cannot be of any")
    return line


def _number(given: object) -> int:
    """Return a number within bounds.

    Raises:
        DamagedNoteError: it is none.
    """
    if type(given) is int and 0 <= given < 2**63:
        return given
    raise DamagedNoteError(
        f"what is noted of the compressed bytes has {given!r:.40} in the place of a number"
    )


def _list(given: object) -> list[object]:
    return given if isinstance(given, list) else [given]


def _can_be(line: ChunkRecord) -> bool:
    """Whether bytes can be cut as a line says, and packed into as few as it says."""
    if not (line.width in WIDTHS and line.block_bytes and line.chunk_bytes and line.chunk < line.chunks):
        return False
    if line.chunks != -(-line.nbytes // line.chunk_bytes):
        return False
    left_bytes = min(line.chunk_bytes, line.nbytes - line.chunk * line.chunk_bytes)
    if len(line.lengths) != -(-left_bytes // line.block_bytes):
        return False
    return all(
        0 < length <= block <= length * _MOST_GAIN
        for length, block in zip(line.lengths, _blocks(left_bytes, line.block_bytes), strict=True)
    )


def _blocks(nbytes: int, block_bytes: int) -> Iterator[int]:
    """Yield how long each block of so many bytes is."""
    while nbytes > 0:
        yield min(nbytes, block_bytes)
        nbytes -= block_bytes


def agree(lines: Sequence[ChunkRecord], nbytes_within: Sequence[int]) -> bool:
    """Whether the lines of all chunks, in order, describe one slot, and the slots within as they are."""
    first = lines[0]
    like = (first.nbytes, first.chunks, first.width, first.block_bytes, first.chunk_bytes)
    return len(lines) == first.chunks and all(
        (line.nbytes, line.chunks, line.width, line.block_bytes, line.chunk_bytes) == like
        and line.chunk == index
        and sum(line.lengths) == nbytes
        for index, (line, nbytes) in enumerate(zip(lines, nbytes_within, strict=True))
    )


def _digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())
