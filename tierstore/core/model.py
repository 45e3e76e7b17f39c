"""The nouns that travel: frozen data without behaviour that could surprise."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Tier:
    """One level of the hierarchy as the ledger sees it.

    Attributes:
        name: what messages call it.
        capacity_bytes: the hard quota.
        high_bytes: above this many charged bytes, eviction begins ...
        low_bytes: ... and goes on down to this many.
        alignment_bytes: a replica is charged a multiple of this.
        is_durable: whether bytes there survive a power loss.
        is_host: whether other tiers' bytes pass through it.
        is_storage: whether its bytes are reached by I/O only, so that they cannot be leased.
        setting: what a user raises who knows of no tiers, keys and leases; ``None``: the capacity.
    """

    name: str
    capacity_bytes: int
    high_bytes: int
    low_bytes: int
    alignment_bytes: int = 1
    is_durable: bool = False
    is_host: bool = False
    is_storage: bool = False
    setting: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be used when: advice for prefetch and eviction, never needed for correctness.

    A plan is a cycle of accesses (one training step); position ``i`` is followed by ``i + 1`` and
    the last by the first.

    Attributes:
        accesses: the keys in the order of their use.
        aliases: other keys that will be used when the ones they stand for are.
        residents: keys that stay where they are as long as anything else can go.
        coming: by position, how many bytes are put into the first tier soon after that access; empty: none.
    """

    accesses: Sequence[str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    residents: Collection[str] = frozenset()
    coming: Sequence[int] = ()
    _positions: Mapping[str, list[int]] = field(init=False, repr=False, compare=False)
    _others: Mapping[str, list[str]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Index the positions of every key."""
        positions: dict[str, list[int]] = {}
        for position, key in enumerate(self.accesses):
            positions.setdefault(key, []).append(position)
        object.__setattr__(self, "_positions", positions)
        others: dict[str, list[str]] = {}
        for other, key in self.aliases.items():
            others.setdefault(key, []).append(other)
        object.__setattr__(self, "_others", others)

    def known_as(self, key: str) -> Sequence[str]:
        """Return the keys that are used when ``key`` is: itself, and those whose alias it is."""
        return (key, *self._others.get(key, ()))

    def distance(self, key: str, position: int) -> int | None:
        """Return how many accesses after ``position`` the key is used next; ``None``: never.

        The access at ``position`` itself counts as past: a key used only there is a whole
        cycle away.  Residents count as used at once.
        """
        key = self.aliases.get(key, key)
        if key in self.residents:
            return 0
        positions = self._positions.get(key)
        if positions is None:
            return None
        index = bisect.bisect_right(positions, position)
        if index < len(positions):
            return positions[index] - position
        return positions[0] + len(self.accesses) - position
