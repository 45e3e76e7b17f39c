"""What stays in a tier where parts of a model are stepped in turn, such as those of an adversarial pair.

There the parameters of one are used far more often than those of the other, and no order of what is trained
says what is worth most.  So what a step would move is counted, with what stays in one order or another, and
the least is taken.

1. What does not stay goes when room is needed, what is used last first.
2. Beside what stays there is room for a few of the largest that come and go.
3. What does not stay is stepped beside its old values, and written with every step.
4. A gradient comes once and is gone after its last use.

Pure: sizes in, keys out.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set

from tierstore.planning.residents import OTHERS, Trained

_CYCLES = 2
"""Steps that are counted through; the last one counts."""

_TRIED = 8
"""Of each order, how many beginnings of it are tried."""

_RETURNS = 3
"""How often parameters come back in a step where nothing goes in turn: forward, backward, an evaluation."""

_OTHERS_SHARE = 4
"""After so many of all parameters, one in this many, it is another pass that brings one back."""


def are_in_turn(trained: Sequence[Trained], accesses: Sequence[str]) -> bool:
    """Say whether parameters of some come back often, also after they were stepped.

    Args:
        trained: all that is trained.
        accesses: the keys that a step used, first use first.
    """
    last = {key: place for place, key in enumerate(accesses)}
    others = 1 + len(trained) // _OTHERS_SHARE
    stepped = (each for each in trained if each.state and each.key in last)
    if not any(last[each.key] > last.get(each.state[-1], len(accesses)) + others for each in stepped):
        return False
    returns = _returns(accesses, {each.key for each in trained}, others)
    return max(returns.values(), default=0) > _RETURNS


def _returns(accesses: Sequence[str], parameters: Set[str], others: int) -> Mapping[str, int]:
    """Count how often each comes back after so many others."""
    seen: dict[str, int] = {}
    returns = Counter[str]()
    for place, key in enumerate(key for key in accesses if key in parameters):
        if place - seen.get(key, -others - 1) > others:
            returns[key] += 1
        seen[key] = place
    return returns


def choose_in_turn(
    usual: Set[str],
    trained: Sequence[Trained],
    accesses: Sequence[str],
    sizes: Mapping[str, int],
    quota_bytes: int,
) -> frozenset[str]:
    """Choose what stays; return the keys.

    Args:
        usual: what would stay if nothing went in turn.
        trained: all that is trained, what is trained last in backward first.
        accesses: the keys that a step used, first use first.
        sizes: in bytes, of each of them but gradients.
        quota_bytes: of the tier.
    """
    room_bytes = quota_bytes - int(OTHERS * max(each.nbytes for each in trained))
    count = _Count(trained, accesses, sizes, room_bytes)
    uses = Counter(accesses)
    by_uses = sorted(trained, key=lambda each: -uses[each.key])
    candidates = itertools.chain(
        [frozenset(usual), frozenset[str]()],
        _beginnings(trained, room_bytes),
        _beginnings(by_uses, room_bytes),
    )
    return min(candidates, key=count.moved_bytes)


def _beginnings(order: Sequence[Trained], room_bytes: int) -> Iterator[frozenset[str]]:
    """Yield the keys of beginnings of an order that find room."""
    ends = list(itertools.accumulate(each.nbytes for each in order))
    fits = sum(end <= room_bytes for end in ends)
    for length in sorted({fits * part // _TRIED for part in range(1, _TRIED + 1)}):
        yield frozenset(key for each in order[:length] for key in (*each.keys, *each.gradients))


class _Count:
    """Counts what a step moves.

    Args:
        trained: all that is trained.
        accesses: the keys that a step uses, first use first.
        sizes: in bytes, of each of them but gradients.
        room_bytes: for what stays and what goes.
    """

    def __init__(
        self, trained: Sequence[Trained], accesses: Sequence[str], sizes: Mapping[str, int], room_bytes: int
    ) -> None:
        self._owners = {key: each for each in trained for key in each.gradients}
        self._sizes = {
            key: each.gradient_bytes // len(each.gradients) for key, each in self._owners.items()
        } | dict(sizes)
        self._accesses = accesses
        self._room_bytes = room_bytes
        self._last = {key: place for place, key in enumerate(accesses)}
        self._next = self._next_places()
        self._stay: Set[str] = frozenset()
        self._there: dict[str, int] = {}  # and where each is used next
        self._there_bytes = 0
        self._victims: list[tuple[int, str]] = []  # used last first; some are outdated
        self._below: set[str] = set()  # gradients that had to go
        self._moved_bytes = 0

    def _next_places(self) -> Sequence[int]:
        following = {
            key: len(self._accesses) + place for place, key in reversed([*enumerate(self._accesses)])
        }
        places = []
        for place, key in reversed([*enumerate(self._accesses)]):
            places.append(following[key])
            following[key] = place
        return places[::-1]

    def moved_bytes(self, stay: Set[str]) -> int:
        """Return the bytes that come and go in a step, with these keys there for good."""
        self._stay = stay
        self._there.clear()
        self._victims.clear()
        self._below.clear()
        self._there_bytes = 0
        for cycle in range(_CYCLES):
            self._moved_bytes = 0
            for place, key in enumerate(self._accesses):
                self._use(key, cycle * len(self._accesses) + self._next[place])
                if key in self._owners and place == self._last[key]:
                    self._end(key)
                self._make_room(key)
        return self._moved_bytes

    def _use(self, key: str, next_place: int) -> None:
        nbytes = self._sizes.get(key, 0)
        if key not in self._there:
            self._there_bytes += nbytes
            if key not in self._owners or key in self._below:
                self._moved_bytes += nbytes
                self._below.discard(key)
        self._there[key] = next_place
        if key not in self._stay:
            heapq.heappush(self._victims, (-next_place, key))

    def _end(self, gradient: str) -> None:
        """A gradient was used last: with the last one of a bundle, it was stepped."""
        owner = self._owners[gradient]
        if gradient == owner.gradients[-1] and not self._stay >= {*owner.keys}:
            self._moved_bytes += owner.kept_bytes
        del self._there[gradient]
        self._there_bytes -= self._sizes.get(gradient, 0)

    def _make_room(self, but: str) -> None:
        while self._there_bytes > self._room_bytes and self._victims:
            place, key = heapq.heappop(self._victims)
            if self._there.get(key) != -place:
                continue
            if key == but:
                heapq.heappush(self._victims, (place, key))
                return
            del self._there[key]
            self._there_bytes -= self._sizes.get(key, 0)
            if key in self._owners:
                self._below.add(key)
                self._moved_bytes += self._sizes.get(key, 0)
