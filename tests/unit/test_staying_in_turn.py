"""What stays where parts are stepped in turn: what moves is counted, and less does than by a fixed order."""

from __future__ import annotations

from collections.abc import Sequence, Set

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.planning import Trained, choose_residents, choose_staying
from tierstore.planning.residents import OTHERS
from tierstore.planning.staying_in_turn import are_in_turn, choose_in_turn

LAYERS = 6


def trained(name: str) -> Trained:
    return Trained((f"p{name}", f"s{name}"), (f"g{name}",), 48, 16)


def sizes_of(order: Sequence[Trained]) -> dict[str, int]:
    return {key: 16 if key[0] == "p" else 32 for each in order for key in each.keys}


def forward(names: Sequence[str]) -> list[str]:
    return [f"p{name}" for name in names]


def backward(names: Sequence[str], *, is_stepped: bool = True) -> list[str]:
    """The gradients come, and each bundle is stepped."""
    state = [["g" + name, "s" + name] if is_stepped else [] for name in names]
    return [
        key
        for name, keys in zip(reversed(names), reversed(state), strict=True)
        for key in ("p" + name, *keys)
    ]


MADE, JUDGED = [f"m{n}" for n in range(LAYERS)], [f"j{n}" for n in range(LAYERS)]
PAIR = [trained(name) for name in (*MADE, *JUDGED)]
JUDGE_STEP = [
    *forward(MADE),
    *forward(JUDGED) * 3,
    *backward(JUDGED, is_stepped=False) * 2,
    *backward(JUDGED),
]
MAKER_STEP = [*forward(MADE), *forward(JUDGED), *backward(JUDGED, is_stepped=False), *backward(MADE)]
ADVERSARIAL = [*JUDGE_STEP, *MAKER_STEP]

ALL = [*MADE, *JUDGED]
IN_ONE = {
    "a usual step": [*forward(ALL), *backward(ALL)],
    "an evaluation between": [*forward(ALL), *forward(ALL), *backward(ALL)],
    "an evaluation after it": [*forward(ALL), *backward(ALL), *forward(ALL)],
    "accumulated": [*forward(ALL), *backward(ALL, is_stepped=False)] * 3 + [*forward(ALL), *backward(ALL)],
    "recomputed": [
        *forward(ALL),
        *(key for name in reversed(ALL) for key in ("p" + name, *backward([name]))),
    ],
}


@pytest.mark.parametrize("kind", IN_ONE)
def test_where_all_is_stepped_at_once_nothing_is_in_turn(kind: str) -> None:
    assert not are_in_turn(PAIR, IN_ONE[kind])


def test_an_adversarial_pair_is_in_turn() -> None:
    assert are_in_turn(PAIR, ADVERSARIAL)


def moved(
    accesses: Sequence[str], sizes: dict[str, int], order: Sequence[Trained], stay: Set[str], room: int
) -> int:
    """Count what a second step moves, as simply as can be."""
    owners = {key: each for each in order for key in each.gradients}
    sizes = sizes | {key: each.gradient_bytes for key, each in owners.items()}
    there: list[str] = []
    below: set[str] = set()
    count = 0
    for number, key in enumerate(2 * [*accesses]):
        count = 0 if number == len(accesses) else count
        rest = [*(2 * [*accesses])[number + 1 :], *accesses]
        if key not in there:
            count += sizes[key] if key not in owners or key in below else 0
            there.append(key)
            below.discard(key)
        if key in owners and key not in accesses[number % len(accesses) + 1 :]:
            there.remove(key)
            count += 0 if stay >= set(owners[key].keys) else owners[key].kept_bytes
        while sum(map(sizes.__getitem__, there)) > room:
            if not (victims := [each for each in there if each not in stay]):
                break
            victim = max(victims, key=rest.index)
            if victim == key:
                break
            there.remove(victim)
            if victim in owners:
                below.add(victim)
                count += sizes[victim]
    return count


@given(
    st.lists(st.sampled_from([*MADE[:3], *JUDGED[:3]]), min_size=1, max_size=30),
    st.integers(0, 500),
    st.sets(st.sampled_from([*MADE[:3], *JUDGED[:3]])),
)
def test_no_choice_moves_less_than_the_one_that_is_taken(
    names: list[str], quota_bytes: int, others: set[str]
) -> None:
    """By a count of its own; bundles are used and stepped in any order."""
    accesses = [key for name in names for key in ("p" + name, "g" + name, "s" + name)]
    order = [trained(name) for name in sorted(set(names))]
    usual = frozenset(
        key for each in order if each.key[1:] in others for key in (*each.keys, *each.gradients)
    )
    chosen = choose_in_turn(usual, order, accesses, sizes_of(order), quota_bytes)
    room = quota_bytes - int(OTHERS * 64)
    count = moved(accesses, sizes_of(order), order, chosen, room)
    assert count <= moved(accesses, sizes_of(order), order, usual, room)
    assert count <= moved(accesses, sizes_of(order), order, frozenset(), room)


def test_less_moves_than_with_what_is_trained_last_in_backward() -> None:
    ratios = []
    for quota_bytes in range(300, 700, 40):
        room = quota_bytes - int(OTHERS * 64)
        stays = (
            choose_staying(PAIR, ADVERSARIAL, sizes_of(PAIR), quota_bytes),
            choose_residents(PAIR, quota_bytes),
        )
        ours, theirs = (moved(ADVERSARIAL, sizes_of(PAIR), PAIR, stay, room) for stay in stays)
        ratios.append(ours / theirs)
    assert max(ratios) <= 1
    assert min(ratios) < 0.65


def test_a_larger_room_moves_no_more() -> None:
    counts = []
    for quota_bytes in range(200, 1000, 40):
        staying = choose_staying(PAIR, ADVERSARIAL, sizes_of(PAIR), quota_bytes)
        room = quota_bytes - int(OTHERS * 64)
        counts.append(moved(ADVERSARIAL, sizes_of(PAIR), PAIR, staying, room))
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 0
