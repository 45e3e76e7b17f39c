"""A digest of what a model has, so that a program can be told from one of another model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from tierstore.planning.program import ByteKind


def fingerprint_of(tensors: Iterable[tuple[str, int, ByteKind]]) -> str:
    """Return 32 hexadecimal digits that are the same for the same tensors in any order, and else others.

    Args:
        tensors: name, bytes and kind of each parameter and each buffer of a model, under the first name that
            ``named_parameters()`` and ``named_buffers()`` give it.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, nbytes, kind in sorted(tensors, key=lambda each: (each[2].value, each[0], each[1])):
        text = name.encode("utf-8", "surrogatepass")
        digest.update(
            f"{kind.value} {nbytes} {len(text)} ".encode()
        )  # lengths, or two lists could be one text
        digest.update(text)
    return digest.hexdigest()
