"""What a caller waits for, and when it is met.

A request names entries and is examined, entry by entry, in their order and whenever one of them
changes; it is met when every entry satisfies it.  `examine` returns whether its entry does, asks the
ledger for what is missing, and raises to fail the whole request.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from tierstore.core.entry import Entry, EntryLife, Replica, Want, Watcher, entered, without
from tierstore.core.messages import Access, FlushRequested, Grant, Granted, Settle, Urgency
from tierstore.errors import CapacityError, LeaseError

FLUSH_ROUNDS = 64
"""How many flushes of some keys may be committed before an older one of more, which is still copying."""


class Desk(Protocol):
    """What requests ask of the ledger."""

    def want(self, entry: Entry, tier: int, urgency: Urgency, request: Request) -> Want:
        """See to it that ``entry`` gets a READY replica in ``tier``."""
        ...

    def hold(self, replica: Replica) -> None:
        """Count one more lease on a READY replica."""
        ...

    def unhold(self, replica: Replica) -> None:
        """Count one lease less."""
        ...

    def touch(self, replica: Replica) -> None:
        """Note a use of a READY replica."""
        ...

    def evict_spare(self, replica: Replica) -> None:
        """Drop a READY replica that is not the last."""
        ...

    def visible(self, key: str) -> Entry | None:
        """Return the entry that is found under ``key``."""
        ...

    def publish(self, entry: Entry) -> None:
        """Let ``entry`` be found under its key; the entry it replaces goes."""
        ...

    def withdraw(self, entry: Entry, error: BaseException) -> None:
        """Forget an entry whose bytes will not come."""
        ...

    def start_lease(self, lease: LeaseRequest) -> None:
        """Count a lease that is granted."""
        ...

    def start_read(self, number: int, replica: Replica) -> None:
        """Count a read that is granted."""
        ...

    def promise(self, replica: Replica) -> None:
        """Count on finding the replica's bytes: they are not freed meanwhile."""
        ...

    def unpromise(self, replica: Replica) -> None:
        """Count on it no more."""
        ...

    def emit(self, command: Grant | Settle) -> None:
        """Answer with a command."""
        ...

    def note_change(self, key: str) -> None:
        """Note that a key is about to change."""
        ...


def refuse_if_written(entry: Entry, doing: str) -> None:
    """Raise if a write lease is held on ``entry``."""
    if entry.writer is not None:
        holders = tuple(entry.holders.values())
        raise LeaseError(
            f"cannot {doing} {entry.key!r} while it is leased for writing by {', '.join(holders)}. "
            "Release that lease first.",
            key=entry.key,
            holders=holders,
        )


def refuse_if_leased(entry: Entry, doing: str, purpose: str = "") -> None:
    """Raise if any lease is held on ``entry``."""
    if entry.holders:
        holders = tuple(entry.holders.values())
        raise LeaseError(
            f"cannot {doing} {entry.key!r}{purpose} while {', '.join(holders)} lease it. "
            "Release those leases first.",
            key=entry.key,
            holders=holders,
        )


def granted(replica: Replica) -> Granted:
    """Return what a caller is told of a replica that it may use."""
    entry = replica.entry
    return Granted(entry.key, replica.place, entry.spec)


class Request(Watcher):
    """Something that a caller waits for.

    An entry without a READY replica is one whose put is under way: requests wait for it.
    """

    def __init__(self, desk: Desk, number: int, entries: Sequence[Entry]) -> None:
        self.desk = desk
        self.number = number
        self.pending = {entry.uid: entry for entry in entries}
        self.unseen: deque[Entry] | None = None

    def check(self, entry: Entry) -> None:
        """See `Watcher.check`: most requests are never wrong."""

    @property
    def keeps_bytes(self) -> bool:
        """See `Watcher.keeps_bytes`."""
        return False

    def finish(self) -> None:
        """Answer the caller: every entry satisfies the request."""
        self.desk.emit(Settle(self.number))

    def fail(self, error: BaseException) -> None:
        """Answer the caller: the request cannot be met."""
        self.desk.emit(Settle(self.number, error))

    def undo(self) -> None:
        """See `Watcher.undo`: most requests take nothing."""

    def decline(self, entry: Entry) -> bool:
        """Return whether the request is content without ``entry`` if it cannot be had."""
        del entry
        return False


