"""The backends of a store's tiers: opened by name, wrapped as their options say, ready for the engine."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from tierstore.codec import Compressed, with_codec
from tierstore.config import TierConfig
from tierstore.core.model import Tier
from tierstore.engine.registry import open_backend
from tierstore.errors import ConfigError, UsageError
from tierstore.spi import Backend, Medium, Record, broken_promise
from tierstore.wrappers.configured import split_options, wrap
from tierstore.wrappers.kinds import TierWrapper

_PAUSES_S = (0.0, 0.05, 0.25)  # before a place that is taken is tried again


@dataclass(frozen=True, slots=True)
class TierBackend:
    """A tier's backend.

    Attributes:
        backend: what the engine calls.
        found: what it has recovered, if it finds its slots again.  Nobody is to ask it a second time.
        codec: what packs its bytes, if something does.
        wrappers: what else stands around the medium, by the name of its kind.
    """

    backend: Backend
    found: Sequence[Record]
    codec: Compressed | None
    wrappers: Mapping[str, TierWrapper]


def open_all(tiers: Sequence[TierConfig], backends: list[Backend]) -> list[TierBackend]:
    """Open every tier's backend; each is added to ``backends`` as soon as it is open, and is to be closed.

    Raises:
        ConfigError: options are wrong, which for wrappers is found before anything is opened; a backend
            cannot do what it says, or what is asked of it.
        UsageError, BackendError: a backend does not open.
    """
    options = [split_options(tier.name, tier.options) for tier in tiers]
    opened: list[TierBackend] = []
    for tier, (own, rest) in zip(tiers, options, strict=True):
        given = tier.backend
        backends.append(_open(tier, given, rest) if isinstance(given, str) else cast("Backend", given))
        if (fault := broken_promise(backends[-1])) is not None:
            raise ConfigError(f"TierConfig {tier.name!r}: the backend {fault}", tier=tier.name)
        wrappers: dict[str, TierWrapper] = {}
        backends[-1] = wrap(backends[-1], own, tier.name, wrappers)
        packed = with_codec(backends[-1], tier.codec, tier.name)
        backends[-1] = packed.backend
        opened.append(TierBackend(packed.backend, packed.found, packed.codec, wrappers))
    return opened


def _open(tier: TierConfig, name: str, options: Mapping[str, object]) -> Backend:
    """Open a tier's backend by its name.

    A store or a run that was forgotten may have the place: until its cycle is collected, and before that
    until its bytes have moved that were on their way.
    """
    for pause_s in _PAUSES_S:
        try:
            return open_backend(name, capacity_bytes=tier.capacity_bytes, options=options)
        except ConfigError:
            raise
        except UsageError as error:
            error.__traceback__ = None
        time.sleep(pause_s)
        for _ in range(2):  # what has a finalizer goes first, and then what only that has kept
            gc.collect()
    return open_backend(name, capacity_bytes=tier.capacity_bytes, options=options)


def tiers_of(configs: Sequence[TierConfig], backends: Sequence[Backend]) -> list[Tier]:
    """Return what the books are told of tiers.

    Raises:
        ConfigError: a store of them could not keep what it promises.
    """
    tiers = [_tier(config, backend) for config, backend in zip(configs, backends, strict=True)]
    durable = [tier.name for tier in tiers if tier.is_durable]
    if len(durable) > 1:
        raise ConfigError(
            f"StoreConfig: one tier of a store can be durable, not {', '.join(durable)}: a flush is one step "
            "on one medium"
        )
    return tiers


def _tier(config: TierConfig, backend: Backend) -> Tier:
    capabilities = backend.capabilities
    return Tier(
        name=config.name,
        capacity_bytes=config.capacity_bytes,
        high_bytes=config.high_bytes,
        low_bytes=config.low_bytes,
        alignment_bytes=capabilities.alignment_bytes,
        is_durable=capabilities.is_durable,
        is_host=capabilities.medium is Medium.HOST,
        is_storage=capabilities.medium is Medium.STORAGE,
        setting=config.setting,
    )
