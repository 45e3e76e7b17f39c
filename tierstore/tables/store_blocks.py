"""Blocks of a table's log as keys of a store, in its last tier.

The store does with them what it does with any key: it places them, charges them, and keeps those that a
flush has named.  Pages are read past its books, by a `tierstore.PartReader`, which holds the blocks that it
has read from.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence

import torch

from tierstore.errors import LeaseError
from tierstore.store import Store
from tierstore.tables.layout import Indices
from tierstore.units import format_bytes


class StoreBlocks:
    """See the module.  Two of one store are equal: what one has put the other finds.

    Args:
        store: that keeps the blocks.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._reader = store.reader()
        self._tier = self._reader.tier
        self._lock = threading.Lock()  # guards the next two
        self._held: set[str] = set()
        self._being_read: list[str] = []  # dropped, but a read of them was under way

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoreBlocks) and other._store is self._store

    def __hash__(self) -> int:
        return hash(id(self._store))

    def put(self, name: str, block: torch.Tensor) -> None:
        """See `tierstore.tables.page_log.BlockMedium.put`."""
        self._drop_what_was_read()
        self._store.put(name, block, tier=self._tier)

    def read(self, parts: Mapping[str, Indices], into: torch.Tensor) -> None:
        """See `tierstore.tables.page_log.BlockMedium.read`.

        Where the tier reads in coarser units than pages, blocks are read whole.
        """
        if into.shape[1] % self._reader.alignment_bytes:
            self._read_whole(parts, into)
            return
        with self._lock:
            new = [name for name in parts if name not in self._held]
            if new:
                self._reader.add(*new)
                self._held.update(new)
            reading = self._reader.read(parts, into)
        reading.result()

    def _read_whole(self, parts: Mapping[str, Indices], into: torch.Tensor) -> None:
        nbytes, at = into.shape[1], 0
        for name, begins in parts.items():
            block = self._store.get(name, device="cpu")
            for begin in begins.tolist():
                into[at] = block[begin : begin + nbytes]
                at += 1

    def drop(self, names: Sequence[str]) -> None:
        """See `tierstore.tables.page_log.BlockMedium.drop`."""
        with self._lock:
            held = self._held.intersection(names)
            self._reader.remove(*held)
            self._held -= held
        self._drop(names)
        self._drop_what_was_read()

    def drop_others(self, prefix: str, names: Collection[str]) -> None:
        """See `tierstore.tables.page_log.BlockMedium.drop_others`."""
        named = set(names)
        others = [key for key in self._store if key.startswith(prefix) and key not in named]
        if others:
            self.drop(others)

    def room(self) -> str:
        """See `tierstore.tables.page_log.BlockMedium.room`."""
        tier = self._store.stats().tiers[self._tier]
        (setting,) = (each.setting for each in self._store.config.tiers if each.name == self._tier)
        free = format_bytes(tier.capacity_bytes - tier.charged_bytes)
        return f"{free} free of {setting or repr(self._tier)} {format_bytes(tier.capacity_bytes)}"

    def close(self) -> None:
        """Hold no block any more.  Idempotent."""
        self._reader.close()
        self._held.clear()
        self._drop_what_was_read()

    def _drop(self, names: Sequence[str]) -> None:
        """Drop blocks; those of which a read is under way later."""
        try:
            self._store.drop(*names)
        except LeaseError:
            for name in names:
                try:
                    self._store.drop(name)
                except LeaseError:
                    with self._lock:
                        self._being_read.append(name)

    def _drop_what_was_read(self) -> None:
        with self._lock:
            names, self._being_read = self._being_read, []
        if names:
            self._drop(names)
