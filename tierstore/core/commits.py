"""What survives a power loss: which replicas the last commit named, and which the next one will.

1. *Promised.*  A replica that the last good commit named is promised, as is one that a commit under way
   names, or a failed one since (it may have reached the medium), or that a flush has found.  Its bytes
   are not freed while it is; if they are of no other use, the replica is RETAINED.
2. *One image.*  A commit names one replica for each key: all that survives, in one step.
3. *One at a time.*  Flushes that have found everything while a commit is under way share the next one.
4. *No key is torn from its like.*  A flush of every key commits when it has a version of every key that is
   there at that moment, so that keys which were renamed together survive together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from tierstore.core.entry import Entry, Life
from tierstore.core.messages import Commit, CommitDone, Grant, Granted, Recovered, Settle
from tierstore.core.moving import Moving
from tierstore.core.requests import Flush, granted
from tierstore.core.residency import Replica
from tierstore.errors import CapacityError, StoreClosed, TierStoreError, UsageError
from tierstore.units import format_bytes

Image = dict[str, Replica]
"""What survives: one replica for each key."""


class Commits:
    """The commits of the one durable tier, and the flushes that wait for them.

    Attributes:
        tier: its index; ``None``: no tier is durable.
        committed: what the last good commit named.
        underway: what the commit under way names.
        doubtful: the replicas, by number, that commits named which failed since the last good one: any of
            those may be what is found.  Each is there once, however many named it, so they are at most as
            many as the tier holds.
    """

    def __init__(self, moving: Moving) -> None:
        self.moving = moving
        self.books = moving.books
        self.tier = next((shelf.index for shelf in self.books.shelves if shelf.tier.is_durable), None)
        self.committed: Image = {}
        self.underway: Image | None = None
        self.doubtful: dict[int, Replica] = {}
        self._flushes: list[Flush] = []  # that wait for the next commit
        self._served: list[Flush] = []  # by the commit under way
        self._numbers = count(1)

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
    def flushes(self) -> Sequence[Flush]:
        """Those that have found everything, and wait for a commit."""
        return self._flushes + self._served

    def recover(self, event: Recovered) -> None:
        """Enter what an earlier process made durable.

        Raises:
            CapacityError: the tier's quota cannot hold it.
        """
        shelf = self.books.shelves[event.tier]
        needed = sum(found.charge_bytes for found in event.found)
        if needed > shelf.limit_bytes:
            raise CapacityError(
                f"{len(event.found)} keys of {format_bytes(needed)} were found in {shelf.tier.name!r}, whose "
                f"capacity is {format_bytes(shelf.limit_bytes)}. Raise it.",
                tier=shelf.tier.name,
                needed_bytes=needed,
                free_bytes=shelf.limit_bytes,
            )
        replicas = self.books.recover(event.tier, event.found)
        self.committed.update((replica.entry.key, replica) for replica in replicas)
        self.books.out.append(Grant(event.request, list(map(granted, replicas))))

    def begin(self, flush: Flush) -> None:
        """A flush has found all that it was asked for: it waits for `start`."""
        self._flushes.append(flush)

    def _look_again(self, flush: Flush, missing: Sequence[Entry]) -> None:
        """Let a flush bring keys that have come since it began."""
        if not flush.rounds:
            flush.undo()
            flush.fail(
                UsageError("keys are put faster than a flush can bring them to the durable tier: pause.")
            )
            return
        flush.rounds -= 1
        flush.pending = {entry.uid: entry for entry in missing}
        try:
            self.moving.begin(flush)
        except TierStoreError as error:
            self.moving.abandon(flush, error)

    def _missing(self, flush: Flush) -> list[Entry]:
        """Return the keys that are there by now and of which the flush has no version."""
        index = self.books.index
        entries = index.values() if flush.keys is None else [index[key] for key in flush.keys if key in index]
        return [
            entry
            for entry in entries
            if entry.life is Life.LIVE and entry.uid not in flush.found and not entry.is_settled(flush.tier)
        ]

    def start(self) -> bool:
        """Begin the next commit, if somebody waits for it and none is under way.

        Between events only: in the middle of one, keys may be half renamed.

        Returns:
            Whether a flush looks for more, which is to be settled.
        """
        if self.underway is not None or not self._flushes:
            return False
        if self.moving.is_closed:
            self.cancel(StoreClosed("the store was closed while this waited."))
            return False
        flushes, self._flushes = self._flushes, []
        ready: list[Flush] = []
        for flush in flushes:
            if missing := self._missing(flush):
                self._look_again(flush, missing)
            else:
                ready.append(flush)
        if ready:
            self._commit(ready)
        return len(ready) < len(flushes)

    def _commit(self, flushes: list[Flush]) -> None:
        self._served = flushes
        self.underway = image = self._image(self._served)
        for replica in image.values():
            self.books.promise(replica)
        shelf = self.books.shelves[self.durable_tier]
        shelf.is_committing = True
        replicas = [Granted(key, replica.place, replica.entry.spec) for key, replica in image.items()]
        self.books.out.append(Commit(next(self._numbers), shelf.index, replicas))

    def _image(self, flushes: Sequence[Flush]) -> Image:
        """Decide what survives: a key's present bytes, those that were found, or what survived before."""
        is_whole = None in [flush.keys for flush in flushes]
        names = {key for flush in flushes for key in flush.keys or ()}
        found = {uid: replica for flush in flushes for uid, replica in flush.found.items()}
        former = {id(replica) for replica in self.committed.values()}
        image: Image = {}
        for key, entry in self.books.index.items():
            if entry.life is not Life.LIVE:
                continue
            replica = entry.replicas[self.durable_tier] if entry.is_settled(self.durable_tier) else None
            if is_whole or key in names or entry.uid in found:
                replica = replica or found.get(entry.uid)
            elif id(replica) not in former:
                replica = None
            if replica is not None:
                image[key] = replica
        self._keep_former(image)
        return image

    def _keep_former(self, image: Image) -> None:
        """Let keys without bytes of their own survive as before, unless those bytes have another key now."""
        used = {id(replica) for replica in image.values()}
        for key, replica in self.committed.items():
            entry = self.books.index.get(key)
            if key not in image and id(replica) not in used and entry is not None and entry.life is Life.LIVE:
                image[key] = replica

    def done(self, event: CommitDone) -> None:
        """The commit under way has ended."""
        assert self.underway is not None
        shelf = self.books.shelves[self.durable_tier]
        shelf.is_committing = False
        self.books.restless.add(shelf.index)
        image, self.underway = self.underway, None
        served, self._served = self._served, []
        if event.error is None:
            former = [*self.committed.values(), *self.doubtful.values()]
            self.committed, self.doubtful = image, {}
            for replica in former:
                self.books.unpromise(replica)
        else:
            self._doubt(image)
        for flush in served:
            flush.undo()
            self.books.out.append(Settle(flush.number, event.error))

    def _doubt(self, image: Image) -> None:
        """What a commit named that failed may have reached the medium: one promise of each is enough."""
        for replica in image.values():
            if replica.place.replica in self.doubtful:
                self.books.unpromise(replica)
            else:
                self.doubtful[replica.place.replica] = replica

    def cancel(self, error: BaseException) -> None:
        """Fail the flushes that wait for a commit which is not under way."""
        flushes, self._flushes = self._flushes, []
        for flush in flushes:
            flush.undo()
            flush.fail(error)
