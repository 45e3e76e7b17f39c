"""Who goes next, by each policy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tierstore.core.entry import Entry, Replica
from tierstore.core.eviction import POLICIES, size_class
from tierstore.core.foresight import Foresight
from tierstore.core.messages import ReplicaId
from tierstore.core.model import Plan
from tierstore.core.residency import ReplicaState, ReplicaStep
from tierstore.errors import InvariantError

MIB = 1024**2


def replicas(*mebibytes: float) -> list[Replica]:
    """Return candidates, oldest use first, keyed "0", "1", ..."""
    return [
        Replica(Entry(number, str(number), 0, None), ReplicaId(number, 0), int(size * MIB))
        for number, size in enumerate(mebibytes)
    ]


def order(
    policy: str, candidates: list[Replica], needed_mib: float = 1, plan: Plan | None = None, position: int = 0
) -> str:
    return "".join(victims(policy, candidates, int(needed_mib * MIB), plan, position))


def victims(
    policy: str, candidates: list[Replica], needed_bytes: int, plan: Plan | None = None, position: int = 0
) -> Iterator[str]:
    """Yield the keys of who goes, one after another."""
    foresight = Foresight()
    order = POLICIES[policy](foresight)
    for candidate in candidates:
        order.add(candidate)
    foresight.follow(plan)
    order.follow()
    foresight.advance(position)
    for victim in order.victims(needed_bytes):
        order.discard(victim)
        yield victim.key


def test_lru_takes_the_oldest_use_first() -> None:
    assert order("lru", replicas(1, 500, 2)) == "012"


@pytest.mark.parametrize(
    ("mib", "expected"),
    [(0, 0), (15.9, 0), (16, 1), (31.9, 1), (32, 2), (64, 3), (512, 6), (1023, 6), (1024, 7), (9000, 7)],
)
def test_size_classes_double_from_16_mib_and_the_last_holds_everything_from_1_gib(
    mib: float, expected: int
) -> None:
    assert size_class(int(mib * MIB)) == expected


def test_size_class_takes_the_first_large_enough_in_the_requests_class() -> None:
    assert order("size-class", replicas(2000, 17, 20, 30), needed_mib=20)[0] == "2"


def test_size_class_then_takes_the_largest_classes_in_the_order_of_use() -> None:
    assert order("size-class", replicas(1, 40, 2000, 17, 1500, 50), needed_mib=33) == "124530"


def test_size_class_searches_only_the_requests_own_class_for_the_lower_bound() -> None:
    assert order("size-class", replicas(17, 100), needed_mib=20) == "10"


def test_next_use_takes_what_is_needed_furthest_in_the_future() -> None:
    plan = Plan(("0", "1", "2"))
    assert order("next-use", replicas(1, 1, 1), plan=plan, position=0) == "021"
    assert order("next-use", replicas(1, 1, 1), plan=plan, position=1) == "102"


def test_next_use_takes_what_no_plan_knows_first_and_is_lru_without_one() -> None:
    assert order("next-use", replicas(1, 1, 1), plan=Plan(("0", "2")), position=0) == "102"
    assert order("next-use", replicas(1, 1, 1)) == "012"


@pytest.mark.parametrize("policy", POLICIES)
def test_what_an_eviction_looks_at_does_not_grow_with_the_number_of_keys(policy: str) -> None:
    class Counting(Foresight):
        asked = 0

        def distance(self, key: str) -> int | None:
            self.asked += 1
            return super().distance(key)

    foresight = Counting()
    order = POLICIES[policy](foresight)
    foresight.follow(Plan([str(number) for number in range(1000)]))
    members = replicas(*[1] * 1000)
    for each in members:
        order.add(each)
    next(order.victims(MIB))
    foresight.asked = 0
    for position in range(1, 101):
        victim = next(order.victims(MIB))
        order.discard(victim)
        order.add(victim)  # as it is brought again, and used
        for key in foresight.advance(position):
            order.refresh(members[int(key)])
    assert foresight.asked <= 2 * 100


def test_a_plan_is_a_cycle() -> None:
    plan = Plan(("a", "b", "a", "c"))
    assert plan.distance("a", 0) == 2
    assert plan.distance("a", 2) == 2
    assert plan.distance("c", 3) == 4
    assert plan.distance("b", 3) == 2
    assert plan.distance("d", 0) is None


def test_a_replica_takes_no_step_outside_its_table() -> None:
    replica = replicas(1)[0]
    assert replica.key == "0"
    with pytest.raises(InvariantError, match="FILLED while ABSENT"):
        replica.step(ReplicaStep.FILLED)
    replica.step(ReplicaStep.RESERVE)
    replica.step(ReplicaStep.FILLED)
    assert replica.state is ReplicaState.READY
    with pytest.raises(InvariantError, match="bug in tierstore"):
        replica.step(ReplicaStep.FREED)
