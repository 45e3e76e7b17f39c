"""``optimizer_in_backward: true``: each parameter is stepped in place as soon as backward has its gradient.

Neither gradients nor old values are kept: a step writes the parameters and the state that do not fit, and
nothing else.  The bits are those of plain PyTorch with a hook after accumulation on each parameter that steps
it alone and clears its gradient, and so is the moment: such a hook is what does it.

1. Ours is the last hook after accumulation, whoever registers another one: what those make of a gradient is
   what is stepped with.  Where one of them raises, or the step does, the gradient stays, and the pass ends.
2. So it is for every parameter that an optimizer has when a pass begins, offloaded or not.
3. A parameter that no optimizer has keeps its gradient, as ever.
4. Gradients of one module come one after another: their bundle and its state stay until autograd does
   something else than the next accumulation, so that both are brought and written once.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from tierstore.training import locks
from tierstore.training.autograd.gradient import Gradient, native_gradient, set_native_gradient
from tierstore.training.autograd.gradients import Gradients
from tierstore.training.bundles.binding import natively
from tierstore.training.bundles.bindings import Binding, Bindings
from tierstore.training.faults import guard
from tierstore.training.locks import Rank
from tierstore.training.modules.hooks import Hook
from tierstore.training.optimizers.step_units import placed
from tierstore.training.optimizers.steps_by_bundle import StepsByBundle
from tierstore.training.pytorch.function_modes import out_of_sight
from tierstore.uncompiled import uncompiled


class Stepping(enum.Enum):
    """When optimizers step."""

    WHEN_ASKED = enum.auto()  # by `optimizer.step()`
    IN_BACKWARD = enum.auto()  # as soon as a parameter has its gradient


class _Accumulated(Hook):
    """The hook after a parameter's accumulation.

    Args:
        act: what to do.
    """

    def __init__(self, act: Callable[[torch.Tensor], None]) -> None:
        self._act = act

    @uncompiled
    def __call__(self, parameter: torch.Tensor) -> None:
        with out_of_sight():
            self._act(parameter)


class BackwardTrainer(Protocol):
    """What such steps need of the session that they are made in."""

    @property
    def bindings(self) -> Bindings:
        """Of the model."""
        ...

    @property
    def gradients(self) -> Gradients:
        """Of the model; those of parameters that no optimizer has are theirs."""
        ...

    def step_tier(self, *bundles: Binding) -> str:
        """See `step_units.StepTrainer.step_tier`."""
        ...

    def hold(self, handle: RemovableHandle) -> None:
        """Let a hook be removed in the end."""
        ...

    def watch_gradient(self, parameter: torch.Tensor) -> None:
        """Let `StepsInBackward.lend` be called before a parameter gets a gradient."""
        ...

    def note_step_in_backward(self, steps: StepsByBundle, seconds: float) -> None:
        """Take in that a parameter was stepped, and how long that took."""
        ...


class StepsInBackward:
    """Steps with gradients as backward makes them.

    Args:
        trainer: the session.
    """

    counts_passes = True

    def __init__(self, trainer: BackwardTrainer) -> None:
        self._trainer = trainer
        self._bindings = trainer.bindings
        self._gradients = trainer.gradients
        self._steps: list[StepsByBundle] = []
        self._stepping = locks.new_lock(
            Rank.STEP_IN_BACKWARD
        )  # an optimizer's groups are one thread's, and so are the next five
        self._owners: dict[torch.Tensor, list[StepsByBundle]] = {}
        self._groups: list[list[object]] = []  # as they were
        self._hooks: dict[torch.Tensor, int] = {}  # the number of ours, by parameter
        self._last: Binding | None = None  # the bundle that was stepped last
        self._held: list[Binding] = []  # for it, until autograd goes on

    def add(self, steps: StepsByBundle) -> None:
        """Step an optimizer, after those that were added before."""
        self._steps.append(steps)

    def watch(self) -> None:
        """Take in which parameters the optimizers have now."""
        with self._stepping:
            with natively():
                groups = [
                    [id(group), *((id(each), each.requires_grad) for each in group["params"])]
                    for group in self._all_groups()
                ]
            if groups == self._groups:
                return
            self._owners.clear()
            for steps in self._steps:
                for parameter in steps.learn_members():
                    self._owners.setdefault(parameter, []).append(steps)
            for parameter in self._owners:
                self._watch_one(parameter)
            self._groups = groups

    def _all_groups(self) -> Iterator[dict[str, Any]]:
        return (group for each in self._steps for group in each.optimizer.param_groups)

    def _watch_one(self, parameter: torch.Tensor) -> None:
        if parameter in self._hooks or not (parameter.is_leaf and parameter.requires_grad):
            return
        self._trainer.watch_gradient(parameter)
        handle = parameter.register_post_accumulate_grad_hook(_Accumulated(self._accumulated))
        self._trainer.hold(handle)
        self._hooks[parameter] = handle.id

    def _come_last(self, parameter: torch.Tensor) -> None:
        with natively():
            hooks: Any = parameter._post_accumulate_grad_hooks  # noqa: SLF001 - nothing else orders them
        own = self._hooks.get(parameter)
        if own is not None and next(reversed(hooks)) != own:
            hooks.move_to_end(own)

    # --- autograd's turn (accumulation.Keeper) --------------------------------------------------

    def begin_pass(self) -> None:
        """A backward pass begins."""
        self.watch()

    def lend(self, parameter: torch.Tensor) -> Gradient | None:
        """Autograd is about to add to a gradient; return the one that `take` is due for when it is done."""
        if parameter not in self._hooks or parameter not in self._owners:
            return self._gradients.lend(parameter)
        gradient = self._gradients.table.find(parameter)
        if gradient is not None and gradient.handle is not None:  # from before this run
            self._gradients.assign(parameter, gradient.handle.clone())
        self._come_last(parameter)
        guarded_tensor = guard.guarded_tensor_of(parameter)
        if guarded_tensor is None or guarded_tensor.binding is not self._last:
            self.go_on()
        return None

    def take(self, gradient: Gradient) -> None:
        """A pass that `lend` was for is done with a gradient."""
        self._gradients.take(gradient)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """Autograd and all other hooks are done with a gradient: step with it.  Blocks for hardware."""
        with self._stepping:
            if native_gradient(parameter) is None:  # somebody else has stepped, and cleared it
                return
            owners = self._owners.get(parameter, ())
            try:
                self._hold_for(parameter, owners)
                for steps in owners:
                    begin = time.perf_counter()
                    steps.step_alone(parameter, self._held)
                    self._trainer.note_step_in_backward(steps, time.perf_counter() - begin)
            except BaseException:
                self.go_on()
                raise
            if owners:
                set_native_gradient(parameter, None)

    def _hold_for(self, parameter: torch.Tensor, owners: Sequence[StepsByBundle]) -> None:
        """Keep windows on a parameter's bundle and its state open, if it has one of this run."""
        bundles = [bundle for each in owners if (bundle := each.bundle_of(parameter)) is not None]
        if not bundles or bundles[0] is self._last:
            return
        self.go_on()
        states = [each.state.bindings.get(bundles[0]) for each in owners]
        needed = [bundles[0], *(state for state in states if state is not None)]
        with placed(self._bindings, needed, self._trainer.step_tier(bundles[0])):
            self._bindings.open_all(needed)
        self._held, self._last = needed, bundles[0]

    def go_on(self) -> None:
        """Autograd goes on to something else than the next accumulation: let what was held go."""
        if self._last is not None:
            with self._stepping:
                held, self._held, self._last = self._held, [], None
                # One that was laid out anew meanwhile, as there is more state now, has no window any more.
                self._bindings.close_all([binding for binding in held if binding.windows])
