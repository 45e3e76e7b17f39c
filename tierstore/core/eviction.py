"""Who goes next: orders over what may be evicted.

A policy is a function from candidates to an order; it never touches the books.  Candidates come in
the order of their last use, oldest first, and the ledger takes as many as it needs from the front.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierstore.core.entry import Replica

SMALLEST_CLASS_BYTES = 16 * 1024**2
CLASS_COUNT = 8

Distance = Callable[[str], int | None]
Policy = Callable[[Iterable["Replica"], int, Distance], Iterator["Replica"]]
"""(candidates, oldest use first; bytes needed; accesses until a key's next use) -> order."""


def least_recently_used(
    candidates: Iterable[Replica], needed_bytes: int, distance: Distance
) -> Iterator[Replica]:
    """Evict what was not used for the longest time."""
    del needed_bytes, distance
    return iter(candidates)


def size_class(nbytes: int) -> int:
    """Return the size class: 0 below 16 MiB, doubling, 7 from 1 GiB up.

    Source: the offload memory manager's eight classes (reference, section B.4).
    """
    return min(max(nbytes // SMALLEST_CLASS_BYTES, 0).bit_length(), CLASS_COUNT - 1)


def by_size_class(candidates: Iterable[Replica], needed_bytes: int, distance: Distance) -> Iterator[Replica]:
    """Evict the first in the request's size class that is large enough, then the largest classes.

    Inside a class the order is that of the candidates.  Source: reference, section B.4.
    """
    del distance
    classes: list[list[Replica]] = [[] for _ in range(CLASS_COUNT)]
    for candidate in candidates:
        classes[size_class(candidate.charge_bytes)].append(candidate)
    own_class = classes[size_class(needed_bytes)]
    lower_bound = next((c for c in own_class if c.charge_bytes >= needed_bytes), None)
    if lower_bound is not None:
        yield lower_bound
    for members in reversed(classes):
        yield from (member for member in members if member is not lower_bound)


def by_next_use(candidates: Iterable[Replica], needed_bytes: int, distance: Distance) -> Iterator[Replica]:
    """Evict what the plan needs furthest in the future, and first what it does not know.

    Optimal for equal sizes (Belady, IBM Systems Journal 5(2), 1966).  Without a plan this is least
    recently used.
    """
    del needed_bytes

    def remaining(candidate: Replica) -> float:
        accesses = distance(candidate.key)
        return math.inf if accesses is None else accesses

    return iter(sorted(candidates, key=remaining, reverse=True))


POLICIES: dict[str, Policy] = {
    "lru": least_recently_used,
    "size-class": by_size_class,
    "next-use": by_next_use,
}
