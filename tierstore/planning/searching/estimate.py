"""About how long a step takes under a placement, without the ledger: to know what is worth simulating.

What is needed next stays, what is needed last leaves; each link moves one key at a time; bytes come as far
ahead as the placement says.  Nothing is promised but the order of placements, roughly: the simulator decides.

O(N log N) for N uses; a few steps are gone through, and the last one counts.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tierstore.planning.deciding import high_of
from tierstore.planning.homes import CPU, PlacedMark, Treatment
from tierstore.planning.machine import Machine, TierFigures
from tierstore.planning.placement import Placement
from tierstore.planning.program import ByteKind, Moment, Phase, Program, Unit
from tierstore.planning.searching.fills import KeyState, TierFill
from tierstore.planning.searching.spans import UseWindow
from tierstore.planning.searching.step_uses import StepUses, step_uses
from tierstore.planning.searching.variants import as_placed, marked_keys
from tierstore.planning.simulating.dividing import trained_bytes

_STEPS = 3
_KEPT_USES = 8  # a search asks for placements with the same marks one after another


@dataclass(frozen=True, slots=True)
class Estimate:
    """About what a step is like.

    Attributes:
        step_s: how long it takes; infinite: it does not fit.
        compute_s: how long it computes on the device.
        moved_bytes: by link's name.
    """

    step_s: float
    compute_s: float
    moved_bytes: dict[str, int]

    @property
    def fits(self) -> bool:
        """Whether there is room for what each moment needs."""
        return math.isfinite(self.step_s)


def estimate(
    program: Program, machine: Machine, placement: Placement, *, is_divided: bool = True
) -> Estimate:
    """Return about what a step is like.

    Args:
        program: as the model has it; what the placement makes of it is applied here.
        machine: that it runs on.
        placement: where bytes are.
        is_divided: whether the first tier holds the program's own bytes, too.
    """
    return Estimator(program, machine, is_divided=is_divided).estimate(placement)


class Estimator:
    """Estimates placements of one program on one machine; what they have in common is found once.

    Args:
        program: as the model has it; what a placement makes of it is applied here.
        machine: that it runs on.
        is_divided: whether the first tier holds the program's own bytes, too.
    """

    def __init__(self, program: Program, machine: Machine, *, is_divided: bool = True) -> None:
        self._program = program
        self._machine = machine
        self._is_divided = is_divided
        self._uses = functools.lru_cache(_KEPT_USES)(self._uses_under)

    def estimate(self, placement: Placement) -> Estimate:
        """Return about what a step is like under a placement."""
        uses = self._uses(placement.marks)
        try:
            return _Passes(uses, self._machine, placement, is_divided=self._is_divided).run()
        except _NoRoomError:
            return Estimate(math.inf, uses.program.compute_s, {})

    def _uses_under(self, marks: tuple[PlacedMark, ...]) -> StepUses:
        placement = Placement(marks=marks)
        program = as_placed(self._program, placement)
        return step_uses(program, marked_keys(program, placement, Treatment.SWAP))


class _NoRoomError(Exception):
    """What has to be there at one time is more than there is."""


class _Passes:
    """A few steps of one program, moment by moment."""

    def __init__(self, uses: StepUses, machine: Machine, placement: Placement, *, is_divided: bool) -> None:
        program = self._program = uses.program
        self._machine = machine
        self._placement = placement
        self._given = uses
        first = machine.tiers[0]
        capacity_bytes = int(first.capacity_bytes * placement.shares.get(first.name, 1.0))
        self._quotas = _quotas(program, uses.own_bytes, capacity_bytes, is_divided=is_divided)
        self._ahead = placement.ahead.get(first.name, 0.0)
        self._high = self._high_of(first, min(self._quotas, default=0), is_divided=is_divided)
        self._tiers = [TierFill(tier.capacity_bytes) for tier in machine.tiers]
        self._keys = self._key_states()
        self._links = _links_of(machine)
        self._on_host = {
            unit.bundle: unit
            for unit in program.units
            if unit.bundle in placement.bundles
            and placement.bundles[unit.bundle].state.device == CPU
            and unit.host_step_s is not None
            and len(machine.tiers) > 1
        }
        self._lent = {key for unit in self._on_host.values() for key in unit.gradients}
        self._free_s: dict[str, float] = {}
        self._moved: dict[str, int] = {}
        self._now_s = self._host_s = self._computed_s = 0.0
        self._step = self._number = 0
        self._ahead_bytes = 0
        self._next = self._uses()
        self._following = next(self._next)

    def _high_of(self, first: TierFigures, kept_bytes: int, *, is_divided: bool) -> float:
        """Return above which share of the first tier is written back early."""
        said = self._placement.said_high(first.name, 1.0)
        is_open = said is None and is_divided and self._machine.has_streams
        trained = trained_bytes(self._program, self._placement) if is_open else None
        if trained is None:
            return 1.0 if said is None else said
        below_bytes = sum(tier.capacity_bytes for tier in self._machine.tiers[1:])
        return high_of(kept_bytes, trained, below_bytes)

    def _key_states(self) -> dict[str, KeyState]:
        states: dict[str, KeyState] = {}
        last = len(self._tiers) - 1
        residents = self._placement.residents or frozenset()
        without_state = self._placement.residents_without_state
        for key in self._program.data:
            if key not in self._given.windows:
                continue
            windows, datum = self._given.windows[key], self._program.data[key]
            owner = datum.owner or key
            is_made = any(window.is_made for window in windows)
            states[key] = KeyState(
                datum.nbytes,
                [window.opens for window in windows],
                None if is_made else last,
                None if is_made else last,
                returns=key in self._given.swapped or _returns(self._placement, key, owner, datum.kind),
                is_resident=key in residents
                or (owner in residents and not (datum.kind is ByteKind.STATE and owner in without_state)),
            )
        for key, state in states.items():
            if state.tier is not None:  # as fast as there is room
                places = range(min(1, last), last + 1)
                state.tier = next((place for place in places if self._fits(place, state.nbytes)), last)
                state.below = state.tier or None
                self._tiers[state.tier].held_bytes += state.nbytes
                heapq.heappush(self._tiers[state.tier].going, (-state.opens[0], key))
        return states

    def _fits(self, place: int, nbytes: int) -> bool:
        return self._tiers[place].held_bytes + nbytes <= self._tiers[place].quota_bytes

    def run(self) -> Estimate:
        begin_s = 0.0
        for self._step in range(_STEPS):
            begin_s = self._now_s
            self._moved, self._computed_s = {}, 0.0
            for number, moment in enumerate(self._program.moments):
                self._number = number
                self._pass(number, moment)
        return Estimate(self._now_s - begin_s, self._computed_s, dict(self._moved))

    # --- one moment ---------------------------------------------------------------------------

    def _pass(self, number: int, moment: Moment) -> None:
        device = self._tiers[0]
        device.quota_bytes = self._quotas[number]
        device.settle(self._now_s)
        stepped = self._stepped_on_host(moment)
        away = {key for unit in stepped for key in (unit.bundle, unit.state, *unit.gradients)}
        arrival_s = self._now_s
        opened = [(key, window) for key, window in self._given.opens[number] if key not in away]
        for key, _ in opened:
            self._keys[key].in_use += 1
        for key, window in opened:
            if not window.is_made:
                arrival_s = max(arrival_s, self._bring(key, self._now_s))
                self._arrived(key)
        self._make_room(0, self._now_s)
        self._prefetch()
        compute_s = moment.compute_s - sum(unit.device_step_s for unit in stepped)
        self._computed_s += max(compute_s, 0.0)
        self._now_s = arrival_s + max(compute_s, 0.0)
        self._now_s += 0.0 if self._machine.has_streams else moment.host_s
        for key, window in opened:
            self._change(key, window)
        for unit in stepped:
            self._step_on_host(unit)
        for key, window in self._given.closes[number]:
            if key not in away:
                self._close(key, window)
        self._write_back()

    def _stepped_on_host(self, moment: Moment) -> list[Unit]:
        if moment.phase is not Phase.OPTIMIZER or not self._on_host:
            return []
        return [self._on_host[use.key] for use in moment.uses if use.key in self._on_host]

    def _change(self, key: str, window: UseWindow) -> None:
        state = self._keys[key]
        if window.is_made:
            if state.tier is not None:  # of the step before: nobody ended it
                self._tiers[state.tier].held_bytes -= state.nbytes
            state.tier = 0
            state.below = None
            self._tiers[0].held_bytes += state.nbytes
            self._make_room(0, self._now_s)
            self._now_s = state.ready_s = self._tiers[0].room_at(0, self._now_s)
        elif window.is_changed:
            state.below = None

    def _close(self, key: str, window: UseWindow) -> None:
        state = self._keys[key]
        state.in_use -= 1
        if window.is_ended:
            if state.tier is not None:
                self._tiers[state.tier].held_bytes -= state.nbytes
            state.tier = state.below = None
        elif state.returns or key in self._lent:
            if state.tier == 0:
                self._evict(key, 0, self._now_s)
        elif state.tier is not None:
            self._may_go(key, state.tier)

    def _step_on_host(self, unit: Unit) -> None:
        begin_s = max(self._host_s, self._now_s)
        for key in (unit.bundle, unit.state, *unit.gradients):
            if key is None or key not in self._keys or self._keys[key].tier is None:
                continue
            state = self._keys[key]
            if state.tier == 0:
                self._evict(key, 0, self._now_s)
            begin_s = max(begin_s, state.ready_s)
        self._host_s = begin_s + (unit.host_step_s or 0.0)
        self._keys[unit.bundle].ready_s = self._host_s

    # --- bytes --------------------------------------------------------------------------------

    def _bring(self, key: str, now_s: float) -> float:
        """Bring a key to the first tier; return when it is there."""
        state = self._keys[key]
        if not state.tier:  # it is there, or nobody made it
            state.tier = 0 if state.tier is None else state.tier
            return state.ready_s
        held = self._tiers[0]
        held.held_bytes += state.nbytes
        self._make_room(0, now_s)
        room_s = held.room_at(0, now_s)
        self._tiers[state.tier].held_bytes -= state.nbytes
        state.ready_s = self._copy(state.tier, 0, state.nbytes, max(room_s, state.ready_s))
        state.below, state.tier = state.tier, 0
        return state.ready_s

    def _make_room(self, place: int, now_s: float) -> None:
        """Decide what leaves a tier until what it holds is no more than it may."""
        held = self._tiers[place]
        while held.held_bytes > held.quota_bytes:
            key = self._latest(place)
            if key is None:
                raise _NoRoomError
            self._evict(key, place, now_s)

    def _latest(self, place: int) -> str | None:
        """Take the key of a tier that is needed last, of those that nobody uses."""
        going = self._tiers[place].going
        while going:
            _, key = heapq.heappop(going)
            state = self._keys[key]
            if state.tier == place and not state.in_use:
                return key
        return None

    def _evict(self, key: str, place: int, now_s: float) -> None:
        state = self._keys[key]
        held, target = self._tiers[place], place + 1
        if target >= len(self._tiers):
            raise _NoRoomError
        held.held_bytes -= state.nbytes
        if state.is_ahead:
            self._arrived(key)
        lower = state.below
        if lower is None:
            self._tiers[target].held_bytes += state.nbytes
            self._make_room(target, now_s)
            begin_s = self._tiers[target].room_at(0, max(now_s, state.ready_s))
            state.ready_s = self._copy(place, target, state.nbytes, begin_s)
            held.leave(state.ready_s, state.nbytes)
            state.tier = target
        else:
            self._tiers[lower].held_bytes += state.nbytes
            state.tier, state.below = lower, None
            self._make_room(lower, now_s)
        if state.tier is not None:
            self._may_go(key, state.tier)

    def _may_go(self, key: str, place: int) -> None:
        state = self._keys[key]
        next_use = -1 if state.is_resident else self._next_use(state)
        heapq.heappush(self._tiers[place].going, (-next_use, key))

    def _next_use(self, state: KeyState) -> int:
        """Return when a key is needed next, counted from the first moment of the first step."""
        moments = len(self._program.moments)
        place = bisect.bisect_right(state.opens, self._number)
        if place < len(state.opens):
            return self._step * moments + state.opens[place]
        return (self._step + 1) * moments + state.opens[0]

    # --- ahead of time ------------------------------------------------------------------------

    def _uses(self) -> Iterator[tuple[int, str]]:
        """Yield what is needed when, over and over."""
        moments = len(self._program.moments)
        for step in itertools.count():
            for position, keys in enumerate(self._given.needed, step * moments):
                for key in keys:
                    yield position, key
            yield (step + 1) * moments, ""

    def _prefetch(self) -> None:
        """Bring what is needed next, as far ahead as the placement says, for what is needed later."""
        limit_bytes = int(self._ahead * self._tiers[0].quota_bytes)
        moments = len(self._program.moments)
        now = self._step * moments + self._number
        while self._following[0] <= now + moments:
            position, key = self._following
            state = self._keys.get(key)
            if position > now and state is not None and state.tier:
                if self._ahead_bytes + state.nbytes > limit_bytes or not self._has_room_for(state, position):
                    return
                self._bring(key, self._now_s)
                state.is_ahead = True
                self._ahead_bytes += state.nbytes
                self._may_go(key, 0)
            self._following = next(self._next)

    def _has_room_for(self, state: KeyState, position: int) -> bool:
        """Let go what is needed after a position until a key has room; say whether it has."""
        held = self._tiers[0]
        while held.held_bytes + state.nbytes > held.quota_bytes:
            key = self._latest(0)
            if key is None:
                return False
            if self._next_use(self._keys[key]) <= position:
                self._may_go(key, 0)
                return False
            self._evict(key, 0, self._now_s)
        return True

    def _arrived(self, key: str) -> None:
        state = self._keys[key]
        if state.is_ahead:
            state.is_ahead = False
            self._ahead_bytes -= state.nbytes

    def _write_back(self) -> None:
        """Write what is needed last before anybody waits for room."""
        held = self._tiers[0]
        high = self._high * held.quota_bytes
        while held.held_bytes > high:
            key = self._latest(0)
            if key is None:
                return
            if self._keys[key].is_resident:  # and so are the others that are left
                self._may_go(key, 0)
                return
            self._evict(key, 0, self._now_s)

    # --- links --------------------------------------------------------------------------------

    def _copy(self, source: int, target: int, nbytes: int, begin_s: float) -> float:
        """Return when a copy that may begin then will have ended: each link moves one key at a time."""
        link = self._links.get((source, target))
        if link is None:  # by way of the tiers between
            step = 1 if target > source else -1
            for place in range(source, target, step):
                begin_s = self._copy(place, place + step, nbytes, begin_s)
            return begin_s
        free_s = self._free_s.get(link.lane, 0.0)
        end_s = max(begin_s + link.latency_s, free_s) + nbytes / link.bytes_per_s
        self._free_s[link.lane] = end_s
        self._moved[link.name] = self._moved.get(link.name, 0) + nbytes
        return end_s


@dataclass(frozen=True, slots=True)
class _Lane:
    """A link: its name, what it waits for, and how fast it is with what it shares."""

    name: str
    lane: str
    bytes_per_s: float
    latency_s: float


def _links_of(machine: Machine) -> dict[tuple[int, int], _Lane]:
    """Return the links by the numbers of their tiers."""
    places = {tier.name: number for number, tier in enumerate(machine.tiers)}
    return {
        (places[each.source], places[each.target]): _Lane(
            each.name,
            each.shares[0] if each.shares else each.name,
            min(each.bytes_per_s, *(machine.shares[share] for share in each.shares), math.inf),
            each.latency_s,
        )
        for each in machine.links
        if each.source in places and each.target in places
    }


def _quotas(
    program: Program, own_bytes: Sequence[int], capacity_bytes: int, *, is_divided: bool
) -> list[int]:
    """Return what the store has of the first tier in each moment: the product measures by phase."""
    if not is_divided:
        return [capacity_bytes] * len(own_bytes)
    is_model = [moment.phase in (Phase.FORWARD, Phase.BACKWARD) for moment in program.moments]
    peaks = {
        each: max((own for own, model in zip(own_bytes, is_model, strict=True) if model is each), default=0)
        for each in (True, False)
    }
    return [capacity_bytes - peaks[each] for each in is_model]


def _returns(placement: Placement, key: str, owner: str, kind: ByteKind) -> bool:
    homes = placement.bundles.get(owner)
    if homes is None:
        return False
    if key == owner:
        return homes.parameters.returns
    return (homes.state if kind is ByteKind.STATE else homes.gradients).returns
