"""A backend around a backend: what a tier's configuration puts between the engine and the medium."""

from __future__ import annotations

from tierstore.errors import ConfigError
from tierstore.spi import Backend, DurableBackend, Medium
from tierstore.wrappers.compressed import Compressed
from tierstore.wrappers.counts import CodecStats
from tierstore.wrappers.durable import DurableCompressed

__all__ = ["CodecStats", "Compressed", "DurableCompressed", "with_codec"]


def with_codec(backend: Backend, codec: str | None, tier: str) -> Backend:
    """Return a backend that packs what ``backend`` holds, or ``backend`` itself if there is nothing to do.

    One that finds its slots again is wrapped even without a codec, as they may have been packed earlier.

    Args:
        backend: what holds the bytes; the one that is returned owns it.
        codec: ``"lz4"`` or None.
        tier: whose backend it is, for messages.

    Raises:
        ConfigError: no such codec, or the bytes of this backend are not behind I/O.
    """
    try:
        return _wrapped(backend, codec)
    except ConfigError as fault:
        raise ConfigError(f"TierConfig {tier!r}: {fault}", tier=tier) from None


def _wrapped(backend: Backend, codec: str | None) -> Backend:
    capabilities = backend.capabilities
    is_found_again = capabilities.is_durable and capabilities.medium is Medium.STORAGE
    if is_found_again and isinstance(backend, DurableBackend):
        return DurableCompressed(backend, codec)
    return backend if codec is None else Compressed(backend, codec)
