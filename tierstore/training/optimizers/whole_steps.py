"""Lets an optimizer that is not known to treat each parameter by itself run its own ``step`` once, as it is.

Its parameters, gradients and state come as it touches them, and leave behind it
(`tierstore.training.faults.guard`).

1. ``step`` is called as the user calls it, and returns what it returns; the closure is the user's.  While the
   closure or the model runs, everything is as in a forward and backward pass.
2. State that it creates goes into the store as soon as it turns to another bundle, and at the end
   (`tierstore.training.optimizers.state`).
3. What it must have all at once cannot be known before it runs.  Where that finds no room, the error names
   the optimizer, says whether anything was changed, and what to do.
4. A step that failed before anything was changed leaves whole steps behind.
"""

from __future__ import annotations

import enum
import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tierstore.errors import CapacityError
from tierstore.training.bundles.bindings import Binding, natively
from tierstore.training.optimizers.registered import is_per_parameter
from tierstore.training.optimizers.state import OptimizerState
from tierstore.training.optimizers.step_units import Progress, StepTrainer, not_whole, own_step, runs_of_step

Closure = Callable[..., object]

_IS_UNKNOWN = "is not known to treat each parameter by itself"
_REFUSES = (
    "refuses a parameter of this step for its kind or its gradient's (sparse, complex, empty, expanded), or "
    "as its gradient or state has another type or shape"
)
_REGISTER = (
    "If its step gives the same bits a few parameters at a time, say so before offload(...): "
    "tierstore.training.register_optimizer({kind}). Else: "
)


class StepPlace(enum.Enum):
    """Where in a step the optimizer is, and what the session does for it."""

    AT_REST = enum.auto()  # nothing: no step is under way
    STEPPING = enum.auto()  # takes state in as it comes, leases where optimizers compute, explains refusals
    IN_MODEL = enum.auto()  # nothing: the model runs in the midst of the step


class Turning(enum.Enum):
    """What happens to a step."""

    BEGIN = enum.auto()
    MODEL_BEGINS = enum.auto()
    CLOSURE_ENDS = enum.auto()
    END = enum.auto()


_NEXT: dict[tuple[StepPlace, Turning], StepPlace] = {
    (StepPlace.AT_REST, Turning.BEGIN): StepPlace.STEPPING,
    (StepPlace.STEPPING, Turning.MODEL_BEGINS): StepPlace.IN_MODEL,
    (StepPlace.IN_MODEL, Turning.MODEL_BEGINS): StepPlace.IN_MODEL,
    (StepPlace.STEPPING, Turning.CLOSURE_ENDS): StepPlace.STEPPING,
    (StepPlace.IN_MODEL, Turning.CLOSURE_ENDS): StepPlace.STEPPING,
    (StepPlace.STEPPING, Turning.END): StepPlace.AT_REST,
    (StepPlace.IN_MODEL, Turning.END): StepPlace.AT_REST,
}


