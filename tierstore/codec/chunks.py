"""Which chunks share a pad, and how one is packed into it and unpacked from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import xxhash

from tierstore.codec.blocks import Bytes, pack, spans, unpack
from tierstore.codec.slots import Chunk, PackedShape
from tierstore.errors import IntegrityError
from tierstore.units import KIB, align_up

PAGE: Final = 4 * KIB
"""Chunks begin at multiples of it in a pad: disks reach such memory directly."""

_HASHED_AT_ONCE: Final = 256 * KIB  # a hash holds the interpreter's lock: let others have it in between


class ChunkPart(NamedTuple):
    """One chunk of one slot of an operation, and its place in the slot's bytes."""

    position: int
    chunk: int
    start: int
    stop: int


def grouped(parts: Iterable[ChunkPart], pad_bytes: int) -> Iterator[list[ChunkPart]]:
    """Yield parts that fit into one pad together, in their order."""
    group: list[ChunkPart] = []
    used = 0
    for part in parts:
        room = align_up(part.stop - part.start, PAGE)
        if group and used + room > pad_bytes:
            yield group
            group, used = [], 0
        group.append(part)
        used += room
    if group:
        yield group


def pack_chunk(raw: Bytes, shape: PackedShape, pad: Bytes) -> tuple[tuple[int, ...], int]:
    """Pack a chunk into the beginning of ``pad``; return its blocks' lengths and its digest."""
    lengths = tuple(pack(raw, shape.width, shape.block_bytes, pad))
    return lengths, _digest(pad[: sum(lengths)])


def unpack_chunk(stored: Bytes, chunk: Chunk, part: ChunkPart, shape: PackedShape, into: Bytes) -> None:
    """Unpack a chunk to its place in ``into``, which is for all of the slot.

    Raises:
        IntegrityError: these are not the bytes that were packed.
    """
    found = _digest(stored)
    if found != chunk.digest:
        raise IntegrityError(
            f"{len(stored)} compressed bytes are not what was written: "
            f"xxh3_64 is {found:016x}, was {chunk.digest:016x}"
        )
    at = 0
    blocks = spans(part.stop - part.start, shape.block_bytes)
    for length, (first, last) in zip(chunk.lengths, blocks, strict=True):
        block = stored[at : at + length]
        at += length
        unpack(block, shape.width, into[part.start + first : part.start + last])


def _digest(stored: Bytes) -> int:
    running = xxhash.xxh3_64()
    for start, stop in spans(len(stored), _HASHED_AT_ONCE):
        running.update(stored[start:stop].data)
    return running.intdigest()
