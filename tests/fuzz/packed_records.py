"""What a codec finds in a medium: bytes that can be read, of the size that was told, or one typed error.

An input is records, each two parts that ``FF FE FF FE`` ends: what the record says of its chunk, and the
chunk.  In what is said ``$`` stands for the digest of the chunk, and all of it gets its own: a digest says
that nothing was damaged, not who wrote it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import xxhash

from tests.codec_bytes import KIB, MIB, Lasting, Shelf, repeating
from tests.fuzz import Judge, see_that_it_is_short
from tierstore.codec import DurableCompressed
from tierstore.codec.chunk_records import later_name
from tierstore.codec.slots import CodecSlot
from tierstore.errors import BackendError
from tierstore.spi import Record
from tierstore.testing.conformance import contents, finish, stored

_END = b"\xff\xfe\xff\xfe"
_MOST_GAIN = 256  # of lz4


def _records(content: bytes) -> list[tuple[str, str, torch.Tensor]]:
    parts = content.split(_END)
    found = []
    for chunk, (said, data) in enumerate(zip(parts[::2], parts[1::2], strict=False)):
        told = said.replace(b"$", xxhash.xxh3_64_hexdigest(data).encode()).decode("utf-8", "replace")
        digest = xxhash.xxh3_64_hexdigest(told.encode())
        name = later_name("k", chunk) if chunk else "k"
        packed = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        found.append((name, f"\x1elz4 {digest} {told}\nnote", packed))
    return found


def _packed(nbytes: int, chunk_bytes: int) -> bytes:
    """Return the input that is what a codec writes itself."""
    shelf = Shelf()
    codec = DurableCompressed(Lasting(MIB, shelf), "lz4", chunk_bytes=chunk_bytes)
    assert finish(codec.commit([Record("k", "", stored(codec, repeating(nbytes)))])) is None
    parts = []
    for _, note, data in shelf.records:
        (told,) = re.findall(r"\{.*\}", note)
        parts += [re.sub('"digest":"[^"]*"', '"digest":"$"', told).encode(), bytes(data.numpy())]
    assert not any(_END in part for part in parts)
    return b"".join(part + _END for part in parts)


SEEDS = {
    "one chunk": _packed(4 * KIB, 64 * KIB),
    "three chunks": _packed(12 * KIB, 4 * KIB),
    "nothing": b"{}" + _END + _END,
}
TOKENS = (
    *(b'"v":1', b'"nbytes":', b'"chunk":', b'"chunks":', b'"width":', b'"block_bytes":', b'"chunk_bytes":'),
    *(b'"lengths":[', b'"digest":"$"', b"4096", b"9223372036854775807", b"-1", b"1e3", b"null", _END),
)


@contextlib.contextmanager
def prepared(directory: Path) -> Iterator[Judge]:
    def judge(content: bytes) -> None:
        shelf = Shelf(_records(content))
        room = sum(data.numel() for _, _, data in shelf.records)
        codec = DurableCompressed(Lasting(MIB, shelf), "lz4", chunk_bytes=64 * KIB)
        with contextlib.closing(codec):  # ends its threads: there are many inputs a second
            for record in codec.recovered():
                assert isinstance(record.slot, CodecSlot)
                if record.slot.damage is not None and record.slot.nbytes > MIB:
                    continue  # parts are missing: it is as long as they say, and cannot be read
                if room and record.slot.damage is None:
                    assert record.slot.nbytes <= room * _MOST_GAIN, (record.slot.nbytes, room)
                try:
                    first = contents(codec, record.slot)
                except BackendError as refused:
                    see_that_it_is_short(refused)
                    continue
                assert first.equal(contents(codec, record.slot))

    yield judge
