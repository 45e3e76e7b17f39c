"""Orders of eviction against what they are defined by: a list that is sorted anew for each victim."""

from __future__ import annotations

import math

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tierstore.core.entry import Entry, Replica
from tierstore.core.eviction import POLICIES, size_class
from tierstore.core.foresight import Foresight
from tierstore.core.messages import ReplicaId
from tierstore.core.model import Plan
from tierstore.units import MIB

KEYS = st.integers(0, 7).map(str)
SIZES = st.sampled_from([1, 17, 20, 30, 40, 1500]).map(lambda mebibytes: mebibytes * MIB)


class EvictionMachine(RuleBasedStateMachine):
    """Replicas come, are used, change their size and go; plans are followed; victims are taken."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)))
    def begin(self, policy: str) -> None:
        self.policy = policy
        self.foresight = Foresight()
        self.order = POLICIES[policy](self.foresight)
        self.model: list[Replica] = []  # oldest use first
        self.plan: Plan | None = None
        self.position = 0
        self.count = 0

    @rule(key=KEYS, nbytes=SIZES)
    def add(self, key: str, nbytes: int) -> None:
        if any(each.key == key for each in self.model):
            return
        self.count += 1
        replica = Replica(Entry(self.count, key, nbytes, None), ReplicaId(self.count, 0), nbytes)
        self.order.add(replica)
        self.model.append(replica)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(self.model))
        self.order.use(replica)
        self.model.remove(replica)
        self.model.append(replica)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(self.model))
        assert self.order.discard(replica)
        assert not self.order.discard(replica)
        self.model.remove(replica)

    @rule(accesses=st.lists(KEYS, min_size=1, max_size=12), residents=st.sets(KEYS, max_size=2))
    def follow(self, accesses: list[str], residents: set[str]) -> None:
        self.plan, self.position = Plan(accesses, {"7": "0"}, residents), 0
        self.foresight.follow(self.plan)
        self.order.follow()

    @precondition(lambda self: self.plan is not None)
    @rule(steps=st.integers(0, 12))
    def advance(self, steps: int) -> None:
        assert self.plan is not None
        self.position = (self.position + steps) % len(self.plan.accesses)
        for key in self.foresight.advance(self.position):
            for replica in self.model:
                if replica.key == key:
                    self.order.refresh(replica)

    @rule(needed=SIZES, most=st.integers(1, 8))
    def take_victims(self, needed: int, most: int) -> None:
        for taken, victim in enumerate(self.order.victims(needed)):
            expected = self._first(needed, is_first=taken == 0)
            assert victim is expected, (self.policy, victim.key, expected.key)
            self.order.discard(victim)
            self.model.remove(victim)
            if taken + 1 == most:
                return
        assert not self.model

    @rule(accesses=st.integers(0, 12))
    def take_what_is_needed_later(self, accesses: int) -> None:
        """By a plan, and only by the policy that looks at one."""
        found = []
        for victim in self.order.needed_later(accesses):
            found.append(victim)
            self.order.discard(victim)
        if self.policy == "next-use":
            later = [each for each in self._by_next_use() if self._distance(each) > accesses]
            assert found == later
        else:
            assert not found
        self.model = [each for each in self.model if each not in found]

    def _distance(self, replica: Replica) -> float:
        distance = None if self.plan is None else self.plan.distance(replica.key, self.position)
        return math.inf if distance is None else distance

    def _by_next_use(self) -> list[Replica]:
        return sorted(self.model, key=self._distance, reverse=True)

    def _first(self, needed: int, *, is_first: bool) -> Replica:
        if self.policy == "lru":
            return self.model[0]
        if self.policy == "next-use":
            return self._by_next_use()[0]
        own = [each for each in self.model if size_class(each.charge_bytes) == size_class(needed)]
        large_enough = [each for each in own if each.charge_bytes >= needed]
        if is_first and large_enough:
            return large_enough[0]
        return max(self.model, key=lambda each: size_class(each.charge_bytes))


TestEviction = EvictionMachine.TestCase
