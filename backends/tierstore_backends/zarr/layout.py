"""A slot as a zarr v3 array: how its bytes are cut into chunks, and what the array's document says.

Pure: no I/O, no zarr.  Chunks of a zarr array all have one length, and the last is padded with zeros; a slot
of ``n`` bytes is therefore cut into chunks of equal length, chosen so that as little as possible is padding
(nothing, unless ``n`` has no suitable divisor; always less than a byte a chunk).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_TRIED = 64  # divisors tried above the least number of chunks: nearly every tensor has one among them

Codec = Mapping[str, object]
"""A codec as zarr writes it: ``name`` and, where it has one, ``configuration``."""


@dataclass(frozen=True, slots=True)
class Cut:
    """``nbytes`` in ``chunks`` chunks of ``chunk_bytes`` each; the last is padded to that length."""

    nbytes: int
    chunk_bytes: int
    chunks: int

    @property
    def padded_bytes(self) -> int:
        """What the chunks take uncompressed, padding included."""
        return self.chunk_bytes * self.chunks

    def span(self, chunk: int) -> slice:
        """Return where the chunk's bytes lie in the slot: the whole chunk, or less at the end."""
        start = chunk * self.chunk_bytes
        return slice(start, min(start + self.chunk_bytes, self.nbytes))


def cut(nbytes: int, most_bytes: int) -> Cut:
    """Cut ``nbytes`` into equal chunks of at most ``most_bytes``, with the least padding."""
    if nbytes == 0:
        return Cut(0, 1, 0)
    least = -(-nbytes // most_bytes)
    chunks = min(range(least, min(least + _TRIED, nbytes + 1)), key=lambda count: (-nbytes % count, count))
    chunk_bytes = -(-nbytes // chunks)
    return Cut(nbytes, chunk_bytes, -(-nbytes // chunk_bytes))


def array_document(shape: Cut, codecs: Sequence[Codec]) -> dict[str, object]:
    """Return what the ``zarr.json`` of an array of bytes says."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [shape.nbytes],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [shape.chunk_bytes]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "bytes"}, *codecs],
        "attributes": {},
        "storage_transformers": [],
    }


GROUP_DOCUMENT: Mapping[str, object] = {"zarr_format": 3, "node_type": "group", "attributes": {}}
"""What the ``zarr.json`` of the group that holds an owner's arrays says."""


def document_key(node: str) -> str:
    """Name the object that describes an array or a group."""
    return f"{node}/zarr.json"


def chunk_key(array: str, chunk: int) -> str:
    """Name the object that holds a chunk."""
    return f"{array}/c/{chunk}"
