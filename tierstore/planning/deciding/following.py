"""Where in a step a program is, and what a store is told of it: what it follows, and what it fetches ahead.

1. The first step is recorded; from the second on the plan made of it is followed, and what comes next is
   prefetched within a share of each tier.  Activations are brought to the tiers below the first only: the
   graph tells when the device needs them.  A step that goes another way is recorded anew.
2. Advice is carried out in order, and the next one is decided when the last was carried out: what happens
   meanwhile counts.  So uses may come in the midst of another one's advice.
3. A step has one order of uses.  One that turns out otherwise the next time is only advised worse.
4. Backward waits for room for a gradient: the plan says where in a step there should be some before it comes.
5. Where new values wait to take the place of old ones, it is they that are brought to the first tier.
6. Below the first tier nothing is brought that stays there: it is stepped in place.  Into the slowest one, in
   which all is that is not newer above, things are brought only where steps are made beside old values, which
   need a second replica: where gradients are the store's.
7. Without an optimizer each use of a model is a step.  Of parts that a program calls itself, what follows is
   planned for as well (`tierstore.planning.deciding.part_order`), and a call that was expected goes on with
   the plan.  Of one that comes again and again nobody knows when it does for the last time: it begins anew.
8. Of what does not stay no more is ahead in the first tier than who says what stays has room for: a key that
   finds none now is not overtaken by one that is used later.
"""

from __future__ import annotations

import collections
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from tierstore.core.model import Plan
from tierstore.planning.deciding.part_order import PartOrder
from tierstore.planning.planner import PlanPosition, plan_from
from tierstore.planning.residents import Staying
from tierstore.planning.trace import Trace


class ResidentChooser(Protocol):
    """Says which keys stay where they are."""

    @property
    def is_stale(self) -> bool:
        """Whether it would choose others of the same uses."""
        ...

    def choose(self, accesses: Sequence[str], gradients: Sequence[str]) -> Staying:
        """Return which keys stay, and how much of the others may be ahead.

        Args:
            accesses: that a step used, first use first.
            gradients: those of them that came to be in it.
        """
        ...


USES_BEFORE_ROOM = 16
"""Room is made so many uses before a gradient comes: a bundle's in backward and in its step, and more."""

MOST_STEPS_WITHOUT_ALL = 16
"""A step ends when every optimizer has stepped, or one of them this often."""


def next_version(key: str) -> str:
    """Return the key that a bundle's new values are under until they take the place of the old ones."""
    return f"{key}~next"


# ---------------------------------------------------------------------- advice


@dataclass(frozen=True, slots=True)
class Follow:
    """A plan is to be followed from now on, from its beginning."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Advance:
    """The plan's access at ``position`` happens now."""

    position: int


@dataclass(frozen=True, slots=True)
class Prefetch:
    """``key`` will be needed in ``tier`` soon; it may not be there yet, or not any more: nothing to bring."""

    key: str
    tier: str


Advice: TypeAlias = Follow | Advance | Prefetch

_NONE: tuple[Advice, ...] = ()


@dataclass(slots=True)
class PrefetchWindow:
    """How far ahead is prefetched into one tier.

    Attributes:
        tier: where to.
        limit_bytes: how many bytes of keys may lie ahead.
        is_slowest: whether no tier is below it.
        turn: up to where it was prefetched, exclusive.
        ahead: the bytes of each key between where the step is and ``turn``.
        ahead_bytes: of them together.
        keys: these keys.
        coming: the bytes of keys among them that do not stay, each counted once.
        coming_bytes: of these together.
    """

    tier: str
    limit_bytes: int
    is_slowest: bool = False
    turn: int = 0
    ahead: collections.deque[int] = field(default_factory=collections.deque)
    ahead_bytes: int = 0
    keys: collections.deque[str] = field(default_factory=collections.deque)
    coming: dict[str, int] = field(default_factory=dict)
    coming_bytes: int = 0

    def add(self, key: str, nbytes: int, *, stays: bool) -> None:
        """The next key lies ahead now."""
        self.turn += 1
        self.ahead.append(nbytes)
        self.keys.append(key)
        self.ahead_bytes += nbytes
        if not stays and key not in self.coming:
            self.coming[key] = nbytes
            self.coming_bytes += nbytes

    def pass_first(self) -> None:
        """The first key that lay ahead is used now."""
        self.ahead_bytes -= self.ahead.popleft()
        self.coming_bytes -= self.coming.pop(self.keys.popleft(), 0)

    def begin_at(self, turn: int) -> None:
        """Nothing lies ahead: the step is at ``turn``."""
        self.turn = turn
        for each in (self.ahead, self.keys, self.coming):
            each.clear()
        self.ahead_bytes = self.coming_bytes = 0


