"""A slot: one zarr array, and what is known of each of its chunks.

Knows nothing of stores.  Its fields are written in the event loop's thread; ``state`` also by whoever calls
the backend, which the engine does one operation at a time.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tierstore_backends.zarr.layout import Cut, chunk_key, document_key


class ArraySlotState(enum.Enum):
    """What may be done with a slot."""

    RESERVED = enum.auto()  # write it, or free it: it holds no bytes
    WRITTEN = enum.auto()  # read it, write it again, or free it
    FREED = enum.auto()  # nothing; after a free that failed: free it again


class Form(enum.Enum):
    """How a slot's chunks are stored."""

    RAW = enum.auto()
    ENCODED = enum.auto()


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """What was stored for a chunk: how many bytes, and their checksum (0 where none is kept)."""

    nbytes: int
    checksum: int


@dataclass(eq=False, slots=True)
class ZarrSlot:
    """Room for ``nbytes`` in one array.

    Attributes:
        nbytes: what was asked for.
        array: the array's path in the store.
        shape: how the bytes are cut.
        home: which arrays it belongs to.
        held_bytes: what its tier is charged; see `tierstore.spi.held_bytes`.
        taken_bytes: what the backend's own quota counts for it: `held_bytes`, and padding.
        state: what may be done with it.
        form: how it is stored, once something may be.
        chunks: what was stored, by chunk; all of them where ``state`` is WRITTEN.
    """

    nbytes: int
    array: str
    shape: Cut
    home: object = field(repr=False)
    held_bytes: int = field(init=False)
    taken_bytes: int = field(init=False)
    state: ArraySlotState = ArraySlotState.RESERVED
    form: Form | None = None
    chunks: list[StoredChunk] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.held_bytes = self.nbytes
        self.taken_bytes = self.shape.padded_bytes

    @property
    def stored_bytes(self) -> int:
        """What its chunks take in the store."""
        return sum(chunk.nbytes for chunk in self.chunks)

    def keys(self) -> list[str]:
        """Return the names of the objects that it consists of."""
        return [document_key(self.array), *(chunk_key(self.array, n) for n in range(self.shape.chunks))]