class WholeSteps:
    """Does the steps of one optimizer, each as a whole.

    Args:
        optimizer: whose.
        state: that it keeps.
        trainer: the session that they are made in.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, state: OptimizerState, trainer: StepTrainer) -> None:
        self.optimizer = optimizer
        self.state = state
        self.seconds = 0.0
        self._trainer = trainer
        self._moment = StepPlace.AT_REST
        self._progress = Progress.WHOLE
        self._last: Binding | None = None
        self._thread = 0
        self._writes = 0
        self._versions = 0
        self._since = 0.0

    # --- hooks --------------------------------------------------------------------------------

    def before(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The step begins; it is called as it was, but that its closure is watched."""
        if self._moment is not StepPlace.AT_REST:
            self.abandon()
        self._trainer.begin_step(self)
        self.begin()
        return self._with_closure_watched(args, kwargs)

    def begin(self) -> None:
        """A step begins that the session knows of, without a closure."""
        self._turn(Turning.BEGIN)
        self._thread = threading.get_ident()
        self._writes = 0
        self._go_on()

    def after(self) -> bool:
        """Take in the state that there is now; return whether a step has ended."""
        if self._moment is StepPlace.AT_REST:
            return False
        self._end()
        self.state.take_in_all()
        self._progress = Progress.WHOLE
        return True

    def abandon(self) -> None:
        """An exception has ended the step; remember if it has left something half done."""
        if self._moment is StepPlace.AT_REST:
            return
        if self._has_written():
            self._progress = Progress.PARTIAL
        self._end()

    @property
    def is_partial(self) -> bool:
        """Whether the last step has left something half done."""
        return self._progress is Progress.PARTIAL

    def require_whole(self) -> None:
        """See `Steps.require_whole`."""
        if self._moment is not StepPlace.AT_REST and not runs_of_step(self.optimizer):
            self.abandon()
        if self._moment is not StepPlace.AT_REST or self._progress is not Progress.WHOLE:
            raise not_whole(self.optimizer)

    def _turn(self, turning: Turning) -> None:
        self._moment = _NEXT[self._moment, turning]

    def _end(self) -> None:
        if self._moment is StepPlace.STEPPING:
            self._stop()
        self._turn(Turning.END)
        self._last = None

    # --- the model in the midst of it -----------------------------------------------------------

    def _with_closure_watched(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments with a closure that also says when it begins and ends."""
        try:
            given = inspect.signature(own_step(self.optimizer)).bind(*args, **kwargs)
        except TypeError:  # it is called wrongly, and will say so
            return None
        closure = given.arguments.get("closure")
        if not callable(closure):
            return None
        given.arguments["closure"] = self._watched(closure)
        return given.args, given.kwargs

    def _watched(self, closure: Closure) -> Closure:
        @functools.wraps(closure)
        def watched(*args: object, **kwargs: object) -> object:
            if self._moment is StepPlace.AT_REST:  # kept for later, when the step is over
                return closure(*args, **kwargs)
            self.begin_model()
            try:
                return closure(*args, **kwargs)
            finally:
                self._end_closure()

        return watched

    def _end_closure(self) -> None:
        if self._moment is not StepPlace.AT_REST:  # as it is when somebody has called the closure too late
            self._turn(Turning.CLOSURE_ENDS)
            self._trainer.go_on_with_step()
            self._go_on()

    def begin_model(self) -> None:
        """The model begins to run: it does so where it always does."""
        if self._moment is StepPlace.STEPPING:
            if self._has_written():
                self._writes += 1
            self._stop()
        self._turn(Turning.MODEL_BEGINS)

    def _go_on(self) -> None:
        """From now on this is the optimizer's own work."""
        self._versions = self._sum_of_versions()
        bundles = [each for each in self.state.bundles() if each.confined_to is None]
        self._trainer.bindings.compute_in(self._trainer.step_tier(*bundles))
        self._since = time.perf_counter()

    def _stop(self) -> None:
        """From now on it is not."""
        self._trainer.bindings.compute_in(None)
        self.seconds += time.perf_counter() - self._since

    # --- in the midst of it -------------------------------------------------------------------

    def begin_use(self, bindings: Sequence[Binding]) -> None:
        """Take in the state of the bundle that the step leaves for another one.

        Not what is about to be used: state that has grown is bound anew, and the use knows its old binding.
        """
        if self._moment is not StepPlace.STEPPING or threading.get_ident() != self._thread:
            return
        for bundle in bindings:
            if bundle is not self._last and bundle in self._trainer.order:
                last, self._last = self._last, bundle
                if last is not None and self.state.bindings.get(last) not in bindings:
                    self.state.take_in(last)
                return

    def note_write(self) -> None:
        """See `Steps.note_write`."""
        self._writes += self._moment is StepPlace.STEPPING

    def _has_written(self) -> bool:
        """Whether the step may have changed parameters, gradients or state, as far as a store can tell."""
        is_here = self._moment is StepPlace.STEPPING
        return self._writes > 0 or (is_here and self._sum_of_versions() != self._versions)

    def _sum_of_versions(self) -> int:
        """Return a number that is another one when any tensor of the step's was changed in place."""
        with natively():
            return sum(tensor._version for tensor in self._tensors() if not tensor.is_inference())  # noqa: SLF001

    def _tensors(self) -> Iterator[torch.Tensor]:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter
                gradient = self._trainer.gradients.get(parameter)
                if gradient is not None:
                    yield gradient
                entries = self.optimizer.state.get(parameter)
                if isinstance(entries, dict):
                    yield from (each for each in entries.values() if isinstance(each, torch.Tensor))

    def explain(self, error: CapacityError) -> CapacityError:
        """Say whose step needs what, whether it has changed anything, and what to do."""
        if self._moment is not StepPlace.STEPPING:
            return error
        kind = type(self.optimizer).__name__
        consequence = (
            "Some parameters, gradients or state may be changed, others not: resume from a checkpoint."
            if self._has_written()
            else "Nothing was changed: parameters, gradients and state are as before the step."
        )
        is_known = is_per_parameter(self.optimizer)
        return CapacityError(
            f"{kind} {_REFUSES if is_known else _IS_UNKNOWN}, so its own step runs, and what it needs at "
            f"once finds no room: {error} {consequence} "
            + ("" if is_known else _REGISTER.format(kind=kind))
            + f"Give the tier {error.tier!r} room for all that it brings together.",
            key=error.key,
            tier=error.tier,
            needed_bytes=error.needed_bytes,
            free_bytes=error.free_bytes,
            holders=error.holders,
        )
