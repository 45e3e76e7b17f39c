"""What becomes of a bundle after use, as its home says; and which setting bounds each tier."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from tierstore.config import StoreConfig
from tierstore.errors import KeyNotFound, LeaseError, StoreClosed
from tierstore.planning import Home
from tierstore.planning.rules import DISK, HOST
from tierstore.store import Store
from tierstore.training.bundles.bindings import Access, Binding

_SETTING_OF = {"device": "max_device_memory", HOST: "offload_cpu_size", DISK: "offload_disk_size"}
"""The key that bounds each tier: who trains knows it by that, and has no keys to drop and no leases."""


def setting_of(tier: str) -> str:
    """Return the key of the configuration that bounds a tier, or what bounds one that has none."""
    return _SETTING_OF.get(tier, f"the capacity of {tier!r}")


def named_by_settings(config: StoreConfig) -> StoreConfig:
    """Return tiers whose messages speak of the keys of `OffloadConfig`."""
    tiers = [replace(tier, setting=_SETTING_OF.get(tier.name)) for tier in config.tiers]
    return replace(config, tiers=tiers)


def is_on_top(store: Store, key: str) -> bool:
    """Say whether the fastest tier has a key's bytes, ready to be used."""
    with contextlib.suppress(KeyNotFound, StoreClosed):
        return store.tier_names[0] in store.where(key)
    return False


def access_after_use(home: Home, store: Store) -> Access | None:
    """Return what is done with a bundle when its lease was released; ``None``: it stays for now."""
    tier = home.tier
    if tier is None or not home.returns:
        return None

    def push_down(binding: Binding) -> None:
        # Dropped or leased again meanwhile: then there is nothing to push down.
        with contextlib.suppress(KeyNotFound, LeaseError):
            store.evict(binding.key, to=tier)

    return push_down