class Follower:
    """Records steps and follows the plan made of them.

    Uses are taken in at once.  What a method returns is decided as it is asked for: take all of it.

    Args:
        windows: what is prefetched where; empty: nothing, and a plan is followed all the same, for what is
            evicted and what stays; ``None``: everything fits, and nothing needs to be known.
        first_tier: where others tell when activations have to be there.
        nbytes_of: the bytes of a key; 0 of one that others bring.
        optimizers: how many there are.
        chooser: says which keys stay where they are, and how much of the others may be ahead; ``None``: none
            do.
        is_there: says whether anything is under a key; ``None``: no new values are made before their time.
    """

    def __init__(
        self,
        windows: Sequence[PrefetchWindow] | None,
        first_tier: str,
        nbytes_of: Callable[[str], int],
        optimizers: int,
        chooser: ResidentChooser | None = None,
        is_there: Callable[[str], bool] | None = None,
    ) -> None:
        self.is_planning = windows is not None
        self._windows = list(windows or ())
        self._first_tier = first_tier
        self._nbytes_of = nbytes_of
        self._steps = [0] * max(1, optimizers)
        self._trace = Trace()
        self._place: PlanPosition | None = None
        self._followed: tuple[str, ...] = ()
        self._parts = PartOrder()
        self._part: Hashable = None  # that is called
        self._has_begun = False  # any part
        # Which parts begin at a position of the plan, but those that come again and again.
        self._begins: Mapping[int, Collection[Hashable]] = {}
        self._last = ""
        self._left_out: set[str] = set()  # keys whose next use no plan has
        self._has_gradients = False  # whether the last step put any into the store
        self._gradients: dict[str, int] = {}  # the bytes that need room in the first tier, by key
        self._passing: dict[str, int] = {}  # the bytes of activations, as they were last
        self._chooser = chooser
        self._staying = Staying()
        self._is_there = is_there

    @property
    def has_plan(self) -> bool:
        """Whether a step was recorded and is followed."""
        return self._place is not None

    @property
    def residents(self) -> frozenset[str]:
        """The keys that stay where they are, as they were chosen last."""
        return self._staying.keys

    @property
    def leaving(self) -> frozenset[str]:
        """The keys that go down whenever they were used, as they were chosen last."""
        return self._staying.leaving

    def set_limit(self, tier: str, limit_bytes: int) -> None:
        """Prefetch as far as ``limit_bytes`` into ``tier`` from now on."""
        for window in self._windows:
            if window.tier == tier:
                window.limit_bytes = limit_bytes

    # --- uses -----------------------------------------------------------------------------------

    def note(self, key: str) -> Iterator[Advice]:
        """Take in that ``key`` is used now; prefetch what comes after it."""
        if not self.is_planning:
            return iter(_NONE)
        if key in self._left_out:
            self._left_out.discard(key)
            return iter(_NONE)
        if key == self._last:
            return iter(_NONE)
        self._last = key
        self._trace.note(key)
        place = self._place
        position = None if place is None else place.pass_by(key)
        return iter(_NONE) if place is None or position is None else self._go_on(place, position)

    def _go_on(self, place: PlanPosition, position: int) -> Iterator[Advice]:
        """Go on from where the plan has a key."""
        yield Advance(position)
        for window in self._windows:
            self._pass(window, place)
            yield from self._prefetch(window, place)

    def note_passing(self, key: str, nbytes: int) -> Iterator[Advice]:
        """Take in that an activation is used now.

        Its user tells when it has to be on the device; until then it is prefetched to the tiers below.
        """
        self._passing[key] = nbytes
        return self.note(key)

    def note_gradient(self, key: str, room_bytes: int = 0) -> Iterator[Advice]:
        """Take in that a gradient comes to be under ``key``: it is there until the step ends.

        Args:
            key: it is put when this is done.
            room_bytes: that the first tier has to have room for then, and others have to leave it for.
        """
        self._gradients[key] = room_bytes
        return self.note(key)

    def leave_out(self, keys: Sequence[str]) -> None:
        """Take in that the next use of each key is as in no other step: plans are made without it."""
        self._left_out.update(keys)

    # --- steps ----------------------------------------------------------------------------------

    def note_step(self, optimizer: int) -> None:
        """Take in that an optimizer has stepped."""
        self._steps[optimizer] += 1

    def begin_forward(self) -> Iterator[Advice]:
        """Take in that a module is used: after the optimizers' steps a new step begins."""
        is_over = all(self._steps) or max(self._steps) >= MOST_STEPS_WITHOUT_ALL
        if not self.is_planning or not is_over:
            return iter(_NONE)
        self._steps = [0] * len(self._steps)
        return self._end_step()

    def begin_inference(self, part: Hashable = None) -> Iterator[Advice]:
        """Take in that a model without an optimizer is used: each use is a step.

        Args:
            part: of it that the program calls; ``None``: it calls nothing but the whole.
        """
        former, self._part = self._part, part
        is_first, self._has_begun = not self._has_begun, True
        if not self.is_planning or is_first:
            return iter(_NONE)
        rooms = self._take_rooms()
        is_new = self._parts.note(former, self._take_accesses(), part)
        place = self._place
        if (
            place is not None
            and not is_new
            and self._is_fresh
            and part in self._begins.get(place.position, ())
        ):
            return iter(_NONE)
        expected = self._parts.expected(part) if part in self._parts else [former]
        begins: defaultdict[int, set[Hashable]] = defaultdict(set)
        accesses: list[str] = []
        for each in expected:
            if not self._parts.comes_again(each):
                begins[len(accesses)].add(each)
            accesses += self._parts.accesses(each)
        self._begins = begins if accesses else self._begins
        return self._plan_for(tuple(accesses), rooms)

    def _end_step(self) -> Iterator[Advice]:
        rooms = self._take_rooms()
        return self._plan_for(self._take_accesses(), rooms)

    def _take_rooms(self) -> Mapping[str, int]:
        rooms, self._gradients = self._gradients, {}
        self._has_gradients = bool(rooms)
        return rooms

    def _take_accesses(self) -> tuple[str, ...]:
        self._left_out.clear()
        self._last = ""
        return self._trace.take()

    @property
    def _is_fresh(self) -> bool:
        return self._chooser is None or not self._chooser.is_stale

    def _plan_for(self, accesses: tuple[str, ...], rooms: Mapping[str, int]) -> Iterator[Advice]:
        """Expect these accesses, and gradients that need some room, from now on.

        What was expected already begins anew.
        """
        if not accesses:
            return iter(_NONE)
        if accesses == self._followed and self._place is not None and self._is_fresh:
            self._place.begin_cycle()
            return iter(_NONE)
        gradients, chooser = tuple(rooms), self._chooser
        self._staying = Staying() if chooser is None else chooser.choose(accesses, gradients)
        # Its end is what a gradient is kept for, whether anybody looks at it or not.
        plan = plan_from(
            (*accesses, *gradients),
            {next_version(key): key for key in dict.fromkeys(accesses)},
            self.residents,
            _coming(accesses, rooms),
        )
        self._followed = accesses
        return self._follow(plan)

    def _follow(self, plan: Plan) -> Iterator[Advice]:
        yield Follow(plan)
        self._place = PlanPosition(plan)
        for window in self._windows:
            window.begin_at(0)

    # --- prefetch -------------------------------------------------------------------------------

    def _pass(self, window: PrefetchWindow, place: PlanPosition) -> None:
        """What was ahead has been reached.

        It may have been by a use in the midst of this one: of what garbage is collected in, say.
        """
        while window.ahead and len(window.ahead) > window.turn - place.turn:
            window.pass_first()
        if window.turn < place.turn:
            window.begin_at(place.turn)

    def _prefetch(self, window: PrefetchWindow, place: PlanPosition) -> Iterator[Advice]:
        """Prefetch within the window, and the next one whatever its size."""
        last = place.turn + place.length - 1
        while window.turn < last:
            key = place.key_at(window.turn)
            nbytes = self._bytes_in(window, key) if self._is_wanted(window, key) else 0
            stays = key in self.residents
            if window.ahead_bytes and window.ahead_bytes + nbytes > window.limit_bytes:
                return
            if not stays and self._lacks_room(window, key, nbytes):
                return
            window.add(key, nbytes, stays=stays)
            if nbytes:
                yield Prefetch(self._newest(key) if window.tier == self._first_tier else key, window.tier)

    def _is_wanted(self, window: PrefetchWindow, key: str) -> bool:
        if window.tier == self._first_tier:
            return True
        return key not in self.residents and (self._has_gradients or not window.is_slowest)

    def _lacks_room(self, window: PrefetchWindow, key: str, nbytes: int) -> bool:
        """Say whether a key that does not stay has to wait until others that do not have been used."""
        room_bytes = self._staying.ahead_bytes
        if window.tier != self._first_tier or room_bytes is None or key in window.coming:
            return False
        return bool(window.coming_bytes) and window.coming_bytes + nbytes > room_bytes

    def _newest(self, key: str) -> str:
        """Return what is used when a key is next: new values, if they wait to take its place."""
        there = self._is_there
        return following if there is not None and there(following := next_version(key)) else key

    def _bytes_in(self, window: PrefetchWindow, key: str) -> int:
        """Return what a window has to bring for a key; nothing if somebody else tells when it comes there."""
        nbytes = self._nbytes_of(key)
        return nbytes if nbytes or window.tier == self._first_tier else self._passing.get(key, 0)


def _coming(accesses: Sequence[str], rooms: Mapping[str, int]) -> Sequence[int]:
    """Return by access for how many bytes of gradients room is made then; empty: for none.

    That is for as many of the next ones as are together no less than the largest one of all.

    Args:
        accesses: of a step.
        rooms: that gradients need when they come, by key.
    """
    largest_bytes = max(rooms.values(), default=0)
    if not largest_bytes:
        return ()
    length = len(accesses) + len(rooms)
    needed = [0] * (length + USES_BEFORE_ROOM)
    for key, position in {key: position for position, key in reversed([*enumerate(accesses)])}.items():
        needed[position] = rooms.get(key, 0)
    return [
        _until(needed[following : following + USES_BEFORE_ROOM], largest_bytes)
        for following in range(1, length + 1)
    ]


def _until(sizes: Sequence[int], enough_bytes: int) -> int:
    total_bytes = 0
    for nbytes in sizes:
        if total_bytes >= enough_bytes:
            break
        total_bytes += nbytes
    return total_bytes