class FetchRequest(Request):
    """The keys are to be READY in a tier."""

    def __init__(
        self, desk: Desk, number: int, entries: Sequence[Entry], tier: int, urgency: Urgency
    ) -> None:
        super().__init__(desk, number, entries)
        self.tier = tier
        self.urgency = urgency

    def check(self, entry: Entry) -> None:
        """See `Request.check`."""
        if not entry.is_ready(self.tier):
            refuse_if_written(entry, "fetch")

    def examine(self, entry: Entry) -> bool:
        """See `Request.examine`."""
        if entry.is_ready(self.tier):
            self.desk.touch(entry.replicas[self.tier])
            return True
        self.check(entry)
        if entry.ready():
            self.desk.want(entry, self.tier, self.urgency, self)
        return False

    def decline(self, entry: Entry) -> bool:
        """A prefetch is advice."""
        del entry
        return self.urgency is Urgency.PREFETCH


class LeaseRequest(Request):
    """The keys are to be READY in a tier, and to stay so until released."""

    def __init__(
        self, desk: Desk, number: int, entries: Sequence[Entry], tier: int, access: Access, holder: str
    ) -> None:
        super().__init__(desk, number, entries)
        self.tier = tier
        self.access = access
        self.holder = holder
        self.entries = tuple(entries)
        self.held: list[Replica] = []

    def check(self, entry: Entry) -> None:
        """See `Request.check`."""
        refuse_if_written(entry, "lease")
        if self.access is Access.WRITE:
            refuse_if_leased(entry, "lease", " for writing")

    def examine(self, entry: Entry) -> bool:
        """See `Request.examine`."""
        self.check(entry)
        if not entry.is_ready(self.tier):
            if entry.ready():
                self.desk.want(entry, self.tier, Urgency.DEMAND, self)
            return False
        if self.access is Access.WRITE:
            if not entry.may_be_written(self.tier):
                return False
            self.desk.note_change(entry.key)
            entry.writer = self.number
        self._take(entry.replicas[self.tier])
        return True

    def _take(self, replica: Replica) -> None:
        entry = replica.entry
        entry.holders = entered(entry.holders, self.number, f"lease {self.number} of {self.holder!r}")
        self.desk.hold(replica)
        self.held.append(replica)

    def finish(self) -> None:
        """See `Request.finish`."""
        if len(self.held) > 1:  # they may have come in another order
            order = {replica.entry.uid: replica for replica in self.held}
            self.held = [order[entry.uid] for entry in self.entries]
        self.desk.start_lease(self)
        self.desk.emit(Grant(self.number, [granted(replica) for replica in self.held]))

    def undo(self) -> None:
        """See `Request.undo`."""
        for replica in self.held:
            entry = replica.entry
            entry.holders = without(entry.holders, self.number)
            if entry.writer == self.number:
                entry.writer = None
            self.desk.unhold(replica)
        self.held = []


class ReadRequest(Request):
    """One key's bytes are to be read, from wherever they are."""

    replica: Replica | None = None

    def check(self, entry: Entry) -> None:
        """See `Request.check`."""
        refuse_if_written(entry, "get")

    def examine(self, entry: Entry) -> bool:
        """See `Request.examine`."""
        self.check(entry)
        ready = entry.ready()
        if not ready:
            return False
        self.replica = ready[0]
        return True

    def finish(self) -> None:
        """See `Request.finish`."""
        assert self.replica is not None
        self.desk.start_read(self.number, self.replica)
        self.desk.emit(Grant(self.number, [granted(self.replica)]))


class EvictRequest(Request):
    """The keys are to have no replica above a tier."""

    def __init__(self, desk: Desk, number: int, targets: dict[Entry, int]) -> None:
        super().__init__(desk, number, list(targets))
        self.targets = {entry.uid: tier for entry, tier in targets.items()}

    def check(self, entry: Entry) -> None:
        """See `Request.check`."""
        to = self.targets[entry.uid]
        if entry.holders and any(r.leases for tier, r in entry.replicas.items() if tier < to):
            holders = tuple(entry.holders.values())
            raise LeaseError(
                f"cannot evict {entry.key!r} while {', '.join(holders)} lease it. Release those first.",
                key=entry.key,
                holders=holders,
            )

    def examine(self, entry: Entry) -> bool:
        """See `Request.examine`."""
        to = self.targets[entry.uid]
        if min(entry.replicas, default=to) >= to:
            return True
        self.check(entry)
        ready = entry.ready()
        if not ready:
            return False
        if ready[-1].tier < to:
            self.desk.want(entry, to, Urgency.WRITE_BACK, self)
            return False
        for replica in ready:
            if replica.tier < to:
                self.desk.evict_spare(replica)
        return False


