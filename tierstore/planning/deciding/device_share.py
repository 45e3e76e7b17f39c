"""How much of the device is the store's: what activations and workspace leave of the budget.

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
4. Evaluations are measured apart from steps.  What the program has when one begins may be more each time
   (keys and values of former tokens, outputs that are collected), and what it makes comes on top of that.
   One is enough to know what that is; where the processor that copies is the one that computes it is known
   exactly, and every one is measured.  Between two uses the
   store has what it has in a step; where none was measured yet, what it has in an evaluation: what fits
   then stays from one forward pass to the next.  In the first of its kind it has half of the device already,
   as long as that is several times what the program took so far: what leaves costs nothing but to come again.
5. When inputs grow, the store makes room in proportion before the model runs, and it is measured
   again, unless they are little larger than those that were.  Smaller inputs teach nothing about larger ones.
6. Where the store cannot have everything there, and the tiers below can, room for one bundle and a half, a
   quarter of what may stay at most, is written back before anybody waits for it: so what comes up does not
   wait for what goes down.  Not where the processor that computes is the one that copies.
7. Where a program calls parts of the model itself, or one in several ways, inputs are compared part by part
   and way by way.  One that was not measured yet, or whose inputs have grown, leaves the store nothing until
   it was, in an evaluation what a first one leaves; what was measured of several counts for its most, as uses
   of them differ.
8. What was not used, stepped or trained when the program was measured may take anything: from when it is
   met the store has nothing in that phase, and the uses that follow are measured.  What was measured of uses
   with different bundles counts for its most.
9. What a node of the graph will allocate cannot be known before it runs for the first time.  Beside it
   there are then only the bytes that it asked for: where that is too much, no budget so small is enough.

It is told what was measured and what is leased, and says what quota to give; who gave it says so
(`DeviceShare.quota_bytes`).  A use of the model is `DeviceShare.begin_use`, `enter`, `too_much`,
`expect_more` (and if it does, `enter` again), `begin_learning`; its optimizers' steps are `enter`,
`begin_step`, `end_step`; an evaluation ends with `end_evaluation` and `enter`.  After every `enter` the store
gets at least its own, and gives back what is more and not leased.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from tierstore.planning.deciding.first_uses import FirstUses, Role, StepPeak
from tierstore.planning.deciding.lessons import MARGIN, CalledPart, Lesson
from tierstore.planning.deciding.phases import (
    CameBytes,
    EvaluationEnd,
    PhasePeak,
    StepPhase,
    TrainedBytes,
    high_of,
)
from tierstore.units import align_up

ALIGNMENT_BYTES = 512
"""What devices' allocators round to."""

LEARNING_STEPS = 2
_LEARNING_EVALUATIONS = 1
_GUESSED = 4
"""How many times what a first evaluation took so far it may take later, if each layer were as wide as
the widest: what an operator is given, what it makes, and both again in a wider type."""

_ROLES: dict[StepPhase, tuple[Role, ...]] = {
    StepPhase.MODEL: (Role.USED, Role.TRAINED),
    StepPhase.OPTIMIZER: (Role.STEPPED,),
    StepPhase.EVALUATION: (),
    StepPhase.BETWEEN: (),
}
"""What is told of in each phase."""


