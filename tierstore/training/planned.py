"""Plans a run before its first step and as its steps show more: what tiers write back early, and have ahead.

1. Before the first step a copy of the model without bytes tells what a step does, where it can
   (`tierstore.training.first_call`), and figures of the machine how long that takes.
2. Two recorded steps make a better program; links are as fast as they were seen to be.  It is planned with
   where nothing was planned before, or two steps in a row take 20 % more or less than was predicted.
3. A search simulates placements, today's rules among them, and the best one holds from then on.
4. Where steps differ from that by as much, two more are recorded and the search is made again: each time
   after twice as many steps as before, and a few times only.
5. Bits never depend on it: what is changed says when bytes move, and nothing else.
6. Searching takes a small share of the time that steps have taken: it waits until it is worth it.  Before the
   first step it waits for nothing, and its size is bounded.
7. Whatever goes wrong in planning is logged and ends it; the run goes on with what it has.

Where a device computes apart from the host (an accelerator's streams) its own events tell what it took, and
are read when a plan is made.  Where it refuses them, what was planned before the first step holds.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from torch.optim import Optimizer

from tierstore.config import OffloadConfig
from tierstore.errors import CapacityError, UsageError
from tierstore.planning.machine import Machine
from tierstore.planning.placement import Placement
from tierstore.planning.program import Program
from tierstore.planning.searching import Choice, search
from tierstore.training.first_call import FirstCall
from tierstore.training.first_plan import LEVERS, SPARE, assumed_of, first_choice
from tierstore.training.modules.hooks import Hook
from tierstore.training.recorded_runs import program_from
from tierstore.training.recording.marks import RecordedStep, RecordedSteps
from tierstore.training.recording.recorder import FIRST_STEP
from tierstore.training.run_machine import conditions_of, with_seen_rates
from tierstore.training.session import Session

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
        first_call: knows what a step does, before the first one; ``None``: nobody does.

    Attributes:
        stage: what it does.
        choice: what was found last; ``None``: nothing yet.
        predicted_s: seconds of a step under the placement that holds; only where there is a choice.
    """

    def __init__(
        self, session: Session, machine: Machine, config: OffloadConfig, first_call: FirstCall | None = None
    ) -> None:
        self.stage = Stage.LEARNING
        self._first_call = first_call
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
        self._first_call = None
        self._recording.close()

    def look(self) -> None:
        """The model begins to run: maybe a step begins with it."""
        if self._first_call is not None:
            self._look_first(self._first_call)
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

    # --- before the first step ----------------------------------------------------------------

    def _look_first(self, first_call: FirstCall) -> None:
        program = first_call.take()
        if program is None:
            return
        self._first_call = None
        try:
            self._plan_first(program)
        except (CapacityError, UsageError) as reason:
            log.debug("planning is left to the steps: %s", reason)
        except Exception:
            log.debug("the run is not planned", exc_info=True)
            self.remove()

    def _plan_first(self, program: Program) -> None:
        given = self._session.placing.placement
        choice = first_choice(program, self._machine, given, self._conditions)
        assumed = assumed_of(self._machine)
        number = self._session.recorder.number
        when = "the first step" if number <= 1 else f"step {number}"
        self._decide(choice, f"before {when}", f"; assumed: {assumed}" if assumed else "")

    # --- comparing ----------------------------------------------------------------------------

    def _step_begins(self, seconds: float) -> None:
        """A step begins after one that took so long."""
        if self.stage is Stage.LEARNING:
            recorder = self._session.recorder
            if recorder.learned is None or recorder.missing:
                return
            self._first_call = None  # what steps have shown is better
            if self.choice is not None:  # before the first step: it holds as long as it is right
                self._until = self._number
                self.stage = Stage.FOLLOWING
            elif self._is_worth_it(recorder.learned):
                self._plan(recorder.learned, recorder.known())
        elif self.stage is Stage.FOLLOWING:
            self._compare(seconds)
        elif self.stage is Stage.RECORDING:
            self._end_recording()

    def _is_worth_it(self, recorded: RecordedSteps) -> bool:
        """Whether a search may take its time now: about as long as the program that was recorded is."""
        search_s = SEARCH_S_A_MOMENT * len(recorded.recording.leases) / RECORDED_STEPS
        return search_s + self._planned_s <= SHARE_OF_TIME * self._trained_s

    def _compare(self, seconds: float) -> None:
        if self._number <= self._until:
            return
        is_like = abs(seconds - self.predicted_s) <= DRIFT * self.predicted_s
        self._differing = 0 if is_like else self._differing + 1
        if not self._plans:
            self._plan_with_learned()
            return
        is_paid = 2 * self._planned_s <= SHARE_OF_TIME * self._trained_s
        if self._differing >= STEPS_THAT_DIFFER and is_paid:
            self._recorded = self._recording.enter_context(self._session.recorder.watched())
            self.stage = Stage.RECORDING

    def _plan_with_learned(self) -> None:
        """Correct what was planned before the first step, if it was wrong."""
        recorder = self._session.recorder
        assert recorder.learned is not None
        if self._differing >= STEPS_THAT_DIFFER and self._is_worth_it(recorder.learned):
            self._plan(recorder.learned, recorder.known())

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
        if self._machine.has_streams and not all(each.is_timed for each in steps):
            log.debug("the run is not planned: nobody knows what the device takes")
            self.remove()
            return
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
        choice = search(
            program, machine, given=given, levers=LEVERS, conditions=self._conditions, spare=SPARE
        )
        self._decide(choice, f"after step {self._number - 1}")

    def _decide(self, choice: Choice, when: str, note: str = "") -> None:
        """Let what was found hold, if it is worth a change, and say so."""
        given = self._session.placing.placement
        chosen_s = choice.timeline.step_s
        given_s = next((each.step_s for each in choice.rejected if each.placement == given), chosen_s)
        self.choice, self.predicted_s = choice, chosen_s
        why = choice.why
        if given_s is not None and chosen_s >= (1 - LEAST_GAIN) * given_s:
            self.predicted_s = given_s
            why = f"nothing is changed: {why}" if choice.placement != given else why
        else:
            self._apply(choice.placement)
        log.info("planned %s: %s%s", when, why, note)

    def _apply(self, placement: Placement) -> None:
        """Let a placement hold from now on: in what tiers write back early, and have ahead."""
        session = self._session
        before, capacities = session.placing.placement, session.store.stats().tiers
        session.placing.change(placement)
        for tier in session.store.config.tiers:
            is_divided = session.budget is not None and tier.name == session.store.tier_names[0]
            capacity_bytes = capacities[tier.name].capacity_bytes
            if placement.high.get(tier.name) != before.high.get(tier.name):
                high = placement.said_high(tier.name, tier.high)  # what no plan says is as it was configured
                if session.budget is not None and is_divided:
                    session.budget.write_back_above(high)
                else:
                    session.store.resize(tier.name, capacity_bytes, high=1.0 if high is None else high)
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


def is_planned(config: OffloadConfig, optimizers: Sequence[Optimizer], placement: Placement) -> bool:
    """Return whether a run is planned, if it has no tables: nobody says what goes where, and something moves.

    Args:
        config: of the run.
        optimizers: that train.
        placement: with which it is opened.
    """
    return config.auto_offload and config.placement is None and bool(optimizers) and bool(placement.ahead)
