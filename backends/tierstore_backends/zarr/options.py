"""What a user may say about scratch arrays: read and checked as a whole.

Promises: all faults in one message, each with what was given and what is accepted; the values of
``storage_options``, which hold passwords, are never printed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from zarr.abc.store import Store

from tierstore.errors import ConfigError
from tierstore.units import GIB, MIB, parse_bytes
from tierstore_backends.zarr.codecs import Chain, parse_codec
from tierstore_backends.zarr.places import check_store

_MOST_CONCURRENCY = 1024
_LARGEST_CHUNK_BYTES = GIB
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
    faults: list[str] = []
    values: dict[str, object] = {}
    for name, given in options.items():
        read = _READERS.get(name)
        if read is None:
            faults.append(_unknown(name))
            continue
        try:
            values[name] = read(given)
        except ConfigError as error:
            shown = "..." if name == _SECRET else repr(given)
            faults.append(f"{name}={shown}: {error}")
    if "store" not in options:
        faults.append("store is missing: the path, URL or zarr store to keep arrays in")
    elif "store" in values:
        faults += _store_faults(values)
    if faults:
        raise ConfigError("options of the 'zarr' backend: " + "; ".join(faults))
    return ZarrOptions(**values)  # type: ignore[arg-type]  # each reader returns its field's type


def _store_faults(values: Mapping[str, object]) -> list[str]:
    try:
        check_store(values["store"], values.get(_SECRET))  # type: ignore[arg-type]  # read above
    except ConfigError as error:
        return [f"store={values['store']!s}: {error}"]
    return []


def _unknown(name: str) -> str:
    known = [each.name for each in fields(ZarrOptions)]
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"unknown option {name!r}{hint}; accepted: {', '.join(known)}"


def _as_given(given: object) -> object:
    return given


def _chunk_bytes(given: object) -> int:
    if isinstance(given, int | str) and not isinstance(given, bool):
        nbytes = parse_bytes(given)
        if 0 < nbytes <= _LARGEST_CHUNK_BYTES:
            return nbytes
    raise ConfigError("accepted: a size from 1 to 1GiB, in bytes or as text such as '4MiB'")


def _concurrency(given: object) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or not 0 < given <= _MOST_CONCURRENCY:
        raise ConfigError(f"accepted: an int from 1 to {_MOST_CONCURRENCY}")
    return given


def _storage_options(given: object) -> Mapping[str, object] | None:
    if given is None or (isinstance(given, Mapping) and all(isinstance(key, str) for key in given)):
        return given
    raise ConfigError("accepted: a mapping from names to what fsspec's file system takes")


def _switch(given: object) -> bool:
    if not isinstance(given, bool):
        raise ConfigError("accepted: True or False")
    return given


def _seconds(given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < float("inf"):
        raise ConfigError("accepted: seconds, 0 or more")
    return float(given)


_READERS: Mapping[str, Callable[[object], object]] = {
    "store": _as_given,
    "chunk_bytes": _chunk_bytes,
    "codec": parse_codec,
    "concurrency": _concurrency,
    "storage_options": _storage_options,
    "checksum": _switch,
    "free_patience_s": _seconds,
}
