"""The auditor: recomputes every sum and checks every rule of the books.

Slow on purpose: it walks over everything and trusts nothing that was kept on the way.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NoReturn

from tierstore.core.entry import Entry, EntryLife, Replica, WantPhase
from tierstore.core.residency import ReplicaState
from tierstore.core.tier_state import TierState
from tierstore.errors import InvariantError

if TYPE_CHECKING:
    from tierstore.core.commits import DurableCommits
    from tierstore.core.copy_scheduler import CopyScheduler


def _fail(message: str, entry: Entry | None = None) -> NoReturn:
    story = "" if entry is None else f"  Story: {entry.events()}"
    raise InvariantError(f"{message}.{story}", key=None if entry is None else entry.key)


def audit(scheduler: CopyScheduler, commits: DurableCommits) -> None:
    """Raise `InvariantError` if any rule of the books is broken."""
    books = scheduler.books
    for tier_state in books.tier_states:
        replicas = [
            e.replicas[tier_state.index] for e in books.entries.values() if tier_state.index in e.replicas
        ]
        _audit_sums(tier_state, replicas)
        _audit_sets(tier_state, replicas)
        _audit_queues(tier_state)
    for key, entry in books.index.items():
        if entry.key != key or entry.life is EntryLife.GONE or books.entries.get(entry.uid) is not entry:
            _fail(f"the index shows an entry under {key!r} that is not its own", entry)
    for entry in books.entries.values():
        _audit_entry(entry)
        _audit_copies(scheduler, entry)
    _audit_windows(scheduler)
    _audit_promises(scheduler, commits)
    if commits.tier is not None:
        _audit_changes(commits)


def _audit_sums(tier_state: TierState, replicas: list[Replica]) -> None:
    """Rule 2: charged until freed, never above the quota."""
    by_state = {state: sum(r.charge_bytes for r in replicas if r.state is state) for state in ReplicaState}
    held = sum(r.charge_bytes for r in replicas if r.state is ReplicaState.DRAINING and r.leases)
    expected = {
        "charged_bytes": sum(by_state.values()) + tier_state.lost_bytes,
        "filling_bytes": by_state[ReplicaState.FILLING],
        "ready_bytes": by_state[ReplicaState.READY],
        "draining_bytes": by_state[ReplicaState.DRAINING] - held,
        "retained_bytes": by_state[ReplicaState.RETAINED],
        "promised_bytes": sum(r.charge_bytes for r in replicas if r.promises),
        "leased_bytes": sum(r.charge_bytes for r in replicas if r.leases),
        "leaving_bytes": sum(r.charge_bytes for r in tier_state.leaving.values()),
    }
    for name, value in expected.items():
        if getattr(tier_state, name) != value:
            _fail(f"{tier_state.tier.name}: {name} is {getattr(tier_state, name)}, should be {value}")
    for replica in replicas:
        if not 0 <= replica.charge_bytes <= tier_state.charge(replica.entry.nbytes):
            _fail(f"{tier_state.tier.name}: a replica is charged {replica.charge_bytes}", replica.entry)
    if by_state[ReplicaState.ABSENT]:
        _fail(f"{tier_state.tier.name}: an ABSENT replica is in the books")
    if tier_state.charged_bytes > tier_state.tier.capacity_bytes:
        _fail(
            f"{tier_state.tier.name}: {tier_state.charged_bytes} charged of {tier_state.tier.capacity_bytes}"
        )


def _audit_sets(tier_state: TierState, replicas: list[Replica]) -> None:
    """A READY replica is leased, evictable, leaving, stuck or kept: exactly one of these."""
    sets = (tier_state.leaving, tier_state.stuck, tier_state.kept)
    for replica in replicas:
        member_of = sum(group.get(replica.entry.uid) is replica for group in sets)
        member_of += replica in tier_state.evictable
        is_free = replica.state is ReplicaState.READY and not replica.leases
        if member_of != int(is_free):
            _fail(
                f"{tier_state.tier.name}: a {replica.state.name} replica is in {member_of} sets",
                replica.entry,
            )
    leased = {replica.entry.uid: replica for replica in replicas if replica.leases}
    if tier_state.leased != leased:
        _fail(f"{tier_state.tier.name}: {len(tier_state.leased)} replicas are said to be leased")
    if len(tier_state.evictable) + sum(len(group) for group in sets) > len(replicas):
        _fail(f"{tier_state.tier.name}: a forgotten replica is still a candidate")
    if any(not replica.promises for replica in tier_state.kept.values()):
        _fail(f"{tier_state.tier.name}: a replica is kept that nobody was promised")
    for replica in tier_state.leaving.values():
        if not any(tier > tier_state.index for tier in replica.entry.wants):
            _fail(f"{tier_state.tier.name}: a replica leaves, but no lower tier wants it", replica.entry)


def _audit_queues(tier_state: TierState) -> None:
    if tier_state.waiting != sum(len(queue) for queue in tier_state.queues.values()):
        _fail(f"{tier_state.tier.name}: {tier_state.waiting} wants are said to wait")
    for urgency, queue in tier_state.queues.items():
        for want in queue:
            if want.phase is not WantPhase.QUEUED or want.urgency is not urgency:
                _fail(f"{tier_state.tier.name}: a want waits in the wrong queue", want.entry)
            if want.entry.wants.get(tier_state.index) is not want:
                _fail(f"{tier_state.tier.name}: a want waits that its entry does not know", want.entry)


def _audit_life(entry: Entry) -> None:
    """Rules 1 and 10."""
    ready = entry.ready()
    if entry.life is EntryLife.LIVE and not ready:
        _fail(f"the live key {entry.key!r} has no READY replica", entry)
    if entry.life is EntryLife.COMING and not any(want.put is not None for want in entry.wants.values()):
        _fail(f"{entry.key!r} waits for a put that nobody makes", entry)
    if entry.life is EntryLife.PARTING and not (ready and entry.is_kept):
        _fail(f"{entry.key!r} parts, and no flush needs it", entry)
    if entry.life is EntryLife.GONE and not entry.replicas:
        _fail(f"{entry.key!r} is gone, but not forgotten", entry)


def _audit_entry(entry: Entry) -> None:
    """Rules 1 and 7."""
    _audit_life(entry)
    if entry.writer is not None and set(entry.holders) != {entry.writer}:
        _fail(f"{entry.key!r} is leased for writing and by others", entry)
    if sum(replica.leases for replica in entry.replicas.values()) < len(entry.holders):
        _fail(f"{entry.key!r} has holders without leases", entry)
    for tier, want in entry.wants.items():
        replica = entry.replicas.get(tier)
        is_filling = replica is not None and replica.state is ReplicaState.FILLING
        if is_filling != (want.phase is not WantPhase.QUEUED):
            _fail(f"a want of {entry.key!r} in tier {tier} is {want.phase.name}", entry)


def _audit_changes(commits: DurableCommits) -> None:
    """Rule 10: who is as he was committed is not dirty, and nobody else is."""
    books = commits.books
    dirty = set(commits.changes.dirty())
    for key in {*books.index, *commits.committed} - dirty:
        entry = books.index.get(key)
        replica = None if entry is None else entry.replicas.get(commits.durable_tier)
        if entry is None or entry.life is not EntryLife.LIVE or replica is not commits.committed.get(key):
            _fail(f"{key!r} is not as it was committed, and no flush would know", entry)
    for key in commits.changes.unknown():
        _fail(f"nobody knows whose bytes were committed as {key!r}")
    survivors = [*commits.committed.values(), *commits.kept.values()]
    if len({replica.place for replica in survivors}) < len(survivors):
        _fail("bytes were committed under two keys")


def _audit_copies(scheduler: CopyScheduler, entry: Entry) -> None:
    """Rule 3: at most one copy writes a replica, and every FILLING one has a want."""
    for tier, replica in entry.replicas.items():
        if replica.state is ReplicaState.FILLING and tier not in entry.wants:
            _fail(f"nobody wants the FILLING replica of {entry.key!r} in tier {tier}", entry)
        if replica.copy is None:
            continue
        copy = scheduler.traffic.copies.get(replica.copy)
        if copy is None or copy.want.entry is not entry or copy.target != tier:
            _fail(f"the copy that writes {entry.key!r} in tier {tier} is unknown", entry)
        if copy.source == tier:
            _fail(f"{entry.key!r} is copied onto itself", entry)


def _audit_windows(scheduler: CopyScheduler) -> None:
    for (source, target), window in scheduler.traffic.windows.items():
        waiting = {number for group in window.waiting.values() for number in group}
        copies = [c for c in scheduler.traffic.copies.values() if (c.source, c.target) == (source, target)]
        flying = [c for c in copies if c.number not in waiting]
        in_flight = sum(copy.nbytes for copy in flying)
        if in_flight != window.in_flight_bytes:
            _fail(f"window {source} -> {target}: {window.in_flight_bytes} B in flight, should be {in_flight}")
        if (
            source >= 0
            and sum(copy.nbytes > 0 for copy in flying) > 1
            and in_flight > scheduler.traffic.window_bytes
        ):
            _fail(f"window {source} -> {target}: {in_flight} B in flight exceed the window")


def _audit_promises(scheduler: CopyScheduler, commits: DurableCommits) -> None:
    """Rule 9: what commits name and flushes have found is there, and nothing else is kept for them."""
    promised = [*commits.committed.values(), *commits.kept.values(), *commits.doubtful.values()]
    if commits.underway is not None:
        promised += commits.underway.replicas()
    promised += [replica for flush in commits.flushes for replica in flush.found.values()]
    counts = Counter(replica.place.replica for replica in promised)
    for replica in promised:
        if scheduler.books.replicas.get(replica.place.replica) is not replica:
            _fail(f"the bytes of {replica.key!r} were promised, and are gone", replica.entry)
    for number, replica in scheduler.books.replicas.items():
        if replica.promises != counts[number]:
            _fail(f"{replica.promises} promises of {replica.key!r}, not {counts[number]}", replica.entry)
        if replica.state is ReplicaState.RETAINED and not (replica.promises and replica.is_idle):
            _fail(f"{replica.key!r} is retained for nobody", replica.entry)
