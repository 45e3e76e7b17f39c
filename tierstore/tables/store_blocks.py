"""Blocks of a table's log as keys of a store, in its last tier.

The store does with them what it does with any key: it places them, checks them, charges them, and keeps
those that a flush has named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tierstore.store import Store
from tierstore.units import format_bytes


@dataclass(frozen=True)
class StoreBlocks:
    """See the module.

    Attributes:
        store: that keeps the blocks.
        tier: in which; its last one.
    """

    store: Store
    tier: str

    def put(self, name: str, block: torch.Tensor) -> None:
        """See `tierstore.tables.page_log.BlockMedium.put`."""
        self.store.put(name, block, tier=self.tier)

    def read(self, parts: Sequence[tuple[str, int]], into: torch.Tensor) -> None:
        """See `tierstore.tables.page_log.BlockMedium.read`.  Each block is read whole, once."""
        wanted: dict[str, list[int]] = {}
        for place, (name, _) in enumerate(parts):
            wanted.setdefault(name, []).append(place)
        for name, places in wanted.items():
            pages = self.store.get(name, device="cpu").view(-1, into.shape[1])
            begins = torch.tensor([parts[place][1] // into.shape[1] for place in places])
            into[places] = pages[begins]

    def drop(self, names: Sequence[str]) -> None:
        """See `tierstore.tables.page_log.BlockMedium.drop`."""
        self.store.drop(*names)

    def drop_others(self, prefix: str, names: Sequence[str]) -> None:
        """See `tierstore.tables.page_log.BlockMedium.drop_others`."""
        named = set(names)
        others = [key for key in self.store if key.startswith(prefix) and key not in named]
        if others:
            self.store.drop(*others)

    def room(self) -> str:
        """See `tierstore.tables.page_log.BlockMedium.room`."""
        tier = self.store.stats().tiers[self.tier]
        (setting,) = (each.setting for each in self.store.config.tiers if each.name == self.tier)
        free = format_bytes(tier.capacity_bytes - tier.charged_bytes)
        return f"{free} free of {setting or repr(self.tier)} {format_bytes(tier.capacity_bytes)}"
