"""Codecs by name: what zarr knows, for the bytes of one chunk.

Promises: what was encoded decodes to the same bytes, or is an error; a codec that cannot promise it (lossy,
or not from bytes to bytes) is refused before anything is stored.  Knows nothing of slots and stores.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
from zarr.abc.codec import BytesBytesCodec
from zarr.core.array_spec import ArrayConfig, ArraySpec
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.core.common import JSON
from zarr.core.metadata.v3 import ArrayV3Metadata
from zarr.registry import get_codec_class

from tierstore.errors import ConfigError
from tierstore_backends.zarr.failures import brief
from tierstore_backends.zarr.layout import Codec, Cut, array_document

Bytes = npt.NDArray[np.uint8]

ACCEPTED = (
    "'none', 'lz4', 'blosc', 'zstd', 'gzip', or any codec of zarr that turns bytes into bytes, by name or as "
    "{'name': ..., 'configuration': {...}}, or a list of such"
)
_SHUFFLED = {"typesize": 4, "shuffle": "shuffle", "blocksize": 0, "clevel": 5}
_KNOWN: Mapping[str, Codec] = {
    "lz4": {"name": "blosc", "configuration": {"cname": "lz4", **_SHUFFLED}},
    "blosc": {"name": "blosc", "configuration": {"cname": "zstd", **_SHUFFLED}},
}
"""Short names: of numbers of four bytes (and of two) the bytes of like weight lie together."""

_PROBE_BYTES = 4099


class Chain:
    """Codecs one after the other.

    Args:
        codecs: as zarr made them; none is the identity.
    """

    def __init__(self, codecs: Sequence[BytesBytesCodec]) -> None:
        self._codecs = tuple(codecs)
        self.documents: tuple[Codec, ...] = tuple(codec.to_dict() for codec in self._codecs)

    def __bool__(self) -> bool:
        return bool(self._codecs)

    async def encode(self, chunk: Bytes) -> Buffer:
        """Return the chunk as it is to be stored.  May raise anything."""
        buffer: Buffer | None = wrap(chunk)
        for codec in self._codecs:
            (buffer,) = await codec.encode([(buffer, _spec(chunk.size))])
        if buffer is None:
            raise ValueError("a codec made nothing of a chunk")
        return buffer

    async def decode(self, stored: Buffer, nbytes: int) -> Bytes:
        """Return the ``nbytes`` of a chunk.  May raise anything."""
        buffer: Buffer | None = stored
        for codec in reversed(self._codecs):
            (buffer,) = await codec.decode([(buffer, _spec(nbytes))])
        if buffer is None:
            raise ValueError("a codec made nothing of a chunk")
        return view(buffer)

    async def probe(self) -> None:
        """See whether bytes come back.

        Raises:
            ConfigError: they do not, or the codec fails.
        """
        sample = (np.arange(_PROBE_BYTES, dtype=np.uint64) * 2654435761 >> 13).astype(np.uint8)
        try:
            back = await self.decode(await self.encode(sample), sample.size)
        except Exception as error:
            raise ConfigError(
                f"codec {self.documents} does not work: {brief(error)}. Accepted: {ACCEPTED}"
            ) from error
        if not np.array_equal(back, sample):
            raise ConfigError(f"codec {self.documents} gives other bytes back than it was given")


def parse_codec(given: object) -> Chain:
    """Read the ``codec`` option.

    Raises:
        ConfigError: an unknown name or a bad configuration; says what is accepted.
    """
    documents = given if isinstance(given, list | tuple) else [] if given == "none" else [given]
    return Chain([_resolve(_document(each)) for each in documents])


def wrap(chunk: Bytes) -> Buffer:
    """Return bytes as zarr's buffer: the same memory."""
    return default_buffer_prototype().buffer.from_array_like(chunk)


def view(buffer: Buffer) -> Bytes:
    """Return a buffer of zarr as one-dimensional bytes: the same memory."""
    return np.asarray(buffer.as_numpy_array()).reshape(-1).view(np.uint8)


def _document(given: object) -> Codec:
    if isinstance(given, str):
        return _KNOWN.get(given, {"name": given})
    if (
        isinstance(given, Mapping)
        and isinstance(given.get("name"), str)
        and set(given) <= {"name", "configuration"}
    ):
        return given
    raise ConfigError(f"accepted: {ACCEPTED}")


def _resolve(document: Codec) -> BytesBytesCodec:
    name = str(document["name"])
    try:
        kind = get_codec_class(name)
    except KeyError:
        raise ConfigError(f"zarr knows no codec {name!r}; accepted: {ACCEPTED}") from None
    if not issubclass(kind, BytesBytesCodec):
        raise ConfigError(f"{name!r} does not turn bytes into bytes; accepted: {ACCEPTED}")
    try:
        made = kind.from_dict(_filled(document))
        # As zarr would read it from an array: what it makes of bytes that stand for themselves.
        return made.evolve_from_array_spec(_spec(1))
    except Exception as error:
        raise ConfigError(f"codec {name!r} does not take this configuration: {brief(error)}") from error


def _filled(document: Codec) -> dict[str, JSON]:
    """Return the document with the empty configuration that zarr wants where there is none."""
    return cast("dict[str, JSON]", {"configuration": {}, **document})


@functools.lru_cache(maxsize=256)
def _spec(nbytes: int) -> ArraySpec:
    """Describe a chunk of ``nbytes`` to a codec."""
    document = cast("dict[str, JSON]", array_document(Cut(nbytes, nbytes, 1), ()))
    metadata = ArrayV3Metadata.from_dict(document)
    return metadata.get_chunk_spec((0,), ArrayConfig.from_dict({}), default_buffer_prototype())
