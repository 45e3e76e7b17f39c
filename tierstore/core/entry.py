"""One generation of a key, and what is wanted of it.

A replaced key gets a new `Entry`: readers of the old one finish in peace while new ones see the new
bytes.  Plain state; the rules that change it are the ledger's.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from tierstore.core.messages import Urgency
from tierstore.core.residency import Replica, ReplicaState

if TYPE_CHECKING:
    from tierstore.core.requests import Request

STORY_EVENTS = 32

V = TypeVar("V")

NOTHING: Mapping[int, Any] = MappingProxyType({})
"""What most entries want, and who watches and holds them: a dict is 64 B, and 224 B once it was used."""


def entered(mapping: Mapping[int, V], number: int, value: V) -> Mapping[int, V]:
    """Return a mapping with a value under a number: the same object, unless that was `NOTHING`."""
    if not isinstance(mapping, dict):
        return {number: value}
    mapping[number] = value
    return mapping


def without(mapping: Mapping[int, V], number: int) -> Mapping[int, V]:
    """Return a mapping without a number, if it had that: the same object, or `NOTHING`."""
    if isinstance(mapping, dict):
        mapping.pop(number, None)
    return mapping or NOTHING


def _speed(replica: Replica) -> int:
    return replica.tier


class EntryLife(enum.Enum):
    """Who can see an entry."""

    COMING = enum.auto()  # its put is under way: an older generation may still be the visible one
    LIVE = enum.auto()  # found under its key
    PARTING = enum.auto()  # dropped or replaced, but a flush of before has not brought its bytes down yet
    GONE = enum.auto()  # dropped or replaced: what was begun is finished, then it vanishes


class WantPhase(enum.Enum):
    """How far a want has come."""

    QUEUED = enum.auto()  # waits for room in its tier
    RESERVED = enum.auto()  # room is charged; waits for a replica that it can be copied from
    COPYING = enum.auto()  # its copy is under way, or waits in the window


class Want:
    """The need for a READY replica of an entry in a tier.  There is one at most for each such pair.

    Attributes:
        requests: who waits for it.
        dependents: wants of faster tiers that will copy from this replica.
        slack_bytes: room beyond its own size that has to be free, because the medium refused once.
        is_direct: whether it goes without a host replica on the way, because there was no room.
        put: the request number of the ``put`` that brings the bytes, if one does.
    """

    __slots__ = (
        "dependents",
        "entry",
        "is_direct",
        "phase",
        "put",
        "refusal",
        "requests",
        "slack_bytes",
        "tier",
        "urgency",
    )

    def __init__(self, entry: Entry, tier: int, urgency: Urgency) -> None:
        self.entry = entry
        self.tier = tier
        self.urgency = urgency
        self.phase = WantPhase.QUEUED
        self.requests: dict[int, Request] = {}
        self.dependents: tuple[Want, ...] = ()  # most have none
        self.slack_bytes = 0
        self.refusal: BaseException | None = None
        self.is_direct = False
        self.put: int | None = None


class Entry:
    """One generation of a key.

    Attributes:
        spec: the putter's description of the bytes, handed back with them.
        uid: its number; keys can be replaced, uids cannot.
        replicas: by tier, those that are not ABSENT.
        wants: by tier, those not yet met; changed by `entered` and `without`, as are the two that follow.
        watchers: requests to be examined when anything here changes, by number.
        holders: who leases it, by request number.
        writer: the request number of the write lease, if one is held.
        story: of the last events tick, what and tier, one after the other: ten thousand keys that write
            five tuples each would call the garbage collector a hundred times.  It need not look at this one.
    """

    __slots__ = (
        "holders",
        "key",
        "life",
        "nbytes",
        "replicas",
        "spec",
        "story",
        "uid",
        "wants",
        "watchers",
        "writer",
    )

    def __init__(self, uid: int, key: str, nbytes: int, spec: object) -> None:
        self.uid = uid
        self.key = key
        self.nbytes = nbytes
        self.spec = spec
        self.life = EntryLife.COMING
        self.replicas: dict[int, Replica] = {}
        self.wants: Mapping[int, Want] = NOTHING
        self.watchers: Mapping[int, Request] = NOTHING
        self.holders: Mapping[int, str] = NOTHING
        self.writer: int | None = None
        self.story: tuple[int | str, ...] = ()

    def events(self) -> list[tuple[int, str, int]]:
        """Return the last events: tick, what happened, and in which tier."""
        flat = iter(self.story)
        return list(zip(flat, flat, flat, strict=True))  # type: ignore[arg-type]  # as `Books.note` adds them

    def ready(self) -> list[Replica]:
        """Return the READY replicas, fastest first."""
        ready: list[Replica] = []
        for replica in self.replicas.values():
            if replica.state is ReplicaState.READY:
                ready.append(replica)  # noqa: PERF401 - for one or two, a comprehension takes longer
        if len(ready) > 1:
            ready.sort(key=_speed)
        return ready

    def is_ready(self, tier: int) -> bool:
        """Whether there is a READY replica in ``tier``."""
        replica = self.replicas.get(tier)
        return replica is not None and replica.state is ReplicaState.READY

    def is_settled(self, tier: int) -> bool:
        """Whether there is a READY replica in ``tier`` whose bytes have all arrived."""
        return self.is_ready(tier) and self.replicas[tier].copy is None

    @property
    def is_kept(self) -> bool:
        """Whether a flush is about these very bytes, and has not got them yet."""
        return any(request.keeps_bytes for request in self.watchers.values())

    def may_be_written(self, tier: int) -> bool:
        """Whether no flush needs the bytes, and no copy reads the replica in ``tier`` or makes a stale one.

        A copy that still reads *another* replica, to bring this one in stream order, does not matter.
        """
        if self.is_kept:
            return False
        others = (replica for other, replica in self.replicas.items() if other != tier)
        is_copied = any(r.state is ReplicaState.FILLING and r.copy is not None for r in others)
        return not self.replicas[tier].readers and not is_copied
