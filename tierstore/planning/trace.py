"""What one step used, in order: a trace of keys, recorded while it happens.

Knows nothing of tiers, sizes or time.
"""

from __future__ import annotations


class Trace:
    """The keys that a step used, in the order of their use."""

    __slots__ = ("_keys",)

    def __init__(self) -> None:
        self._keys: list[str] = []

    def note(self, key: str) -> None:
        """Record that ``key`` is used now; an immediate repetition is the same use."""
        if not self._keys or self._keys[-1] != key:
            self._keys.append(key)

    @property
    def accesses(self) -> tuple[str, ...]:
        """What was used so far, first use first."""
        return tuple(self._keys)

    def take(self) -> tuple[str, ...]:
        """Return what was used so far and begin anew."""
        keys, self._keys = tuple(self._keys), []
        return keys

    def __len__(self) -> int:
        return len(self._keys)
