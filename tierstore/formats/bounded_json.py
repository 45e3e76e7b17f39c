"""JSON from files that somebody hands in: of bounded length and depth, each key of a mapping once."""

from __future__ import annotations

import json
from pathlib import Path

from tierstore.quoting import quoted
from tierstore.regular import read_regular

MOST_BYTES = 100_000_000


def read_json(path: Path) -> object:
    """Return what a file of JSON says.

    Raises:
        OSError: it cannot be read, or is no regular file of at most `MOST_BYTES`.
        ValueError: it is no JSON, nests deeper than Python goes, or has a key twice.
    """
    try:
        document: object = json.loads(read_regular(path, MOST_BYTES).decode(), object_pairs_hook=_once)
    except RecursionError as cause:
        raise ValueError("it nests too deep") from cause
    return document


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {quoted(twice)} is given twice in one mapping")
    return found
