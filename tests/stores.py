"""Stores for tests: three tiers of plain memory, the last behind I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tierstore.config import StoreConfig, TierConfig
from tierstore.spi import Backend
from tierstore.store import Store
from tierstore_backends.memory import open_backend

NAMES = ("device", "host", "disk")


def memory_backends(capacities: Sequence[int]) -> list[Backend]:
    """Return plain memory backends; the last of several is reached by reads and writes only."""
    last = max(len(capacities) - 1, 1)
    return [
        open_backend(capacity_bytes=capacity, options={"storage": index == last})
        for index, capacity in enumerate(capacities)
    ]


def make_store(
    *capacities: int,
    eviction: str = "lru",
    high: float = 1.0,
    low: float | None = None,
    wrap: Callable[[Backend], Backend] = lambda backend: backend,
) -> Store:
    """Return a store over memory backends, each wrapped by ``wrap``."""
    tiers = [
        TierConfig(name, wrap(backend), capacity, high, low)
        for name, backend, capacity in zip(
            NAMES[-len(capacities) :], memory_backends(capacities), capacities, strict=True
        )
    ]
    return Store(StoreConfig(tiers, eviction=eviction))


def numbered(number: int, nbytes: int = 100) -> torch.Tensor:
    """Return bytes that tell which tensor they are of."""
    return torch.full((nbytes,), number % 251, dtype=torch.uint8)
