"""Which idle spans stay in which tier: those that cost most to keep for what they save go first.

MindSpore's way (`tierstore.planning.searching.original`) with time instead of kernels: the weight of a span
is the time for which it could move, at most what moving takes, times its bytes.  Spans are kept in ascending
order of it as long as there is room at every moment strictly inside.  O(spans log moments).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierstore.planning.machine import Machine
from tierstore.planning.program import ByteKind, Program
from tierstore.planning.searching.spans import IdleSpan, StepUsage, usage_of


@dataclass(frozen=True)
class KeptSpans:
    """Where spans stay.

    Attributes:
        spans: all of them.
        places: of each, the number of the tier that holds it.
    """

    spans: tuple[IdleSpan, ...]
    places: tuple[int, ...]

    def residents(self) -> frozenset[str]:
        """Return the keys that never leave the first tier."""
        leave = {span.key for span, place in zip(self.spans, self.places, strict=True) if place}
        return frozenset(span.key for span in self.spans) - leave

    def homes(self) -> dict[str, int]:
        """Return the number of the tier that holds its longest span, for each key that leaves the first."""
        longest: dict[str, tuple[int, int]] = {}
        for span, place in zip(self.spans, self.places, strict=True):
            if place and span.end - span.begin > longest.get(span.key, (0, 0))[0]:
                longest[span.key] = (span.end - span.begin, place)
        return {key: place for key, (_, place) in longest.items()}

    def swapped_layers(self, program: Program) -> tuple[int, ...]:
        """Return the layers of whose activations at least half of the bytes leave the first tier."""
        leaving = self.homes()
        balance: dict[int, int] = {}
        for key, datum in program.data.items():
            if datum.kind is ByteKind.ACTIVATION and datum.layer is not None:
                change = datum.nbytes if key in leaving else -datum.nbytes
                balance[datum.layer] = balance.get(datum.layer, 0) + change
        return tuple(sorted(layer for layer, more in balance.items() if more >= 0))


def keep_greedily(program: Program, machine: Machine, *, swapped: Sequence[str] = ()) -> KeptSpans:
    """Decide for every span of a program; the last tier takes what no other one holds.

    Args:
        program: whose step.
        machine: whose tiers.
        swapped: activations that may leave, as of `usage_of`.
    """
    usage = usage_of(program, swapped=swapped)
    return keep(usage, [tier.capacity_bytes for tier in machine.tiers], _weights(program, machine))


def keep(usage: StepUsage, capacities: Sequence[int], weigh: Callable[[IdleSpan], float]) -> KeptSpans:
    """Keep spans in ascending order of their weights, each in the first tier with room.

    Args:
        usage: of a step.
        capacities: of the tiers; the last one is not looked at.
        weigh: returns what keeping a span costs.
    """
    moments = len(usage.leased_bytes)
    upper = [_Room([capacities[0] - used for used in usage.used_bytes])]
    upper += [_Room([capacity] * moments) for capacity in capacities[1:-1]]
    places = [len(capacities) - 1] * len(usage.spans)
    for number in sorted(range(len(usage.spans)), key=lambda each: weigh(usage.spans[each])):
        span = usage.spans[number]
        ranges = list(span.inside(moments))
        for place, room in enumerate(upper):
            if min(room.least(first, end) for first, end in ranges) >= span.nbytes:
                for first, end in ranges:
                    room.take(first, end, span.nbytes)
                places[number] = place
                break
    return KeptSpans(usage.spans, tuple(places))


def _weights(program: Program, machine: Machine) -> Callable[[IdleSpan], float]:
    """Return what weighs a span: seconds in which it could move, times bytes; then moments times bytes."""
    seconds = [0.0, *itertools.accumulate(moment.compute_s for moment in program.moments)]
    moments = len(program.moments)
    below = machine.tiers[1].name if len(machine.tiers) > 1 else None
    link = machine.link(below, machine.tiers[0].name) if below else None
    rate = link.bytes_per_s if link else math.inf

    def weigh(span: IdleSpan) -> float:
        idle_s = sum(seconds[end] - seconds[first] for first, end in span.inside(moments))
        # Where nothing is known of time, what the original counts decides.
        counted = (span.end - span.begin - 1) * span.nbytes * _TINY_S
        return min(idle_s, span.nbytes / rate) * span.nbytes + counted

    return weigh


_TINY_S = 1e-12


class _Room:
    """What is free at each moment: the least of a range, and taking from a range, in O(log moments)."""

    def __init__(self, free_bytes: Sequence[int]) -> None:
        self._size = 1 << max(len(free_bytes) - 1, 0).bit_length()
        self._least = [0] * self._size + [*free_bytes, *[2**63] * (self._size - len(free_bytes))]
        self._change = [0] * (2 * self._size)  # that all below a node have in common
        for node in range(self._size - 1, 0, -1):
            self._least[node] = min(self._least[2 * node], self._least[2 * node + 1])

    def least(self, first: int, end: int) -> int:
        left, right = first + self._size, end + self._size - 1
        low_left, low_right = self._least[left], self._least[right]
        while left >> 1 != right >> 1:
            if not left & 1:
                low_left = min(low_left, self._least[left ^ 1])
            if right & 1:
                low_right = min(low_right, self._least[right ^ 1])
            left >>= 1
            right >>= 1
            low_left += self._change[left]
            low_right += self._change[right]
        least = min(low_left, low_right)
        while left > 1:
            left >>= 1
            least += self._change[left]
        return least

    def take(self, first: int, end: int, nbytes: int) -> None:
        left, right = first + self._size, end + self._size
        ends = left, right - 1
        while left < right:
            if left & 1:
                self._lower(left, nbytes)
                left += 1
            if right & 1:
                right -= 1
                self._lower(right, nbytes)
            left >>= 1
            right >>= 1
        for node in ends:
            self._settle(node)

    def _lower(self, node: int, nbytes: int) -> None:
        self._least[node] -= nbytes
        if node < self._size:
            self._change[node] -= nbytes

    def _settle(self, node: int) -> None:
        """Make what lies above a node right again."""
        while node > 1:
            node >>= 1
            self._least[node] = min(self._least[2 * node], self._least[2 * node + 1]) + self._change[node]
