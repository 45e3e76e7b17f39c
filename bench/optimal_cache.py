"""The hits that no cache of rows can exceed: Belady's rule, where a batch asks for all of its rows at once.

A row that is kept from one batch that asks for it to the next such batch is a hit.  While a batch is computed
with, its own rows are in slots, so those that only wait for a later batch have the slots that it leaves.  Who
has to go is whoever is asked for last from then on, or never: any other choice could be changed to that one
without losing a hit, as what waits longest is in the way of the most batches.

(L. A. Belady, A study of replacement algorithms for a virtual-storage computer, 1966; here slots that are
free for others change from batch to batch, which the argument allows.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


def optimal_hits(batches: Sequence[Ids], slots: int, *, may_pass_by: bool = False) -> Ids:
    """Return how many rows of each batch are in a cache that knows what will be asked for.

    Args:
        batches: the ids that each asks for, distinct, in any order.
        slots: rows that there is room for.
        may_pass_by: rows of a batch need no slots of the cache, so that others can stay beside them: a bound
            for whatever serves a batch.  Else all of a batch are in slots at once.

    Raises:
        ValueError: a batch has ids twice, or more than there are slots.
    """
    numbers, following = _next_batches(batches)
    due = np.zeros(1 + max((int(each.max(initial=-1)) for each in numbers), default=-1), np.int64)
    cached = np.zeros(len(due), np.bool_)
    hits = np.zeros(len(batches), np.int64)
    for at, (rows, next_use) in enumerate(zip(numbers, following, strict=True)):
        if len(rows) > slots and not may_pass_by:
            raise ValueError(f"batch {at} asks for {len(rows)} rows, and there are {slots} slots")
        hits[at] = np.count_nonzero(cached[rows])
        due[rows] = next_use
        cached[rows] = False
        waiting = np.flatnonzero(cached)
        candidates = np.concatenate([waiting, rows]) if may_pass_by else waiting
        cached[rows] = True
        excess = len(waiting) + len(rows) - slots
        if excess > 0:
            latest = np.argpartition(-due[candidates], excess - 1)[:excess]
            cached[candidates[latest]] = False
    return hits


def informed_hits(batches: Sequence[Ids], slots: int) -> Ids:
    """Return the hits of a cache that knows how often each row is asked for in all, but not when.

    Where ids are drawn independently of each other nobody who does not know the future has more.

    Args:
        batches: the ids that each asks for, distinct, in any order.
        slots: rows that there is room for, as many as the largest batch at least.

    Raises:
        ValueError: a batch has ids twice, or more than there are slots.
    """
    numbers, _ = _next_batches(batches)
    counts = np.bincount(np.concatenate([np.zeros(0, np.int64), *numbers]))
    cached = np.zeros(len(counts), np.bool_)
    hits = np.zeros(len(batches), np.int64)
    for at, rows in enumerate(numbers):
        if len(rows) > slots:
            raise ValueError(f"batch {at} asks for {len(rows)} rows, and there are {slots} slots")
        hits[at] = np.count_nonzero(cached[rows])
        cached[rows] = False
        waiting = np.flatnonzero(cached)
        cached[rows] = True
        excess = len(waiting) + len(rows) - slots
        if excess > 0:
            seldom = np.argpartition(counts[waiting], excess - 1)[:excess]
            cached[waiting[seldom]] = False
    return hits


def _next_batches(batches: Sequence[Ids]) -> tuple[list[Ids], list[Ids]]:
    """Return for each batch its rows, by small numbers, and which batch asks for each of them next.

    For none it is how many batches there are.
    """
    lengths = [len(each) for each in batches]
    every = np.concatenate([np.zeros(0, np.int64), *batches])
    distinct, numbers = np.unique(every, return_inverse=True)
    parts = np.split(numbers, np.cumsum(lengths)[:-1]) if batches else []
    never = len(batches)
    next_use = np.full(len(distinct), never)
    following = []
    for at in range(never - 1, -1, -1):
        rows = parts[at]
        following.append(next_use[rows])
        next_use[rows] = at
        if len(np.unique(rows)) != len(rows):
            raise ValueError(f"batch {at} has ids more than once")
    return parts, following[::-1]
