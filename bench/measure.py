"""Turns, medians and ratios: how two ways of doing one thing are compared.

Knows nothing of what is measured.  A *run* does its work once and returns the seconds it counts, by
name, so that each run decides what is set-up and what is measured.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Run = Callable[[], Mapping[str, float]]
"""Does the work once; returns the seconds that count, by the names of what took them."""


@dataclass(frozen=True)
class Spread:
    """A sample in four numbers: seconds, ratios, whatever was measured."""

    median: float
    lowest: float
    highest: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise at least one value."""
        return cls(statistics.median(values), min(values), max(values), len(values))

    def __str__(self) -> str:
        """Print the median and, where there is more than one value, the range."""
        if self.count == 1:
            return f"{self.median:.4g}"
        return f"{self.median:.4g} ({self.lowest:.4g}-{self.highest:.4g}, n={self.count})"


def stopwatch(work: Callable[[], object]) -> float:
    """Return the seconds that ``work()`` takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


@contextlib.contextmanager
def objects_left_alone() -> Iterator[None]:
    """Keep Python's garbage collector from looking at the objects that there are, inside the context.

    A whole collection looks at every object of the process: those of other runs and of imported modules too.
    It takes as long as a step of a small model, and it interrupts whichever run happens to be next.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def take_turns(runs: Sequence[Run], *, repeats: int, warmups: int) -> dict[str, list[float]]:
    """Run all of ``runs`` once a round; return their seconds by name, lists in the order of rounds.

    Every second round goes through the runs backwards, so that none is always first.  The first
    ``warmups`` rounds are not counted.

    Raises:
        ValueError: no round would count.
    """
    if repeats < 1 or warmups < 0:
        raise ValueError(f"repeats must be at least 1 and warmups at least 0, not {repeats} and {warmups}")
    seconds: dict[str, list[float]] = {}
    for turn in range(warmups + repeats):
        for run in runs if turn % 2 == 0 else reversed(runs):
            taken = run()
            if turn >= warmups:
                for name, value in taken.items():
                    seconds.setdefault(name, []).append(value)
    return seconds


def ratios(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Divide round by round: what slows both runs of a round down does not show."""
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least ``percent`` of all values do not exceed."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]
