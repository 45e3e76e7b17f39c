"""One generation of a key, its replicas, what is wanted of it, and who is told of its changes.

A replaced key gets a new `Entry`: readers of the old one finish in peace while new ones see the new
bytes.  Plain state; the rules that change it are the ledger's.
"""

from __future__ import annotations

import abc
import enum
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from tierstore.core.messages import ReplicaId, Urgency
from tierstore.core.residency import TABLE, ReplicaState, ReplicaStep
from tierstore.errors import InvariantError

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


class Watcher(abc.ABC):
    """Who is asked again whenever an entry changes: see `tierstore.core.requests.Request`.

    Attributes:
        number: names it in events and commands.
        pending: the entries that do not satisfy it yet, by uid.
        unseen: in order, those whose turn to be examined has not come, if there are many.
    """

    number: int
    pending: dict[int, Entry]
    unseen: deque[Entry] | None

    @property
    @abc.abstractmethod
    def keeps_bytes(self) -> bool:
        """Whether its entries are to stay as they are until they satisfy it, even when they are dropped."""

    @abc.abstractmethod
    def check(self, entry: Entry) -> None:
        """Raise if ``entry`` as it is makes the request wrong."""

    @abc.abstractmethod
    def examine(self, entry: Entry) -> bool:
        """Return whether ``entry`` satisfies it; ask for what is missing."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Answer the caller: every entry satisfies it."""

    @abc.abstractmethod
    def fail(self, error: BaseException) -> None:
        """Answer the caller: it cannot be met."""

    @abc.abstractmethod
    def undo(self) -> None:
        """Give back what was taken for the entries that satisfied what now fails."""

    @abc.abstractmethod
    def decline(self, entry: Entry) -> bool:
        """Return whether it is content without ``entry`` if that cannot be had."""


class Replica:
    """One key's bytes in one tier, and who is busy with them.

    Attributes:
        entry: whose bytes.
        place: names them for those who have them, whatever key they are under.
        tier: index of the tier.
        charge_bytes: what the tier is charged while the replica is not ``ABSENT``; once its copy has
            ended, what the medium really holds for it.
        leases: how many leases hold it; it is not dropped while there are any.
        readers: how many copies and gets read it; it is not freed while there are any.
        copy: the number of the copy that writes it, if one does; it is not freed meanwhile.
        promises: how many commits and flushes count on finding it; it is not freed while there are any.
    """

    __slots__ = (
        "charge_bytes",
        "copy",
        "entry",
        "leases",
        "place",
        "promises",
        "readers",
        "state",
        "tier",
    )

    def __init__(self, entry: Entry, place: ReplicaId, charge_bytes: int) -> None:
        self.entry = entry
        self.place = place
        self.tier = place.tier
        self.charge_bytes = charge_bytes
        self.state = ReplicaState.ABSENT
        self.leases = 0
        self.readers = 0
        self.copy: int | None = None
        self.promises = 0

    @property
    def key(self) -> str:
        """The key whose bytes these are."""
        return self.entry.key

    @property
    def is_idle(self) -> bool:
        """Whether nobody holds, reads or writes the bytes, so that they may be freed."""
        return not (self.leases or self.readers or self.copy is not None)

    def step(self, step: ReplicaStep) -> None:
        """Change the state.

        Raises:
            InvariantError: the table has no such step.
        """
        try:
            self.state = TABLE[self.state, step]
        except KeyError:
            raise InvariantError(
                f"replica of {self.key!r} in tier {self.tier} cannot take {step.name} "
                f"while {self.state.name}. This is a bug in tierstore.",
                key=self.key,
            ) from None


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
        self.requests: dict[int, Watcher] = {}
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
        self.watchers: Mapping[int, Watcher] = NOTHING
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
