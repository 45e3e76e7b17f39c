"""What stays in a tier from step to step: the choice, and what eviction makes of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_eviction import MIB, replicas, victims
from tierstore.planning import Plan, Trained, choose_residents, plan_from
from tierstore.planning.residents import OTHERS


def trained(number: int, kept_bytes: int = 48, gradient_bytes: int = 16) -> Trained:
    return Trained((f"p{number}", f"s{number}"), (f"g{number}",), kept_bytes, gradient_bytes)


def chosen(order: list[Trained], quota_bytes: int) -> list[int]:
    """Return which stay, by their place in the order; all of their keys do, and nothing else does."""
    keys = choose_residents(order, quota_bytes)
    found = [index for index, each in enumerate(order) if each.keys[0] in keys]
    assert keys == {key for index in found for key in (*order[index].keys, *order[index].gradients)}
    return found


def test_the_100_m_model_keeps_nine_of_its_bundles_in_608_mib() -> None:
    assert chosen([trained(number) for number in range(24)], 608) == list(range(9))


def test_nothing_stays_where_the_others_need_all_the_room() -> None:
    assert chosen([trained(number) for number in range(24)], int(OTHERS * 64) + 47) == []
    assert chosen([], 1000) == []


def test_a_tier_that_holds_everything_keeps_everything() -> None:
    assert chosen([trained(number) for number in range(4)], 4 * 48 + int(OTHERS * 64)) == [0, 1, 2, 3]


sizes = st.tuples(st.integers(0, 50), st.integers(0, 20))


@given(st.lists(sizes, max_size=12), st.integers(0, 600))
def test_what_stays_is_the_longest_beginning_beside_which_there_is_room(
    parts: list[tuple[int, int]], quota_bytes: int
) -> None:
    order = [trained(number, *each) for number, each in enumerate(parts)]
    others_bytes = int(OTHERS * max((kept + gradient for kept, gradient in parts), default=0))

    def has_room(count: int) -> bool:
        kept_bytes = sum(kept for kept, _ in parts[:count])
        gradient_bytes = sum(gradient for _, gradient in parts[:count])
        return kept_bytes + others_bytes <= quota_bytes and kept_bytes + gradient_bytes <= quota_bytes

    longest = max((n for n in range(len(parts) + 1) if n == 0 or has_room(n)), default=0)
    assert chosen(order, quota_bytes) == list(range(longest))


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=20),
    st.sets(st.integers(0, 7)),
    st.sets(st.integers(0, 7), min_size=1),
    st.integers(0, 19),
)
def test_residents_go_last_and_the_others_as_they_would_without_them(
    accesses: list[int], residents: set[int], there: set[int], position: int
) -> None:
    candidates = [replica for replica in replicas(*[1] * 8) if int(replica.key) in there]
    position %= len(accesses)

    def order(plan: Plan, among: set[int]) -> list[str]:
        some = [replica for replica in candidates if int(replica.key) in among]
        return list(victims("next-use", some, MIB, plan, position))

    trace = list(map(str, accesses))
    with_residents = order(plan_from(trace, {}, set(map(str, residents))), there)
    assert with_residents[: len(there - residents)] == order(plan_from(trace), there - residents)
    assert set(with_residents) == set(map(str, there))


def test_new_values_of_a_resident_stay_as_well() -> None:
    plan = plan_from(["a", "b"], {"a~next": "a"}, {"a"})
    assert plan.distance("a~next", 0) == plan.distance("a", 0) == 0
    assert plan.distance("b", 0) == 1