class FlushStage(enum.Enum):
    """How far a flush has come."""

    AWAITING = enum.auto()  # puts of new keys that had begun before it
    COPYING = enum.auto()  # its moment was taken: what it is about is on its way to the durable tier
    READY = enum.auto()  # for a commit
    ENDED = enum.auto()  # a commit has it, or it failed


class FlushRequest(Request):
    """Keys are to be found, as they were at one moment, if the power fails.

    Attributes:
        tier: the durable one.
        keys: which; None: every key.
        stage: how far it has come.
        names: the keys at its moment, with the entry that each was; None: the key was not there.
        found: by the entries' uids, the replicas that a commit is to name.
        rounds: how many flushes of some of its keys may still be committed before it.
        keep: see `FlushRequested`.
        release: see `FlushRequested`.
    """

    def __init__(self, desk: Desk, entries: Sequence[Entry], tier: int, event: FlushRequested) -> None:
        super().__init__(desk, event.request, entries)
        self.tier = tier
        self.keys = event.keys
        self.keep = event.keep
        self.release = event.release
        self.stage = FlushStage.AWAITING
        self.names: dict[str, Entry | None] = {}
        self.found: dict[int, Replica] = {}
        self.rounds = FLUSH_ROUNDS

    @property
    def keeps_bytes(self) -> bool:
        """See `Request.keeps_bytes`."""
        return self.stage is FlushStage.COPYING

    def take(self, names: dict[str, Entry | None]) -> None:
        """Let this be its moment.

        Raises:
            LeaseError: somebody writes to one of the keys.
        """
        entries = [entry for entry in names.values() if entry is not None]
        for entry in entries:
            self.check(entry)
        self.stage = FlushStage.COPYING
        self.names = names
        self.pending = {entry.uid: entry for entry in entries}

    def check(self, entry: Entry) -> None:
        """See `Request.check`."""
        refuse_if_written(entry, "flush")

    def examine(self, entry: Entry) -> bool:
        """See `Request.examine`."""
        if self.stage is FlushStage.AWAITING:
            return entry.life is not EntryLife.COMING
        if entry.is_settled(self.tier):
            replica = entry.replicas[self.tier]
            self.found[entry.uid] = replica
            self.desk.promise(replica)
            return True
        if entry.ready() and not entry.is_ready(self.tier):
            self.desk.want(entry, self.tier, Urgency.DEMAND, self)
        return False

    def finish(self) -> None:
        """See `Request.finish`: its moment is still to be taken, or committed."""
        if self.stage is FlushStage.COPYING:
            self.stage = FlushStage.READY

    def fail(self, error: BaseException) -> None:
        """See `Request.fail`."""
        self.stage = FlushStage.ENDED
        super().fail(error)

    def undo(self) -> None:
        """See `Request.undo`."""
        for replica in self.found.values():
            self.desk.unpromise(replica)
        self.found = {}


class PutRequest(Request):
    """A new entry's bytes are to come from the caller, into the first of ``tiers`` that has room."""

    def __init__(self, desk: Desk, number: int, entry: Entry, tiers: Sequence[int]) -> None:
        super().__init__(desk, number, [entry])
        self.entry = entry
        self.tiers = list(tiers)
        self.tier: int | None = None

    def examine(self, entry: Entry) -> bool:
        """See `Request.examine`."""
        if self.tier is None:
            self._try_next()
        if not entry.ready():
            return False
        former = self.desk.visible(entry.key)
        if former is not None and former is not entry:
            refuse_if_written(former, "replace")
        return True

    def _try_next(self) -> None:
        self.tier = self.tiers.pop(0)
        self.desk.want(self.entry, self.tier, Urgency.DEMAND, self).put = self.number

    def finish(self) -> None:
        """See `Request.finish`."""
        self.desk.publish(self.entry)
        super().finish()

    def fail(self, error: BaseException) -> None:
        """Try the next lower tier if this one has no room; else the entry vanishes."""
        if isinstance(error, CapacityError) and self.tiers and self.entry.life is EntryLife.COMING:
            self.pending = {self.entry.uid: self.entry}
            self.entry.watchers = entered(self.entry.watchers, self.number, self)
            self._try_next()
            return
        self.desk.withdraw(self.entry, error)
        super().fail(error)
