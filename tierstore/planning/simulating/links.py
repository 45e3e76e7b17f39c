"""How long copies take: links that carry one after another, and what they share.

1. A link carries one copy after another, in the order in which they are asked for; latency is paid by each,
   and holds up none.
2. What several links share lets through no more bytes a second than it can, first come first served: two
   that are busy at once have less each.
3. Where a link has a burst, its rate is a limit (`tierstore.pacing.TokenBucket`): a copy waits until its
   bytes may pass, then takes no time.  Those of one limit wait together, reads before writes, as
   those of a drive do.
4. Where no link goes straight from one tier to another, a copy takes those between, one after another.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tierstore.pacing import TokenBucket
from tierstore.planning.machine import LinkFigures, Machine, TierMedium
from tierstore.planning.simulating.queue import EventQueue

_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Transit:
    """A copy on one link.

    Attributes:
        link: its name.
        begin_s: when its bytes begin to move.
        end_s: when the last of them is there.
    """

    link: str
    begin_s: float
    end_s: float


Arrived = Callable[[Transit], None]


class _CopyCarrier(Protocol):
    """What carries the bytes of one link."""

    def carry(self, nbytes: int, ready_s: float, arrived: Arrived) -> None:
        """Carry bytes that are ready from a time on; say when they are there."""
        ...


class _SharedRate:
    """What several links have together: bytes pass one after another."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._busy_until_s = 0.0

    def passed_s(self, nbytes: int, begin_s: float) -> float:
        """Return when so many bytes have passed that begin at a time."""
        self._busy_until_s = max(self._busy_until_s, begin_s) + nbytes / self._bytes_per_s
        return self._busy_until_s


class _SerialLink:
    """One copy after another."""

    def __init__(self, figures: LinkFigures, shared: Sequence[_SharedRate], queue: EventQueue) -> None:
        self._figures = figures
        self._shared = shared
        self._queue = queue
        self._busy_until_s = 0.0
        self._name = figures.name

    def carry(self, nbytes: int, ready_s: float, arrived: Arrived) -> None:
        """See `_CopyCarrier`."""
        begin_s = max(ready_s, self._busy_until_s, self._queue.now_s)
        end_s = begin_s + nbytes / self._figures.bytes_per_s
        for each in self._shared:
            end_s = max(end_s, each.passed_s(nbytes, begin_s))
        self._busy_until_s = end_s
        transit = Transit(self._name, begin_s, end_s + self._figures.latency_s)
        self._queue.at(transit.end_s, functools.partial(arrived, transit))


@dataclass(frozen=True, slots=True)
class _WaitingCopy:
    link: LinkFigures
    nbytes: int
    arrived: Arrived


class _Limit:
    """What waits until its bytes may pass: reads, then writes."""

    def __init__(self, bytes_per_s: float, burst_s: float, queue: EventQueue) -> None:
        rate = max(1, int(bytes_per_s))
        self._bucket = TokenBucket(rate, max(1, int(rate * burst_s)))
        self._queue = queue
        self._waiting: tuple[deque[_WaitingCopy], deque[_WaitingCopy]] = (deque(), deque())
        self._since_ns = 0
        self._turn_ns: int | None = None

    def enter(self, waiting: _WaitingCopy, *, is_read: bool) -> None:
        """Let a copy wait for its turn, if it has to."""
        if not any(self._waiting):
            self._since_ns = math.ceil(self._queue.now_s * _NS)
            if self._bucket.due_ns(waiting.nbytes, self._since_ns) <= self._since_ns:
                self._bucket.take(waiting.nbytes, self._since_ns)
                self._pass(waiting)
                return
        self._waiting[not is_read].append(waiting)
        self._plan_turn()

    def _plan_turn(self) -> None:
        line = self._waiting[0] or self._waiting[1]
        if not line:
            return
        due_ns = self._bucket.due_ns(line[0].nbytes, self._since_ns)
        if self._turn_ns is None or due_ns < self._turn_ns:
            self._turn_ns = due_ns
            self._queue.at(max(due_ns / _NS, self._queue.now_s), functools.partial(self._turn, due_ns))

    def _turn(self, due_ns: int) -> None:
        if self._turn_ns != due_ns:
            return  # an earlier turn has taken its place
        self._turn_ns = None
        while line := self._waiting[0] or self._waiting[1]:
            if self._bucket.due_ns(line[0].nbytes, self._since_ns) > due_ns:
                break
            first = line.popleft()
            self._bucket.take(first.nbytes, due_ns)
            self._pass(first)
        self._plan_turn()

    def _pass(self, copy: _WaitingCopy) -> None:
        end_s = self._queue.now_s + copy.link.latency_s
        begin_s = max(0.0, end_s - copy.nbytes / copy.link.bytes_per_s)
        self._queue.at(end_s, functools.partial(copy.arrived, Transit(copy.link.name, begin_s, end_s)))


