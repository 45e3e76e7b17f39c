"""Plans a run anew as its steps show what they do: what tiers write back early, and what is brought ahead.

1. Two recorded steps make a program; links are as fast as they were seen to be.  A search simulates
   placements, today's rules among them, and the best one holds from the next step on.
2. Where two steps in a row take 20 % more or less than was predicted, two more are recorded and the search is
   made again: each time after twice as many steps as before, and a few times only.
3. Bits never depend on it: what is changed says when bytes move, and nothing else.
4. Searching takes a small share of the time that steps have taken: it waits until it is worth it.
5. Whatever goes wrong in planning is logged and ends it; the run goes on with what it has.

Where a device computes apart from the host (an accelerator's streams) nothing is planned while steps run: the
host's clock does not tell what the device's kernels take.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import time
from dataclasses import replace

from torch import nn

from tierstore.config import OffloadConfig
from tierstore.errors import CapacityError
from tierstore.planning.machine import Machine
from tierstore.planning.placement import Placement
from tierstore.planning.program import Program
from tierstore.planning.searching import Choice, Levers, search
from tierstore.training.modules.hooks import Hook
from tierstore.training.recorded_runs import program_from
from tierstore.training.recording.marks import RecordedStep, RecordedSteps
from tierstore.training.recording.recorder import FIRST_STEP
from tierstore.training.run_machine import conditions_of, with_seen_rates
from tierstore.training.session import Session

LEVERS = Levers.HIGH | Levers.AHEAD
"""What can be changed while a run goes on."""

DRIFT = 0.2
"""By how much of the prediction a step may differ from it."""

STEPS_TO_SETTLE = 2
"""What a change moves at once, and what is followed anew, is in the steps after it."""

STEPS_THAT_DIFFER = 2

RECORDED_STEPS = 2

FIRST_PAUSE, MOST_PLANS = 4, 6
"""Steps until a plan may be made again, which doubles; and how many are made."""

SHARE_OF_TIME = 0.05
"""That planning may take of the time that steps took after the first one."""

SEARCH_S_A_MOMENT = 0.01
"""About what a search takes for each moment of the program: measured, on one core, within a factor of two."""

LEAST_GAIN = 0.02
"""Of a step: a smaller one is not worth a change."""

log = logging.getLogger("tierstore")


class Stage(enum.Enum):
    """What a planner does while steps run."""

    LEARNING = enum.auto()  # it waits until the run's first steps have been recorded
    FOLLOWING = enum.auto()  # it compares steps with what was predicted
    RECORDING = enum.auto()  # it has steps recorded, as they differ
    RESTING = enum.auto()  # nothing any more


class RunPlanner:
    """Plans one run.

    Args:
        session: of the run.
        machine: that it has, as it was opened.
        config: of the run.

    Attributes:
        stage: what it does.
        choice: what was found last; ``None``: nothing yet.
        predicted_s: seconds of a step under the placement that holds; only where there is a choice.
    """

    def __init__(self, session: Session, machine: Machine, config: OffloadConfig) -> None:
        self.stage = Stage.LEARNING
        self.choice: Choice | None = None
        self.predicted_s = 0.0
        self._session = session
        self._machine = machine
        # Nothing stops a run above its quota on an emulated device, but for its leases.
        self._conditions = replace(conditions_of(config, machine), is_enforced=machine.has_streams)
        self._number = 0  # of the step that the run is in
        self._begun_s = 0.0  # when that began
        self._differing = 0  # steps in a row
        self._until = 0  # the number of the step from which on one is compared
        self._pause = FIRST_PAUSE
        self._trained_s = 0.0  # in steps after the first one
        self._planned_s = 0.0  # in planning
        self._plans = 0
        self._recorded: RecordedSteps | None = None
        self._recording = contextlib.ExitStack()

    def watch(self) -> None:
        """Plan between steps from now on, until the session ends."""
        self._session.hold(self)
        hook = _BeforeModel(self)
        self._session.hold(self._session.model.register_forward_pre_hook(hook))

    def remove(self) -> None:
        """Plan nothing any more.  Idempotent."""
        self.stage = Stage.RESTING
        self._recording.close()

    def look(self) -> None:
        """The model begins to run: maybe a step begins with it."""
        number = self._session.recorder.number
        if self.stage is Stage.RESTING or number == self._number:
            return
        now = time.perf_counter()
        seconds = (now - self._begun_s) / max(1, number - self._number)
        self._number = number
        if number > FIRST_STEP:  # the first one is slow in ways that later ones are not
            self._trained_s += now - self._begun_s
        try:
            self._step_begins(seconds)
        except Exception:
            log.debug("the run is not planned any more", exc_info=True)
            self.remove()
        self._begun_s = time.perf_counter()
        self._planned_s += self._begun_s - now

    def _step_begins(self, seconds: float) -> None:
        """A step begins after one that took so long."""
        if self.stage is Stage.LEARNING:
            recorder = self._session.recorder
            if recorder.learned is not None and not recorder.missing and self._is_worth_it(recorder.learned):
                self._plan(recorder.learned, recorder.known())
        elif self.stage is Stage.FOLLOWING:
            self._compare(seconds)
        elif self.stage is Stage.RECORDING:
            self._end_recording()

    def _is_worth_it(self, recorded: RecordedSteps) -> bool:
        """Whether a search may take its time now: about as long as the program that was recorded is."""
        search_s = SEARCH_S_A_MOMENT * len(recorded.recording.leases) / RECORDED_STEPS
        return search_s + self._planned_s <= SHARE_OF_TIME * self._trained_s

    # --- comparing ----------------------------------------------------------------------------

    def _compare(self, seconds: float) -> None:
        if self._number <= self._until:
            return
        is_like = abs(seconds - self.predicted_s) <= DRIFT * self.predicted_s
        self._differing = 0 if is_like else self._differing + 1
        is_paid = 2 * self._planned_s <= SHARE_OF_TIME * self._trained_s
        if self._differing >= STEPS_THAT_DIFFER and is_paid:
            self._recorded = self._recording.enter_context(self._session.recorder.watched())
            self.stage = Stage.RECORDING

    def _end_recording(self) -> None:
        """Plan anew, if enough steps were recorded since the comparison."""
        recorded = self._recorded
        assert recorded is not None
        ended = [each for each in recorded.whole if each is not recorded.steps[-1]]
        if len(ended) < RECORDED_STEPS + 1:  # the first of them had begun before
            return
        self._recording.close()
        self._plan(recorded, ended[1:])

    # --- planning -----------------------------------------------------------------------------

    def _plan(self, recorded: RecordedSteps, steps: list[RecordedStep]) -> None:
        program = program_from(self._session, recorded, steps)
        machine = with_seen_rates(self._machine, recorded.recording.copies)
        self._plans += 1
        self._pause *= 2
        try:
            self._choose(program, machine)
        except CapacityError:
            log.debug("the run is not planned: what it does is predicted not to fit", exc_info=True)
            self.remove()
            return
        self._differing = 0
        self._until = self._number + (STEPS_TO_SETTLE if self._plans == 1 else self._pause)
        self.stage = Stage.FOLLOWING if self._plans < MOST_PLANS else Stage.RESTING

    def _choose(self, program: Program, machine: Machine) -> None:
        given = self._session.placing.placement
        choice = search(program, machine, given=given, levers=LEVERS, conditions=self._conditions)
        chosen_s = choice.timeline.step_s
        given_s = next((each.step_s for each in choice.rejected if each.placement == given), chosen_s)
        self.choice, self.predicted_s = choice, chosen_s
        why = choice.why
        if given_s is not None and chosen_s >= (1 - LEAST_GAIN) * given_s:
            self.predicted_s = given_s
            why = f"nothing is changed: {why}" if choice.placement != given else why
        else:
            self._apply(choice.placement)
        log.info("planned after step %d: %s", self._number - 1, why)

    def _apply(self, placement: Placement) -> None:
        """Let a placement hold from now on: in what tiers write back early, and have ahead."""
        session = self._session
        before, capacities = session.placing.placement, session.store.stats().tiers
        session.placing.change(placement)
        for tier in session.store.config.tiers:
            is_divided = session.budget is not None and tier.name == session.store.tier_names[0]
            capacity_bytes = capacities[tier.name].capacity_bytes
            if placement.high.get(tier.name) != before.high.get(tier.name):
                high = placement.high.get(tier.name, tier.high)  # what no plan says is as it was configured
                if session.budget is not None and is_divided:
                    session.budget.write_back_above(high)
                else:
                    session.store.resize(tier.name, capacity_bytes, high=high)
            if tier.name in before.ahead and not is_divided:
                session.prefetcher.set_limit(tier.name, placement.ahead_bytes(tier.name, capacity_bytes))
        if session.budget is not None:
            session.budget.tell_own()


class _BeforeModel(Hook):
    """Looks whenever the model runs."""

    def __init__(self, planner: RunPlanner) -> None:
        self._planner = planner

    def __call__(self, model: nn.Module, inputs: object) -> None:
        del model, inputs
        self._planner.look()


def is_planned(session: Session, config: OffloadConfig) -> bool:
    """Return whether a run is planned while it goes on: if nobody says what goes where, and something moves.

    Args:
        session: of the run.
        config: of the run.
    """
    return (
        config.auto_offload
        and config.placement is None
        and bool(session.optimizers)
        and bool(session.placing.placement.ahead)
        and session.store.device.type == "cpu"
        and not list(session.tables.attached())
    )
