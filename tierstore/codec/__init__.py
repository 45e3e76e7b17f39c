"""A backend around a backend: what a tier's configuration puts between the engine and the medium."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from tierstore.codec.chunk_records import is_ours
from tierstore.codec.compressed import Compressed
from tierstore.codec.counters import CodecStats
from tierstore.codec.durable import DurableCompressed
from tierstore.errors import ConfigError
from tierstore.spi import Backend, DurableBackend, Medium, Record

__all__ = ["CodecStats", "Compressed", "DurableCompressed", "OpenedBackend", "with_codec"]


@dataclass(frozen=True, slots=True)
class OpenedBackend:
    """A tier's backend, ready for the engine.

    Attributes:
        backend: what the engine calls.
        found: what it has recovered, if it finds its slots again.  Nobody is to ask it a second time.
        codec: the backend itself, if it packs or unpacks.
    """

    backend: Backend
    found: Sequence[Record] = ()
    codec: Compressed | None = None


def with_codec(backend: Backend, codec: str | None, tier: str) -> OpenedBackend:
    """Return a backend that packs what ``backend`` holds, or ``backend`` itself if there is nothing to do.

    One that finds its slots again is asked for them here: where some were packed earlier, it is wrapped even
    without a codec, so that they can be read.  Where none were, nothing stands between the engine and what
    the backend can do besides, such as reaching a device's memory.

    Args:
        backend: what holds the bytes; the one that is returned owns it.
        codec: ``"lz4"`` or None.
        tier: whose backend it is, for messages.

    Raises:
        ConfigError: no such codec, or the bytes of this backend are not behind I/O.
        BackendError: what it recovered could not be read.
    """
    try:
        return _opened(backend, codec)
    except ConfigError as fault:
        raise ConfigError(f"TierConfig {tier!r}: {fault}", tier=tier) from None


def _opened(backend: Backend, codec: str | None) -> OpenedBackend:
    if not backend.capabilities.is_durable:
        if codec is None:
            return OpenedBackend(backend)
        packed = Compressed(backend, codec)
        return OpenedBackend(packed, codec=packed)
    durable = cast("DurableBackend", backend)
    if codec is not None:
        wrapped = DurableCompressed(durable, codec)  # which may refuse: before anything is asked
        return OpenedBackend(wrapped, wrapped.recovered(), wrapped)
    found = durable.recovered()
    if backend.capabilities.medium is not Medium.STORAGE or not any(is_ours(record.note) for record in found):
        return OpenedBackend(backend, found)
    wrapped = DurableCompressed(durable, codec)
    return OpenedBackend(wrapped, wrapped.unpacked(found), wrapped)