class _LinkWithLimit:
    """A link whose rate is a limit."""

    def __init__(self, figures: LinkFigures, limit: _Limit, queue: EventQueue, *, is_read: bool) -> None:
        self._figures = figures
        self._limit = limit
        self._queue = queue
        self._is_read = is_read

    def carry(self, nbytes: int, ready_s: float, arrived: Arrived) -> None:
        """See `_CopyCarrier`."""
        waiting = _WaitingCopy(self._figures, nbytes, arrived)
        enter = functools.partial(self._limit.enter, waiting, is_read=self._is_read)
        if ready_s <= self._queue.now_s:
            enter()
        else:
            self._queue.at(ready_s, enter)


class MachineLinks:
    """All links of a machine.

    Args:
        machine: whose.
        queue: where it is entered when bytes are there.
    """

    def __init__(self, machine: Machine, queue: EventQueue) -> None:
        self._machine = machine
        self._queue = queue
        self._shared = {name: _SharedRate(rate) for name, rate in machine.shares.items()}
        self._limits: dict[str, _Limit] = {}
        self._carriers = {(each.source, each.target): self._carrier(each) for each in machine.links}
        self._ways: dict[tuple[int, int], tuple[_CopyCarrier, ...]] = {}

    def _carrier(self, figures: LinkFigures) -> _CopyCarrier:
        if not figures.burst_s or math.isinf(figures.bytes_per_s):
            return _SerialLink(figures, [self._shared[name] for name in figures.shares], self._queue)
        name, rate = figures.name, figures.bytes_per_s
        for share in figures.shares:  # the slowest is the limit that all of its links wait for
            if self._machine.shares[share] <= rate:
                name, rate = share, self._machine.shares[share]
        limit = self._limits.setdefault(name, _Limit(rate, figures.burst_s, self._queue))
        is_read = self._machine.tier(figures.source).medium is TierMedium.STORAGE
        return _LinkWithLimit(figures, limit, self._queue, is_read=is_read)

    def send(self, source: int, target: int, nbytes: int, ready_s: float, arrived: Arrived) -> None:
        """Carry bytes from one tier to another.

        Args:
            source: index of the tier.
            target: index of the tier.
            nbytes: how many.
            ready_s: from when on they can be read.
            arrived: told when they are there, of the whole way; its link is the tiers' names.
        """
        way = self._way(source, target)
        if len(way) == 1:
            way[0].carry(nbytes, ready_s, arrived)
            return
        begins: list[float] = []
        names = self._machine.tiers[source].name, self._machine.tiers[target].name

        def go(number: int, transit: Transit | None) -> None:
            if transit is not None:
                begins.append(transit.begin_s)
            if number < len(way):
                at_s = ready_s if transit is None else transit.end_s
                way[number].carry(nbytes, at_s, functools.partial(go, number + 1))
            else:
                arrived(Transit("->".join(names), begins[0], self._queue.now_s))

        go(0, None)

    def _way(self, source: int, target: int) -> tuple[_CopyCarrier, ...]:
        """Return the links that a copy takes."""
        if (source, target) not in self._ways:
            names = [tier.name for tier in self._machine.tiers]
            direct = self._carriers.get((names[source], names[target]))
            step = 1 if target > source else -1
            stops = [names[index] for index in range(source, target + step, step)]
            self._ways[source, target] = (
                (direct,)
                if direct is not None
                else tuple(self._carriers[pair] for pair in itertools.pairwise(stops))
            )
        return self._ways[source, target]
