"""What a user may say about scratch arrays: read and checked as a whole.

Promises: all faults in one message, each with what was given and what is accepted; the values of
``storage_options``, which hold passwords, are never printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from zarr.abc.store import Store

from tierstore.errors import ConfigError
from tierstore.units import MIB
from tierstore_backends.options import Reader, count, read_all, seconds, size, switch
from tierstore_backends.zarr.codecs import Chain, parse_codec
from tierstore_backends.zarr.places import check_store

_MOST_CONCURRENCY = 1024
_SECRET = "storage_options"


@dataclass(frozen=True, slots=True)
class ZarrOptions:
    """Where to keep arrays, and how.

    Attributes:
        store: a directory's path; a URL, ``s3://bucket/prefix`` and whatever else fsspec knows
            (``memory://`` is a store of its own in this process's memory); or a store object of zarr, such
            as ``zarr.storage.ObjectStore`` around one of obstore.  An object is the backend's from then on:
            it is used in the backend's own event loop and closed in the end.
        chunk_bytes: the most bytes in one object.  Each is moved, summed and checked by itself.
        codec: ``"none"``, ``"lz4"``, ``"blosc"``, ``"zstd"``, ``"gzip"`` or another codec that zarr knows by
            name; ``{"name": ..., "configuration": {...}}`` as in a ``zarr.json``; or a list of such, applied
            in order.  ``"lz4"`` and ``"blosc"`` shuffle the bytes of four-byte elements.
        concurrency: at most this many chunks are on their way at a time.
        storage_options: for fsspec, with a URL: credentials, ``endpoint_url``, time-outs.
        checksum: whether chunks are summed when written and compared when read.
        free_patience_s: how long removing a slot is tried again while the store fails in ways that may pass.
    """

    store: Store | str | Path
    chunk_bytes: int = 4 * MIB
    codec: Chain = field(default_factory=lambda: Chain(()))
    concurrency: int = 16
    storage_options: Mapping[str, object] | None = None
    checksum: bool = True
    free_patience_s: float = 30.0


def parse_options(options: Mapping[str, object]) -> ZarrOptions:
    """Read the options of the ``zarr`` backend.

    Raises:
        ConfigError: unknown names, with near misses, and bad values, with what is accepted.
    """
    values = read_all(
        "zarr", options, _READERS, needed=_NEEDED, contradictions=_contradictions, secret=(_SECRET,)
    )
    return ZarrOptions(**values)  # type: ignore[arg-type]  # each reader returns its field's type


def _contradictions(values: Mapping[str, object]) -> list[str]:
    """Return what is wrong with the store, which its own options are part of."""
    if "store" not in values:
        return []
    try:
        check_store(values["store"], values.get(_SECRET))  # type: ignore[arg-type]  # read above
    except ConfigError as error:
        return [f"store={values['store']!s}: {error}"]
    return []


def _as_given(given: object) -> object:
    return given


def _storage_options(given: object) -> Mapping[str, object] | None:
    if given is None or (isinstance(given, Mapping) and all(isinstance(key, str) for key in given)):
        return given
    raise ConfigError("accepted: a mapping from names to what fsspec's file system takes")


_READERS: Mapping[str, Reader] = {
    "store": _as_given,
    "chunk_bytes": size("1GiB", example="4MiB"),
    "codec": parse_codec,
    "concurrency": count(_MOST_CONCURRENCY),
    "storage_options": _storage_options,
    "checksum": switch,
    "free_patience_s": seconds,
}

_NEEDED = {"store": "the path, URL or zarr store to keep arrays in"}
