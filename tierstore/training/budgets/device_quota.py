"""How much of the device the store may have: what activations and workspace leave of the budget.

A step has two phases with different needs: forward and backward, which make activations, and the
optimizers' steps, which need a bundle's gradients and state beside its parameters.

1. The store has at every moment its *own* bytes or what is leased, whichever is more.  Own bytes are what
   the program, at its peak, leaves of the budget: they may be full of what is used later.
2. What the program takes is measured in the first two steps; until then nothing is the store's own, but
   what finds no room in the tiers below.  So a first step takes the same bytes whatever the budget is, and
   later ones no more than the budget if they are like it: what trains within some budget trains within
   every larger one.
3. Where leases need more than the store's own, it is given what the program leaves at that moment, until
   they end, and the program is measured in every step.
4. When inputs grow, the store makes room in proportion before the model runs, and it is measured
   again.  Smaller inputs teach nothing about larger ones.
5. What a node of the graph will allocate cannot be known before it runs for the first time.  Beside it
   there are then only the bytes that it asked for: where that is too much, no budget so small is enough.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierstore.errors import CapacityError
from tierstore.store import Store
from tierstore.training import locks
from tierstore.training.budgets.memory_meters import Meter, tensors_in
from tierstore.training.bundles.bindings import let_frames_go
from tierstore.training.bundles.working_sets import ALIGNMENT_BYTES, WorkingSet, largest_needs, too_large
from tierstore.training.locks import Rank
from tierstore.training.pytorch.own_work import ordinary_mode
from tierstore.units import align_up, format_bytes

LEARNING_STEPS = 2
MARGIN = 1.1
"""Steps differ a little: allocations overlap otherwise, a metric is kept a while longer."""


class StepPhase(enum.Enum):
    """What the program does."""

    MODEL = enum.auto()  # forward and backward
    OPTIMIZER = enum.auto()
    EVALUATION = enum.auto()  # forward alone
    BETWEEN = enum.auto()  # nothing of the model's: inputs are made


@dataclass(slots=True)
class _Lesson:
    """How much of one kind of use is known: of steps, or of evaluations."""

    steps_to_learn: int = LEARNING_STEPS
    seen_elements: int = 0  # of the largest inputs so far
    elements: int = 0  # of the last inputs
    too_many_elements: int | None = None  # of inputs that took more than the budget, with nothing to take
    needed_bytes: int = 0  # by them


class DeviceQuota:
    """Sets the quota of the store's device tier.

    `prepare`, `grow` and `settle` are safe from any thread; the rest is for the one that trains.

    Args:
        store: with a device tier as its fastest.
        limit_bytes: all that the program may have on the device.
        sets: of every bundle.
        meter: of what the program has outside the store.
        resized: told how much is the store's own.
        staying_bytes: returns the bytes of gradients that are the program's for now.

    Raises:
        CapacityError: one bundle alone does not fit.
    """

    def __init__(
        self,
        store: Store,
        limit_bytes: int,
        sets: Sequence[WorkingSet],
        meter: Meter,
        resized: Callable[[int], None],
        staying_bytes: Callable[[], int],
    ) -> None:
        self._store = store
        self._tier = store.tier_names[0]
        self._limit_bytes = limit_bytes
        self._meter = meter
        self._resized = resized
        _, needed_bytes = largest_needs(sets)
        if needed_bytes > limit_bytes:
            raise too_large(self._tier, limit_bytes, sets)
        self._step_ahead_bytes = min(limit_bytes, needed_bytes + max(each.bundle_bytes for each in sets))
        self._all_bytes = sum(each.nbytes for each in sets)
        self._gradient_bytes = self._all_bytes - sum(each.bundle_bytes + each.state_bytes for each in sets)
        self._lock = locks.new_lock(Rank.DEVICE_QUOTA)  # guards what follows; held while hardware makes room
        below = [tier.capacity_bytes for name, tier in store.stats().tiers.items() if name != self._tier]
        # What the tiers below cannot hold has to be on the device, beside what is in use there.
        pinned_bytes = sum(each.pinned_bytes for each in sets)
        homeless_bytes = max(pinned_bytes, self._all_bytes + self._step_ahead_bytes - sum(below))
        self._floor_bytes = min(limit_bytes, homeless_bytes)
        self._own = dict.fromkeys(StepPhase, self._floor_bytes)
        self._program: dict[StepPhase, int] = {}  # its peaks in the last use that was measured
        self._standing_bytes = 0  # what of them was there before the use, and does not vary
        self._seen: dict[StepPhase, int] = {}  # in the one that is being measured
        self._unseen = dict.fromkeys(StepPhase, 0)  # by the meter, as the allocator told afterwards
        self._leased: dict[StepPhase, int] = dict.fromkeys(
            StepPhase, 0
        )  # the most that leases needed together
        self._at_gradients_bytes = 0
        self._step_bytes = 0
        self._before_step_bytes = 0
        self._quota_bytes = -1
        self._phase = StepPhase.BETWEEN
        self._around_evaluation = StepPhase.BETWEEN
        self._lessons = {StepPhase.MODEL: _Lesson(), StepPhase.EVALUATION: _Lesson()}
        self._learning: _Lesson | None = None
        self._elements = 0  # the most of inputs in the use that is learned from
        self._has_ended = False  # the use that is learned from, as far as is known
        self._staying_bytes = staying_bytes
        self._give(self._floor_bytes)

    # --- a step -------------------------------------------------------------------------------

    def begin_forward(self, inputs: Sequence[object], phase: StepPhase) -> None:
        """The model begins to run on ``inputs``: in a step (``MODEL``) or for itself (``EVALUATION``)."""
        self._conclude()
        if phase is StepPhase.EVALUATION and self._phase is not phase:
            self._around_evaluation = self._phase
        self._enter(phase)
        lesson = self._lessons[phase]
        elements = sum(tensor.numel() for tensor in tensors_in(inputs))
        self._require_less(lesson, elements)
        if elements > lesson.seen_elements:
            self._expect_more(phase, lesson, elements)
        if self._learning is None and (lesson.steps_to_learn or self._is_tight):
            self._learning = lesson
            self._at_gradients_bytes = self._step_bytes = self._elements = 0
        if self._learning is lesson:
            self._elements = max(self._elements, elements)
        if self._learning is not None:
            self._standing_bytes = self._meter.standing_bytes()
            self._meter.begin(inputs)

    def _require_less(self, lesson: _Lesson, elements: int) -> None:
        """Raise if inputs of that size took more than the budget the last time."""
        lesson.elements = elements
        if lesson.too_many_elements is None or elements < lesson.too_many_elements:
            return
        raise CapacityError(
            f"the last use of the model took {format_bytes(lesson.needed_bytes)} on the device, with "
            f"inputs no larger than these and nothing there that was not in use; max_device_memory is "
            f"{format_bytes(self._limit_bytes)}. Raise it, take smaller batches, or swap or recompute more.",
            tier=self._tier,
            needed_bytes=lesson.needed_bytes,
            free_bytes=self._limit_bytes,
        )

    def _expect_more(self, phase: StepPhase, lesson: _Lesson, elements: int) -> None:
        """The inputs are larger than any before: so will be what is made of them."""
        if phase in self._program:
            # Inputs, and what was computed of them, are there as well when the optimizer steps.
            for each in (phase, StepPhase.OPTIMIZER) if phase is StepPhase.MODEL else (phase,):
                program_bytes = self._program.get(each, 0)
                self._program[each] = program_bytes * elements // max(1, lesson.seen_elements)
            lesson.steps_to_learn = LEARNING_STEPS
            self._divide()
            self._enter(phase)
        lesson.seen_elements = elements

    def begin_optimizer(self) -> None:
        """An optimizer begins to step."""
        self._enter(StepPhase.OPTIMIZER)
        if self._learning is self._lessons[StepPhase.MODEL]:
            self._meter.begin_step()
            self._has_ended = False
            self._before_step_bytes = self._meter.live_bytes()

    def end_evaluation(self) -> None:
        """The model has run for itself."""
        if self._phase is StepPhase.EVALUATION:  # and it may have run in the midst of a step
            self._end(self._lessons[StepPhase.EVALUATION], self._around_evaluation)

    def end_step(self) -> None:
        """An optimizer has stepped, or a model without one was used."""
        self._end(self._lessons[StepPhase.MODEL])

    def _end(self, lesson: _Lesson, then: StepPhase = StepPhase.BETWEEN) -> None:
        """A use has ended, unless another optimizer steps, too."""
        self._enter(then)
        if self._learning is lesson:
            self._meter.end()
            self._has_ended = True

    def _conclude(self) -> None:
        """Another use begins: what there was to learn from the last one is known."""
        lesson = self._learning
        if lesson is None or not self._has_ended:
            return
        self._learning, self._has_ended = None, False
        is_like_the_largest = self._elements >= lesson.seen_elements
        for phase, peak_bytes in self._seen.items():
            former_bytes = 0 if is_like_the_largest else self._program.get(phase, 0)
            self._program[phase] = max(former_bytes, peak_bytes)
        self._seen.clear()
        if is_like_the_largest:
            lesson.steps_to_learn = max(0, lesson.steps_to_learn - 1)
        if lesson.steps_to_learn == 0:
            self._divide()

    def look(self) -> None:
        """Take a sample of what the program has."""
        if self._learning is not None:
            self._meter.look()
            self._at_gradients_bytes = max(self._at_gradients_bytes, self._meter.live_bytes())

    def suspend(self) -> None:
        """Let the store have nothing of the device, and do not measure what others do there.

        Raises:
            CapacityError: the tiers below cannot take what is there: it has what it had.
        """
        with self._lock:
            self._note_peak(0)
            self._meter.end()
            self._give(0)

    def resume(self) -> None:
        """Give the store its own again."""
        with self._lock:
            self._give(self._own[self._phase])

    def close(self) -> None:
        """Stop measuring."""
        self._learning = None
        self._meter.end()

    def _enter(self, phase: StepPhase) -> None:
        if phase is not self._phase:
            whole_bytes = self._meter.take_whole_peak() or 0
            self._note_peak(whole_bytes)
            self._note_excess(whole_bytes - self._limit_bytes)
            self._phase = phase
        self._resized(self._own[phase])
        with self._lock:
            if self._quota_bytes < self._own[phase]:
                self._give(self._own[phase])
        self.settle()

    def _note_peak(self, whole_bytes: int) -> None:
        """Keep the peak of the phase that ends: the last use measured counts, as the first makes state.

        Args:
            whole_bytes: the most that the whole device had, if it is known: the store had no more than its
                quota, and what kernels take for themselves nobody else tells.
        """
        if self._learning is not None and not self._has_ended:
            peak_bytes = self._meter.take_peak()
            former_bytes = self._program.get(self._phase, 0) if self._meter.was_peak_hidden else 0
            quota_bytes = max(self._own[self._phase], self._leased[self._phase])
            peak_bytes = max(peak_bytes, former_bytes, whole_bytes - quota_bytes)
            self._seen[self._phase] = max(self._seen.get(self._phase, 0), peak_bytes)
            if self._phase is StepPhase.OPTIMIZER:
                self._step_bytes = max(self._step_bytes, peak_bytes - self._before_step_bytes)

    def _note_excess(self, excess_bytes: int) -> None:
        """Where the phase that ends had more than the budget, let the store have less from now on."""
        phase = self._phase
        if excess_bytes <= 0 or phase is StepPhase.BETWEEN:
            return
        if self._own[phase] > self._floor_bytes:
            self._unseen[phase] += max(excess_bytes, self._unseen[phase])
            self._divide()
            return
        lesson = self._lessons[StepPhase.EVALUATION if phase is StepPhase.EVALUATION else StepPhase.MODEL]
        lesson.too_many_elements = lesson.elements
        lesson.needed_bytes = self._limit_bytes + excess_bytes

    # --- what is known ------------------------------------------------------------------------

    @property
    def _is_tight(self) -> bool:
        """Whether leases may need more than the store's own: then the program is measured from then on."""
        return any(self._leased[phase] > self._own[phase] for phase in self._program)

    @property
    def has_room_for_gradients(self) -> bool:
        """Whether it is known that all there is fits beside the program, so that gradients may be its own."""
        needed_bytes = self._spared(self._program.get(StepPhase.MODEL, 0)) + self._all_bytes
        return not self._lessons[StepPhase.MODEL].steps_to_learn and needed_bytes <= self._limit_bytes

    @property
    def allows_steps_in_backward(self) -> bool:
        """Whether an optimizer may step while there are activations: it is known what both take."""
        return (
            StepPhase.OPTIMIZER in self._program
            and not self._lessons[StepPhase.MODEL].steps_to_learn
            and min(self._own[StepPhase.MODEL], self._beside_steps_bytes) >= self._step_ahead_bytes
        )

    @property
    def _beside_steps_bytes(self) -> int:
        """What the program leaves where an optimizer steps in the midst of backward."""
        return self._limit_bytes - self._spared(self._at_gradients_bytes + self._step_bytes)

    def _spared(self, program_bytes: int) -> int:
        """Return what is left to the program that had so much: more, as what varies may be more."""
        standing_bytes = min(self._standing_bytes, program_bytes)
        return standing_bytes + int((program_bytes - standing_bytes) * MARGIN)

    # --- quotas -------------------------------------------------------------------------------

    def _divide(self) -> None:
        """Make the store's own what the program leaves of the budget."""
        gradient_bytes = self._gradient_bytes if self.has_room_for_gradients else self._staying_bytes()
        for phase, program_bytes in self._program.items():
            rest_bytes = (
                self._limit_bytes - self._spared(program_bytes) - gradient_bytes - self._unseen[phase]
            )
            if phase is StepPhase.MODEL and self._beside_steps_bytes >= self._step_ahead_bytes:
                rest_bytes = min(rest_bytes, self._beside_steps_bytes)
            self._own[phase] = max(self._floor_bytes, rest_bytes)
        self._own[StepPhase.BETWEEN] = self._own[StepPhase.MODEL]

    def _give(self, quota_bytes: int) -> None:
        if quota_bytes != self._quota_bytes:
            with ordinary_mode():  # what is allocated here is the store's
                self._store.resize(self._tier, quota_bytes)
            self._quota_bytes = quota_bytes

    def _leased_bytes(self) -> int:
        return self._store.leased_bytes(self._tier)

    def prepare(self, needed_bytes: int) -> None:
        """See to it that so many bytes can be leased, where they may be more than the store's own.

        Raises:
            CapacityError: see `grow`.
        """
        if self._learning is not None or self._is_tight or not self._program:
            self.grow(needed_bytes)

    def grow(self, needed_bytes: int) -> bool:
        """Give the store room for so much beside what is leased, until leases end.

        For what must be on the device together.  Returns whether it had less.

        Raises:
            CapacityError: the program uses what would be given.
        """
        with self._lock:
            leased_bytes, live_bytes = self._leased_bytes(), self._meter.live_bytes()
            quota_bytes = leased_bytes + align_up(needed_bytes, ALIGNMENT_BYTES)
            self._leased[self._phase] = max(self._leased[self._phase], quota_bytes)
            if quota_bytes + live_bytes > self._limit_bytes:
                raise self._too_much(needed_bytes, leased_bytes, live_bytes)
            if quota_bytes <= self._quota_bytes:
                return False
            self._give(quota_bytes)
            return True

    def _too_much(self, needed_bytes: int, leased_bytes: int, live_bytes: int) -> CapacityError:
        return CapacityError(
            f"no room for {format_bytes(needed_bytes)} in {self._tier!r}: {format_bytes(leased_bytes)} are "
            f"in use there, and the program has {format_bytes(live_bytes)} beside the store, such as "
            "activations and the workspace of operators. max_device_memory is "
            f"{format_bytes(self._limit_bytes)}. Raise it, take smaller batches, or swap or recompute more.",
            tier=self._tier,
            needed_bytes=needed_bytes,
            free_bytes=max(0, self._limit_bytes - leased_bytes - live_bytes),
        )

    def settle(self) -> None:
        """Take back what was given to the store for leases that have ended.

        Where the tiers below have no room for what has to leave, it stays as long as it is not in the way.

        Raises:
            CapacityError: it is.
        """
        with self._lock:
            while self._quota_bytes > self._own[self._phase]:
                leased_bytes = self._leased_bytes()
                try:
                    self._give(max(self._own[self._phase], leased_bytes))
                except CapacityError as error:
                    if self._leased_bytes() > leased_bytes:
                        continue
                    if self._quota_bytes + self._meter.live_bytes() > self._limit_bytes:
                        raise
                    let_frames_go(error)
                return
