"""What stays in a tier from step to step where backward steps each parameter, key by key.

No gradient waits there until an optimizer steps, and none has to exist when backward has ended.

1. A byte of a parameter that stays saves two reads, forward's and backward's, and a write; a byte of state
   one read and a write; a byte of what nothing trains two reads at most.  So parameters stay first, then
   state, then what nothing trains.
2. What comes and goes lies as far apart in the step as can be: its copies have the time of all the others.
3. Beside what stays is room for what comes and goes of two bundles: one that is trained, while what was
   trained before is written and what is trained next is read in its place.  No more than that is brought
   ahead: what would be brought beyond it takes the room of what is needed before, and is read twice.
4. State that does not stay goes down when it was used: nothing waits until its room is asked for.
5. Where few bundles are much larger than the others, these may stay as a whole before all else: they need
   that room in any case.

Pure: sizes in, keys out.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tierstore.planning.residents import Staying, Trained

MOST_WHOLE = 4
"""How many of the largest bundles it is tried with to keep them before all others."""


class KeptKind(enum.Enum):
    """What may stay of a bundle by itself; what saves most a byte comes first."""

    PARAMETERS = enum.auto()
    STATE = enum.auto()
    UNTRAINED = enum.auto()


@dataclass(frozen=True, slots=True)
class _Part:
    """A kind of a bundle's bytes: where the bundle is in the order of the step, and how many."""

    place: int
    kind: KeptKind
    nbytes: int


@dataclass(frozen=True, slots=True)
class KeptInBackward:
    """What stays of bundles where backward steps.

    Attributes:
        bundles: keys of bundles whose parameters stay.
        without_state: those of them whose state does not.
    """

    bundles: frozenset[str]
    without_state: frozenset[str]


def choose_in_backward(trained: Iterable[Trained], quota_bytes: int, low_bytes: int) -> KeptInBackward:
    """Choose what stays in a tier where backward steps.

    Args:
        trained: all bundles that a step uses, what is trained last in backward first.
        quota_bytes: of the tier.
        low_bytes: down to which it writes back early, whatever stays.
    """
    order = list(trained)
    places = _spread(len(order))
    # Those that are much larger than the others need that room anyway, whether they stay or not.
    largest = sorted(places, key=lambda place: -order[place].kept_bytes)[:MOST_WHOLE]
    found = [
        _kept(order, list(_by_worth(order, places, largest[:count])), quota_bytes, low_bytes)
        for count in range(len(largest) + 1)
    ]
    best = max(found, key=lambda parts: sum(_WORTH[part.kind] * part.nbytes for part in parts))
    with_state = {order[part.place].key for part in best if part.kind is KeptKind.STATE}
    bundles = {order[part.place].key for part in best if part.kind is not KeptKind.STATE}
    has_state = {each.key for each in order if each.state}
    return KeptInBackward(frozenset(bundles), frozenset(bundles & has_state - with_state))


def stay_in_backward(trained: Iterable[Trained], kept: KeptInBackward, quota_bytes: int) -> Staying:
    """Return what stays where backward steps, and how much of the others may be ahead.

    Args:
        trained: see `choose_in_backward`.
        kept: of it; what is named there beside it is passed over.
        quota_bytes: of the tier.
    """
    keys: set[str] = set()
    leaving: set[str] = set()
    kept_bytes = passing_bytes = 0
    for each in trained:
        stays = each.may_stay and each.key in kept.bundles
        has_state = stays and each.key not in kept.without_state
        own_bytes = (each.parameter_bytes if stays else 0) + (each.state_bytes if has_state else 0)
        keys.update([each.key] * stays)
        if each.may_stay:
            (keys if has_state else leaving).update(each.state)
        kept_bytes += own_bytes
        used_bytes = each.kept_bytes if each.is_trained and each.may_stay else each.parameter_bytes
        passing_bytes = max(passing_bytes, used_bytes - own_bytes)
    ahead_bytes = max(0, quota_bytes - kept_bytes - passing_bytes)
    return Staying(frozenset(keys), frozenset(leaving), ahead_bytes)


_WORTH = {KeptKind.PARAMETERS: 3, KeptKind.STATE: 2, KeptKind.UNTRAINED: 2}
"""Bytes that a step need not read and write for one that stays."""


