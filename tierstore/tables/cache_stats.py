"""What became of the hot rows of a table on the device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Hot rows of one table, now and since the device was attached.

    A row counts once for each lookup that names it, however often that does.

    Attributes:
        slots: how many rows there is room for, each with its states.
        used: how many are there.
        dirty: of these, how many differ from what is in host memory.
        hits: rows that were looked up and there.
        misses: those that were not.
        bypassed: of the misses, those for which no slot could be had: they went past the cache.
        prefetched: rows that were brought because of a prefetch.
        prefetches_declined: rows in host memory that a prefetch named and there was no slot for.
        evictions: rows that made room for others.
        rows_to_device: rows that were carried to the device, by lookups, steps and prefetches.
        rows_to_host: rows that were carried back.
        bytes_to_device: of rows with their states, and of their places: all that was carried there.
        bytes_to_host: likewise, back.
    """

    slots: int
    used: int
    dirty: int
    hits: int = 0
    misses: int = 0
    bypassed: int = 0
    prefetched: int = 0
    prefetches_declined: int = 0
    evictions: int = 0
    rows_to_device: int = 0
    rows_to_host: int = 0
    bytes_to_device: int = 0
    bytes_to_host: int = 0

    @property
    def hit_ratio(self) -> float:
        """Which part of the rows that were looked up were there; 0 before the first lookup."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0
