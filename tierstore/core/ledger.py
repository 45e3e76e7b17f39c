"""The books: told what happened, answers with what to do.

A `Ledger` is a plain, deterministic object without torch, threads, clock or files.  `apply` takes an
event and returns commands; nothing else changes it.  The rules it keeps, all verified by `check`:

1. *Last copy.*  A live key always has a READY replica.  Dropping the last is refused unless the key
   itself is dropped.
2. *Charged until freed.*  A tier's charged bytes are the sum over replicas that are not ABSENT and
   never exceed its quota.  A replica is charged its whole size until its copy has ended, and from
   then on what the medium says that it takes.
3. *Single flight.*  At most one copy writes a replica; later wants join it.
4. *Wait for hardware, never for people.*  A want waits for copies and drains only; if only leases
   stand in the way it is refused at once, naming the holders.
5. *First come, first served*; demand before prefetch before write-back.
6. *Failure is an event.*  It fails the wants that waited for it; the source replica is unharmed.
7. *Write leases invalidate.*  They are exclusive; when one that wrote is released, the other
   replicas drop.
8. *A clean replica is dropped, not copied.*
9. *What a commit named stays* until another, which does not name it, has ended well (`commits`).
10. *A flush is about one moment*: what it is about stays as it is until it has reached the durable tier.

Room is taken from the fastest tier down: a want holds its room above while it waits for room below,
and evictions only go down, so that waits cannot form a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tierstore.core import messages as m
from tierstore.core.audit import audit
from tierstore.core.commits import DurableCommits
from tierstore.core.copy_scheduler import CopyScheduler
from tierstore.core.entry import Entry, EntryLife, Replica, Want
from tierstore.core.eviction import Policy
from tierstore.core.inflight import MOST_IN_FLIGHT
from tierstore.core.model import Tier
from tierstore.core.renaming import can_split, check_names, is_split_to_wait
from tierstore.core.requests import (
    EvictRequest,
    FetchRequest,
    FlushRequest,
    LeaseRequest,
    PutRequest,
    ReadRequest,
    Request,
    granted,
    refuse_if_leased,
    refuse_if_written,
)
from tierstore.core.tier_state import advice
from tierstore.errors import (
    CapacityError,
    KeyExists,
    KeyNotFound,
    LeaseError,
    StoreClosed,
    TierStoreError,
    UsageError,
)
from tierstore.units import format_bytes

DEFAULT_WINDOW_BYTES = 256 * 1024**2
DEFAULT_STRIDE = 2 * MOST_IN_FLIGHT  # those in flight, and those that are next or give their room back


_REQUESTS = frozenset(
    {
        m.PutRequested,
        m.LeaseRequested,
        m.ReadRequested,
        m.FetchRequested,
        m.EvictRequested,
        m.FlushRequested,
        m.DropRequested,
        m.SplitRequested,
        m.RenameRequested,
        m.ResizeRequested,
    }
)
"""What is refused once the store closes: nobody would answer it."""


class Ledger:
    """The decisions of one store.  Not thread-safe: the engine holds its lock around every call.

    Args:
        tiers: fastest first.
        policy: who is evicted next.
        window_bytes: how many bytes may be in flight in each direction.
        stride: how many keys of one request may be on their way at a time.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        policy: Policy,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        stride: int = DEFAULT_STRIDE,
    ) -> None:
        self.scheduler = CopyScheduler(tiers, policy, window_bytes, stride)
        self.books = self.scheduler.books
        self.commits = DurableCommits(self.scheduler)
        self._leases: dict[int, LeaseRequest] = {}
        self._reads: dict[int, Replica] = {}
        self._closing: int | None = None
        self._splits: list[m.SplitRequested] = []  # that wait for copies
        self._handlers: dict[type, Callable[[Any], None]] = {
            m.PutRequested: self._put,
            m.LeaseRequested: self._lease,
            m.LeaseReleased: self._release,
            m.ReadRequested: self._read,
            m.ReadDone: self._read_done,
            m.FetchRequested: self._fetch,
            m.EvictRequested: self._evict,
            m.FlushRequested: self._flush,
            m.RecordsRecovered: self.commits.recover,
            m.DropRequested: self._drop,
            m.SplitRequested: self._split,
            m.RenameRequested: self._rename,
            m.ResizeRequested: self.scheduler.resizes.begin,
            m.CloseRequested: self._close,
            m.PlanFollowed: self._follow,
            m.Advanced: self._advance,
            m.CopyOrdered: self.scheduler.copy_ordered,
            m.CopyRefused: self.scheduler.copy_refused,
            m.CopyDone: self._copy_done,
            m.CommitDone: self.commits.done,
            m.Freed: self._freed,
        }

    def apply(self, *events: m.Event) -> list[m.Command]:
        """Take in what happened; return what to do about it, in this order.

        Several at a time are what the hardware did: a request comes alone, so that it can be refused.

        Raises:
            UsageError: the request is wrong as things are; nothing was changed.
            StoreClosed: a request came after the store began to close.
            CapacityError: a resize that leases forbid; nothing was changed.
            InvariantError: a bug: the event does not fit the books.
        """
        books, scheduler = self.books, self.scheduler
        for event in events:
            if scheduler.is_closed and type(event) in _REQUESTS:
                raise StoreClosed("the store is closed.")
            books.tick += 1
            self._handlers[type(event)](event)
        if books.changed or books.restless or scheduler.striding or scheduler.parting:
            scheduler.run_to_rest()
        while self.commits.start():
            self.scheduler.run_to_rest()
        if self._closing is not None:
            self._finish_closing()
        out, books.out = books.out, []
        return out

    # --- requests -----------------------------------------------------------------------------

    def _entry(self, key: str) -> Entry:
        try:
            return self.books.index[key]
        except KeyError:
            raise KeyNotFound(
                f"no key {key!r} in the store: it was never put, or it was dropped.", key=key
            ) from None

    def _entries(self, keys: Sequence[str]) -> list[Entry]:
        return [self._entry(key) for key in dict.fromkeys(keys)]

    def _put(self, event: m.PutRequested) -> None:
        existing = self.books.index.get(event.key)
        if existing is not None and not event.replace:
            raise KeyExists(
                f"{event.key!r} is there already. Drop it, or use put(..., replace=True) to replace it.",
                key=event.key,
            )
        if existing is not None:
            refuse_if_written(existing, "replace")
        tiers = range(len(self.books.tier_states)) if event.tier is None else (event.tier,)
        possible = [t for t in tiers if self._can_ever_hold(t, event.nbytes)]
        if not possible:
            raise self._too_large(event, tiers)
        entry = self.books.new_entry(event.key, event.nbytes, event.spec)
        self.note_change(event.key)
        if existing is None:
            self.books.index[event.key] = entry
        self.scheduler.begin(PutRequest(self, event.request, entry, possible))

    def _can_ever_hold(self, tier: int, nbytes: int) -> bool:
        tier_state = self.books.tier_states[tier]
        return tier_state.charge(nbytes) <= tier_state.limit_bytes

    def _too_large(self, event: m.PutRequested, tiers: Sequence[int]) -> CapacityError:
        tier_states = [self.books.tier_states[tier] for tier in tiers]
        capacities = ", ".join(f"{s.tier.name!r} {format_bytes(s.limit_bytes)}" for s in tier_states)
        for tier_state in tier_states:
            tier_state.counters.refusals += 1
        return CapacityError(
            f"{event.key!r} needs {format_bytes(event.nbytes)}, more than the whole capacity of any tier "
            f"that may hold it ({capacities}). {advice(tier_states, 'Raise')}",
            key=event.key,
            tier=tier_states[-1].tier.name,
            needed_bytes=event.nbytes,
            free_bytes=tier_states[-1].free_bytes,
        )

    def _count_access(self, entries: Sequence[Entry], tier: int) -> None:
        counters = self.books.tier_states[tier].counters
        for entry in entries:
            if entry.is_ready(tier):
                counters.hits += 1
            else:
                counters.faults += 1

    def _lease(self, event: m.LeaseRequested) -> None:
        tier = self.books.tier_states[event.tier].tier
        if tier.is_durable and event.access is m.Access.WRITE:
            raise UsageError(
                f"bytes in {tier.name!r} are never changed in place, as they are to survive a power loss: "
                "lease for writing in a faster tier.",
                tier=tier.name,
            )
        entries = self._entries(event.keys)
        lease = LeaseRequest(self, event.request, entries, event.tier, event.access, event.holder)
        for entry in entries:
            lease.check(entry)
        self._count_access(entries, event.tier)
        self._end_evictions(entries, event.tier)
        self.scheduler.begin(lease)

    def _release(self, event: m.LeaseReleased) -> None:
        lease = self._leases.pop(event.request)
        is_written = event.written and lease.access is m.Access.WRITE
        replicas = list(lease.held)
        lease.undo()
        for replica in replicas:
            entry = replica.entry
            if entry.life is EntryLife.GONE:
                continue
            if is_written:
                self.books.note(entry, "written", replica.tier)
                for other in entry.ready():
                    if other is not replica:
                        self.books.drop(other)

    def _read(self, event: m.ReadRequested) -> None:
        read = ReadRequest(self, event.request, [self._entry(event.key)])
        self.scheduler.begin(read)

    def _read_done(self, event: m.ReadDone) -> None:
        replica = self._reads.pop(event.request)
        replica.readers -= 1
        self.books.touch(replica)
        self.books.free_if_idle(replica)
        if replica.entry.watchers:
            self.books.changed[replica.entry.uid] = replica.entry

    def _fetch(self, event: m.FetchRequested) -> None:
        entries = self._entries(event.keys)
        if event.urgency is not m.Urgency.PREFETCH:
            self._count_access(entries, event.tier)
        else:
            # Advice about a key that is being written is advice that comes too late.
            entries = [entry for entry in entries if entry.writer is None]
        self._end_evictions(entries, event.tier)
        if all(entry.is_ready(event.tier) for entry in entries):  # as most advice finds it
            for entry in entries:
                self.books.touch(entry.replicas[event.tier])
            self.books.out.append(m.Settle(event.request))
            return
        self.scheduler.begin(FetchRequest(self, event.request, entries, event.tier, event.urgency))

    def _end_evictions(self, entries: Sequence[Entry], tier: int) -> None:
        """Whoever asks last is heard: a key that is wanted in ``tier`` is no longer to leave it.

        Otherwise the two would undo each other's work for ever.
        """
        for entry in entries:
            for request in list(entry.watchers.values()):
                if isinstance(request, EvictRequest) and request.targets[entry.uid] > tier:
                    name = self.books.tier_states[tier].tier.name
                    wanted = LeaseError(
                        f"{entry.key!r} is wanted in {name!r} again: it stays.", key=entry.key
                    )
                    self.scheduler.abandon(request, wanted)

    def _evict(self, event: m.EvictRequested) -> None:
        targets: dict[Entry, int] = {}
        for entry in self._entries(event.keys):
            to = event.to
            if to is None:
                fastest = min(entry.replicas, default=0)
                to = min(fastest + 1, len(self.books.tier_states) - 1)
            targets[entry] = to
        self.scheduler.begin(EvictRequest(self, event.request, targets))

    def _flush(self, event: m.FlushRequested) -> None:
        entries = None if event.keys is None else self._entries(event.keys)
        self.commits.begin(event, entries, self)

    def _drop(self, event: m.DropRequested) -> None:
        entries = self._entries(event.keys)
        for entry in entries:
            refuse_if_leased(entry, "drop")
        for entry in entries:
            gone = KeyNotFound(f"{entry.key!r} was dropped while it was waited for.", key=entry.key)
            self._bury(entry, gone)

    def _split(self, event: m.SplitRequested) -> None:
        lease = self._leases[event.lease]
        if lease.access is not m.Access.WRITE:
            raise UsageError("only a lease for writing can be split: lease(..., write=True).")
        replicas = [replica for replica in lease.held if replica.place in event.names]
        names = {replica.key: event.names[replica.place] for replica in replicas}
        check_names(self.books, names, replace=False)
        if is_split_to_wait(replicas):
            self._splits.append(event)
            return
        if not all(can_split(replica) for replica in replicas):
            self.books.out.append(m.Settle(event.request))
            return
        for replica in replicas:
            self.note_change(names[replica.key])
            self.books.split(replica, names[replica.key])
        self.books.out.append(m.Grant(event.request, [granted(replica) for replica in replicas]))

    def _copy_done(self, event: m.CopyDone) -> None:
        self.scheduler.copy_done(event)
        if self._splits:
            self._split_again(has_failed=event.error is not None)

    def _split_again(self, *, has_failed: bool) -> None:
        """Look at splits that wait for copies: at those of a copy that failed for the last time."""
        waiting, self._splits = self._splits, []
        for event in waiting:
            if has_failed or event.lease not in self._leases:
                self.books.out.append(m.Settle(event.request))
                continue
            try:
                self._split(event)
            except TierStoreError as error:  # a name was taken meanwhile
                self.books.out.append(m.Settle(event.request, error))

    def _rename(self, event: m.RenameRequested) -> None:
        check_names(self.books, event.names, replace=event.replace)
        former = [self.books.index[name] for name in event.names.values() if name in self.books.index]
        for entry in former:
            refuse_if_leased(entry, "replace")
        entries = [(self._entry(key), name) for key, name in event.names.items()]
        for entry in former:
            self._bury(
                entry, KeyNotFound(f"{entry.key!r} was replaced while it was waited for.", key=entry.key)
            )
        for entry, name in entries:
            self.note_change(entry.key)
            self.note_change(name)
            self.books.rename(entry, name)

    def _bury(self, entry: Entry, error: BaseException) -> None:
        """An entry is nobody's: fail who waits for it; its replicas drain once no flush needs them."""
        self.note_change(entry.key)
        entry.life = EntryLife.PARTING
        if self.books.index.get(entry.key) is entry:
            del self.books.index[entry.key]
        self.commits.changes.note_end(entry)
        for request in list(entry.watchers.values()):
            if not isinstance(request, FlushRequest):
                self.scheduler.abandon(request, error)
            elif not request.keeps_bytes:
                self.scheduler.meet(request, entry)
        if not entry.is_kept:
            self.scheduler.part_with(entry, error)

    def _follow(self, event: m.PlanFollowed) -> None:
        self.books.follow(event.plan)

    def _advance(self, event: m.Advanced) -> None:
        self.books.advance(event.position)

    def _freed(self, event: m.Freed) -> None:
        replica = self.books.replicas[event.place.replica]
        if event.error is None:
            self.books.freed(replica)
        else:
            self.books.free_failed(replica)

    # --- what requests ask of the ledger (requests.Desk) --------------------------------------

    def want(self, entry: Entry, tier: int, urgency: m.Urgency, request: Request) -> Want:
        """See to it that ``entry`` gets a READY replica in ``tier``."""
        return self.scheduler.want(entry, tier, urgency, request)

    def hold(self, replica: Replica) -> None:
        """Count one more lease on a READY replica."""
        self.books.hold(replica)

    def unhold(self, replica: Replica) -> None:
        """Count one lease less."""
        self.books.unhold(replica)

    def evict_spare(self, replica: Replica) -> None:
        """Drop a READY replica that is not the last."""
        self.books.tier_states[replica.tier].counters.evictions += 1
        self.books.drop(replica)

    def visible(self, key: str) -> Entry | None:
        """Return the entry that is found under ``key``."""
        return self.books.index.get(key)

    def publish(self, entry: Entry) -> None:
        """Let ``entry`` be found under its key; the entry it replaces goes."""
        self.note_change(entry.key)
        former = self.books.index.get(entry.key)
        entry.life = EntryLife.LIVE
        if entry.watchers:  # a flush may wait for this, and have been asked before
            self.books.changed[entry.uid] = entry
        self.books.index[entry.key] = entry
        if former is not None and former is not entry:
            replaced = KeyNotFound(f"{entry.key!r} was replaced while it was waited for.", key=entry.key)
            self._bury(former, replaced)
            self.books.index[entry.key] = entry

    def withdraw(self, entry: Entry, error: BaseException) -> None:
        """Forget an entry whose bytes will not come."""
        if entry.life is not EntryLife.GONE:
            self._bury(entry, error)

    def promise(self, replica: Replica) -> None:
        """Count on finding the replica's bytes."""
        self.books.promise(replica)

    def unpromise(self, replica: Replica) -> None:
        """Count on it no more."""
        self.books.unpromise(replica)

    def note_change(self, key: str) -> None:
        """Note that a key is about to change, for the next commit."""
        self.commits.changes.note(key)

    def emit(self, command: m.Grant | m.Settle) -> None:
        """Answer with a command."""
        self.books.out.append(command)

    def touch(self, replica: Replica) -> None:
        """Note a use of a READY replica."""
        self.books.touch(replica)

    def start_lease(self, lease: LeaseRequest) -> None:
        """Count a lease that was granted."""
        self._leases[lease.number] = lease

    def start_read(self, number: int, replica: Replica) -> None:
        """Count a read that was granted."""
        replica.readers += 1
        self._reads[number] = replica

    # --- closing ------------------------------------------------------------------------------

    def _close(self, event: m.CloseRequested) -> None:
        self._closing = event.request
        self.scheduler.is_closed = True
        closed = StoreClosed("the store was closed while this waited.")
        self.scheduler.resizes.cancel(closed)
        for entry in list(self.books.entries.values()):
            for request in list(entry.watchers.values()):
                self.scheduler.abandon(request, closed)
            self.scheduler.cancel_wants(entry, closed)
        self.commits.cancel(closed)

    def _finish_closing(self) -> None:
        is_draining = any(tier_state.draining_bytes for tier_state in self.books.tier_states)
        is_busy = self.scheduler.traffic.copies or self._reads or self.commits.underway is not None
        if self._closing is not None and not (is_busy or is_draining):
            self.books.out.append(m.Settle(self._closing))
            self._closing = None

    # --- looking ------------------------------------------------------------------------------

    def __contains__(self, key: object) -> bool:
        entry = self.books.index.get(key) if isinstance(key, str) else None
        return entry is not None and entry.life is EntryLife.LIVE

    def __len__(self) -> int:
        return sum(entry.life is EntryLife.LIVE for entry in self.books.index.values())

    def __iter__(self) -> Iterator[str]:
        return iter([key for key, entry in self.books.index.items() if entry.life is EntryLife.LIVE])

    def where(self, key: str) -> tuple[int, ...]:
        """Return the tiers that hold a READY replica, fastest first."""
        return tuple(replica.tier for replica in self._entry(key).ready())

    def spec(self, key: str) -> object:
        """Return the description that came with the key's bytes."""
        return self._entry(key).spec

    def story(self, key: str) -> list[str]:
        """Return the last events of the key, oldest first."""
        names = [tier_state.tier.name for tier_state in self.books.tier_states]
        return [f"{tick}: {what} in {names[tier]}" for tick, what, tier in self._entry(key).events()]

    def check(self) -> None:
        """Verify every rule of the books.

        Raises:
            InvariantError: one is broken.
        """
        audit(self.scheduler, self.commits)
