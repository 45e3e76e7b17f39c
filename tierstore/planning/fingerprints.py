"""What tells one model's programs from another's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from tierstore.planning.program import ByteKind

_DIGEST_BYTES = 16


def fingerprint(named: Iterable[tuple[str, int, ByteKind]]) -> str:
    """Return a digest of names, sizes and kinds: what `Program.fingerprint` holds.

    Args:
        named: of each parameter and buffer its first name, its bytes and what it is, in any order.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name, nbytes, kind in sorted((name, nbytes, kind.value) for name, nbytes, kind in named):
        text = f"{len(name)} {name} {nbytes} {kind}\n"  # with its length, or two lists could be one text
        digest.update(text.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