def _spread(count: int) -> Sequence[int]:
    """Return all places so that each beginning is evenly spread: van der Corput's order."""
    bits = max(1, count - 1).bit_length()
    return sorted(range(count), key=lambda place: int(f"{place:0{bits}b}"[::-1], 2))


def _by_worth(order: Sequence[Trained], places: Sequence[int], whole: Sequence[int]) -> Iterator[_Part]:
    """Yield what may stay: some bundles as a whole, then what saves most, within that by place."""
    for place in whole:
        yield from _parts_of(order, place)
    others = [part for place in places if place not in whole for part in _parts_of(order, place)]
    yield from sorted(others, key=lambda part: part.kind.value)


def _parts_of(order: Sequence[Trained], place: int) -> Iterator[_Part]:
    each = order[place]
    if not each.may_stay:
        return
    yield _Part(place, KeptKind.PARAMETERS if each.is_trained else KeptKind.UNTRAINED, each.parameter_bytes)
    if each.state and each.is_trained:  # else nobody uses it
        yield _Part(place, KeptKind.STATE, each.state_bytes)


def _kept(
    order: Sequence[Trained], parts: Sequence[_Part], quota_bytes: int, low_bytes: int
) -> Sequence[_Part]:
    """Return the longest beginning beside which there is room, and what fits beside that of the rest."""
    passing = [0 if each.may_stay else each.parameter_bytes for each in order]
    room = _RoomBeside(passing, quota_bytes, low_bytes, sum(part.nbytes for part in parts))
    count = len(parts)
    while count and not room.has(0):
        count -= 1
        room.let_pass(parts[count])
    found, rest = list(parts[:count]), list(parts[count:])
    while rest:
        places = {part.place for part in found}
        passed = []
        for part in rest:
            if (part.kind is not KeptKind.STATE or part.place in places) and room.has(part.nbytes):
                room.keep(part)
                found.append(part)
            else:
                passed.append(part)
        if len(passed) == len(rest):
            break
        rest = passed
        room.measure()  # what comes and goes may be less now
    return found


class _RoomBeside:
    """What is kept, and whether there is room for what comes and goes beside it.

    Args:
        passing: bytes of each bundle that come and go whatever stays.
        quota_bytes: of the tier.
        low_bytes: down to which it writes back early.
        kept_bytes: all that may stay: nothing else comes and goes.
    """

    def __init__(self, passing: Iterable[int], quota_bytes: int, low_bytes: int, kept_bytes: int) -> None:
        self._passing = list(passing)
        self._quota_bytes = quota_bytes
        self._low_bytes = low_bytes
        self._kept_bytes = kept_bytes
        self._largest = 0  # the place of the bundle that needs most
        self._largest_bytes = 0  # what it needs
        self._next_bytes = 0  # what the next largest needs
        if any(self._passing):
            self.measure()

    def has(self, more_bytes: int) -> bool:
        """Say whether two bundles find room beside what is kept, and one beside what is written back to."""
        least_bytes = self._kept_bytes + more_bytes + self._largest_bytes
        return least_bytes + self._next_bytes <= self._quota_bytes and least_bytes <= self._low_bytes

    def let_pass(self, part: _Part) -> None:
        """A part comes and goes from now on."""
        self._kept_bytes -= part.nbytes
        self._passing[part.place] += part.nbytes
        if part.place != self._largest:
            less, self._largest = sorted((part.place, self._largest), key=self._passing.__getitem__)
            self._next_bytes = max(self._next_bytes, self._passing[less])
        self._largest_bytes = self._passing[self._largest]

    def keep(self, part: _Part) -> None:
        """A part stays from now on; until it is measured anew as much room is left as before."""
        self._kept_bytes += part.nbytes
        self._passing[part.place] -= part.nbytes

    def measure(self) -> None:
        """Look anew which two bundles need most."""
        places = sorted(range(len(self._passing)), key=self._passing.__getitem__)
        self._largest, self._largest_bytes = places[-1], self._passing[places[-1]]
        self._next_bytes = self._passing[places[-2]] if len(places) > 1 else 0
