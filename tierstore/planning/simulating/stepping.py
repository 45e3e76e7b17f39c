"""The turns of optimizers: in their time, ahead of it in backward, aside on the host, or in backward at once.

1. A turn opens the bundle, its stashed gradients and its state together; fresh state is put after it.
2. Turns whose step was made in backward only take the new values over, before all others.
3. When a step is made is `tierstore.planning.deciding`'s to say.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.errors import CapacityError, LeaseError
from tierstore.planning.deciding import StepTime, has_room_ahead, next_version, step_time
from tierstore.planning.homes import CPU
from tierstore.planning.program import ByteKind, Does, Moment, Phase, Program, Unit
from tierstore.planning.simulating.homes_of import homes_of
from tierstore.planning.simulating.host_lane import StepTask
from tierstore.planning.simulating.parts import RunParts


class OptimizerTurns:
    """Makes the steps of one run.

    Args:
        parts: of the run.
    """

    def __init__(self, parts: RunParts) -> None:
        program = parts.program
        self._data = program.data
        self._placement = parts.placement
        self._conditions = parts.conditions
        self._store = parts.store
        self._windows = parts.windows
        self._device = parts.device
        self._own = parts.own
        self._lanes = parts.lanes
        self._host_lane = parts.host_lane
        self._units = {unit.bundle: unit for unit in program.units}
        self._unit_of = {key: unit for unit in program.units for key in unit.gradients}
        self._optimizers = list(dict.fromkeys(unit.optimizer for unit in program.units))
        self._moments = {
            unit.bundle: moment for moment in program.moments if (unit := self.unit_of(moment)) is not None
        }
        self._order = list(self._moments)
        self._expected = _landings(program)
        self._landed: dict[str, int] = {}
        self._left: dict[str, int] = {}
        self._done: set[str] = set()  # bundles that were stepped in this step
        self._made: dict[str, None] = {}  # bundles whose new values are beside the old ones
        self._aside: dict[str, StepTask] = {}
        self._without_others: set[str] = set()
        self._has_stepped = False
        self._is_under_way = False

    def unit_of(self, moment: Moment) -> Unit | None:
        """Return what a moment steps, if it is an optimizer's turn."""
        if moment.phase is not Phase.OPTIMIZER:
            return None
        return next((self._units[use.key] for use in moment.uses if use.key in self._units), None)

    def begin_step(self) -> None:
        """Another step begins."""
        self._landed.clear()
        self._done.clear()
        self._is_under_way = False
        self._left = dict.fromkeys(self._optimizers, 0)
        for bundle in self._order:
            self._left[self._units[bundle].optimizer] += 1

    # --- in backward --------------------------------------------------------------------------

    def land(self, key: str) -> None:
        """A gradient was accumulated: make the step of which it was the last, if that may be."""
        unit = self._unit_of.get(key)
        if unit is None:
            return
        self._landed[key] = self._landed.get(key, 0) + 1
        if any(self._landed.get(each, 0) < self._expected.get(each, 1) for each in unit.gradients):
            return
        if self._conditions.optimizer_in_backward:
            if unit.bundle in self._moments:
                self._step_in_place(self._moments[unit.bundle], unit, 0)
        elif self._may_be_made_ahead(unit):
            self._make_ahead(unit)

    def steps_at_once(self, key: str) -> bool:
        """Say whether a gradient is stepped with as soon as it is there: then it is never stashed."""
        return self._conditions.optimizer_in_backward and key in self._unit_of

    def used_up_by(self, key: str) -> tuple[str, ...]:
        """Return the gradients that a step in backward was made with when one landed."""
        unit = self._unit_of.get(key)
        is_done = unit is not None and self.steps_at_once(key) and unit.bundle in self._done
        return unit.gradients if unit is not None and is_done else ()

    def _may_be_made_ahead(self, unit: Unit) -> bool:
        keys = [unit.bundle, *_state(unit), *unit.gradients]
        return (
            unit.may_step_ahead
            and self._conditions.steps_ahead
            and self._has_stepped
            and len(self._store.names) > 1
            and unit.bundle in self._moments
            and all(key in self._store and not self._windows.is_open(key) for key in keys)
        )

    def _make_ahead(self, unit: Unit) -> None:
        device = self._device
        is_aside = homes_of(self._placement, unit.bundle).state.device == CPU and self._lanes.host_tier != 0
        when = step_time(
            is_aside=is_aside,
            is_stepping=self._is_under_way,
            is_kept=unit.bundle in (self._placement.residents or self._windows.follower.residents),
            is_allowed_in_backward=device is None or device.allows_step_in_backward(unit.bundle),
        )
        needed = [unit.bundle, *_state(unit)]
        new_bytes = sum(self._data[key].nbytes for key in needed)
        if when is StepTime.IN_TIME or not has_room_ahead(
            when,
            self._store.rooms(),
            self._store.names[self._step_tier(unit)],
            new_bytes=new_bytes,
            gradient_bytes=sum(self._data[key].nbytes for key in unit.gradients),
            pending_bytes=self._host_lane.pending_bytes,
        ):
            return
        if when is StepTime.ASIDE:
            self._hand_over(unit, needed, new_bytes)
        else:
            self._step_beside(unit, needed)

    def _hand_over(self, unit: Unit, needed: Sequence[str], new_bytes: int) -> None:
        self._windows.note(*needed, *unit.gradients)
        moment = self._moments[unit.bundle]
        task = StepTask(moment.name, needed, unit.gradients, self._host_seconds(moment, unit), new_bytes)
        self._aside[unit.bundle] = task
        self._host_lane.hand_over(task)

    def _step_beside(self, unit: Unit, needed: Sequence[str]) -> None:
        """Step into replicas that become keys of their own; the others keep the old values."""
        keys = [*needed, *unit.gradients]
        try:
            lease = self._store.lease(keys, 0)  # gradients, too: else room for the state is made of theirs
        except (CapacityError, LeaseError):
            return
        if self._store.split(lease, {key: next_version(key) for key in needed}):
            self._windows.note(*keys)
            self._own.compute(self._moments[unit.bundle], keys)
            self._store.release(lease, is_written=False)  # no other replicas have the keys of the new values
            self._made[unit.bundle] = None
        else:
            self._store.release(lease, is_written=False)
            self._without_others.add(unit.bundle)
            self._windows.note(*needed)
            for key in sorted(unit.gradients, key=lambda key: -self._data[key].nbytes):
                self._windows.note(key)  # the plan is that of steps that are made ahead
        for key in unit.gradients:
            self._windows.go_home(key)

    # --- in their time ------------------------------------------------------------------------

    def step(self, moment: Moment, unit: Unit) -> None:
        """Make a turn."""
        if not self._is_under_way:
            self._is_under_way = True
            self._take_over()
        if unit.bundle in self._done:
            return
        self._advise_next(unit)
        self._step_in_place(moment, unit, self._step_tier(unit))

    def _take_over(self) -> None:
        """Let new values take the place of the old ones."""
        self._host_lane.finish()
        for key in self._host_lane.take_used():
            self._windows.go_home(key)
        self._made.update({bundle: None for bundle, task in self._aside.items() if task.is_made})
        self._aside.clear()
        for bundle in self._order:
            if bundle in self._made:
                unit = self._units[bundle]
                keys = [bundle, *_state(unit)]
                self._store.rename({next_version(key): key for key in keys})
                for key in keys:
                    self._windows.go_home(key)
                self._end_turn(unit)
        self._made.clear()
        self._has_stepped = True

    def _step_in_place(self, moment: Moment, unit: Unit, tier: int) -> None:
        gradients = [key for key in unit.gradients if key in self._store]
        kept = [key for key in _state(unit) if key in self._store]
        keys = [unit.bundle, *gradients, *kept]
        if unit.bundle in self._without_others:
            self._windows.follower.leave_out(keys)
        self._windows.open_all(keys, tier)
        if tier == 0:
            self._own.compute(moment, keys)
        else:
            self._lanes.step_on_host(moment.name, self._host_seconds(moment, unit), moment.host_s)
        self._windows.close_all(keys, [unit.bundle, *kept])
        for key in _state(unit):
            if key not in self._store:
                home = homes_of(self._placement, unit.bundle).state
                tier_number = None if home.tier is None else self._store.names.index(home.tier)
                self._store.put(key, self._data[key].nbytes, tier_number)
        self._push_down(unit)
        self._end_turn(unit)

    def _push_down(self, unit: Unit) -> None:
        """Bring down what was stepped, if its one copy was in the way: the next time there are two."""
        if unit.bundle in self._without_others:
            self._without_others.discard(unit.bundle)
            for key in (unit.bundle, *_state(unit)):
                self._store.evict(key, None)

    @staticmethod
    def _host_seconds(moment: Moment, unit: Unit) -> float:
        return moment.compute_s if unit.host_step_s is None else unit.host_step_s

    def _end_turn(self, unit: Unit) -> None:
        self._done.add(unit.bundle)
        self._left[unit.optimizer] -= 1
        if not self._left[unit.optimizer]:
            self._windows.follower.note_step(self._optimizers.index(unit.optimizer))
            is_in_time = not self._conditions.optimizer_in_backward
            if self._device is not None and is_in_time:
                self._device.end_step()

    def _step_tier(self, unit: Unit) -> int:
        is_on_host = homes_of(self._placement, unit.bundle).state.device == CPU
        return self._lanes.host_tier if is_on_host else 0

    def _advise_next(self, unit: Unit) -> None:
        """While no plan does it, prefetch what the next turn needs."""
        is_ahead = self._store.names[0] in self._placement.ahead
        following = [
            each for each in self._order[self._order.index(unit.bundle) + 1 :] if each not in self._done
        ]
        if self._windows.follower.has_plan or not is_ahead or not following:
            return
        then = self._units[following[0]]
        for key in (then.bundle, *then.gradients, *_state(then)):
            self._store.prefetch([key], self._step_tier(then))


def _state(unit: Unit) -> list[str]:
    return [] if unit.state is None else [unit.state]


def _landings(program: Program) -> dict[str, int]:
    """Return how often each gradient is accumulated in a step."""
    found: dict[str, int] = {}
    for moment in program.moments:
        if moment.phase is Phase.BACKWARD:
            for use in moment.uses:
                is_gradient = program.data[use.key].kind is ByteKind.GRADIENT
                if is_gradient and use.does in (Does.MAKE, Does.WRITE):
                    found[use.key] = found.get(use.key, 0) + 1
    return found
