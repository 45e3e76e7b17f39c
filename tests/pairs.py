"""Few cases of a grid that have every pair of values once: where no three factors meet in the code."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

Value = TypeVar("Value", bound=Hashable)
Row = tuple[Value, ...]
Pair = tuple[int, Value, int, Value]


def pairs_of(row: Row[Value]) -> set[Pair[Value]]:
    """Return the pairs of values that a case has, each with the numbers of their factors."""
    return {(one, row[one], other, row[other]) for one, other in itertools.combinations(range(len(row)), 2)}


def covering(
    *factors: Iterable[Value], is_there: Callable[[Row[Value]], bool] = lambda _: True
) -> Sequence[Row[Value]]:
    """Return cases in which each pair of values that there is comes, the same ones at every call.

    Args:
        *factors: the values of each.
        is_there: whether there is such a case.
    """
    left = {row: pairs_of(row) for row in itertools.product(*factors) if is_there(row)}
    chosen: list[Row[Value]] = []
    while left:
        chosen.append(max(left, key=lambda row: len(left[row])))
        come = left[chosen[-1]]
        left = {row: rest for row, pairs in left.items() if (rest := pairs - come)}
    return chosen
