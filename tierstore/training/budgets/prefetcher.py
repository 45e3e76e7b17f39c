"""Where in a step the program is, and what it will need next.

The first step is recorded; from the second on the store follows the plan made of it, and what comes
next is prefetched: to the fastest tier within a share of it, and from disk to host memory further
ahead.  Activations are brought to host memory only: the graph tells when the device needs them.  A step
that goes another way is recorded anew.

Safe from any thread: autograd runs backward in threads of its own.  A step has one order of uses, in which
threads may interleave as they like: one that turns out otherwise the next time is only advised worse.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tierstore.errors import KeyNotFound
from tierstore.planning import Trace, plan_from
from tierstore.planning.planner import PlanPosition
from tierstore.store import Store
from tierstore.training import locks
from tierstore.training.bundles.grouping import next_version
from tierstore.training.locks import Rank

ChooseResidents = Callable[[Sequence[str], Sequence[str]], frozenset[str]]

MOST_STEPS_WITHOUT_ALL = 16
"""A step ends when every optimizer has stepped, or one of them this often."""


@dataclass(slots=True)
class PrefetchWindow:
    """How far ahead is prefetched into one tier.

    Attributes:
        tier: where to.
        limit_bytes: how many bytes of keys may lie ahead.
        turn: up to where it was prefetched, exclusive.
        ahead: the bytes of each key between where the step is and ``turn``.
        ahead_bytes: of them together.
    """

    tier: str
    limit_bytes: int
    turn: int = 0
    ahead: collections.deque[int] = field(default_factory=collections.deque)
    ahead_bytes: int = 0

    def add(self, nbytes: int) -> None:
        """The next key lies ahead now."""
        self.turn += 1
        self.ahead.append(nbytes)
        self.ahead_bytes += nbytes

    def begin_at(self, turn: int) -> None:
        """Nothing lies ahead: the step is at ``turn``."""
        self.turn = turn
        self.ahead.clear()
        self.ahead_bytes = 0


class Prefetcher:
    """Records steps and follows the plan made of them.

    Args:
        store: that takes the plan as advice.
        windows: what is prefetched where; empty: nothing, and a plan is followed all the same, for what is
            evicted and what stays; ``None``: everything fits, and nothing needs to be known.
        nbytes_of: the bytes of a key.
        optimizers: how many there are.
        choose_residents: says which keys stay where they are, from those that a step used and those of
            gradients among them; ``None``: none do.
    """

    def __init__(
        self,
        store: Store,
        windows: Sequence[PrefetchWindow] | None,
        nbytes_of: Callable[[str], int],
        optimizers: int,
        choose_residents: ChooseResidents | None = None,
    ) -> None:
        self._store = store
        # Guards all below, and the order in which the store is advised, which waits for nobody.
        self._lock = locks.new_lock(Rank.PREFETCHER)
        self._is_planning = windows is not None
        self._windows = list(windows or ())
        self._nbytes_of = nbytes_of
        self._steps = [0] * max(1, optimizers)
        self._trace = Trace()
        self._place: PlanPosition | None = None
        self._followed: tuple[str, ...] = ()
        self._last = ""
        self._gradients: dict[str, None] = {}
        self._passing: dict[str, int] = {}  # the bytes of activations, as they were last
        self._choose_residents = choose_residents

    @property
    def has_plan(self) -> bool:
        """Whether a step was recorded and is followed."""
        return self._place is not None

    def set_limit(self, tier: str, limit_bytes: int) -> None:
        """Prefetch as far as ``limit_bytes`` into ``tier`` from now on."""
        with self._lock:
            for window in self._windows:
                if window.tier == tier:
                    window.limit_bytes = limit_bytes

    def note(self, key: str) -> None:
        """Take in that ``key`` is used now; prefetch what comes after it."""
        if not self._is_planning:
            return
        with self._lock:
            if key == self._last:
                return
            self._last = key
            self._trace.note(key)
            if self._place is not None:
                self._go_on(self._place, key)

    def _go_on(self, place: PlanPosition, key: str) -> None:
        """Go on to where the plan has ``key``, if it has."""
        position = place.pass_by(key)
        if position is None:
            return
        self._store.advance(position)
        for window in self._windows:
            self._pass(window, place)
            self._prefetch(window, place)

    def note_passing(self, key: str, nbytes: int) -> None:
        """Take in that an activation is used now.

        Its user tells when it has to be on the device; until then it is prefetched to the tiers below.
        """
        with self._lock:
            self._passing[key] = nbytes
            self.note(key)

    def note_gradient(self, key: str) -> None:
        """Take in that a gradient comes to be under ``key``: it is there until the step ends."""
        with self._lock:
            self._gradients[key] = None
            self.note(key)

    def note_step(self, optimizer: int) -> None:
        """Take in that an optimizer has stepped."""
        with self._lock:
            self._steps[optimizer] += 1

    def begin_forward(self) -> None:
        """Take in that a module is used: after the optimizers' steps a new step begins."""
        with self._lock:
            is_over = all(self._steps) or max(self._steps) >= MOST_STEPS_WITHOUT_ALL
            if self._is_planning and is_over:
                self._steps = [0] * len(self._steps)
                self._end_step()

    def begin_inference(self) -> None:
        """Take in that a model without an optimizer is used: each use is a step."""
        with self._lock:
            if self._is_planning and len(self._trace):
                self._end_step()

    def _end_step(self) -> None:
        accesses = self._trace.take()
        gradients, self._gradients = tuple(self._gradients), {}
        self._last = ""
        if not accesses:
            return
        if accesses == self._followed and self._place is not None:
            self._place.begin_cycle()
            return
        choose = self._choose_residents
        residents = frozenset[str]() if choose is None else choose(accesses, gradients)
        # Its end is what a gradient is kept for, whether anybody looks at it or not.
        plan = plan_from(
            (*accesses, *gradients),
            {next_version(key): key for key in dict.fromkeys(accesses)},
            residents,
        )
        self._followed = accesses
        self._store.follow(plan)
        self._place = PlanPosition(plan)
        for window in self._windows:
            window.begin_at(0)

    # --- prefetch -----------------------------------------------------------------------------

    def _pass(self, window: PrefetchWindow, place: PlanPosition) -> None:
        """What was ahead has been reached.

        It may have been by a use in the midst of this one: of what garbage is collected in, say.
        """
        while window.ahead and len(window.ahead) > window.turn - place.turn:
            window.ahead_bytes -= window.ahead.popleft()
        if window.turn < place.turn:
            window.begin_at(place.turn)

    def _prefetch(self, window: PrefetchWindow, place: PlanPosition) -> None:
        """Prefetch within the window, and the next one whatever its size."""
        last = place.turn + place.length - 1
        while window.turn < last:
            key = place.key_at(window.turn)
            nbytes = self._bytes_in(window, key)
            if window.ahead_bytes and window.ahead_bytes + nbytes > window.limit_bytes:
                return
            window.add(nbytes)
            if nbytes:
                self._advise(key, window.tier)

    def _bytes_in(self, window: PrefetchWindow, key: str) -> int:
        """Return what a window has to bring for a key; nothing if somebody else tells when it comes there."""
        nbytes = self._nbytes_of(key)
        return nbytes if nbytes or window.tier == self._store.tier_names[0] else self._passing.get(key, 0)

    def _advise(self, key: str, tier: str) -> None:
        # A gradient that is not there yet, or was dropped: nothing to bring.
        with contextlib.suppress(KeyNotFound):
            self._store.prefetch(key, tier=tier)
