"""What a manifest says of its directory and of itself: one JSON object with a checksum.

Rule 1: nothing of it is believed that cannot be: each field has its type and its bounds here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Final

import xxhash

from tierstore_backends.files.addressing.drives import SPAN_BYTES
from tierstore_backends.files.options import MOST_DRIVES

FORMAT = 1
LARGEST_NUMBER: Final = 2**63 - 1  # of what SQLite keeps

_LARGEST_ALIGNMENT_BYTES = 1 << 16
_LONGEST_TEXT = 256


@dataclass(frozen=True, slots=True)
class Meta:
    """What a manifest says of its directory, and of itself.

    Attributes:
        format: the version of all that `docs/reference/store-directory.md` says.
        directory: a name that no other directory has.
        created_by: what made it.
        segment_bytes: how long a full file is.
        alignment_bytes: what extents are multiples of.
        bandwidths: bytes per second of each of its drives; none if there is only this directory.
        commit: the number of the last commit; 0 before the first.
        records: how many rows there are.
        digest: the sum of their checks, modulo 2**64.
        next_id: above the id of every row so far.
    """

    format: int
    directory: str
    created_by: str
    segment_bytes: int
    alignment_bytes: int
    bandwidths: Sequence[int] = ()
    commit: int = 0
    records: int = 0
    digest: int = 0
    next_id: int = 1

    @property
    def drives(self) -> int:
        """How many directories the store has."""
        return max(1, len(self.bandwidths))


class MetaError(ValueError):
    """Something that a manifest cannot say of itself; the message says what.  It has its checksum."""


class LaterFormatError(ValueError):
    """A later version of tierstore wrote it; the message says which format, and what made it."""


def encode_meta(meta: Meta) -> tuple[str, bytes]:
    """Return the text and its checksum."""
    body = json.dumps(asdict(meta), sort_keys=True)
    return body, meta_sum(body.encode())


def meta_sum(body: bytes) -> bytes:
    """Return the checksum of what a manifest says of itself."""
    return xxhash.xxh3_64_digest(body)


def decode_meta(body: bytes) -> Meta:
    """Return what ``body``, which has its checksum, says.

    Raises:
        LaterFormatError: it has a format that is not known here.
        MetaError: it says what cannot be.
    """
    try:
        told = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MetaError(f"it is no JSON ({type(error).__name__})") from error
    if not isinstance(told, dict):
        raise MetaError(f"it is no object: {body[:60]!r}")
    given = told.get("format")
    if type(given) is int and given > FORMAT:
        made_by = f"{told.get('created_by')!s:.80}"
        raise LaterFormatError(f"format {given:.0f}" if given < 2**63 else "a later format", made_by)
    fault = _fault(told)
    if fault is not None:
        raise MetaError(fault)
    return Meta(**told)


def _fault(told: Mapping[str, object]) -> str | None:
    """Say which field cannot be as it is."""
    known = {field.name for field in fields(Meta)}
    needed = {field.name for field in fields(Meta) if field.default is MISSING}
    if not needed <= told.keys() <= known:
        return f"its keys are {sorted(told)!s:.200}, and those that are known {sorted(known)}"
    for name, value in told.items():
        if not _MAY_BE[name](value):
            return f"{name!r} is {_brief(value)}"
    return _contradiction(Meta(**told))  # type: ignore[arg-type]  # just looked at


def _contradiction(meta: Meta) -> str | None:
    """Say which fields cannot be so together."""
    if meta.segment_bytes % meta.alignment_bytes or (meta.drives > 1 and SPAN_BYTES % meta.segment_bytes):
        return f"'segment_bytes' is {meta.segment_bytes} with an alignment of {meta.alignment_bytes}"
    if meta.records >= meta.next_id:
        return f"'next_id' is {meta.next_id} with {meta.records} records"
    return None


def _brief(value: object) -> str:
    if isinstance(value, int) and abs(value) > 2**200:
        return "an enormous number"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _is_number(least: int, most: int) -> Callable[[object], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_TEXT


def _is_alignment(value: object) -> bool:
    return type(value) is int and 512 <= value <= _LARGEST_ALIGNMENT_BYTES and value & (value - 1) == 0


def _are_bandwidths(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) != 1
        and len(value) <= MOST_DRIVES
        and all(map(_is_number(1, LARGEST_NUMBER), value))
    )


_MAY_BE: Mapping[str, Callable[[object], bool]] = {
    "format": _is_number(1, FORMAT),
    "directory": _is_text,
    "created_by": _is_text,
    "segment_bytes": _is_number(1, SPAN_BYTES),
    "alignment_bytes": _is_alignment,
    "bandwidths": _are_bandwidths,
    "commit": _is_number(0, LARGEST_NUMBER - 1),
    "records": _is_number(0, LARGEST_NUMBER),
    "digest": _is_number(0, 2**64 - 1),
    "next_id": _is_number(1, LARGEST_NUMBER),
}
