"""The ledger against hardware that completes whatever it likes, in any order, or fails.

The oracle knows only bytes: which value every slot holds.  It never asks the ledger what should be.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tierstore.core import messages as m
from tierstore.core.eviction import POLICIES
from tierstore.core.ledger import Ledger
from tierstore.core.model import Plan, Tier
from tierstore.core.residency import ReplicaState
from tierstore.errors import BackendError, CapacityError, TierStoreError

KEYS = ["a", "b", "c", "d", "e", "f"]
KEPT = "kept "
keys = st.sampled_from(KEYS)
key_lists = st.lists(keys, min_size=1, max_size=3)
tiers = st.integers(0, 2)
keeps = st.sampled_from(["", "", KEPT])
releases = st.sampled_from(["", "", "", KEPT, f"{KEPT}a"])
flushes_of_machines = st.lists(st.tuples(st.none() | key_lists, keeps, releases), min_size=1, max_size=2)


class Oracle:
    """What the slots really hold: a value for each place, and the value of each key.

    A *generation* is what was put or split off at one time: its places hold the same value.  A replaced
    key's former generation keeps its own for those who still lease or read it.
    """

    def __init__(self) -> None:
        self.slots: dict[m.ReplicaId, int | None] = {}
        self.generation_of: dict[m.ReplicaId, int] = {}
        self.values: dict[str, int] = {}
        self.generation_values: dict[int, int] = {}
        self.generations: dict[str, int] = {}
        self.held: dict[m.ReplicaId, int] = {}  # what the medium takes for a slot, where it said so

    def value_of(self, place: m.ReplicaId) -> int:
        return self.generation_values[self.generation_of[place]]

    def key_of(self, generation: int) -> str:
        (key,) = [key for key, each in self.generations.items() if each == generation]
        return key


class LedgerMachine(RuleBasedStateMachine):
    """Requests at random; hardware that completes, fails or refuses at random."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = count(1)
        self.value_numbers = count(1)
        self.oracle = Oracle()
        self.copies: dict[int, m.StartCopy] = {}
        self.copy_values: dict[int, int | None] = {}
        self.ordered: set[int] = set()
        self.frees: list[m.FreeSlot] = []
        self.waiting: dict[int, m.Event] = {}
        self.puts: dict[int, tuple[str, int]] = {}
        self.leases: dict[int, list[m.Granted]] = {}
        self.writes: set[int] = set()
        self.reads: dict[int, m.Granted] = {}
        self.splits: dict[int, tuple[str, str]] = {}
        self.settled: dict[int, BaseException | None] = {}
        self.commits: dict[int, m.Commit] = {}
        self.survivors: list[dict[str, tuple[m.ReplicaId, int]]] = [
            {}
        ]  # the last, or any of the doubtful ones
        self.flushes: dict[int, int] = {}  # each began at this moment of the history
        self.history: list[dict[str, int]] = [{}]
        self.acknowledged: dict[str, int] = {}  # of each key, when the last flush began that has ended

    @initialize(
        capacities=st.tuples(st.integers(2, 8), st.integers(2, 10), st.integers(4, 30)),
        policy=st.sampled_from(sorted(POLICIES)),
        is_host=st.booleans(),
        high=st.sampled_from([1.0, 0.7]),
        window=st.integers(1, 12),
        alignment=st.sampled_from([1, 2]),
        stride=st.sampled_from([1, 2, 1024]),
    )
    def begin(
        self,
        capacities: tuple[int, int, int],
        policy: str,
        is_host: bool,
        high: float,
        window: int,
        alignment: int,
        stride: int,
    ) -> None:
        tiers = [
            Tier(
                "device", capacities[0], int(capacities[0] * high), int(capacities[0] * high) // 2, alignment
            ),
            Tier(
                "host",
                capacities[1],
                int(capacities[1] * high),
                int(capacities[1] * high) // 2,
                1,
                is_host=is_host,
            ),
            Tier("disk", capacities[2], capacities[2], capacities[2], 1, is_durable=True),
        ]
        self.ledger = Ledger(tiers, POLICIES[policy], window, stride)
        self.ledger.apply(m.PlanFollowed(Plan(("a", "b", "c", "a", "d"), coming=(0, 3, 30, 1, 0))))

    # --- telling and doing ------------------------------------------------------------------

    def tell(self, *events: m.Event) -> None:
        commands = self.ledger.apply(*events)
        # A put is visible to those who waited for it as soon as it is settled.
        for command in sorted(commands, key=lambda command: not isinstance(command, m.Settle)):
            self.do(command)
        self.history.append(dict(self.oracle.values))
        self.ledger.check()

    def do(self, command: m.Command) -> None:
        match command:
            case m.StartCopy():
                self.start_copy(command)
            case m.FreeSlot():
                self.start_free(command)
            case m.Grant():
                self.grant(command)
            case m.Settle():
                self.settle(command)
            case m.Commit():
                self.start_commit(command)
            case m.SetCapacity():
                pass

    def start_copy(self, command: m.StartCopy) -> None:
        assert command.copy not in self.copies
        place = command.target
        assert place not in self.oracle.slots, "a slot is reserved twice"
        self.copies[command.copy] = command
        if command.source is None:
            generation = command.request
            self.oracle.generation_values[generation] = self.puts[command.request][1]
        else:
            generation = self.oracle.generation_of[command.source]
        self.oracle.generation_of[place] = generation

    def start_free(self, command: m.FreeSlot) -> None:
        place = command.place
        busy = {place for c in self.copies.values() for place in (c.source, c.target)}
        assert place not in busy
        assert not any(g.place == place for gs in self.leases.values() for g in gs)
        assert not any(g.place == place for g in self.reads.values())
        assert not any(place == p for image in self.survivors for p, _ in image.values())
        assert not any(g.place == place for c in self.commits.values() for g in c.replicas)
        self.frees.append(command)

    def start_commit(self, command: m.Commit) -> None:
        assert not self.commits, "two commits at a time"
        self.commits[command.commit] = command
        for granted in command.replicas:
            assert self.oracle.slots[granted.place] is not None

    def settle(self, command: m.Settle) -> None:
        assert command.request not in self.settled, "a request is settled twice"
        self.settled[command.request] = command.error
        event = self.waiting.pop(command.request)
        if command.error is not None:
            return
        if isinstance(event, m.PutRequested):
            key, value = self.puts[event.request]
            self.oracle.values[key] = value
            self.oracle.generations[key] = event.request
        elif isinstance(event, m.FlushRequested):
            self.was_flushed(event)

    def was_flushed(self, event: m.FlushRequested) -> None:
        """What survives is the store as it was at one moment since the flush began: keys and bytes."""
        (image,) = self.survivors
        start = self.flushes.pop(event.request)
        since = [*self.history[start:], self.oracle.values]
        keys = KEYS if event.keys is None else event.keys
        found = {key: image[key][1] for key in keys if key in image}
        assert any(found == {key: moment[key] for key in keys if key in moment} for moment in since), (
            f"{keys} were never {found} together since they were flushed"
        )
        self.acknowledged.update(dict.fromkeys(keys, start))

    def look_at_survivors(self) -> None:
        """No key is found as it never was, or as it was before a flush of it that has ended."""
        (image,) = self.survivors
        for key in KEYS:
            value = image[key][1] if key in image else None
            since = [*self.history[self.acknowledged.get(key, 0) :], self.oracle.values]
            assert any(moment.get(key) == value for moment in since), f"{key} is found as {value}"

    def grant(self, command: m.Grant) -> None:
        event = self.waiting.pop(command.request)
        replicas = list(command.replicas)
        for granted in replicas:
            assert self.oracle.slots[granted.place] == self.oracle.value_of(granted.place)
        if isinstance(event, m.SplitRequested):
            self.split_off(command.request, *replicas)
        elif isinstance(event, m.LeaseRequested):
            assert all(granted.place.tier == event.tier for granted in replicas)
            self.leases[command.request] = replicas
            if event.access is m.Access.WRITE:
                self.writes.add(command.request)
        else:
            self.reads[command.request] = replicas[0]

    def split_off(self, number: int, granted: m.Granted) -> None:
        key, name = self.splits[number]
        assert granted.key == name
        assert self.oracle.generation_of[granted.place] == self.oracle.generations[key]
        self.oracle.generation_of[granted.place] = number
        self.oracle.generation_values[number] = self.oracle.values[name] = self.oracle.values[key]
        self.oracle.generations[name] = number

    def ask(self, event: m.Event) -> None:
        number = event.request  # type: ignore[union-attr]
        self.waiting[number] = event
        try:
            self.tell(event)
        except TierStoreError:
            del self.waiting[number]
            self.ledger.check()

    # --- people -----------------------------------------------------------------------------

    @rule(key=keys, nbytes=st.integers(0, 6), tier=st.none() | tiers, replace=st.booleans())
    def put(self, key: str, nbytes: int, tier: int | None, replace: bool) -> None:
        number = next(self.numbers)
        self.puts[number] = (key, next(self.value_numbers))
        self.ask(m.PutRequested(number, key, nbytes, tier, replace))

    @rule(keys=key_lists, tier=tiers, access=st.sampled_from(m.Access))
    def lease(self, keys: list[str], tier: int, access: m.Access) -> None:
        self.ask(m.LeaseRequested(next(self.numbers), keys, tier, access, "somebody"))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), written=st.booleans())
    def release(self, data: st.DataObject, written: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.leases)))
        replicas = self.leases.pop(number)
        if number in self.writes and written:
            for granted in replicas:
                value = next(self.value_numbers)
                generation = self.oracle.generation_of[granted.place]
                self.oracle.slots[granted.place] = value
                self.oracle.generation_values[generation] = value
                self.oracle.values[self.oracle.key_of(generation)] = value
        self.tell(m.LeaseReleased(number, written))

    @rule(key=keys)
    def read(self, key: str) -> None:
        self.ask(m.ReadRequested(next(self.numbers), key))

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def end_read(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.reads)))
        del self.reads[number]
        self.tell(m.ReadDone(number))

    @rule(keys=key_lists, tier=tiers, urgency=st.sampled_from([m.Urgency.DEMAND, m.Urgency.PREFETCH]))
    def fetch(self, keys: list[str], tier: int, urgency: m.Urgency) -> None:
        self.ask(m.FetchRequested(next(self.numbers), keys, tier, urgency))

    @rule(keys=key_lists, to=st.none() | tiers)
    def evict(self, keys: list[str], to: int | None) -> None:
        self.ask(m.EvictRequested(next(self.numbers), keys, to))

    @rule(keys=st.none() | key_lists, keep=keeps, release=releases)
    def flush(self, keys: list[str] | None, keep: str, release: str) -> None:
        number = next(self.numbers)
        self.flushes[number] = len(self.history) - 1
        self.ask(m.FlushRequested(number, keys, keep, release))

    @rule(keys=key_lists)
    def drop(self, keys: list[str]) -> None:
        former = dict(self.oracle.values)
        for key in keys:
            self.oracle.values.pop(key, None)
        try:
            self.tell(m.DropRequested(keys))
        except TierStoreError:
            self.oracle.values = former
            self.ledger.check()

    @precondition(lambda self: self.writes & set(self.leases))
    @rule(data=st.data())
    def split(self, data: st.DataObject) -> None:
        self.split_one(data, data.draw(st.sampled_from(sorted(self.writes & set(self.leases)))))

    def split_one(self, data: st.DataObject, lease: int) -> None:
        name = data.draw(st.sampled_from(sorted(set(KEYS) - set(self.oracle.values)) or KEYS))
        place = data.draw(st.sampled_from([granted.place for granted in self.leases[lease]]))
        number = next(self.numbers)
        self.splits[number] = (self.oracle.key_of(self.oracle.generation_of[place]), name)
        self.ask(m.SplitRequested(number, lease, {place: name}))

    def in_several_tiers(self) -> list[tuple[str, int]]:
        where = {key: self.ledger.where(key) for key in sorted(self.oracle.values)}
        return [(key, tier) for key, tiers in where.items() if len(tiers) > 1 for tier in tiers]

    @precondition(lambda self: self.in_several_tiers())
    @rule(data=st.data())
    def lease_and_split(self, data: st.DataObject) -> None:
        key, tier = data.draw(st.sampled_from(self.in_several_tiers()))
        lease = next(self.numbers)
        self.ask(m.LeaseRequested(lease, [key], tier, m.Access.WRITE, "somebody"))
        if lease in self.leases:
            self.split_one(data, lease)

    @precondition(lambda self: self.oracle.values)
    @rule(
        data=st.data(),
        new=st.lists(keys, min_size=1, max_size=2),
        replace=st.booleans(),
    )
    def rename(self, data: st.DataObject, new: list[str], replace: bool) -> None:
        names = {data.draw(st.sampled_from(sorted(self.oracle.values))): name for name in new}
        oracle = self.oracle
        former = dict(oracle.values), dict(oracle.generations)
        found = {name: (oracle.values.pop(k, -1), oracle.generations.pop(k, -1)) for k, name in names.items()}
        oracle.values |= {name: value for name, (value, _) in found.items()}
        oracle.generations |= {name: generation for name, (_, generation) in found.items()}
        try:
            self.tell(m.RenameRequested(names, replace))
        except TierStoreError:
            oracle.values, oracle.generations = former
            self.ledger.check()

    @rule(tier=tiers, capacity=st.integers(1, 20))
    def resize(self, tier: int, capacity: int) -> None:
        self.ask(m.ResizeRequested(next(self.numbers), tier, capacity, capacity, capacity // 2))

    @rule(position=st.integers(0, 4))
    def advance(self, position: int) -> None:
        self.tell(m.Advanced(position))

    # --- hardware ---------------------------------------------------------------------------

    def start(self, copy: m.StartCopy) -> None:
        """The bytes are read at some moment between start and end; the source must not change."""
        if copy.copy not in self.copy_values:
            self.copy_values[copy.copy] = (
                self.puts[copy.request][1] if copy.source is None else self.oracle.slots[copy.source]
            )

    def end_copy(self, number: int, error: BaseException | None, spared: int = 0) -> m.Event:
        """End a copy; the medium takes ``spared`` units of its alignment less than it was charged."""
        copy = self.copies.pop(number)
        self.start(copy)
        value = self.copy_values.pop(number)
        if copy.source is not None:
            assert self.oracle.slots[copy.source] == value, "the source changed under the copy"
        if number in self.ordered:  # its bytes have been there since, and may have been written over
            self.ordered.remove(number)
        else:
            self.oracle.slots[copy.target] = value if error is None else None
        if not spared or error is not None:
            return m.CopyDone(number, error)
        alignment = self.ledger.books.tier_states[copy.target.tier].tier.alignment_bytes
        whole = -(-copy.nbytes // alignment) * alignment
        self.oracle.held[copy.target] = max(0, whole - spared * alignment)
        return m.CopyDone(number, None, self.oracle.held[copy.target])

    def end_free(self, index: int, error: BaseException | None) -> m.Event:
        command = self.frees.pop(index)
        self.oracle.slots.pop(command.place, None)
        return m.Freed(command.place, error)

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), spared=st.sampled_from([0, 0, 1, 2, 6]))
    def copy_ends(self, data: st.DataObject, spared: int) -> None:
        self.tell(self.end_copy(data.draw(st.sampled_from(sorted(self.copies))), None, spared))

    @precondition(lambda self: len(self.copies) + len(self.frees) > 1)
    @rule(data=st.data())
    def a_batch_ends(self, data: st.DataObject) -> None:
        numbers = (
            data.draw(st.lists(st.sampled_from(sorted(self.copies)), unique=True)) if self.copies else []
        )
        failed = set(data.draw(st.lists(st.sampled_from(numbers), max_size=1))) if numbers else set()
        spared = data.draw(st.sampled_from([0, 0, 1]))
        events = [
            self.end_copy(
                number, BackendError("one of many") if number in failed - self.ordered else None, spared
            )
            for number in numbers
        ]
        events += [self.end_free(0, None) for _ in range(data.draw(st.integers(0, len(self.frees))))]
        self.tell(*events)

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def copy_begins_to_read(self, data: st.DataObject) -> None:
        self.start(self.copies[data.draw(st.sampled_from(sorted(self.copies)))])

    @precondition(lambda self: set(self.copies) - self.ordered)
    @rule(data=st.data())
    def copy_fails(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(set(self.copies) - self.ordered)))
        self.tell(self.end_copy(number, BackendError("the medium failed")))

    @precondition(lambda self: bool(set(self.copies) - set(self.copy_values)))
    @rule(data=st.data())
    def copy_is_refused(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(set(self.copies) - set(self.copy_values))))
        del self.copies[number]
        self.tell(m.CopyRefused(number, CapacityError("fragmented")))

    @precondition(
        lambda self: any(
            c.source and c.source.tier == 1 and c.copy not in self.ordered for c in self.copies.values()
        )
    )
    @rule(data=st.data())
    def copy_is_ordered(self, data: st.DataObject) -> None:
        candidates = sorted(
            c.copy
            for c in self.copies.values()
            if c.source and c.source.tier == 1 and c.copy not in self.ordered
        )
        copy = self.copies[data.draw(st.sampled_from(candidates))]
        self.start(copy)
        self.ordered.add(copy.copy)
        self.oracle.slots[copy.target] = self.copy_values[copy.copy]
        self.tell(m.CopyOrdered(copy.copy))

    @precondition(lambda self: self.commits)
    @rule(fails=st.sampled_from([False, False, True]))
    def commit_ends(self, fails: bool) -> None:
        self.end_commit(BackendError("the disk is gone") if fails else None)

    def end_commit(self, error: BaseException | None) -> None:
        ((number, command),) = self.commits.items()
        self.commits.clear()
        named: dict[str, Any] = {g.key: (g.place, self.oracle.slots[g.place]) for g in command.replicas}
        assert named.keys().isdisjoint(command.gone)
        images = [
            {key: found for key, found in (image | named).items() if key not in command.gone}
            for image in self.survivors
        ]
        before, flushes = self.survivors[0], dict(self.waiting)  # what the last good one has left
        if error is not None:
            self.survivors += [image for image in images if image not in self.survivors]
        else:
            self.survivors = images[:1]
            assert all(image == images[0] for image in images), "what failed ones have left shows through"
            self.look_at_survivors()
        self.tell(m.CommitDone(number, error))
        if error is None:
            flushes = {
                number: each for number, each in flushes.items() if self.settled.get(number, 0) is None
            }
            self.look_at_kept(
                before, [each for each in flushes.values() if isinstance(each, m.FlushRequested)]
            )

    def look_at_kept(
        self, before: dict[str, tuple[m.ReplicaId, int]], flushes: list[m.FlushRequested]
    ) -> None:
        """What was kept stays until it is released; what is found no more is kept where asked for."""
        (after,) = self.survivors
        released = tuple(each.release for each in flushes if each.release)
        for name, found in before.items():
            if name.startswith(KEPT) and not name.startswith(released):
                assert after.get(name) == found, f"{name} was kept, and nobody has released it"
        for name in [name for name in after if name.startswith(KEPT)]:
            is_old = name in before and not name.startswith(released)
            assert is_old or after[name] == before[name.removeprefix(KEPT)]
            assert is_old or any(each.keep for each in flushes)
        assert len({place for place, _ in after.values()}) == len(after), "bytes are found under two names"
        for flush in flushes:
            for key in (KEYS if flush.keys is None else flush.keys) if flush.keep else ():
                if (KEPT + key).startswith(released):
                    continue  # perhaps by a later one that this commit was for, too
                if key in before and before[key] not in [after.get(each) for each in KEYS]:
                    assert KEPT + key in after, f"what {key} was found as is lost"

    @precondition(lambda self: self.frees)
    @rule(data=st.data(), fails=st.sampled_from([False] * 15 + [True]))
    def free_ends(self, data: st.DataObject, fails: bool) -> None:
        index = data.draw(st.integers(0, len(self.frees) - 1))
        self.tell(self.end_free(index, BackendError("stuck") if fails else None))

    # --- what must hold ---------------------------------------------------------------------

    @invariant()
    def every_key_can_be_read(self) -> None:
        if not hasattr(self, "ledger"):
            return
        assert set(self.ledger) == set(self.oracle.values)
        written = {g.key for n in self.writes if n in self.leases for g in self.leases[n]}
        for key in set(self.oracle.values) - written:
            entry = self.ledger.books.index[key]
            ready = entry.ready()
            assert ready, f"{key} is lost"
            for replica in ready:
                assert self.oracle.slots[replica.place] == self.oracle.values[key]

    @invariant()
    def what_was_committed_stays(self) -> None:
        for image in self.survivors:
            for place, value in image.values():
                assert self.oracle.slots[place] == value

    @invariant()
    def no_tier_holds_more_than_its_capacity(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for tier_state in self.ledger.books.tier_states:
            held = {
                replica.place: self.oracle.held.get(replica.place, tier_state.charge(replica.entry.nbytes))
                for replica in self.ledger.books.replicas.values()
                if replica.tier == tier_state.index and replica.place in self.oracle.slots
            }
            assert sum(held.values()) <= tier_state.tier.capacity_bytes
            for place, nbytes in held.items():
                if self.oracle.slots[place] is not None and place not in self.being_written():
                    assert self.ledger.books.replicas[place.replica].charge_bytes == nbytes

    def being_written(self) -> set[m.ReplicaId]:
        return {copy.target for copy in self.copies.values()}

    def teardown(self) -> None:
        """When the hardware is done and everybody has let go, nobody waits."""
        if not hasattr(self, "ledger"):
            return
        for number in list(self.leases):
            del self.leases[number]
            self.tell(m.LeaseReleased(number, written=False))
        self.quiesce()
        assert not self.waiting, f"nobody will ever answer {self.waiting}"
        number = next(self.numbers)
        self.waiting[number] = m.CloseRequested(number)
        self.tell(m.CloseRequested(number))
        self.quiesce()
        assert self.settled[number] is None
        for entry in self.ledger.books.entries.values():
            assert not any(r.state is ReplicaState.FILLING for r in entry.replicas.values())

    def quiesce(self) -> None:
        while self.copies or self.frees or self.reads or self.leases or self.commits:
            for number in list(self.reads):
                del self.reads[number]
                self.tell(m.ReadDone(number))
            for number in list(self.leases):
                del self.leases[number]
                self.tell(m.LeaseReleased(number, written=False))
            for number in list(self.copies):
                self.tell(self.end_copy(number, None))
            if self.commits:
                self.end_commit(None)
            while self.frees:
                self.tell(self.end_free(-1, None))


class KeptMachine(LedgerMachine):
    """The same where hardware is fast and has room, so that flushes end, and two moments survive."""

    @initialize()
    def begin(self) -> None:
        tiers = [Tier("device", 100, 100, 50, 1), Tier("host", 100, 100, 50, 1, is_host=True)]
        self.ledger = Ledger([*tiers, Tier("disk", 300, 300, 300, 1, is_durable=True)], POLICIES["lru"], 100)

    @rule(key=keys)
    def write_and_rest(self, key: str) -> None:
        self.put(key, 1, 1, replace=True)
        self.quiesce()

    @rule(flushes=flushes_of_machines, fails=st.sampled_from([False, False, True]))
    def flush_and_end(self, flushes: list[tuple[list[str] | None, str, str]], fails: bool) -> None:
        for keys, keep, release in flushes:
            self.flush(keys, keep, release)
        while self.copies:
            self.tell(self.end_copy(min(self.copies), None))
        if self.commits and fails:
            self.end_commit(BackendError("the disk is gone"))
        self.quiesce()


TestKept = KeptMachine.TestCase
TestLedger = pytest.mark.timeout(600)(LedgerMachine.TestCase)
