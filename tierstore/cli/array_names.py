"""Names of the arrays of a zarr group: one for each key, and one that every place can hold.

A name is the key with everything but letters, digits, and ``_.-~`` percent-encoded, so that no two keys have
the same and none leaves its group.  What a place cannot tell apart or hold is refused
before anything is written.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import quote

from tierstore.errors import UsageError
from tierstore.quoting import quoted

MOST_BYTES = 255
"""Of a name: what file systems hold."""


def array_names(keys: Iterable[str]) -> dict[str, str]:
    """Return the name of each key's array.

    Raises:
        UsageError: a key has none: it is no text that UTF-8 can hold, or too long.
    """
    return {key: _array_name(key) for key in keys}


def _array_name(key: str) -> str:
    try:
        name = quote(key, safe="")
    except UnicodeEncodeError as cause:
        raise UsageError(
            f"{quoted(key)} cannot be the name of an array in a zarr group, which is UTF-8: the surrogate at "
            f"character {cause.start} has no encoding there. Put the tensor under another key.",
            key=key,
        ) from cause
    is_taken = name.startswith((".", "_")) or name == "zarr.json"
    name = f"%{ord(name[0]):02X}{name[1:]}" if is_taken else name or "%"
    if len(name) > MOST_BYTES:
        raise UsageError(
            f"{quoted(key)} takes {len(name)} bytes as the name of an array in a zarr group; accepted are "
            f"{MOST_BYTES}. Export it to a safetensors file, or put the tensor under a shorter key.",
            key=key,
        )
    return name


def require_tells_case(place: Path, names: Mapping[str, str]) -> None:
    """See to it that a directory tells the names of all arrays apart.

    Raises:
        UsageError: it takes capitals for small letters, and two names differ in nothing else.
    """
    folded: dict[str, str] = {}
    for key, name in names.items():
        other = folded.setdefault(name.casefold(), key)
        if other != key and not _tells_case(place):
            raise UsageError(
                f"{quoted(other)} and {quoted(key)} differ in capitals only, which {str(place)!r} does not "
                "tell apart. Export them to a safetensors file, or elsewhere.",
                key=key,
            )


def _tells_case(place: Path) -> bool:
    with tempfile.NamedTemporaryFile(prefix="case.", dir=place) as small:
        path = Path(small.name)
        return not path.with_name(path.name.replace("case.", "CASE.")).exists()
