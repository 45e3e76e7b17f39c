"""What survives a power loss: which replicas the last commit named, and which the next one will.

1. *Promised.*  A replica that the last good commit named is promised, as is one that a commit under way
   names, or a failed one since (it may have reached the medium), or that a flush has found.  Its bytes
   are not freed while it is; if they are of no other use, the replica is RETAINED.
2. *One moment.*  A flush is about the store as it was at one moment after its call: the keys that were there
   and their bytes.  Whoever writes to a key waits until these are on the durable tier; who drops or replaces
   it does not, and the bytes stay until then.
3. *In their order.*  No commit names what an older flush has found in place of what a newer one committed.
   A flush of every key takes older ones along, for its moment is one of theirs, too.  One of some keys may be
   committed before an older one that is still copying, which then begins again with a moment of now.
4. *Some keys.*  A flush of some keys leaves the others as they were committed, names and bytes.  What a key
   was renamed from, or gave its name to, goes with it (`changes`), and so do keys that are gone.
5. *What changes.*  A commit speaks of the keys that it changes, and of those that failed ones since the last
   good one spoke of: the medium may have either of what these left.
6. *One at a time.*  Flushes that become ready while a commit is under way share the next one.
7. *Kept.*  A flush may keep what is found under its keys until then, beside what is found from then on,
   under names that begin otherwise.  The first that does so counts: what is kept stays, whatever is flushed,
   until a flush releases it.  Names that are kept are no keys: who opens the tier again finds them as keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from tierstore.core.changes import Changes, Image
from tierstore.core.copy_scheduler import CopyScheduler
from tierstore.core.entry import Entry, EntryLife, Replica
from tierstore.core.messages import (
    Commit,
    CommitDone,
    FlushRequested,
    Grant,
    Granted,
    RecordsRecovered,
    Settle,
)
from tierstore.core.requests import Desk, FlushRequest, FlushStage, granted, refuse_if_written
from tierstore.core.tier_state import advice
from tierstore.errors import CapacityError, StoreClosed, TierStoreError, UsageError
from tierstore.units import format_bytes

Kept = dict[str, Replica | None]
"""What is kept under names beside the keys; ``None``: nothing."""


@dataclass(slots=True)
class Difference:
    """What a commit changes.

    Attributes:
        names: the keys, with what is to be found under each; ``None``: nothing.
        uids: by key, of the entries whose bytes these are.
        kept: names beside the keys, with what is kept under each; ``None``: nothing.
    """

    names: dict[str, Replica | None] = field(default_factory=dict)
    uids: dict[str, int] = field(default_factory=dict)
    kept: Kept = field(default_factory=dict)

    def add(self, flush: FlushRequest) -> None:
        """Let what a flush has found be found."""
        for key, entry in flush.names.items():
            if entry is None:
                self.names[key] = None
                self.uids.pop(key, None)
            else:
                self.names[key] = flush.found[entry.uid]
                self.uids[key] = entry.uid

    def keep(self, flush: FlushRequest, committed: Image, kept: Image) -> None:
        """Let what is found until now, and would not be any more, be kept as a flush says."""
        for name in (*kept, *self.kept) if flush.release else ():
            if name.startswith(flush.release):
                self.kept[name] = None
        named = set(map(id, self.replicas())) if flush.keep else set()
        for key in flush.names if flush.keep else ():
            former, name = committed.get(key), flush.keep + key
            if former is None or id(former) in named or key.startswith(flush.keep):
                continue
            if self.kept.get(name, kept.get(name)) is None:
                self.kept[name] = former

    def on_medium(self) -> dict[str, Replica | None]:
        """Return everything that it is about: no name is both a key and kept."""
        return self.names | {
            name: self.names.get(name) if replica is None else replica for name, replica in self.kept.items()
        }

    def replicas(self) -> list[Replica]:
        """Return what it names."""
        return [replica for replica in self.on_medium().values() if replica is not None]


class DurableCommits:
    """The commits of the one durable tier, and the flushes that wait for them.

    Attributes:
        tier: its index; ``None``: no tier is durable.
        changes: what the last good commit named, and which keys differ from it.
        kept: what it kept, by its names.
        underway: what the commit under way changes.
        doubtful: the replicas, by number, that commits named which failed since the last good one: any of
            those may be what is found.  Each is there once, however many named it, so they are at most as
            many as the tier holds.
    """

    def __init__(self, scheduler: CopyScheduler) -> None:
        self.scheduler = scheduler
        self.books = scheduler.books
        self.tier = next(
            (tier_state.index for tier_state in self.books.tier_states if tier_state.tier.is_durable), None
        )
        self.changes = Changes(self.books, self.tier)
        self.kept: Image = {}
        self.underway: Difference | None = None
        self.doubtful: dict[int, Replica] = {}
        self._unsure: dict[str, None] = {}  # keys that failed commits were about
        self._unsure_kept: dict[str, None] = {}  # and names
        self._flushes: list[FlushRequest] = []  # in the order of their moments, after those that await theirs
        self._served: list[FlushRequest] = []  # by the commit under way
        self._numbers = count(1)

    @property
    def committed(self) -> Image:
        """What the last good commit named."""
        return self.changes.committed

    @property
    def durable_tier(self) -> int:
        """The index of the durable tier.

        Raises:
            UsageError: there is none.
        """
        if self.tier is None:
            raise UsageError("flush needs a durable tier; every tier of this store is scratch space.")
        return self.tier

    @property
    def flushes(self) -> Sequence[FlushRequest]:
        """All that have not ended."""
        return self._flushes + self._served

    def recover(self, event: RecordsRecovered) -> None:
        """Enter what an earlier process made durable.

        Raises:
            CapacityError: the tier's quota cannot hold it.
        """
        tier_state = self.books.tier_states[event.tier]
        needed = sum(found.charge_bytes for found in event.found)
        if needed > tier_state.limit_bytes:
            raise CapacityError(
                f"{len(event.found)} keys of {format_bytes(needed)} were found in "
                f"{tier_state.tier.name!r}, whose capacity is {format_bytes(tier_state.limit_bytes)}. "
                f"{advice([tier_state], 'Raise')}",
                tier=tier_state.tier.name,
                needed_bytes=needed,
                free_bytes=tier_state.limit_bytes,
            )
        replicas = self.books.recover(event.tier, event.found)
        self.committed.update((replica.entry.key, replica) for replica in replicas)
        self.books.out.append(Grant(event.request, list(map(granted, replicas))))

    # --- moments ------------------------------------------------------------------------------

    def begin(self, event: FlushRequested, entries: Sequence[Entry] | None, desk: Desk) -> None:
        """Begin a flush; `start` takes its moment once puts that it is about have ended.

        Args:
            event: what was asked for.
            entries: those that were named; ``None``: every one.
            desk: for the flush.

        Raises:
            UsageError: no tier is durable.
            LeaseError: somebody writes to one of the keys.
        """
        tier = self.durable_tier
        index = self.books.index
        if entries is None:
            entries = [index[key] for key in self.changes.dirty() if key in index]
        for entry in entries:
            refuse_if_written(entry, "flush")
        coming = [entry for entry in entries if entry.life is EntryLife.COMING]
        flush = FlushRequest(desk, coming, tier, event)
        self._flushes.append(flush)
        self.scheduler.begin(flush)

    def start(self) -> bool:
        """Take moments, and begin the next commit if a flush is ready for it and none is under way.

        Between events only: in the middle of one, keys may be half renamed.

        Returns:
            Whether something was begun that is to be settled.
        """
        if not self._flushes:
            return False
        if self.scheduler.is_closed:
            self.cancel(StoreClosed("the store was closed while this waited."))
            return False
        has_taken = False
        for flush in [
            each for each in self._flushes if each.stage is FlushStage.AWAITING and not each.pending
        ]:
            self._take_moment(flush)
            has_taken = True
        self._flushes = [each for each in self._flushes if each.stage is not FlushStage.ENDED]
        if self.underway is None and not has_taken:
            has_taken = self._commit_next()
        return has_taken

    def _take_moment(self, flush: FlushRequest) -> None:
        """Let a flush be about the store as it is now, and bring what it is about to the durable tier."""
        index = self.books.index
        keys = self._keys_of(flush)
        entries = {key: index.get(key) for key in keys}
        names = {
            key: None if entry is None or entry.life is not EntryLife.LIVE else entry
            for key, entry in entries.items()
        }
        self._flushes.remove(flush)
        self._flushes.append(flush)
        try:
            self._check_names(flush, names)
            flush.take(names)
            self.scheduler.begin(flush)
        except TierStoreError as error:
            if flush.pending:
                self.scheduler.abandon(flush, error)
            else:
                flush.undo()
                flush.fail(error)

    def _check_names(self, flush: FlushRequest, names: Mapping[str, Entry | None]) -> None:
        """Refuse what would be found under a key and be kept at the same time.

        Raises:
            UsageError: it says which key.
        """
        twice = [key for key, entry in names.items() if entry is not None and key in self.kept]
        if flush.keep:
            twice += [key for key in names if self._is_key(flush.keep + key, names)]
            twice += self._renamed(names)
        if twice:
            raise UsageError(
                f"{twice[0]!r} cannot be flushed: what the last flush has left would be found under two "
                "names, as it was kept or got another name since. Release what is kept first.",
                key=twice[0],
            )

    def _is_key(self, name: str, names: Mapping[str, Entry | None]) -> bool:
        return name in self.books.index or (name in self.committed and name not in names)

    def _renamed(self, names: Mapping[str, Entry | None]) -> list[str]:
        """Return the keys whose committed bytes are another key's now."""
        name_of = {entry.uid: key for key, entry in names.items() if entry is not None}
        found = {key: self.committed[key] for key in names if key in self.committed}
        return [
            key
            for key, replica in found.items()
            if name_of.get(replica.entry.uid, key) != key
            and replica.entry.replicas.get(self.durable_tier) is replica
        ]

    def _keys_of(self, flush: FlushRequest) -> list[str]:
        if flush.keys is None:
            return self.changes.dirty()
        return self.changes.joined(flush.keys, [each.names for each in self.flushes])

    # --- commits ------------------------------------------------------------------------------

    def _commit_next(self) -> bool:
        """Begin a commit of what is ready; return whether an older flush began again."""
        last = max((n for n, each in enumerate(self._flushes) if _is_ready_for_all(each)), default=-1)
        if last >= 0:
            # Its moment is one of all the older ones', too.
            older = [each for each in self._flushes[: last + 1] if each.stage is not FlushStage.AWAITING]
            self._commit(older)
            return True
        chosen, overtaken = self._choose()
        if chosen:
            self._commit(chosen)
        for flush in overtaken:  # at once: nobody writes now
            flush.rounds -= 1
            self.scheduler.forget(flush)
            flush.undo()
            self._take_moment(flush)
        return bool(chosen)

    def _choose(self) -> tuple[list[FlushRequest], list[FlushRequest]]:
        """Return the flushes of some keys that may be committed now, and older ones that begin again then."""
        chosen: list[FlushRequest] = []
        overtaken: list[FlushRequest] = []
        waiting: list[FlushRequest] = []  # older than the one that is looked at
        for flush in self._flushes:
            if flush.stage is FlushStage.AWAITING:
                continue
            before = [each for each in waiting if _shares_keys(each, flush)]
            if flush.stage is FlushStage.READY and all(map(self._may_begin_again, before)):
                chosen.append(flush)
                overtaken += before
                waiting = [each for each in waiting if each not in before]
            else:
                waiting.append(flush)
        return chosen, overtaken

    def _may_begin_again(self, flush: FlushRequest) -> bool:
        """Whether a flush may have another moment: now, as nobody writes to what it is about."""
        index = self.books.index
        entries = [index[key] for key in self._keys_of(flush) if key in index]
        return flush.rounds > 0 and all(entry.writer is None for entry in entries)

    def _commit(self, flushes: list[FlushRequest]) -> None:
        """Begin a commit of what some flushes are about; of those that still copy, a later one of them is."""
        difference = Difference(
            {key: self.committed.get(key) for key in self._unsure},
            self.changes.uids(self._unsure),
            {name: self.kept.get(name) for name in self._unsure_kept},
        )
        for flush in flushes:
            if flush.stage is FlushStage.READY:
                difference.add(flush)
            else:
                self.scheduler.forget(flush)
            flush.stage = FlushStage.ENDED
        for flush in flushes:
            difference.keep(flush, self.committed, self.kept)
        self._flushes = [each for each in self._flushes if each.stage is not FlushStage.ENDED]
        self._served, self.underway = flushes, difference
        for replica in difference.replicas():
            self.books.promise(replica)
        tier_state = self.books.tier_states[self.durable_tier]
        tier_state.is_committing = True
        told = difference.on_medium()
        replicas = [
            Granted(key, replica.place, replica.entry.spec)
            for key, replica in told.items()
            if replica is not None
        ]
        gone = [key for key, replica in told.items() if replica is None]
        self.books.out.append(Commit(next(self._numbers), tier_state.index, replicas, gone))

    def done(self, event: CommitDone) -> None:
        """The commit under way has ended."""
        assert self.underway is not None
        tier_state = self.books.tier_states[self.durable_tier]
        tier_state.is_committing = False
        self.books.restless.add(tier_state.index)
        difference, self.underway = self.underway, None
        served, self._served = self._served, []
        if event.error is None:
            former = [self.committed[key] for key in difference.names if key in self.committed]
            former += [self.kept[name] for name in difference.kept if name in self.kept]
            former += self.doubtful.values()
            self.doubtful, self._unsure, self._unsure_kept = {}, {}, {}
            self._enter_kept(difference.kept)
            self.changes.commit(difference.names, difference.uids, [each.names for each in self._flushes])
            for replica in former:
                self.books.unpromise(replica)
        else:
            self._doubt(difference)
        for flush in served:
            flush.undo()
            self.books.out.append(Settle(flush.number, event.error))

    def _enter_kept(self, kept: Kept) -> None:
        for name, replica in kept.items():
            if replica is None:
                self.kept.pop(name, None)
            else:
                self.kept[name] = replica

    def _doubt(self, difference: Difference) -> None:
        """What a commit named that failed may have reached the medium: one promise of each is enough."""
        self._unsure.update(dict.fromkeys(difference.names))
        self._unsure_kept.update(dict.fromkeys(difference.kept))
        for key in difference.names:
            self.changes.note(key)  # as it may be found otherwise
        for replica in difference.replicas():
            if replica.place.replica in self.doubtful:
                self.books.unpromise(replica)
            else:
                self.doubtful[replica.place.replica] = replica

    def cancel(self, error: BaseException) -> None:
        """Fail the flushes that no commit under way is about."""
        flushes, self._flushes = self._flushes, []
        for flush in flushes:
            if flush.stage is not FlushStage.ENDED:
                self.scheduler.forget(flush)
                flush.undo()
                flush.fail(error)


def _is_ready_for_all(flush: FlushRequest) -> bool:
    return flush.keys is None and flush.stage is FlushStage.READY


def _shares_keys(one: FlushRequest, other: FlushRequest) -> bool:
    return one.keys is None or not one.names.keys().isdisjoint(other.names)
