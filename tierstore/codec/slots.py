"""What the wrapper holds for a slot: one slot of the backend within, or the packed chunks of its bytes.

A tensor is packed *chunk* by chunk, each into a slot of its own in the backend within, so that nothing has
to hold all of it at a time, a chunk is packed while another is written, and a part can be read.  A chunk is
packed *block* by block; the blocks' lengths are kept here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tierstore.codec.blocks import BLOCK_BYTES, spans
from tierstore.errors import IntegrityError
from tierstore.spi import Capabilities, Record, Slot, held_bytes
from tierstore.units import MIB, align_up

CHUNK_BYTES: Final = 4 * MIB


@dataclass(frozen=True, slots=True)
class PackedShape:
    """How bytes were cut and shuffled."""

    width: int
    block_bytes: int = BLOCK_BYTES
    chunk_bytes: int = CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class Chunk:
    """One packed part of a tensor.

    Attributes:
        slot: of the backend within; exactly as long as the blocks together.
        lengths: of its blocks, as they are stored.
        digest: xxh3_64 of the stored bytes.
    """

    slot: Slot
    lengths: tuple[int, ...]
    digest: int


@dataclass(frozen=True, slots=True)
class SlotDamage:
    """Why a slot that was found cannot be read.

    Attributes:
        error: what reading it comes to.
        records: what was found of it, by number of the chunk: kept as it is, for whoever can do better.
    """

    error: IntegrityError
    records: Mapping[int, Record]


class CodecSlot:
    """Room for ``nbytes`` bytes, packed or not.

    Attributes:
        nbytes: see `tierstore.spi.Slot`.
        home: the backend that it belongs to.
        medium: what the backend within can do.
        held_bytes: what it takes of the medium: all of its size until a write has ended.
        whole: the slot within, if the bytes are, or are to be, stored as they are.
        shape: how they are packed, if they are.
        chunks: the packed ones; None where one is not yet written.
        damage: why they cannot be read, if what describes them was found damaged.
        is_freed: whether nothing may be done with it any more.
    """

    __slots__ = ("chunks", "damage", "held_bytes", "home", "is_freed", "medium", "nbytes", "shape", "whole")

    def __init__(self, nbytes: int, home: object, whole: Slot | None, medium: Capabilities) -> None:
        self.nbytes = nbytes
        self.home = home
        self.medium = medium
        self.whole = whole
        self.shape: PackedShape | None = None
        self.chunks: list[Chunk | None] = []
        self.damage: SlotDamage | None = None
        self.is_freed = False
        self.held_bytes = align_up(nbytes, medium.alignment_bytes)

    def __repr__(self) -> str:
        """Show how the bytes are stored."""
        how = "as it is" if self.shape is None else f"packed in {len(self.chunks)} chunks"
        return f"<slot of {self.nbytes} bytes, {how}, {self.held_bytes} held>"

    @property
    def within(self) -> Sequence[Slot]:
        """All that it has of the backend within."""
        chunks = [chunk.slot for chunk in self.chunks if chunk is not None]
        return chunks if self.whole is None else [self.whole, *chunks]

    def clear(self) -> None:
        """Forget what it had of the backend within."""
        self.whole, self.shape, self.chunks = None, None, []

    def weigh(self) -> None:
        """Take note of what it takes of the medium now."""
        self.held_bytes = sum(held_bytes(slot, self.medium) for slot in self.within)

    def cuts(self, shape: PackedShape) -> list[tuple[int, int]]:
        """Return where each chunk begins and ends in the bytes."""
        return spans(self.nbytes, shape.chunk_bytes)
