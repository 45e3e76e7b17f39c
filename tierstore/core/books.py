"""The primitive entries in the books: each keeps every sum right, and none decides anything."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from tierstore.core.entry import NOTHING, STORY_EVENTS, Entry, EntryLife, Replica
from tierstore.core.eviction import Policy
from tierstore.core.foresight import Foresight
from tierstore.core.messages import Command, Found, FreeSlot, ReplicaId
from tierstore.core.model import Plan, Tier
from tierstore.core.residency import ReplicaState, ReplicaStep
from tierstore.core.tier_state import TierState
from tierstore.errors import InvariantError


class Books:
    """Entries, replicas and the sums over them.

    Attributes:
        foresight: what will be used when.
        tier_states: one for each tier, fastest first.
        index: the LIVE entry of each key, or the COMING one of a key that is new.
        entries: every entry that has replicas, wants or a name, by uid.
        replicas: every one that is not ABSENT, by its number.
        out: the commands to answer with.
        changed: entries whose watchers are to be asked again.
        restless: tier states on which somebody may now get room.
    """

    def __init__(self, tiers: Sequence[Tier], policy: Policy) -> None:
        self.foresight = Foresight()
        self.tier_states = [
            TierState(index, tier, policy(self.foresight)) for index, tier in enumerate(tiers)
        ]
        self.index: dict[str, Entry] = {}
        self.entries: dict[int, Entry] = {}
        self.replicas: dict[int, Replica] = {}
        self.out: list[Command] = []
        self.changed: dict[int, Entry] = {}
        self.restless: set[int] = set()
        self.tick = 0
        self._uids = count(1)
        self._replica_numbers = count(1)

    def note(self, entry: Entry, what: str, tier: int) -> None:
        """Write a line of the entry's story."""
        story = entry.story
        if len(story) >= 3 * STORY_EVENTS:
            story = story[3:]
        entry.story = story + (self.tick, what, tier)  # noqa: RUF005 - unpacking takes twice as long

    def new_entry(self, key: str, nbytes: int, spec: object) -> Entry:
        """Open an entry that nobody sees yet."""
        entry = Entry(next(self._uids), key, nbytes, spec)
        self.entries[entry.uid] = entry
        return entry

    def reserve(self, entry: Entry, tier: int) -> Replica:
        """Charge room for a replica: it is FILLING."""
        tier_state = self.tier_states[tier]
        place = ReplicaId(next(self._replica_numbers), tier)
        replica = Replica(entry, place, tier_state.charge(entry.nbytes))
        replica.step(ReplicaStep.RESERVE)
        self.replicas[place.replica] = replica
        entry.replicas[tier] = replica
        tier_state.charged_bytes += replica.charge_bytes
        tier_state.filling_bytes += replica.charge_bytes
        tier_state.peak_charged_bytes = max(tier_state.peak_charged_bytes, tier_state.charged_bytes)
        self.note(entry, "reserved", tier)
        return replica

    def filled(self, replica: Replica) -> None:
        """A FILLING replica has its bytes: it is READY."""
        replica.step(ReplicaStep.FILLED)
        tier_state = self.tier_states[replica.tier]
        tier_state.filling_bytes -= replica.charge_bytes
        tier_state.ready_bytes += replica.charge_bytes
        tier_state.evictable.add(replica)
        self.note(replica.entry, "ready", replica.tier)
        self._stir(replica)

    def shrink(self, replica: Replica, charge_bytes: int) -> None:
        """A replica that is not ABSENT takes only ``charge_bytes`` of its medium: the rest is free.

        Raises:
            InvariantError: that is more than what it is charged.
        """
        less = replica.charge_bytes - charge_bytes
        if less < 0:
            raise InvariantError(
                f"{replica.key!r} takes {charge_bytes} B in tier {replica.tier}, "
                f"but was charged {replica.charge_bytes} B: its backend breaks its promise.",
                key=replica.key,
            )
        if not less:
            return
        tier_state = self.tier_states[replica.tier]
        tier_state.charged_bytes -= less
        if replica.state is ReplicaState.FILLING:
            tier_state.filling_bytes -= less
        elif replica.state is ReplicaState.READY:
            tier_state.ready_bytes -= less
        elif not replica.leases:
            tier_state.draining_bytes -= less
        if replica.leases:
            tier_state.leased_bytes -= less
        if replica.entry.uid in tier_state.leaving:
            tier_state.leaving_bytes -= less
        replica.charge_bytes = charge_bytes
        tier_state.evictable.refresh(replica)
        self.note(replica.entry, f"takes {charge_bytes} B", replica.tier)
        self._stir(replica)

    def fill_failed(self, replica: Replica, step: ReplicaStep = ReplicaStep.FAILED) -> None:
        """A FILLING replica will not get its bytes (``step`` FAILED or DROP): it drains."""
        replica.step(step)
        tier_state = self.tier_states[replica.tier]
        tier_state.filling_bytes -= replica.charge_bytes
        tier_state.draining_bytes += replica.charge_bytes
        self.note(replica.entry, step.name.lower(), replica.tier)
        self.free_if_idle(replica)
        self._stir(replica)

    def drop(self, replica: Replica) -> None:
        """Let a READY replica drain.

        Raises:
            InvariantError: it is the last of a live key, or leased and its key is not gone.
        """
        entry = replica.entry
        if entry.life is not EntryLife.GONE and (replica.leases or len(entry.ready()) == 1):
            raise InvariantError(f"dropping the last or a leased replica of {entry.key!r}", key=entry.key)
        replica.step(ReplicaStep.DROP)
        tier_state = self.tier_states[replica.tier]
        tier_state.ready_bytes -= replica.charge_bytes
        if not replica.leases:
            tier_state.draining_bytes += replica.charge_bytes
        tier_state.evictable.discard(replica)
        tier_state.stuck.pop(entry.uid, None)
        tier_state.kept.pop(entry.uid, None)
        if tier_state.leaving.pop(entry.uid, None) is not None:
            tier_state.leaving_bytes -= replica.charge_bytes
            tier_state.counters.evictions += entry.life is EntryLife.LIVE
        self.note(entry, "dropped", replica.tier)
        self.free_if_idle(replica)
        self._stir(replica)

    def free_if_idle(self, replica: Replica) -> None:
        """Give a DRAINING replica back once nobody holds, reads or writes it, or keep it for a commit."""
        if replica.state is not ReplicaState.DRAINING or not replica.is_idle:
            return
        if replica.promises:
            self._retain(replica)
        else:
            self.out.append(FreeSlot(replica.place))

    def freed(self, replica: Replica) -> None:
        """The backend gave a DRAINING replica's bytes back: it is ABSENT and no longer charged."""
        replica.step(ReplicaStep.FREED)
        tier_state = self.tier_states[replica.tier]
        tier_state.draining_bytes -= replica.charge_bytes
        tier_state.charged_bytes -= replica.charge_bytes
        self._remove(replica)
        self.note(replica.entry, "freed", replica.tier)
        self._stir(replica)
        self.forget_if_empty(replica.entry)

    def free_failed(self, replica: Replica) -> None:
        """The backend keeps a DRAINING replica's bytes for good: the tier stays charged for them."""
        tier_state = self.tier_states[replica.tier]
        tier_state.draining_bytes -= replica.charge_bytes
        tier_state.lost_bytes += replica.charge_bytes
        self._remove(replica)
        self.note(replica.entry, "lost", replica.tier)
        self._stir(replica)
        self.forget_if_empty(replica.entry)

    def _remove(self, replica: Replica) -> None:
        del replica.entry.replicas[replica.tier]
        del self.replicas[replica.place.replica]

    def forget_if_empty(self, entry: Entry) -> None:
        """Forget a GONE entry of which nothing is left."""
        if entry.life is EntryLife.GONE and not entry.replicas:
            self.entries.pop(entry.uid, None)

    def hold(self, replica: Replica) -> None:
        """Count one more lease on a READY replica: it cannot be evicted."""
        tier_state = self.tier_states[replica.tier]
        uid = replica.entry.uid
        if replica.leases == 0:
            tier_state.leased_bytes += replica.charge_bytes
            tier_state.leased[uid] = replica
            tier_state.evictable.discard(replica)
            tier_state.stuck.pop(uid, None)
            tier_state.kept.pop(uid, None)
            self.unmark_leaving(replica)
        replica.leases += 1

    def unhold(self, replica: Replica) -> None:
        """Count one lease less."""
        tier_state = self.tier_states[replica.tier]
        replica.leases -= 1
        if replica.leases:
            return
        tier_state.leased_bytes -= replica.charge_bytes
        del tier_state.leased[replica.entry.uid]
        if replica.state is ReplicaState.READY and replica.promises:
            tier_state.kept[replica.entry.uid] = replica
        elif replica.state is ReplicaState.READY:
            tier_state.evictable.add(replica)
        else:
            tier_state.draining_bytes += replica.charge_bytes
        self.free_if_idle(replica)
        self._stir(replica)

    def touch(self, replica: Replica) -> None:
        """Note a use: an evictable replica goes to the end of the order."""
        self.tier_states[replica.tier].evictable.use(replica)

    def mark_leaving(self, replica: Replica) -> None:
        """Mark an evictable replica as leaving: it drops when a lower one is READY."""
        tier_state = self.tier_states[replica.tier]
        tier_state.evictable.discard(replica)
        tier_state.leaving[replica.entry.uid] = replica
        tier_state.leaving_bytes += replica.charge_bytes

    # --- promises -----------------------------------------------------------------------------

    def recover(self, tier: int, found: Sequence[Found]) -> list[Replica]:
        """Enter keys whose bytes are found READY in ``tier``, promised to the commit that left them there."""
        tier_state = self.tier_states[tier]
        replicas: list[Replica] = []
        for key, nbytes, charge_bytes, spec in found:
            entry = self.new_entry(key, nbytes, spec)
            entry.life = EntryLife.LIVE
            self.index[key] = entry
            place = ReplicaId(next(self._replica_numbers), tier)
            replica = Replica(entry, place, charge_bytes)
            replica.state = ReplicaState.READY
            replica.promises = 1
            self.replicas[place.replica] = entry.replicas[tier] = tier_state.kept[entry.uid] = replica
            replicas.append(replica)
        charged_bytes = sum(replica.charge_bytes for replica in replicas)
        tier_state.charged_bytes += charged_bytes
        tier_state.ready_bytes += charged_bytes
        tier_state.promised_bytes += charged_bytes
        tier_state.peak_charged_bytes = max(tier_state.peak_charged_bytes, tier_state.charged_bytes)
        return replicas

    def promise(self, replica: Replica) -> None:
        """Count one more commit or flush that counts on finding a replica's bytes."""
        replica.promises += 1
        if replica.promises > 1:
            return
        tier_state = self.tier_states[replica.tier]
        uid = replica.entry.uid
        tier_state.promised_bytes += replica.charge_bytes
        self.unmark_leaving(replica)
        tier_state.evictable.discard(replica)
        tier_state.stuck.pop(uid, None)
        if replica.state is ReplicaState.READY and not replica.leases:
            tier_state.kept[uid] = replica

    def unpromise(self, replica: Replica) -> None:
        """Count one less: bytes that are of no other use are given back."""
        replica.promises -= 1
        if replica.promises:
            return
        tier_state = self.tier_states[replica.tier]
        tier_state.promised_bytes -= replica.charge_bytes
        if tier_state.kept.pop(replica.entry.uid, None) is not None:
            tier_state.evictable.add(replica)
        if replica.state is ReplicaState.RETAINED:
            replica.step(ReplicaStep.RELEASE)
            tier_state.retained_bytes -= replica.charge_bytes
            tier_state.draining_bytes += replica.charge_bytes
            self.free_if_idle(replica)
        self._stir(replica)

    def _retain(self, replica: Replica) -> None:
        """Keep an idle DRAINING replica for the commits that name it, out of its key's way."""
        replica.step(ReplicaStep.RETAIN)
        tier_state = self.tier_states[replica.tier]
        tier_state.draining_bytes -= replica.charge_bytes
        tier_state.retained_bytes += replica.charge_bytes
        former = replica.entry
        self.note(former, "kept for the last flush", replica.tier)
        self._stir(replica)
        if former.life is not EntryLife.GONE:
            entry = self.new_entry(former.key, former.nbytes, former.spec)
            entry.life = EntryLife.GONE
            entry.replicas[replica.tier] = former.replicas.pop(replica.tier)
            replica.entry = entry

    # --- names --------------------------------------------------------------------------------

    def split(self, replica: Replica, key: str) -> None:
        """Make a replica that is leased for writing a key of its own; its entry has another one."""
        former = replica.entry
        self.note(former, f"split off as {key!r}", replica.tier)
        self._stir(replica)
        entry = self.new_entry(key, former.nbytes, former.spec)
        entry.life = EntryLife.LIVE
        self.index[key] = entry
        entry.writer, former.writer = former.writer, None
        entry.holders, former.holders = former.holders, NOTHING
        entry.replicas[replica.tier] = former.replicas.pop(replica.tier)
        leased = self.tier_states[replica.tier].leased
        leased[entry.uid] = leased.pop(former.uid)
        replica.entry = entry
        self.note(entry, f"split off from {former.key!r}", replica.tier)

    def rename(self, entry: Entry, key: str) -> None:
        """Let a LIVE entry be found under ``key``, which is nobody's."""
        self.note(entry, f"renamed from {entry.key!r}", min(entry.replicas))
        del self.index[entry.key]
        entry.key = key
        self.index[key] = entry
        self.look_ahead_anew(entry)

    def look_ahead_anew(self, entry: Entry) -> None:
        """An entry's next use is another one than it was."""
        for tier, replica in entry.replicas.items():
            self.tier_states[tier].evictable.refresh(replica)

    def follow(self, plan: Plan | None) -> None:
        """Follow another plan."""
        self.foresight.follow(plan)
        for tier_state in self.tier_states:
            tier_state.evictable.follow()
        self._expect()

    def advance(self, position: int) -> None:
        """Go on to a position of the plan."""
        for key in self.foresight.advance(position):
            entry = self.index.get(key)
            if entry is not None:
                self.look_ahead_anew(entry)
        self._expect()

    def _expect(self) -> None:
        """Have room made for what comes soon."""
        first = self.tier_states[0]
        if first.expected_bytes != self.foresight.coming_bytes:
            first.expected_bytes = self.foresight.coming_bytes
            self.restless.add(first.index)

    def unmark_leaving(self, replica: Replica) -> None:
        """Take back `mark_leaving` if the replica was leaving, without making it evictable."""
        tier_state = self.tier_states[replica.tier]
        if tier_state.leaving.pop(replica.entry.uid, None) is not None:
            tier_state.leaving_bytes -= replica.charge_bytes
            self.restless.add(replica.tier)

    def _stir(self, replica: Replica) -> None:
        """Something changed: ask the entry's watchers and this tier state's waiters again."""
        entry = replica.entry
        if entry.watchers:
            self.changed[entry.uid] = entry
        if self.tier_states[replica.tier].is_restless:
            self.restless.add(replica.tier)
