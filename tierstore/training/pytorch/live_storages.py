"""What is known of storages while they live: they are told by the object, never by an address."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import torch

Known = TypeVar("Known")


class _KnownStorage(weakref.ref[torch.UntypedStorage], Generic[Known]):
    """A live storage, and what is known of it."""

    __slots__ = ("key", "known")

    key: int
    known: Known


class LiveStorages(Generic[Known]):
    """A table of live storages.  One thread at a time may change it; storages may die in any.

    What is known of a storage has to keep neither the storage nor what it is of alive.
    """

    def __init__(self) -> None:
        self._live: dict[int, _KnownStorage[Known]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def get(self, storage: torch.UntypedStorage) -> Known | None:
        """Return what is known of a storage; ``None``: nothing."""
        live = self._live.get(id(storage))
        return live.known if live is not None and live() is storage else None

    def put(self, storage: torch.UntypedStorage, known: Known) -> None:
        """Know this of a storage, and nothing else any more."""
        live: _KnownStorage[Known] = _KnownStorage(storage, self._forget)
        live.key, live.known = id(storage), known
        self._live[live.key] = live

    def discard(self, storage: torch.UntypedStorage) -> None:
        """Know nothing of a storage."""
        self._live.pop(id(storage), None)

    def clear(self) -> None:
        """Know nothing."""
        self._live.clear()

    def _forget(self, live: weakref.ref[torch.UntypedStorage]) -> None:
        """A storage has died.  Runs anywhere: what a dictionary does to one key is one step."""
        assert isinstance(live, _KnownStorage)
        if self._live.get(live.key) is live:
            del self._live[live.key]
