"""JSON from files that somebody hands in: read within bounds, as `tierstore.formats.json_text` says."""

from __future__ import annotations

from pathlib import Path

from tierstore.formats import json_text
from tierstore.formats.json_text import MOST_BYTES
from tierstore.regular import read_regular


def read_json(path: Path) -> object:
    """Return what a file of JSON says.

    Raises:
        OSError: it cannot be read, or is no regular file of at most `MOST_BYTES`.
        ValueError: it is no JSON, nests deeper than Python goes, or has a key twice.
    """
    return json_text.parse(read_regular(path, MOST_BYTES).decode())
