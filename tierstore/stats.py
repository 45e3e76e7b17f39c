"""What `Store.stats` returns: one frozen object, in bytes, counts and seconds.

1. It can be copied, pickled and given to ``dataclasses.asdict``, and is that moment's: nothing in it changes
   any more.
2. Its ``as_dict`` has nothing but what JSON has: `plain_values`.
"""

from __future__ import annotations

import enum
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

from tierstore.codec import CodecStats

Counted = int | float | str | tuple[Mapping[str, object], ...]
"""What a medium says under one name."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier, now and since the start.

    Attributes:
        capacity_bytes: the quota.
        charged_bytes: what is charged now, in whatever state.
        ready_bytes: the part of it that can be used.
        in_flight_bytes: the part of it that copies are writing, or are about to.
        leased_bytes: the part of it that leases hold.
        peak_charged_bytes: the most that was ever charged.
        reserved_bytes: what the medium holds for it (a pool's blocks); at least what is charged.
        hits: leases and fetches that found their key ready here.
        faults: those that did not.
        evictions: replicas that were let go to make room or because they were told to.
        refusals: requests that could get no room.
        codec: what the tier's codec has packed, and what it came to; None: it has none.
        io: what the medium counts of its own, by name, such as calls, their mean size and how many were
            in flight; empty where it counts nothing.  A tier over several drives has ``drives``, a tuple
            with a mapping of the same kind for each.
        wrappers: what stands around the medium because the tier's options say so, and what it did:
            ``"bandwidth"`` and ``"retries"``, each a mapping like ``io``.
    """

    capacity_bytes: int
    charged_bytes: int
    ready_bytes: int
    in_flight_bytes: int
    leased_bytes: int
    peak_charged_bytes: int
    reserved_bytes: int
    hits: int
    faults: int
    evictions: int
    refusals: int
    codec: CodecStats | None = None
    io: Mapping[str, Counted] = field(default_factory=dict, hash=False)
    wrappers: Mapping[str, Mapping[str, Counted]] = field(default_factory=dict, hash=False)


class RoomInTier(NamedTuple):
    """What one tier has room for; see `TierStats`."""

    capacity_bytes: int
    charged_bytes: int
    leased_bytes: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """One direction since the start."""

    copies: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class MovingCopy:
    """A copy that is under way now; ``"caller"`` stands for who puts."""

    key: str
    source: str
    target: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A store, now and since the start.

    Attributes:
        tiers: by name, fastest first.
        traffic: by (from, to); ``"caller"`` stands for who puts and gets.
        stall_seconds: how long callers were blocked in leases and fetches, summed over threads.
    """

    tiers: Mapping[str, TierStats]
    traffic: Mapping[tuple[str, str], Traffic]
    stall_seconds: float

    @property
    def hits(self) -> int:
        """Over all tiers."""
        return sum(tier.hits for tier in self.tiers.values())

    @property
    def faults(self) -> int:
        """Over all tiers."""
        return sum(tier.faults for tier in self.tiers.values())

    @property
    def evictions(self) -> int:
        """Over all tiers."""
        return sum(tier.evictions for tier in self.tiers.values())

    @property
    def refusals(self) -> int:
        """Over all tiers."""
        return sum(tier.refusals for tier in self.tiers.values())

    @property
    def copies(self) -> int:
        """Over all directions."""
        return sum(traffic.copies for traffic in self.traffic.values())

    @property
    def copied_bytes(self) -> int:
        """Over all directions."""
        return sum(traffic.nbytes for traffic in self.traffic.values())

    def as_dict(self) -> dict[str, Any]:
        """Return what ``dataclasses.asdict`` does, with ``"from->to"`` for directions: JSON can say that."""
        told: dict[str, Any] = plain_values(self)
        return told


def plain_values(value: object) -> Any:  # noqa: ANN401 - what JSON has
    """Return statistics, of whatever kind of mapping or number, as plain dicts, tuples and numbers.

    Keys become texts: a direction ``"from->to"``, a member of an enumeration its value.

    Args:
        value: a dataclass, a mapping, a sequence, a number, a text or ``None``; what is nothing of these is
            shown as a text.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain_values(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {_key(key): plain_values(each) for key, each in value.items()}
    if isinstance(value, tuple | list | set | frozenset):
        return tuple(map(plain_values, value))
    return _plain(value)


def _plain(value: object) -> object:
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    return str(value)


def _key(key: object) -> str:
    return "->".join(map(_key, key)) if isinstance(key, tuple) else str(_plain(key))
