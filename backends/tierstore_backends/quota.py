"""Bytes held against a capacity: the backend's own check on what it is asked to hold.

Promises: the bytes taken never exceed the capacity, from any number of threads.  The engine keeps
its own books; this one is here so that a mistake there becomes an error and not an overcommitment.
"""

from __future__ import annotations

import threading

from tierstore.errors import CapacityError
from tierstore.units import align_up, format_bytes


class Quota:
    """What one backend holds.  Thread-safe.

    Args:
        backend: the name that messages give it.
        capacity_bytes: the most it may hold.
        alignment_bytes: every slot counts as a multiple of this.
    """

    def __init__(self, backend: str, capacity_bytes: int, alignment_bytes: int = 1) -> None:
        self._backend = backend
        self._alignment_bytes = alignment_bytes
        self._lock = threading.Lock()
        self._capacity_bytes = capacity_bytes  # guarded by _lock, as is the next
        self._held_bytes = 0

    @property
    def capacity_bytes(self) -> int:
        """The most that may be held."""
        return self._capacity_bytes

    @property
    def held_bytes(self) -> int:
        """What is held now."""
        return self._held_bytes

    def take(self, nbytes: int) -> None:
        """Hold ``nbytes`` more.

        Raises:
            CapacityError: they are more than what is free.
        """
        charged_bytes = align_up(nbytes, self._alignment_bytes)
        with self._lock:
            free_bytes = self._capacity_bytes - self._held_bytes
            if charged_bytes <= free_bytes:
                self._held_bytes += charged_bytes
                return
            capacity_bytes = self._capacity_bytes
        raise CapacityError(
            f"{format_bytes(charged_bytes)} do not fit in the {self._backend!r} backend: "
            f"{format_bytes(max(free_bytes, 0))} free of {format_bytes(capacity_bytes)}. "
            "Free something or raise its capacity.",
            needed_bytes=charged_bytes,
            free_bytes=max(free_bytes, 0),
        )

    def give(self, nbytes: int) -> None:
        """Hold ``nbytes`` less."""
        with self._lock:
            self._held_bytes -= align_up(nbytes, self._alignment_bytes)

    def resize(self, capacity_bytes: int) -> None:
        """Hold at most ``capacity_bytes`` from now on."""
        with self._lock:
            self._capacity_bytes = capacity_bytes
