"""One crate as bytes: a directory of what is in it, and the bytes of its tensors behind that.

A crate is a tensor of bytes: 8 that say what it is, the length of the directory and its checksum (8 each,
little endian), the directory, and the tensors, each from a multiple of 64 on, in the directory's order.
The directory is JSON: ``keys``, the ``specs`` that they have (`tierstore.tensors.to_text`), and
``spec_of``: of each key the number of its spec, or -1 for a note that nothing is under the key any more.

The directory is written with the crate and never changes, so the two cannot be out of step.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np
import torch
import xxhash

from tierstore.errors import BackendError
from tierstore.tensors import TensorSpec, from_text, to_text, view_bytes
from tierstore.units import align_up

ALIGNMENT_BYTES: Final = 64
"""Where tensors begin: a cache line, and a multiple of every element."""

HEAD_BYTES: Final = 24

_HEAD: Final = struct.Struct("<8sQQ")
_MAGIC: Final = b"tscrate1"
_NOTE: Final = -1

PackedTensor = tuple[TensorSpec, torch.Tensor]
"""A tensor for a crate, and how `view_bytes` is to show it."""

Contents = Mapping[str, PackedTensor | None]
"""What goes into a crate; ``None``: a note that nothing is under the key."""


class CrateRecord(NamedTuple):
    """Where a tensor is in its crate.

    Attributes:
        spec: what it looks like; ``None``: this is a note that nothing is under the key.
        begin: in bytes of the crate.
    """

    spec: TensorSpec | None
    begin: int

    @property
    def nbytes(self) -> int:
        """What its tensor takes, without gaps."""
        return 0 if self.spec is None else self.spec.nbytes


def cost(key: str, nbytes: int) -> int:
    """Return what a tensor takes of a crate, in bytes, its place in the directory counted roughly."""
    return align_up(nbytes, ALIGNMENT_BYTES) + len(key) + 16


def divide(contents: Contents, crate_bytes: int) -> Iterator[dict[str, PackedTensor | None]]:
    """Yield parts that fit in crates of so many bytes, in order."""
    part: dict[str, PackedTensor | None] = {}
    left = crate_bytes
    for key, packed in contents.items():
        needed = cost(key, 0 if packed is None else packed[0].nbytes)
        if part and needed > left:
            yield part
            part, left = {}, crate_bytes
        part[key] = packed
        left -= needed
    if part:
        yield part


def pack(contents: Contents) -> tuple[torch.Tensor, dict[str, CrateRecord]]:
    """Return the bytes of a crate, in host memory, and what is where in it."""
    specs: dict[str, int] = {}
    spec_of = [
        _NOTE if packed is None else specs.setdefault(to_text(packed[0]), len(specs))
        for packed in contents.values()
    ]
    fields = {"keys": list(contents), "specs": list(specs), "spec_of": spec_of}
    directory = json.dumps(fields, separators=(",", ":")).encode()
    records, end = _placed(
        ((key, None if packed is None else packed[0]) for key, packed in contents.items()), len(directory)
    )
    memory = torch.zeros(end, dtype=torch.uint8)
    head = _HEAD.pack(_MAGIC, len(directory), xxhash.xxh3_64_intdigest(directory)) + directory
    memory.numpy()[: len(head)] = np.frombuffer(head, np.uint8)
    with torch.no_grad():
        for key, packed in contents.items():
            if packed is not None and packed[0].nbytes:
                view(memory, records[key]).copy_(packed[1])
    return memory, records


def _placed(
    specs: Iterable[tuple[str, TensorSpec | None]], directory_bytes: int
) -> tuple[dict[str, CrateRecord], int]:
    """Return where tensors are behind a directory, and where the last one ends."""
    records: dict[str, CrateRecord] = {}
    end = HEAD_BYTES + directory_bytes
    for key, spec in specs:
        begin = align_up(end, ALIGNMENT_BYTES)
        records[key] = CrateRecord(spec, begin)
        if spec is not None and spec.nbytes:
            end = begin + spec.nbytes
    return records, end


def view(memory: torch.Tensor, record: CrateRecord) -> torch.Tensor:
    """View a tensor in the bytes of its crate."""
    assert record.spec is not None  # who has a note asks for no tensor
    if not record.spec.nbytes:
        return torch.empty_strided(
            record.spec.shape, record.spec.stride, dtype=record.spec.dtype, device=memory.device
        )
    return view_bytes(memory[record.begin : record.begin + record.spec.nbytes], record.spec)


def copied(
    memory: torch.Tensor, record: CrateRecord, device: torch.device | str | None = None
) -> torch.Tensor:
    """Return a copy of a tensor of a crate on a device; ``None``: where it was when it was put."""
    spec = record.spec
    assert spec is not None  # who has a note asks for no tensor
    target = spec.device if device is None else torch.device(device)
    copy = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=target)
    with torch.no_grad():
        return copy.copy_(view(memory, record))


# --- reading what somebody left ---------------------------------------------------------------


def is_crate(head: bytes) -> bool:
    """Whether the first bytes of a tensor are a crate's."""
    return len(head) >= HEAD_BYTES and head.startswith(_MAGIC)


def directory_end(head: bytes) -> int:
    """Return where the directory of a crate ends, as its first bytes say."""
    _, length, _ = _HEAD.unpack_from(head)
    return HEAD_BYTES + int(length)


def beginning_of(memory: torch.Tensor) -> bytes:
    """Return the first bytes of a crate, up to the end of its directory; of what is none, some."""
    plain = memory.contiguous().reshape(-1).view(torch.uint8).numpy()
    head = plain[:HEAD_BYTES].tobytes()
    return plain[: directory_end(head)].tobytes() if is_crate(head) else head


def read_directory(head: bytes, crate_bytes: int) -> dict[str, CrateRecord]:
    """Return what is where in a crate of so many bytes, whose first ones these are.

    Raises:
        ValueError: they are not those of a crate, or not as they were written.
    """
    _, length, check = _HEAD.unpack_from(head)
    directory = head[HEAD_BYTES : HEAD_BYTES + length]
    if len(directory) != length or xxhash.xxh3_64_intdigest(directory) != check:
        raise ValueError("its directory is not as it was written")
    fields = json.loads(directory)
    try:
        keys = [_key(each) for each in fields["keys"]]
        specs: dict[int, TensorSpec | None] = dict(enumerate(map(from_text, fields["specs"])))
        specs[_NOTE] = None
        records, end = _placed(zip(keys, map(specs.__getitem__, fields["spec_of"]), strict=True), length)
    except (BackendError, KeyError, TypeError) as error:
        raise ValueError(f"its directory says nothing that can be read: {error}") from error
    if len(records) != len(keys) or end != crate_bytes:
        raise ValueError(f"it has {crate_bytes} bytes, and {end} for {len(keys)} keys in its directory")
    return records


def _key(given: object) -> str:
    if not isinstance(given, str):
        raise TypeError("a key that is no text")
    return given
