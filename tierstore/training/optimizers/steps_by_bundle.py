"""Steps an optimizer that treats each parameter by itself, a bundle at a time, from inside its own ``step``.

The user's optimizer stays in charge: a step pre-hook does the work and leaves the outer step nothing
to do: its groups name only the parameters that are not offloaded, until a post-hook restores them.

1. For one bundle after another, parameters, gradients and state are brought together, the
   optimizer's ``param_groups`` name only the bundle's parameters, and its own ``step`` runs.
2. State tensors that a step created or replaced become a bundle of the store under the parameters'
   own (`tierstore.training.optimizers.state`).
3. Bundles whose step was made during backward (`tierstore.training.optimizers.speculative_steps`) take its
   outcome over; the others go in the order of the forward pass: backward has left the first ones resident.
4. Parameters that are not offloaded are left to the outer step.
5. A step that the optimizer is going to refuse in its midst (`tierstore.training.optimizers.refused_steps`)
   is left to it as a whole (`tierstore.training.optimizers.whole_steps`): what is stepped before it raises is
   what plain PyTorch steps.
6. A step is linear in its parameters: which bundle each is in is looked up once.
7. A step that has failed in its midst is gone on with by the next one: bundles that were stepped with the
   gradients that they have still are not stepped twice.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tierstore import trace_ranges
from tierstore.errors import CapacityError
from tierstore.optim.failed_step import GradientMark
from tierstore.optim.table_optimizer import TableOptimizer
from tierstore.training.autograd.gradient import native_gradient
from tierstore.training.autograd.gradients import Gradients
from tierstore.training.bundles.bindings import Binding
from tierstore.training.faults import guard
from tierstore.training.optimizers.local_steps import may_be_local, only_local
from tierstore.training.optimizers.refused_steps import refuses
from tierstore.training.optimizers.speculative_steps import Expectations, SpeculativeSteps
from tierstore.training.optimizers.state import OptimizerState, order_entries
from tierstore.training.optimizers.step_units import (
    ONE_BY_ONE,
    Group,
    Members,
    Parameters,
    Progress,
    StepTrainer,
    StepUnit,
    by_bundle,
    not_whole,
    one_by_one_of,
    only,
    own_step,
    placed,
    runs_of_step,
    turn_of,
    turns_of,
)
from tierstore.training.optimizers.whole_steps import WholeSteps
from tierstore.training.pytorch.function_modes import in_sight
from tierstore.training.pytorch.own_work import is_dispatch_mode_on
from tierstore.training.recording.marks import BundleStep, Sign


class StepsByBundle:
    """Does the steps of one optimizer, a bundle at a time.

    Args:
        optimizer: whose.
        state: that it keeps.
        trainer: the session that they are made in.
        expectations: of all optimizers.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        state: OptimizerState,
        trainer: StepTrainer,
        expectations: Expectations,
    ) -> None:
        self.optimizer = optimizer
        self.state = state
        self._trainer = trainer
        self._gradients = trainer.gradients
        self._members: dict[Binding, Members] = {}
        self._one_by_one: frozenset[int] = frozenset()  # groups in which the last step was made so
        self._alone: dict[torch.Tensor, Members] = {}  # of each parameter that is stepped in backward
        self._withheld: list[tuple[Group, Parameters]] = []
        self._known_entries = 0  # of parameters that had state before the step that is under way
        self._whole: WholeSteps | None = None  # makes the step that is under way
        self._progress = Progress.WHOLE
        self._own_seconds = 0.0
        self._stepped: dict[Binding, _Stepped] = {}  # in the step that is under way, or has failed
        self._ahead = SpeculativeSteps(optimizer, trainer, expectations, self._turn_of, state.bindings.get)

    @property
    def seconds(self) -> float:
        """How long all steps took, with those that were made ahead."""
        return self._own_seconds + self._ahead.seconds

    # --- hooks --------------------------------------------------------------------------------

    def before(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Do the step; return what the outer step is called with instead."""
        self.abandon()  # of a step that an exception has ended
        closure, others = _split_closure(args, kwargs)
        loss: object = None
        if closure is not None:
            with torch.enable_grad(), in_sight():
                loss = closure()
        begin = time.perf_counter()
        self._trainer.bindings.sweep()
        self._trainer.begin_step(self)  # after the closure, which runs the model
        if refuses(self.optimizer, self._gradients):
            self._begin_whole()
        else:
            self._known_entries = len(self.optimizer.state)
            self._step_all(others)
            self._leave_the_rest()
            if any(
                each.grad is not None for group in self.optimizer.param_groups for each in group["params"]
            ):
                self._progress = Progress.PARTIAL
            self._own_seconds += time.perf_counter() - begin
        return None if closure is None else ((self.optimizer, lambda: loss), others)

    def _begin_whole(self) -> None:
        """Let the outer step do everything."""
        self._ahead.learn()
        self._ahead.forget_all()
        self._ahead.end_step()
        self._whole = WholeSteps(self.optimizer, self.state, self._trainer)
        self._whole.begin()

    def _leave_the_rest(self) -> None:
        """Let the outer step see only parameters that are not offloaded, or that another run has."""
        own = self._trainer.order
        for group in self.optimizer.param_groups:
            self._withheld.append((group, group["params"]))
            group["params"] = [
                p
                for p in group["params"]
                if (t := guard.guarded_tensor_of(p)) is None or t.binding not in own
            ]
            if id(group) in self._one_by_one:
                group.update(ONE_BY_ONE)

    def after(self) -> bool:
        """Give the groups their parameters back; return whether a step has ended."""
        is_by_bundle = bool(self._withheld)
        has_ended = is_by_bundle or self._whole is not None
        if self._whole is not None:
            self._whole.after()
        if has_ended:
            self._progress = Progress.WHOLE
            self._stepped.clear()
        self.abandon()
        if is_by_bundle and len(self.optimizer.state) > self._known_entries + 1:
            self._order_new_entries()
        return has_ended

    def _order_new_entries(self) -> None:
        """Let the state of parameters that had none come in the order in which a whole step makes it."""
        state = self.optimizer.state
        parameters = (each for group in self.optimizer.param_groups for each in group["params"])
        places = {each: place for place, each in enumerate(parameters)}
        fresh = list(itertools.islice(state, self._known_entries, None))
        order_entries(self.optimizer, sorted(fresh, key=lambda each: places.get(each, len(places))))

    def abandon(self) -> None:
        """Give the groups their parameters back."""
        whole, self._whole = self._whole, None
        if whole is not None:
            whole.abandon()
            self._own_seconds += whole.seconds
            is_partial = whole.is_partial or self._has_stepped_tables
            self._progress = Progress.PARTIAL if is_partial else self._progress
        for group, parameters in self._withheld:
            group["params"] = parameters
            if id(group) in self._one_by_one:
                group["foreach"] = None
        self._withheld.clear()

    @property
    def _has_stepped_tables(self) -> bool:
        """Whether its own step has failed after it had stepped a table."""
        return isinstance(self.optimizer, TableOptimizer) and self.optimizer.failed_step.is_partial

    def require_whole(self) -> None:
        """See `Steps.require_whole`."""
        if (self._withheld or self._whole is not None) and not runs_of_step(self.optimizer):
            self.abandon()
        if self._withheld or self._whole is not None or self._progress is not Progress.WHOLE:
            raise not_whole(self.optimizer)

    def begin_use(self, bindings: Sequence[Binding]) -> None:
        """See `Steps.begin_use`: a bundle at a time windows are open already."""
        if self._whole is not None:
            self._whole.begin_use(bindings)

    def note_write(self) -> None:
        """See `Steps.note_write`: every bundle that is stepped by itself counts as written."""
        if self._whole is not None:
            self._whole.note_write()

    def begin_model(self) -> None:
        """See `Steps.begin_model`: it is no part of such a step."""

    def explain(self, error: CapacityError) -> CapacityError:
        """See `Steps.explain`: of one bundle it says itself which it is."""
        return error if self._whole is None else self._whole.explain(error)

    # --- the step -----------------------------------------------------------------------------

    def _step_all(self, kwargs: dict[str, Any]) -> None:
        self._ahead.learn()
        self._members = by_bundle(self.optimizer)
        try:
            has = self._gradients.has
            self._one_by_one = one_by_one_of(self.optimizer, has)
            all_turns = turns_of(self._members, self._trainer.order, has, self._one_by_one)
            turns = [turn for turn in all_turns if not self._is_stepped(turn) and not self._take_ahead(turn)]
            for number, turn in enumerate(turns):
                if number + 1 < len(turns):
                    then = turns[number + 1]
                    self._trainer.advise(self._keys(then), self._trainer.step_tier(then.bundle))
                self._step(turn, kwargs)
            self._progress = Progress.WHOLE
        finally:
            self._ahead.end_step()

    # --- in backward --------------------------------------------------------------------------

    def learn_members(self) -> list[torch.Tensor]:
        """Take in which parameters there are now, and return them."""
        self._members = by_bundle(self.optimizer)
        self._alone = {}
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                self._alone.setdefault(parameter, []).append((group, [parameter]))
        return list(self._alone)

    def bundle_of(self, parameter: torch.Tensor) -> Binding | None:
        """Return the bundle of a parameter; ``None``: it is not offloaded, or another run has it."""
        guarded_tensor = guard.guarded_tensor_of(parameter)
        return (
            guarded_tensor.binding
            if guarded_tensor is not None and guarded_tensor.binding in self._trainer.order
            else None
        )

    def step_alone(self, parameter: torch.Tensor, held: Sequence[Binding]) -> None:
        """Step one parameter where it is, with the gradient that autograd itself sees.

        Args:
            parameter: which.
            held: what has a window already.
        """
        begin = time.perf_counter()
        bundle = self.bundle_of(parameter)
        if bundle is not None:
            if parameter in self._alone:
                self._step(StepUnit(bundle, self._alone[parameter]), {}, held)
        else:
            self._progress = Progress.PARTIAL
            with only(self.optimizer, self._alone.get(parameter, [])), in_sight():
                own_step(self.optimizer)(self.optimizer)
        self._own_seconds += time.perf_counter() - begin

    def end_pass(self) -> None:
        """A whole backward pass has stepped all that it had to."""
        self._progress = Progress.WHOLE
        self._stepped.clear()

    @contextlib.contextmanager
    def _noting(self, turn: StepUnit) -> Iterator[Callable[[], None]]:
        """Yield what is called when a bundle has been stepped: it is, whatever fails after that."""
        stepped: list[StepUnit] = []
        try:
            yield lambda: stepped.append(turn)
        finally:
            if stepped:
                self._stepped[turn.bundle] = _Stepped(turn, self._gradients)

    def _take_ahead(self, turn: StepUnit) -> bool:
        told = self._told(turn) if self._trainer.recorder.is_on else None
        is_taken = self._ahead.take(turn)
        if is_taken:
            if told is not None:
                self._trainer.recorder.mark_step(Sign.TAKEN, told)
            self._progress = Progress.PARTIAL
            self._stepped[turn.bundle] = _Stepped(turn, self._gradients)
        return is_taken

    def _is_stepped(self, turn: StepUnit) -> bool:
        """Whether a step that has failed had stepped a bundle, with the gradients that it has still."""
        known = self._stepped.get(turn.bundle)
        if known is None or not known.is_of(turn, self._gradients):
            return False
        self.state.take_in(turn.bundle, turn.parameters)  # that may be what has failed
        return True

    def _turn_of(self, bundle: Binding) -> StepUnit | None:
        """Return what the step of one bundle would be about, by the groups of the last step."""
        return turn_of(bundle, self._members.get(bundle, []), self._gradients.has, self._one_by_one)

    def _told(self, turn: StepUnit) -> BundleStep:
        """Return what a recorder is told of one bundle's step."""
        state = self.state.bindings.get(turn.bundle)
        stashed = self._gradients.bindings_of(turn.parameters)
        return BundleStep(
            f"{type(self.optimizer).__name__} {self.state.index}",
            turn.bundle.key,
            None if state is None else state.key,
            tuple((binding.key, binding.nbytes) for _, binding in stashed),
            is_on_host=self._trainer.computes_on(turn.bundle).type == "cpu",
            may_be_ahead=self._ahead.could_make(turn),
        )

    @contextlib.contextmanager
    def _recorded(self, turn: StepUnit) -> Iterator[None]:
        """Tell a recorder of one bundle's step, inside the context."""
        recorder = self._trainer.recorder
        if not recorder.is_on:
            yield
            return
        told = self._told(turn)
        recorder.mark_step(Sign.STEP, told)
        yield
        if recorder.is_on:
            recorder.mark_step(Sign.STEPPED, told)

    def _keys(self, turn: StepUnit) -> list[str]:
        keys = [turn.bundle.key]
        keys += [binding.key for _, binding in self._gradients.bindings_of(turn.parameters)]
        state = self.state.bindings.get(turn.bundle)
        return keys if state is None else [*keys, state.key]

    def _step(self, turn: StepUnit, kwargs: dict[str, Any], held: Sequence[Binding] = ()) -> None:
        bindings = self._trainer.bindings
        stashed = self._gradients.bindings_of(turn.parameters)
        state = self.state.bindings.get(turn.bundle)
        needed = [turn.bundle, *(binding for _, binding in stashed), *([state] if state else [])]
        needed = [binding for binding in needed if binding not in held]
        self._ahead.leave_out(turn, needed)
        with (
            _range(turn) if trace_ranges.are_on() else trace_ranges.NO_RANGE,
            self._recorded(turn),
            self._noting(turn) as has_stepped,
            placed(bindings, needed, self._trainer.step_tier(turn.bundle)),
            bindings.window(needed),
        ):
            turn.bundle.is_dirty = True
            if state is not None:
                state.is_dirty = True
            # Fused steps unscale in place, unseen; and in a mode no counter tells what foreach writes.
            is_unseen = getattr(self.optimizer, "grad_scale", None) is not None or is_dispatch_mode_on()
            for _, binding in stashed:
                binding.is_dirty |= is_unseen
            self._gradients.show(stashed)
            self._progress = Progress.PARTIAL
            try:
                with self._seen_alone(turn), in_sight():
                    own_step(self.optimizer)(self.optimizer, **kwargs)
                has_stepped()
            finally:
                changed = self._gradients.hide(stashed)
        for parameter, value in changed:  # the step itself forgot or replaced them
            self._gradients.assign(parameter, value)
        self.state.take_in(turn.bundle, turn.parameters)
        self._ahead.push_down(turn)

    def _seen_alone(self, turn: StepUnit) -> contextlib.AbstractContextManager[None]:
        """Let the optimizer see one bundle's parameters alone, inside the context."""
        if may_be_local(self.optimizer, turn, native_gradient):
            return only_local(self.optimizer, turn, native_gradient)
        return only(self.optimizer, turn.groups, turn.one_by_one)


class _Stepped:
    """The gradients with which a bundle was stepped.

    Args:
        turn: of the bundle.
        gradients: of the model.
    """

    def __init__(self, turn: StepUnit, gradients: Gradients) -> None:
        self._turn = turn
        self._stashed = _stashed(turn, gradients)
        self._others = [GradientMark(native_gradient(each)) for each in turn.parameters]

    def is_of(self, turn: StepUnit, gradients: Gradients) -> bool:
        """Whether a bundle's turn is the same again."""
        return (
            turn.is_same(self._turn)
            and _stashed(turn, gradients) == self._stashed
            and all(
                mark.is_of(native_gradient(each))
                for mark, each in zip(self._others, turn.parameters, strict=True)
            )
        )


def _range(turn: StepUnit) -> contextlib.AbstractContextManager[None]:
    """Return a range for who profiles."""
    return trace_ranges.named_range("step", [turn.bundle.key], turn.bundle.nbytes)


def _stashed(turn: StepUnit, gradients: Gradients) -> list[tuple[Binding, int]]:
    """Return the gradients of a bundle that are in the store, with how often they were written."""
    return [(binding, binding.writes) for _, binding in gradients.bindings_of(turn.parameters)]


def _split_closure(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Callable[[], object] | None, dict[str, Any]]:
    """Return the closure that ``step`` was called with, and its other arguments."""
    others = dict(kwargs)
    closure = others.pop("closure", None)
    if len(args) > 1:
        closure = args[1]
    return closure, others
