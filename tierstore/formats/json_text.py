"""JSON as a text, read within bounds: of bounded length and depth, each key of a mapping once.  No files."""

from __future__ import annotations

import json
from collections.abc import Callable

from tierstore.quoting import quoted

MOST_BYTES = 100_000_000


def parse(
    text: str, *, most_chars: int = MOST_BYTES, constant: Callable[[str], object] | None = None
) -> object:
    """Return what a text of JSON says.

    Args:
        text: of at most ``most_chars`` characters.
        most_chars: how long it may be.
        constant: gives what ``NaN``, ``Infinity`` and ``-Infinity`` are read as; ``None``: as floats.

    Raises:
        ValueError: it is no JSON, too long, nests deeper than Python goes, or has a key twice.
    """
    if len(text) > most_chars:
        raise ValueError(f"it is longer than is accepted: at most {most_chars} characters")
    try:
        document: object = json.loads(text, object_pairs_hook=_once, parse_constant=constant)
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