class DeviceShare:
    """Divides a device between the program and the store.

    Args:
        limit_bytes: all that the program may have on the device; at least ``trained.largest_bytes``.
        trained: what the store has to hold.
        below_bytes: what the tiers below the device can hold together.
        staying_bytes: returns the bytes of gradients that are the program's for now.
        came: returns what there was so far of what is trained.
        said_high: see the attribute.
        has_streams: whether copies and computing go on beside each other.

    Attributes:
        phase: what the program does.
        said_high: the share of its quota above which the store writes back early; ``None``: nobody says it.
        quota_bytes: what the store has; set by who gave it.
    """

    def __init__(
        self,
        limit_bytes: int,
        trained: TrainedBytes,
        below_bytes: int,
        staying_bytes: Callable[[], int],
        came: Callable[[], CameBytes],
        said_high: float | None = None,
        *,
        has_streams: bool = True,
    ) -> None:
        self.phase = StepPhase.BETWEEN
        self.said_high = said_high
        self._has_streams = has_streams
        self.quota_bytes = -1
        self._limit_bytes = limit_bytes
        self._step_ahead_bytes = min(limit_bytes, trained.largest_bytes + trained.largest_bundle_bytes)
        self._trained = trained
        self._below_bytes = below_bytes
        # What the tiers below cannot hold has to be on the device, beside what is in use there.
        homeless_bytes = trained.all_bytes + self._step_ahead_bytes - below_bytes
        self._floor_bytes = min(limit_bytes, max(trained.pinned_bytes, homeless_bytes))
        self._own = dict.fromkeys(StepPhase, self._floor_bytes)
        self._program: dict[StepPhase, int] = {}  # its peaks in the last use that was measured
        self._standing_bytes = 0  # what of them was there before the use, and does not vary
        self._seen: dict[StepPhase, int] = {}  # in the one that is being measured
        self._unseen = dict.fromkeys(StepPhase, 0)  # by the meter, as the allocator told afterwards
        self._leased = dict.fromkeys(StepPhase, 0)  # the most that leases needed together
        self._at_gradients_bytes = 0
        self._seen_at_gradients_bytes = 0  # in the use that is being measured
        self._seen_step_bytes = 0
        self._before_step_bytes = 0
        self._around_evaluation = StepPhase.BETWEEN
        self._lessons = {
            StepPhase.MODEL: Lesson(LEARNING_STEPS),
            StepPhase.EVALUATION: Lesson(_LEARNING_EVALUATIONS),
        }
        self._learning: Lesson | None = None
        self._elements: dict[CalledPart, int] = {}  # the most of inputs in the use that is learned from
        self._has_ended = False  # the use that is learned from, as far as is known
        self._staying_bytes = staying_bytes
        self._came = came
        self._came_bytes = CameBytes(trained.gradient_bytes, trained.state_bytes)  # or are to come
        self._may_guess = True
        self._held_bytes = 0  # by the program, when the evaluation began that is learned from
        self._together_bytes = 0  # of leases since `guess` was asked last
        self._first_uses = FirstUses()
        self._is_another = False  # use than the one before: the phase begins with it

    # --- a use of the model ---------------------------------------------------------------------

    def begin_use(self, phase: StepPhase, called: Hashable = None) -> None:
        """The model begins to run: what there was to learn from the last use is known.

        Args:
            phase: in a step (``MODEL``), or for itself (``EVALUATION``).
            called: the part that the program calls, and in which way; ``None``: the whole, in one way.
        """
        self._conclude()
        self._lessons[phase].begin(called)
        self._is_another = self.phase is not phase  # else it goes on, with another part or another batch
        if phase is not StepPhase.EVALUATION:
            if self._is_another:
                self._first_uses.begin_use()
            return
        if self._is_another:
            self._around_evaluation = self.phase
        if self._may_guess and not self._is_known(phase):
            self._own[phase] = self._guessed_bytes(self._standing_bytes)

    def too_much(self, phase: StepPhase, elements: int) -> int | None:
        """Return what the last use took, if inputs of that size took more than the budget then."""
        part = self._lessons[phase].part
        part.elements = elements
        if part.too_many_elements is None or elements < part.too_many_elements:
            return None
        return part.needed_bytes

    def expect_more(self, phase: StepPhase, elements: int) -> bool:
        """If the inputs are larger than any before, so will be what is made of them.

        Returns whether the store's own is less for it.
        """
        lesson, part = self._lessons[phase], self._lessons[phase].part
        seen_elements = part.seen_elements
        part.seen_elements = max(seen_elements, elements)
        is_more = part.has_grown(elements) if lesson.has_several else elements > seen_elements
        if not is_more or phase not in self._program:
            return False
        if lesson.has_several:
            lesson.steps_to_learn, lesson.is_known = max(1, lesson.steps_to_learn), False
        else:
            self._program[phase] = self._program[phase] * elements // max(1, seen_elements)
            if phase is StepPhase.MODEL:
                # Inputs, and what was computed of them, are there as well when the optimizer steps.
                self._first_uses.grow(elements, seen_elements)
                self._take_in_step_peak()
            part.made_bytes = part.made_bytes * elements // max(1, seen_elements)
            if part.has_grown(elements):
                lesson.learn_again()
            lesson.is_known = True
        self._divide()
        return True

    def begin_learning(self, phase: StepPhase, elements: int) -> bool:
        """The model runs on so many elements; return whether a use is learned from."""
        lesson = self._lessons[phase]
        is_step = phase is StepPhase.MODEL
        # A step is measured for what was met: from its beginning, or what its first forward made is missed.
        is_met_wanted = self._is_another and self._first_uses.are_to_be_measured
        is_wanted = is_met_wanted if is_step else not self._has_streams
        if self._learning is None and (lesson.steps_to_learn or self._is_tight or is_wanted):
            self._learning = lesson
            if is_step:
                self._seen_at_gradients_bytes = self._seen_step_bytes = 0
                self._first_uses.begin_measuring()
            self._elements.clear()
        if self._learning is lesson:
            self._elements[lesson.part] = max(self._elements.get(lesson.part, 0), elements)
        return self.is_learning

    def meet(self, keys: Mapping[Hashable, int], *, are_parameters: bool = False) -> bool:
        """Bundles are used, or parameters are trained in the step that begins.

        Args:
            keys: with their bytes; of parameters, all that are trained in it.
            are_parameters: whether they are.

        Returns:
            whether the store's own is less from now on, as something is met for the first time.
        """
        if not (roles := _ROLES[self.phase]):
            return False
        role = Role.TRAINED if are_parameters else roles[0]
        is_known = self._first_uses.take_in(role, keys, is_measured=self.is_measuring)
        own_bytes = self.own_bytes
        if not is_known and self._is_known(self.phase):
            self._first_uses.meet(role)
        return self.own_bytes < own_bytes

    def note_standing(self, nbytes: int) -> None:
        """Take in what the program has that no use of the model makes."""
        self._standing_bytes = nbytes

    def expect_held(self, nbytes: int) -> bool:
        """Take in what the program has when an evaluation begins.

        It may be more every time: what it made of former ones, and work of its own.  Where copies go on
        beside computing that is known roughly: what is within the spared tenth changes nothing.

        Returns whether the store's own is another for it.
        """
        self._held_bytes = nbytes
        phase = StepPhase.EVALUATION
        lesson = self._lessons[phase]
        needed_bytes = nbytes + lesson.made_bytes
        if self._has_streams and needed_bytes <= self._spared(lesson.measured_bytes):
            needed_bytes = lesson.measured_bytes
        if not self._is_known(phase) or needed_bytes == self._program.get(phase):
            return False
        self._program[phase] = needed_bytes
        self._divide()
        return True

    def note_at_gradients(self, nbytes: int) -> None:
        """Take in what the program has where a gradient was accumulated."""
        self._seen_at_gradients_bytes = max(self._seen_at_gradients_bytes, nbytes)

    def begin_step(self, live_bytes: int) -> None:
        """An optimizer begins to step in what is learned from, beside so much of the program's."""
        self._has_ended = False
        self._before_step_bytes = live_bytes

    @property
    def around_evaluation(self) -> StepPhase:
        """What the program did before the model ran for itself, and does again when it has run."""
        return self._around_evaluation

    def end_step(self) -> bool:
        """A step has ended, unless another optimizer steps, too; return whether it was learned from."""
        is_learned = self.learns_from(StepPhase.MODEL)
        self._has_ended |= is_learned
        return is_learned

    @property
    def is_guessing(self) -> bool:
        """Whether an evaluation of its kind is the first: `guess` is asked whenever leases begin or ended."""
        if not self._may_guess or self._is_known(StepPhase.EVALUATION):
            return False
        return self.phase is StepPhase.EVALUATION and self.learns_from(StepPhase.EVALUATION)

    def guess(self, peak_bytes: int, whole_bytes: int, leased_bytes: int) -> None:
        """Let the store keep, in a first evaluation of some kind, what its program will hardly take.

        Args:
            peak_bytes: what the program took in it so far, at most.
            whole_bytes: the most that the whole device had since this was asked last; 0: it is not known.
            leased_bytes: now.
        """
        kept_bytes = max(0, self.quota_bytes - max(self._floor_bytes, self._together_bytes))
        self._together_bytes = leased_bytes
        excess_bytes = whole_bytes - kept_bytes - self._limit_bytes
        if excess_bytes > 0:  # with nothing kept, too
            self._refuse_as_many(excess_bytes)
        self._own[StepPhase.EVALUATION] = self._guessed_bytes(peak_bytes)

    def _guessed_bytes(self, peak_bytes: int) -> int:
        standing_bytes = min(self._standing_bytes, peak_bytes)
        free_bytes = self._limit_bytes - standing_bytes
        later_bytes = int((peak_bytes - standing_bytes) * _GUESSED * self._trained.widening)
        guessed_bytes = free_bytes - max(free_bytes // 2, later_bytes)
        if StepPhase.EVALUATION in self._program:  # others of which it is known: it may take as much
            guessed_bytes = min(guessed_bytes, self._rest_bytes(StepPhase.EVALUATION))
        return max(self._floor_bytes, guessed_bytes)

    def end_evaluation(self, peak: PhasePeak, how: EvaluationEnd) -> bool:
        """The model has run for itself; what it took is known at once.  Another phase is to be entered.

        Args:
            peak: of the evaluation.
            how: it ended: of one that an exception ended nothing is learned.

        Returns:
            whether it was learned from.
        """
        self._take_in(peak)
        if not self.learns_from(StepPhase.EVALUATION):
            return False
        self._has_ended = True
        if how is EvaluationEnd.WHOLE:
            made_bytes = self._seen.get(StepPhase.EVALUATION, 0) - self._held_bytes
            self._lessons[StepPhase.EVALUATION].note_made(made_bytes)
            self._conclude()
        else:
            self._learning, self._has_ended = None, False
            self._seen.clear()
            is_first = not self._is_known(StepPhase.EVALUATION)
            if how is EvaluationEnd.OUT_OF_MEMORY and self._may_guess and is_first:
                self._may_guess = False  # what was kept may have been in the way
                self._own[StepPhase.EVALUATION] = self._floor_bytes
            self._keep_between()
        return True

    def stop_learning(self) -> None:
        """Nothing is measured any more."""
        self._learning = None

    def _conclude(self) -> None:
        lesson = self._learning
        if lesson is None or not self._has_ended:
            return
        self._learning, self._has_ended = None, False
        self._came_bytes = self._came_bytes.at_least(self._came())
        largest = [part for part, elements in self._elements.items() if elements >= part.seen_elements]
        self._take_in_seen(has_largest=bool(largest) and not lesson.has_several)
        if lesson is self._lessons[StepPhase.MODEL]:
            self._first_uses.conclude()
            self._take_in_step_peak()
        for part, elements in self._elements.items():
            part.measured_elements = max(part.measured_elements, elements)
        if largest or lesson.has_several:
            lesson.steps_to_learn = max(0, lesson.steps_to_learn - 1)
        if lesson.steps_to_learn == 0:
            lesson.is_known = True
            if lesson is self._lessons[StepPhase.EVALUATION]:
                lesson.measured_bytes = self._program[StepPhase.EVALUATION]
            self._divide()

    def _take_in_seen(self, *, has_largest: bool) -> None:
        """Take in the peaks of the use that ended; say whether it had the largest inputs of all."""
        step_bytes = self._seen.pop(StepPhase.OPTIMIZER, None)
        if step_bytes is not None:
            peak = StepPeak(step_bytes, self._seen_step_bytes)
            self._first_uses.take_in_step(peak, has_largest=has_largest)
            self._program.setdefault(StepPhase.OPTIMIZER, 0)
        for phase, peak_bytes in self._seen.items():
            is_like_all = has_largest and self._first_uses.is_like_all(_ROLES[phase])
            is_alone = is_like_all and self._counts_alone(phase, peak_bytes)
            self._program[phase] = max(0 if is_alone else self._program.get(phase, 0), peak_bytes)
            if phase is StepPhase.MODEL:
                former_bytes = 0 if is_alone else self._at_gradients_bytes
                self._at_gradients_bytes = max(former_bytes, self._seen_at_gradients_bytes)
        self._seen.clear()

    def _take_in_step_peak(self) -> None:
        if StepPhase.OPTIMIZER in self._program:
            self._program[StepPhase.OPTIMIZER] = self._first_uses.step_peak.program_bytes

    def _counts_alone(self, phase: StepPhase, peak_bytes: int) -> bool:
        """Whether a use of the largest inputs says more than those before it.

        A first step makes state, and may be a little larger otherwise; one that is much larger comes again.
        An evaluation may hold what those before it made.
        """
        lesson = self._learning_of(phase)
        is_first = lesson.steps_to_learn == lesson.uses_to_learn_from
        is_much_less = peak_bytes * MARGIN < self._program.get(phase, 0)
        if phase is StepPhase.EVALUATION:
            return is_first
        return is_first or not lesson.steps_to_learn or not is_much_less

    # --- phases ---------------------------------------------------------------------------------

    def enter(self, phase: StepPhase, peak: PhasePeak) -> None:
        """Another phase begins.

        Args:
            phase: that begins.
            peak: of the one that ends.
        """
        self._take_in(peak)
        self.phase = phase

    def _take_in(self, peak: PhasePeak) -> None:
        self.note_peak(peak)
        self._note_excess(peak.whole_bytes - self._limit_bytes)

    def note_peak(self, peak: PhasePeak) -> None:
        """Keep the peak of the phase that ends: the last use measured counts, as the first makes state."""
        if not self.is_measuring:
            return
        phase = self.phase
        former_bytes = self._program.get(phase, 0) if peak.is_hidden else 0
        # The store had no more than its quota; what kernels take for themselves nobody else tells.
        quota_bytes = max(self._own[phase], self._leased[phase])
        beside_bytes = 0 if self.is_guessing else peak.whole_bytes - quota_bytes  # a guess has changed
        peak_bytes = max(peak.program_bytes, former_bytes, beside_bytes)
        self._seen[phase] = max(self._seen.get(phase, 0), peak_bytes)
        if phase is StepPhase.OPTIMIZER:
            self._seen_step_bytes = max(self._seen_step_bytes, peak_bytes - self._before_step_bytes)

    def _note_excess(self, excess_bytes: int) -> None:
        """Where the phase that ends had more than the budget, let the store have less from now on."""
        phase = self.phase
        if excess_bytes <= 0 or phase is StepPhase.BETWEEN or self.is_guessing:
            return
        if self._own[phase] > self._floor_bytes:
            self._unseen[phase] += max(excess_bytes, self._unseen[phase])
            self._divide()
            return
        self._refuse_as_many(excess_bytes)

    def _refuse_as_many(self, excess_bytes: int) -> None:
        """Inputs of this size took so much more than the budget, with nothing to take from the store."""
        is_evaluation = self.phase is StepPhase.EVALUATION
        part = self._lessons[StepPhase.EVALUATION if is_evaluation else StepPhase.MODEL].part
        part.too_many_elements = part.elements
        part.needed_bytes = self._limit_bytes + excess_bytes

    # --- what is known --------------------------------------------------------------------------

    @property
    def is_learning(self) -> bool:
        """Whether a use is learned from."""
        return self._learning is not None

    @property
    def is_measuring(self) -> bool:
        """Whether a use is learned from that has not ended: peaks of its phases count."""
        return self._learning is not None and not self._has_ended

    def learns_from(self, phase: StepPhase) -> bool:
        """Say whether it is a use of that kind (``MODEL`` or ``EVALUATION``) that is learned from."""
        return self._learning is self._lessons[phase]

    @property
    def own_bytes(self) -> int:
        """The store's own in this phase."""
        return self._floor_bytes if self._has_met else self._own[self.phase]

    @property
    def _has_met(self) -> bool:
        """Whether something is used in this phase that was not measured."""
        return self._first_uses.has_met(_ROLES[self.phase])

    @property
    def kept_bytes(self) -> int:
        """What is the store's own through a whole step: so much may stay there from one to the next."""
        if not self._is_known(StepPhase.MODEL) or StepPhase.OPTIMIZER not in self._program:
            return 0
        return min(self._own[StepPhase.MODEL], self._own[StepPhase.OPTIMIZER])

    @property
    def high(self) -> float:
        """The share of its quota above which the store writes back before anybody waits for room."""
        if self.said_high is not None or not self._has_streams:
            return 1.0 if self.said_high is None else self.said_high
        elsewhere_bytes = self._trained.gradient_bytes if self.has_room_for_gradients else 0
        return high_of(self.kept_bytes, self._trained, self._below_bytes, elsewhere_bytes)

    @property
    def staying_room_bytes(self) -> int:
        """How much of what is kept may stay: what is above `high` is to be free."""
        return int(self.kept_bytes * self.high)

    @property
    def _is_tight(self) -> bool:
        """Whether leases may need more than the store's own: then the program is measured from then on."""
        return any(self._leased[phase] > self._own[phase] for phase in self._program)

    @property
    def has_room_for_gradients(self) -> bool:
        """Whether it is known that all there is fits beside the program, so that gradients may be its own.

        What is met has gradients and state that nobody foresaw; what is measured for it is so without them.
        """
        if self._lessons[StepPhase.MODEL].steps_to_learn or self._first_uses.are_to_be_measured:
            return False
        trained, came = self._trained, self._came_bytes
        fixed_bytes = trained.all_bytes - trained.gradient_bytes - trained.state_bytes
        kept_bytes = fixed_bytes + came.gradient_bytes + came.state_bytes
        return self._spared(self._program.get(StepPhase.MODEL, 0)) + kept_bytes <= self._limit_bytes

    @property
    def allows_steps_in_backward(self) -> bool:
        """Whether an optimizer may step while there are activations: it is known what both take."""
        return (
            StepPhase.OPTIMIZER in self._program
            and not self._lessons[StepPhase.MODEL].steps_to_learn
            and min(self._own[StepPhase.MODEL], self._beside_steps_bytes) >= self._step_ahead_bytes
        )

    def allows_step_in_backward(self, key: Hashable) -> bool:
        """Whether this bundle may be stepped there: what its step takes was measured, too."""
        return self.allows_steps_in_backward and self._first_uses.is_known(Role.STEPPED, key)

    @property
    def _beside_steps_bytes(self) -> int:
        """What the program leaves where an optimizer steps in the midst of backward."""
        return self._limit_bytes - self._spared(
            self._at_gradients_bytes + self._first_uses.step_peak.more_bytes
        )

    def _spared(self, program_bytes: int) -> int:
        """Return what is left to the program that had so much: more, as what varies may be more."""
        standing_bytes = min(self._standing_bytes, program_bytes)
        return standing_bytes + int((program_bytes - standing_bytes) * MARGIN)

    # --- quotas ---------------------------------------------------------------------------------

    def _divide(self) -> None:
        """Make the store's own what the program leaves of the budget."""
        for phase in self._program:
            if self._is_known(phase):
                self._own[phase] = max(self._floor_bytes, self._rest_bytes(phase))
            elif phase is StepPhase.EVALUATION and self._may_guess:
                self._own[phase] = self._guessed_bytes(self._standing_bytes)
            else:
                self._own[phase] = self._floor_bytes
        self._keep_between()

    def _keep_between(self) -> None:
        like = StepPhase.MODEL if self._is_known(StepPhase.MODEL) else StepPhase.EVALUATION
        self._own[StepPhase.BETWEEN] = self._own[like]

    def _rest_bytes(self, phase: StepPhase) -> int:
        """Return what the program leaves in a phase, as far as it was measured."""
        gradient_bytes = (
            self._came_bytes.gradient_bytes if self.has_room_for_gradients else self._staying_bytes()
        )
        program_bytes = self._spared(self._program[phase])
        rest_bytes = self._limit_bytes - program_bytes - gradient_bytes - self._unseen[phase]
        if phase is StepPhase.MODEL and self._beside_steps_bytes >= self._step_ahead_bytes:
            return min(rest_bytes, self._beside_steps_bytes)
        return rest_bytes

    def _is_known(self, phase: StepPhase) -> bool:
        """Whether the store's own in a phase is what the program leaves: enough uses were measured."""
        return self._learning_of(phase).is_known

    def _learning_of(self, phase: StepPhase) -> Lesson:
        return self._lessons[phase if phase is StepPhase.EVALUATION else StepPhase.MODEL]

    @property
    def is_to_prepare(self) -> bool:
        """Whether leases may need more than the store has: `grow` is asked before they begin."""
        return self.is_learning or self._is_tight or self._has_met or not self._program

    def grow(self, needed_bytes: int, leased_bytes: int, live_bytes: int) -> int | None:
        """Return the quota with which so much more can be leased; ``None``: the program uses it.

        Args:
            needed_bytes: together.
            leased_bytes: by others, now.
            live_bytes: that the program has now.
        """
        quota_bytes = self._together_bytes = leased_bytes + align_up(needed_bytes, ALIGNMENT_BYTES)
        self._leased[self.phase] = max(self._leased[self.phase], quota_bytes)
        if quota_bytes + live_bytes > self._limit_bytes:
            return None
        return max(self.quota_bytes, quota_bytes, self.own_bytes)

    @property
    def has_more_than_own(self) -> bool:
        """Whether something was given for leases, which may have ended."""
        return self.quota_bytes > self.own_bytes

    def settled_bytes(self, leased_bytes: int) -> int:
        """Return the quota without what was given for leases that have ended."""
        return max(self.own_bytes, leased_bytes)

    def is_in_the_way(self, live_bytes: int) -> bool:
        """Say whether the store's quota and what the program has now are more than the budget."""
        return self.quota_bytes + live_bytes > self._limit_bytes
