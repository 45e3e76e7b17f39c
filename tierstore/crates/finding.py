"""The crates that are in a store already, with what their directories say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from tierstore.crates import layout
from tierstore.crates.index import Crate
from tierstore.errors import IntegrityError, UsageError
from tierstore.part_reader import PartReader
from tierstore.store import Store
from tierstore.tensors import TensorSpec

_FIRST_LOOK_BYTES: Final = 16 * 1024
"""How much of a crate on disk is read to see its directory: some hundred keys."""


def found_crates(store: Store, name: str) -> Iterator[Crate]:
    """Yield crates in ascending order; those that were emptied have no records.

    Raises:
        UsageError: something else is under a key of theirs.
        IntegrityError: the directory of one is damaged.
        BackendError: it cannot be read.
    """
    prefix = f"{name}/"
    numbers = sorted(
        int(key[len(prefix) :]) for key in store if key.startswith(prefix) and _is_number(key[len(prefix) :])
    )
    with store.reader() as reader:
        for number in numbers:
            key = f"{prefix}{number}"
            spec = store.spec(key)
            yield Crate(
                number, key, _records(key, spec, _beginning(store, reader, key, spec)) if spec.nbytes else {}
            )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and str(int(text)) == text


def _beginning(store: Store, reader: PartReader, key: str, spec: TensorSpec) -> bytes:
    """Return the first bytes of a crate, its whole directory among them.

    Of one that is on disk alone, they are all that is read; they have a checksum of their own.
    """
    unit = reader.alignment_bytes
    nbytes = min(_FIRST_LOOK_BYTES, spec.nbytes // unit * unit)
    if unit > 1 and nbytes and store.where(key) == (reader.tier,):
        into = torch.empty(1, nbytes, dtype=torch.uint8)
        reader.add(key)
        try:
            reader.read([(key, 0)], into).result()
        finally:
            reader.remove(key)
        head = into.numpy().tobytes()
        if not layout.is_crate(head) or layout.directory_end(head) <= nbytes:
            return head
    return layout.beginning_of(store.get(key, device="cpu"))


def _records(key: str, spec: TensorSpec, head: bytes) -> dict[str, layout.CrateRecord]:
    if spec.dtype != torch.uint8 or len(spec.shape) != 1 or not layout.is_crate(head):
        raise UsageError(f"{key!r} is no crate; give the crates another name.", key=key)
    try:
        return layout.read_directory(head, spec.nbytes)
    except ValueError as error:
        raise IntegrityError(
            f"the crate {key!r} cannot be used: {error}. Store.drop forgets it.", key=key
        ) from error
