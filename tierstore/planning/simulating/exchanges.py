"""Collectives of a simulated rank: what is on the network when, and which moments begin and await it.

1. Moments are known by their names: those that begin or await a collective have names of their own.
2. A rank's collectives are carried out one after another, in the order in which they are begun.
3. The device awaits them; the host goes on, where it has streams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tierstore.planning.timeline import WAITING, Interval, StallCause


@dataclass(frozen=True, slots=True)
class Passage:
    """A collective's way over one network.

    Attributes:
        lane: the network's name.
        seconds: that it takes there.
        nbytes: that one rank sends there.
    """

    lane: str
    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective of a step.

    Attributes:
        name: of it: its kind and what is exchanged.
        passages: one after another.
        after: the name of a moment that has to be computed before: it gives back the memory that is used.
    """

    name: str
    passages: tuple[Passage, ...]
    after: str | None = None


@dataclass(frozen=True)
class Exchanges:
    """All collectives of a step.

    Attributes:
        begun: by the name of the moment that begins them.
        awaited: by the name of a moment, that of the moment which began what it awaits.
    """

    begun: Mapping[str, Exchange] = field(default_factory=dict)
    awaited: Mapping[str, str] = field(default_factory=dict)


class NetworkLanes:
    """Carries out the collectives of one run.

    Args:
        exchanges: of each step.
        moved: told of the bytes that were sent, by lane.
    """

    def __init__(self, exchanges: Exchanges, moved: Counter[str]) -> None:
        self._exchanges = exchanges
        self._moved = moved
        self._marked = {each.after for each in exchanges.begun.values()}
        self._free_s = 0.0
        self._ends_s: dict[str, float] = {}
        self._computed_s: dict[str, float] = {}

    def reach(self, moment: str, asked_s: float, begin_s: float, intervals: list[Interval]) -> float:
        """Return when a moment can be computed that is reached now.

        Args:
            moment: its name.
            asked_s: when what it needs beside collectives is there: what it begins is ready then.
            begin_s: when the device could compute it.
            intervals: told of collectives and of the wait for them.
        """
        if moment in self._exchanges.awaited:
            begun = self._exchanges.awaited[moment]
            end_s = self._ends_s[begun]
            if end_s > begin_s:
                name = self._exchanges.begun[begun].name
                intervals.append(Interval(begin_s, end_s, WAITING, name, cause=StallCause.COLLECTIVE))
                begin_s = end_s
        if moment in self._exchanges.begun:
            self._begin(moment, self._exchanges.begun[moment], asked_s, intervals)
        if moment in self._marked:
            self._computed_s[moment] = begin_s
        return begin_s

    def busy_until_s(self, moment: str) -> float:
        """Return until when a collective reads what the moment that began it has leased."""
        return self._ends_s.get(moment, 0.0) if moment in self._exchanges.begun else 0.0

    def _begin(self, moment: str, exchange: Exchange, ready_s: float, intervals: list[Interval]) -> None:
        after_s = 0.0 if exchange.after is None else self._computed_s.get(exchange.after, 0.0)
        now_s = max(ready_s, self._free_s, after_s)
        for each in exchange.passages:
            intervals.append(
                Interval(now_s, now_s + each.seconds, each.lane, exchange.name, nbytes=each.nbytes)
            )
            self._moved[each.lane] += each.nbytes
            now_s += each.seconds
        self._free_s = self._ends_s[moment] = now_s
