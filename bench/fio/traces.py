"""Orders of accesses that tell eviction policies apart, and the best that any policy could do.

The optimum is computed from the trace alone; it calls nothing of what it judges.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.fio.sequence import indices
from bench.fio.values import Shape, Spreading

_DEFAULT_THETA = 1.1
_DEFAULT_HOT_PERCENT = 25


def accesses(trace: str, count: int, length: int, draws: random.Random) -> list[int]:
    """Return ``length`` accesses to ``count`` tensors.

    Args:
        trace: ``cyclic``: one after the other, again and again, as the layers of a model in training;
            ``zipf:THETA``: the k-th most wanted in proportion to ``k ** -THETA``, as rows of embeddings;
            ``scan:HOT``: HOT percent of the tensors are used again and again, in random order, and
            between each round of them a stretch as long goes through the others once.
        count: how many tensors there are.
        length: how many accesses.
        draws: decides what is left to chance.
    """
    name, _, parameter = trace.partition(":")
    if name == "cyclic":
        return [position % count for position in range(length)]
    if name == "zipf":
        spread = Spreading(Shape.ZIPF, float(parameter or _DEFAULT_THETA))
        chosen = indices(spread, count, draws)
        return [next(chosen) for _ in range(length)]
    return _scan(count, length, float(parameter or _DEFAULT_HOT_PERCENT), draws)


def _scan(count: int, length: int, hot_percent: float, draws: random.Random) -> list[int]:
    hot_count = min(max(1, round(count * hot_percent / 100)), count)
    hot, cold = range(hot_count), range(hot_count, count)
    order: list[int] = []
    scanned = 0
    while len(order) < length:
        order += draws.sample(hot, hot_count)
        order += [cold[(scanned + step) % len(cold)] for step in range(hot_count if cold else 0)]
        scanned += hot_count
    return order[:length]


@dataclass(frozen=True, slots=True)
class Optimum:
    """The most hits that are possible.

    Attributes:
        hits: of ``accesses``.
        kind: how it was computed: whether it can be reached, or only not surpassed.
    """

    hits: int
    accesses: int
    kind: str

    @property
    def ratio(self) -> float:
        """Hits of all accesses."""
        return self.hits / self.accesses


EXACT = "Belady's MIN, exact"
BOUND = "PFOO-L, an upper bound"


def optimum(order: Sequence[int], sizes: Sequence[int], capacity_bytes: int) -> Optimum:
    """Return the best that a cache could do which begins empty and takes in whatever is used.

    With equal sizes exact; otherwise a bound that cannot be surpassed and perhaps not reached.
    """
    if len(set(sizes)) <= 1:
        slots = capacity_bytes // sizes[0]
        return Optimum(belady_hits(order, slots), len(order), EXACT)
    return Optimum(pfoo_hits(order, sizes, capacity_bytes), len(order), BOUND)


def _next_uses(order: Sequence[int]) -> list[int]:
    """Return for each access the position of the next one to the same tensor; the length for none."""
    following: dict[int, int] = {}
    nexts = [len(order)] * len(order)
    for position in range(len(order) - 1, -1, -1):
        nexts[position] = following.get(order[position], len(order))
        following[order[position]] = position
    return nexts


def belady_hits(order: Sequence[int], slots: int) -> int:
    """Count the hits if always what is needed furthest in the future makes room.

    Source: L. A. Belady, IBM Systems Journal 5(2), 1966.
    """
    if slots < 1:
        return 0
    nexts = _next_uses(order)
    held: dict[int, int] = {}  # tensor: its next use
    furthest: list[tuple[int, int]] = []  # (-next use, tensor), entries of the past among them
    hits = 0
    for position, tensor in enumerate(order):
        if tensor in held:
            hits += 1
        elif len(held) == slots:
            _drop_furthest(held, furthest)
        held[tensor] = nexts[position]
        heapq.heappush(furthest, (-nexts[position], tensor))
    return hits


def _drop_furthest(held: dict[int, int], furthest: list[tuple[int, int]]) -> None:
    while True:
        negative, tensor = heapq.heappop(furthest)
        if held.get(tensor) == -negative:
            del held[tensor]
            return


def pfoo_hits(order: Sequence[int], sizes: Sequence[int], capacity_bytes: int) -> int:
    """Count the hits if the cache had to keep to its size on average over the trace only.

    A hit costs the tensor's bytes for as long as it is kept; the cheapest are taken until bytes times
    time are used up.  Source: Berger, Beckmann, Harchol-Balter, "Practical Bounds on Optimal Caching with
    Variable Object Sizes", SIGMETRICS 2018 (PFOO-L).
    """
    nexts = _next_uses(order)
    costs = sorted(
        (nexts[position] - position) * sizes[tensor]
        for position, tensor in enumerate(order)
        if nexts[position] < len(order) and sizes[tensor] <= capacity_bytes
    )
    budget, hits = capacity_bytes * len(order), 0
    for cost in costs:
        if cost > budget:
            break
        budget -= cost
        hits += 1
    return hits
