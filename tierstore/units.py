"""Bytes as people write them, parsed and printed.

Promises: one reading of a size everywhere, with 1 KB = 1 KiB = 1024 bytes (the offload
configuration's own reading of GB).  Knows nothing of tiers or configurations.
"""

from __future__ import annotations

import math
import re

from tierstore.errors import ConfigError
from tierstore.quoting import quoted

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4

_UNIT_BYTES = {"B": 1, "K": KIB, "M": MIB, "G": GIB, "T": TIB}
_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(?P<unit>[KMGT]i?B|B)", re.ASCII)
_ACCEPTED = (
    "an int of bytes, or a number with a unit: B, KB, MB, GB, TB, KiB, MiB, GiB or TiB "
    "(all powers of 1024), such as '1.5GiB'"
)


def parse_bytes(size: int | str) -> int:
    """Read a size in bytes from an int or from text such as ``"512GB"``.

    Fractions of a byte are cut off.  The whole text must match.

    Raises:
        ConfigError: a negative number, a bool, another type, or text that is not a size.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise ConfigError(f"not a size: {quoted(size)}. Accepted: {_ACCEPTED}")
    if isinstance(size, int):
        if size < 0:
            raise ConfigError(f"a size cannot be negative: {quoted(size)}. Accepted: {_ACCEPTED}")
        return size
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ConfigError(f"not a size: {quoted(size)}. Accepted: {_ACCEPTED}")
    value = float(match["number"]) * _UNIT_BYTES[match["unit"][0]]
    if not math.isfinite(value):
        raise ConfigError(f"too large for a size: {quoted(size)}. Accepted: {_ACCEPTED}")
    return int(value)


def parse_rate(rate: int | str) -> int:
    """Read bytes a second from an int or from text: a size, with or without ``/s`` behind it.

    Raises:
        ConfigError: it is none, or 0.
    """
    text = rate.strip().removesuffix("/s") if isinstance(rate, str) else rate
    try:
        nbytes = parse_bytes(text)
    except ConfigError:
        nbytes = 0
    if not nbytes:
        raise ConfigError("accepted: bytes per second above 0, as an int or as text such as '2GB/s'")
    return nbytes


def format_bytes(nbytes: int) -> str:
    """Print ``nbytes`` with the largest binary unit that keeps the number at 1 or more."""
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(nbytes) >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} B"


def align_up(nbytes: int, alignment_bytes: int) -> int:
    """Round ``nbytes`` up to a multiple of ``alignment_bytes`` (at least 1)."""
    return -(-nbytes // alignment_bytes) * alignment_bytes
