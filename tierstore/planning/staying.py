"""What stays in a tier from step to step where bundles are unequal, or gradients are used again and again.

As `tierstore.planning.residents`, of which it is the general case: residents are what is trained last in
backward, and beside them there is room for what comes and goes.

1. The others' room is that of those that go: one that is trained, one beside it that comes, and a part of one
   that leaves.  A large bundle that stays needs none, and one that goes needs it once.
   What is used and never trained passes by, whatever stays, and needs as much room beside gradients, too.
2. So a few of the largest stay out of their turn, if more bytes stay then.  They have their gradients while
   others are trained that go.
3. A gradient comes once and is read once, and so is state.  But one that is accumulated over several passes,
   clipped, unscaled, looked at or zeroed is used in each; state still comes and goes once.  Where gradients
   are used so they stay first, then parameters, and state last.  Parameters that are used more often still,
   as in accumulation, stay with their gradients.
4. Where parts are stepped in turn, what moves is counted instead: see `tierstore.planning.staying_in_turn`.

Pure: sizes in, keys out.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set

from tierstore.planning.residents import OTHERS, Trained
from tierstore.planning.staying_in_turn import are_in_turn, choose_in_turn

OUT_OF_TURN = 3
"""Of the largest, how many may stay out of their turn: each doubles the walks through all that is trained."""

_ANOTHER_ROOM = 0.05
"""How much a tier's quota has to differ from the one that was chosen for."""

_USUAL_USES = 2
"""Of a gradient in a step: backward makes it, and the optimizer reads it."""


def choose_staying(
    trained: Iterable[Trained],
    accesses: Sequence[str],
    sizes: Mapping[str, int],
    quota_bytes: int,
    passing_bytes: int = 0,
) -> frozenset[str]:
    """Choose what stays in a tier; return the keys.

    Args:
        trained: all that is trained, what is trained last in backward first; the parameters' key is the first
            of its ``keys``.
        accesses: the keys that a step used, first use first.
        sizes: in bytes, of each of ``keys``.
        quota_bytes: of the tier.
        passing_bytes: of the largest of what is used beside what is trained.
    """
    whole = list(trained)
    usual = _usual(whole, accesses, sizes, quota_bytes, int(OTHERS * passing_bytes))
    if are_in_turn(whole, accesses):
        return choose_in_turn(usual, whole, accesses, sizes, quota_bytes - int(OTHERS * passing_bytes))
    return usual


def _usual(
    trained: Iterable[Trained],
    accesses: Sequence[str],
    sizes: Mapping[str, int],
    quota_bytes: int,
    passing_room_bytes: int,
) -> frozenset[str]:
    """Return the keys that stay by the rules above."""
    order = _by_worth(trained, Counter(accesses), sizes)
    largest = heapq.nlargest(OUT_OF_TURN, range(len(order)), key=lambda number: order[number].nbytes)
    best: list[Trained] = []
    best_bytes = 0
    for count in range(len(largest) + 1):
        for first in itertools.combinations(largest, count):
            stay = _most_that_fit(order, frozenset(first), quota_bytes, passing_room_bytes)
            nbytes = sum(each.nbytes for each in stay)
            if nbytes > best_bytes:
                best, best_bytes = stay, nbytes
    return frozenset(key for each in best for key in (*each.keys, *each.gradients))


def is_another_room(chosen_bytes: int | None, quota_bytes: int) -> bool:
    """Say whether there is to be chosen anew.

    Args:
        chosen_bytes: that was chosen for; ``None``: nothing was chosen.
        quota_bytes: now.
    """
    return chosen_bytes is None or abs(quota_bytes - chosen_bytes) > _ANOTHER_ROOM * max(
        quota_bytes, chosen_bytes
    )


def _by_worth(
    trained: Iterable[Trained], uses: Mapping[str, int], sizes: Mapping[str, int]
) -> Sequence[Trained]:
    """Return what stays together, what is worth most first."""
    first: list[Trained] = []
    parameters: list[Trained] = []
    states: list[Trained] = []
    for each in trained:
        most = max((uses.get(key, 0) for key in each.gradients), default=0)
        if most <= _USUAL_USES:
            first.append(each)
            continue
        key, *state = each.keys
        if uses[key] > most:
            first.append(Trained((key,), each.gradients, sizes[key], each.gradient_bytes))
        else:
            first.append(Trained((), each.gradients, 0, each.gradient_bytes))
            parameters.append(Trained((key,), (), sizes[key], 0))
        if state:
            states.append(Trained(tuple(state), (), sum(sizes[each] for each in state), 0))
    return [*first, *parameters, *states]


def _most_that_fit(
    order: Sequence[Trained], first: Set[int], quota_bytes: int, passing_room_bytes: int
) -> list[Trained]:
    """Return the most that can stay: some out of their turn, no more than fits."""
    stay = [order[number] for number in first]
    kept_bytes = sum(each.kept_bytes for each in stay)
    gradient_bytes = sum(each.gradient_bytes for each in stay)
    rooms = _rooms(order, first)
    last_bytes = 0  # of gradients that are made when all that goes has been trained
    fits = 0
    for number, each in enumerate(order):
        if number not in first:
            stay.append(each)
            kept_bytes += each.kept_bytes
            gradient_bytes += each.gradient_bytes
        last_bytes += each.gradient_bytes
        others_bytes = gradient_bytes - last_bytes + rooms[number + 1]
        if kept_bytes + max(gradient_bytes + passing_room_bytes, others_bytes) <= quota_bytes:
            fits = len(stay)
    return stay[:fits]


def _rooms(order: Sequence[Trained], first: Set[int]) -> Sequence[int]:
    """Return by place what those need that go if all from there on do but for some."""
    rooms = [0]
    one = other = 0  # the next two that go
    for number in reversed(range(len(order))):
        room_bytes = rooms[-1]
        if number not in first:
            nbytes = order[number].nbytes
            comes, leaves = max(nbytes, other), min(nbytes, other)
            room_bytes = max(room_bytes, nbytes, one + comes + leaves // 2)
            one, other = nbytes, one
        rooms.append(room_bytes)
    return rooms[::-1]
