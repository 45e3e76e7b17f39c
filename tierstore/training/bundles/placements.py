"""Where each kind of bytes goes: the configuration's wishes, as tiers of the store."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from tierstore.config import OffloadConfig, StoreConfig
from tierstore.errors import ConfigError, KeyNotFound, LeaseError
from tierstore.store import Store
from tierstore.training.bundles.bindings import Access, Binding

HOST = "host"
DISK = "disk"
_TIER_OF = {"cpu": HOST, "disk": DISK}


_SETTING_OF = {"device": "max_device_memory", HOST: "offload_cpu_size", DISK: "offload_disk_size"}
"""The key that bounds each tier: who trains knows it by that, and has no keys to drop and no leases."""


def setting_of(tier: str) -> str:
    """Return the key of the configuration that bounds a tier, or what bounds one that has none."""
    return _SETTING_OF.get(tier, f"the capacity of {tier!r}")


def named_by_settings(config: StoreConfig) -> StoreConfig:
    """Return tiers whose messages speak of the keys of `OffloadConfig`."""
    tiers = [replace(tier, setting=_SETTING_OF.get(tier.name)) for tier in config.tiers]
    return replace(config, tiers=tiers)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one kind of bytes goes.

    Attributes:
        start: the tier that they are first put to; ``None``: as fast as there is room.
        after_use: called with a bundle when its lease was released; ``None``: it stays until the
            store needs the room.
    """

    start: str | None = None
    after_use: Access | None = None


@dataclass(frozen=True, slots=True)
class Placements:
    """Where everything goes.

    Attributes:
        parameters, gradients, state: each kind's placement.
        optimizer_tier: where the optimizer computes.
    """

    parameters: Placement
    gradients: Placement
    state: Placement
    optimizer_tier: str

    @classmethod
    def of(cls, config: OffloadConfig, store: Store) -> Placements:
        """Read them from a configuration.

        Raises:
            ConfigError: a tier is asked for that the store has not.
        """
        return cls(
            parameters=_placement("offload_param", config.offload_param, config, store),
            gradients=_placement("offload_grad", config.offload_grad, config, store),
            state=_placement("offload_optimizer", config.offload_optimizer, config, store),
            optimizer_tier=HOST if config.optimizer_target == "cpu" else store.tier_names[0],
        )


def _placement(key: str, wish: str | None, config: OffloadConfig, store: Store) -> Placement:
    if wish is None:
        return Placement()
    tier = _TIER_OF[wish]
    if tier not in store.tier_names:
        raise ConfigError(
            f"{key}={wish!r} needs the tier {tier!r}; this configuration has {', '.join(store.tier_names)}. "
            "Give it a size, or leave the key out."
        )
    if config.auto_offload or tier == store.tier_names[0]:
        return Placement(start=tier)

    def push_down(binding: Binding) -> None:
        # Dropped or leased again meanwhile: then there is nothing to push down.
        with contextlib.suppress(KeyNotFound, LeaseError):
            store.evict(binding.key, to=tier)

    return Placement(start=tier, after_use=push_down)
