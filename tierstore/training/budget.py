"""How much of the device the store may have: what activations and workspace leave of the budget.

A step has two phases with different needs: forward and backward, which make activations, and the
optimizers' steps, which need a bundle's gradients and state beside its parameters.

1. At first the store has in each phase only what the largest bundle needs there, and a prefetch.
2. What the program takes beside it is measured in the first two steps; from then on the store has the
   rest of the budget, less a margin.
3. Where leases need more together than that, the store is given what the program leaves at that moment,
   and the program is measured in every step.
4. When inputs grow, the store makes room in proportion before the model runs, and it is measured
   again.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tierstore.errors import CapacityError
from tierstore.store import Store
from tierstore.training.footprint import Meter, tensors_in
from tierstore.units import format_bytes

LEARNING_STEPS = 2
MARGIN = 1.1
"""Steps differ a little: allocations overlap otherwise, a metric is kept a while longer."""


class Phase(enum.Enum):
    """What the program does."""

    MODEL = enum.auto()  # forward and backward
    OPTIMIZER = enum.auto()
    EVALUATION = enum.auto()  # forward alone


@dataclass(slots=True)
class _Lesson:
    """How much of one kind of use is known: of steps, or of evaluations."""

    steps_to_learn: int = LEARNING_STEPS
    seen_elements: int = 0  # of the largest inputs so far


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """The bytes that have to be on the device together, for one bundle.

    Attributes:
        name: of its first parameter.
        bundle_bytes: of its parameters.
        state_bytes: of what optimizers keep for them.
        nbytes: of these, with gradients.
    """

    name: str
    bundle_bytes: int
    state_bytes: int
    nbytes: int


class DeviceBudget:
    """Sets the quota of the store's device tier.

    Args:
        store: with a device tier as its fastest.
        limit_bytes: all that the program may have on the device.
        sets: of every bundle.
        meter: of what the program has outside the store.
        apart: what is allocated inside this context is the store's.
        resized: told of each new quota.

    Raises:
        CapacityError: one bundle alone does not fit.
    """

    def __init__(
        self,
        store: Store,
        limit_bytes: int,
        sets: Sequence[WorkingSet],
        meter: Meter,
        apart: Callable[[], AbstractContextManager[object]],
        resized: Callable[[int], None],
    ) -> None:
        self._store = store
        self._tier = store.tier_names[0]
        self._limit_bytes = limit_bytes
        self._meter = meter
        self._apart = apart
        self._resized = resized
        largest = max(sets, key=lambda each: each.nbytes)
        if largest.nbytes > limit_bytes:
            raise self._too_large(largest)
        bundle_bytes = max(each.bundle_bytes for each in sets)
        self._least = {
            Phase.MODEL: min(limit_bytes, 2 * bundle_bytes),
            Phase.OPTIMIZER: min(limit_bytes, largest.nbytes + bundle_bytes),
            Phase.EVALUATION: min(limit_bytes, 2 * bundle_bytes),
        }
        self._quotas = dict(self._least)
        self._program: dict[Phase, int] = {}
        self._at_gradients_bytes = 0
        self._step_bytes = 0
        self._before_step_bytes = 0
        self._quota_bytes = 0
        self._grown_bytes = 0  # the most that leases needed together so far
        self._phase = Phase.MODEL
        self._lessons = {Phase.MODEL: _Lesson(), Phase.EVALUATION: _Lesson()}
        self._learning: _Lesson | None = None
        self._give(self._quotas[Phase.MODEL])

    def _too_large(self, largest: WorkingSet) -> CapacityError:
        return CapacityError(
            f"{largest.name!r} cannot be trained on the device: its bundle's parameters, gradients and "
            f"optimizer state need {format_bytes(largest.nbytes)} together, and max_device_memory is "
            f"{format_bytes(self._limit_bytes)}. Raise it, or split the module.",
            key=largest.name,
            tier=self._tier,
            needed_bytes=largest.nbytes,
            free_bytes=self._limit_bytes,
        )

    # --- a step -------------------------------------------------------------------------------

    def begin_forward(self, inputs: Sequence[object], phase: Phase) -> None:
        """The model begins to run on ``inputs``: in a step (``MODEL``) or for itself (``EVALUATION``)."""
        self._enter(phase)
        lesson = self._lessons[phase]
        elements = sum(tensor.numel() for tensor in tensors_in(inputs))
        if elements > lesson.seen_elements:
            self._expect_more(phase, lesson, elements)
        if (lesson.steps_to_learn or self._is_tight) and self._learning is None:
            self._learning = lesson
            self._at_gradients_bytes = 0
            self._meter.begin(inputs)

    def _expect_more(self, phase: Phase, lesson: _Lesson, elements: int) -> None:
        """The inputs are larger than any before: so will be what is made of them."""
        if phase in self._program:
            # Inputs, and what was computed of them, are there as well when the optimizer steps.
            for each in (phase, Phase.OPTIMIZER) if phase is Phase.MODEL else (phase,):
                expected_bytes = self._program.get(each, 0) * elements // max(1, lesson.seen_elements)
                self._quotas[each] = self._rest(each, expected_bytes)
            self._give(self._quotas[phase])
            lesson.steps_to_learn = LEARNING_STEPS
        lesson.seen_elements = elements

    def begin_optimizer(self) -> None:
        """An optimizer begins to step."""
        self._enter(Phase.OPTIMIZER)
        if self._learning is not None:
            self._before_step_bytes = self._meter.live_bytes()

    def end_evaluation(self) -> None:
        """The model has run for itself."""
        if self._learning is self._lessons[Phase.EVALUATION]:
            self._end()

    def end_step(self) -> None:
        """An optimizer has stepped."""
        if self._learning is self._lessons[Phase.MODEL]:
            self._end()

    def _end(self) -> None:
        """What there was to learn from this use is known."""
        lesson = self._learning
        assert lesson is not None
        self._note_peak()
        self.close()
        lesson.steps_to_learn = max(0, lesson.steps_to_learn - 1)
        if lesson.steps_to_learn == 0:
            for phase, program_bytes in self._program.items():
                self._quotas[phase] = self._rest(phase, program_bytes)
            self._give(self._quotas[self._phase])

    def look(self) -> None:
        """Take a sample of what the program has."""
        if self._learning is not None:
            self._meter.look()
            self._at_gradients_bytes = max(self._at_gradients_bytes, self._meter.live_bytes())

    def close(self) -> None:
        """Stop measuring."""
        if self._learning is not None:
            self._learning = None
            self._meter.end()

    def _enter(self, phase: Phase) -> None:
        if phase is not self._phase:
            self._note_peak()
            self._phase = phase
        self._give(self._quotas[phase])

    def _note_peak(self) -> None:
        """Keep the peak of the phase that ends: the last one measured counts, as the first makes state."""
        if self._learning is not None:
            self._program[self._phase] = self._meter.take_peak()
            if self._phase is Phase.OPTIMIZER:
                self._step_bytes = max(0, self._program[self._phase] - self._before_step_bytes)

    @property
    def _is_tight(self) -> bool:
        """Whether leases may need more than the quota again: then the program is measured from then on."""
        return self._grown_bytes > self._quotas[Phase.MODEL]

    @property
    def allows_steps_in_backward(self) -> bool:
        """Whether an optimizer may step while there are activations: it is known what both take."""
        return (
            Phase.OPTIMIZER in self._program
            and not self._lessons[Phase.MODEL].steps_to_learn
            and (self._quotas[Phase.MODEL] >= self._least[Phase.OPTIMIZER])
        )

    # --- quotas -------------------------------------------------------------------------------

    def _rest(self, phase: Phase, program_bytes: int) -> int:
        """Return what the program leaves of the budget, at least what is needed to train at all.

        Where an optimizer can step in the midst of backward, its workspace is left as well.
        """
        rest = max(self._least[phase], self._limit_bytes - int(program_bytes * MARGIN))
        if phase is Phase.MODEL:
            beside_step = self._limit_bytes - int((self._at_gradients_bytes + self._step_bytes) * MARGIN)
            return min(rest, beside_step) if beside_step >= self._least[Phase.OPTIMIZER] else rest
        return rest

    def _give(self, quota_bytes: int) -> None:
        if quota_bytes == self._quota_bytes:
            return
        with self._apart():
            self._store.resize(self._tier, quota_bytes)
        self._quota_bytes = quota_bytes
        self._resized(quota_bytes)

    def grow(self, needed_bytes: int) -> bool:
        """Give the store so much more of what the program does not use now; return whether there was any.

        For what must be on the device together though no bundle needs it, such as the weights that a
        graph of gradients keeps, or the activations that one node of it uses.
        """
        free_bytes = self._limit_bytes - int(self._meter.live_bytes() * MARGIN) - self._quota_bytes
        if free_bytes <= 0:
            return False
        self._give(self._quota_bytes + min(free_bytes, max(1, needed_bytes)))
        self._grown_bytes = max(self._grown_bytes, self._quota_bytes)
        return True
