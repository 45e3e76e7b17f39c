"""Blocks of a table's log as keys of a store, in its last tier, of which pages are read as parts.

The store does with them what it does with any key: it places them, checks them, charges them, and keeps
those that a flush has named.  Rule 1: all blocks of one store are held by one reader, whoever asks for them,
from their first read until they are dropped.  Rule 2: a block is dropped when no read of it is under way, and
a read that comes meanwhile finds no key.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from tierstore import forks
from tierstore.errors import KeyNotFound
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
        """See `tierstore.tables.page_log.BlockMedium.read`.

        Where the tier reads no parts, or none that begin where pages do, each block is read whole, once.
        """
        held = _held_blocks(self.store)
        if into.shape[1] % held.reader.alignment_bytes:
            self._read_whole(parts, into)
        else:
            held.read(parts, into)

    def drop(self, names: Sequence[str]) -> None:
        """See `tierstore.tables.page_log.BlockMedium.drop`."""
        with _held_blocks(self.store).leaving(names):
            self.store.drop(*names)

    def drop_others(self, prefix: str, names: Sequence[str]) -> None:
        """See `tierstore.tables.page_log.BlockMedium.drop_others`."""
        named = set(names)
        others = [key for key in self.store if key.startswith(prefix) and key not in named]
        if others:
            self.drop(others)

    def room(self) -> str:
        """See `tierstore.tables.page_log.BlockMedium.room`."""
        tier = self.store.stats().tiers[self.tier]
        (setting,) = (each.setting for each in self.store.config.tiers if each.name == self.tier)
        free = format_bytes(tier.capacity_bytes - tier.charged_bytes)
        return f"{free} free of {setting or repr(self.tier)} {format_bytes(tier.capacity_bytes)}"

    def _read_whole(self, parts: Sequence[tuple[str, int]], into: torch.Tensor) -> None:
        wanted: dict[str, list[int]] = {}
        for place, (name, _) in enumerate(parts):
            wanted.setdefault(name, []).append(place)
        for name, places in wanted.items():
            pages = self.store.get(name, device="cpu").view(-1, into.shape[1])
            begins = torch.tensor([parts[place][1] // into.shape[1] for place in places])
            into[places] = pages[begins]


class _HeldBlocks:
    """The blocks of one store that are held to be read.  Safe from any thread.

    Attributes:
        reader: that holds them.
    """

    def __init__(self, store: Store) -> None:
        self.reader = store.reader()
        self._process = forks.here()
        self._adding = threading.Lock()  # held while keys are added, so that each is added once
        self._changed = threading.Condition()  # guards the next three
        self._names: set[str] = set()  # of those that the reader has
        self._reading: Counter[str] = Counter()
        self._leaving: set[str] = set()

    def read(self, parts: Sequence[tuple[str, int]], into: torch.Tensor) -> None:
        """Fill ``into``.  Blocks."""
        forks.require_here(self._process)
        names = {name for name, _ in parts}
        with self._being_read(names):
            self._add(names)
            self.reader.read(parts, into).result()

    @contextmanager
    def leaving(self, names: Sequence[str]) -> Iterator[None]:
        """Hold blocks no longer, and let nobody read them inside the context.  Blocks until nobody does."""
        forks.require_here(self._process)
        try:
            with self._changed:
                self._leaving.update(names)
                self._changed.wait_for(lambda: not any(self._reading[name] for name in names))
                held = self._names.intersection(names)
                self._names -= held
            self.reader.remove(*held)
            yield
        finally:
            with self._changed:
                self._leaving.difference_update(names)

    @contextmanager
    def _being_read(self, names: set[str]) -> Iterator[None]:
        with self._changed:
            for name in names & self._leaving:
                raise KeyNotFound(f"no key {name!r} in the store: it is being dropped.", key=name)
            self._reading.update(names)
        try:
            yield
        finally:
            with self._changed:
                for name in names:
                    self._reading[name] -= 1
                    if not self._reading[name]:
                        del self._reading[name]
                self._changed.notify_all()

    def _add(self, names: set[str]) -> None:
        with self._adding:
            missing = names - self._names
            if missing:
                self.reader.add(*missing)
                with self._changed:
                    self._names |= missing


_opening: Final = forks.free_in_child(threading.Lock())  # guards the next
_held: Final[weakref.WeakKeyDictionary[Store, _HeldBlocks]] = weakref.WeakKeyDictionary()


def _held_blocks(store: Store) -> _HeldBlocks:
    """Return the held blocks of a store: the same as long as it lives, and they do not keep it."""
    with _opening:
        if store not in _held:
            _held[store] = _HeldBlocks(store)
        return _held[store]
