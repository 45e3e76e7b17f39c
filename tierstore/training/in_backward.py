"""``optimizer_in_backward: true``: each bundle is stepped in place as soon as backward has its gradients.

Neither gradients nor old values are kept: a step writes the parameters and the state that do not fit, and
nothing else.  The bits are those of plain PyTorch with a hook after accumulation on each parameter that steps
it alone and clears its gradient.

1. When autograd and every hook are done with a gradient, it is taken from the parameter, which has none from
   then on.
2. A bundle is stepped when all those of its parameters have one that had in the last pass; at first, all that
   are trained.  What is left when a pass ends, or is interrupted, is stepped then.
3. A parameter that gets another gradient before its bundle was stepped is stepped with the first one first.
4. A parameter that no optimizer has keeps its gradient, as ever.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable

import torch

from tierstore.training import guard
from tierstore.training.binding import Binding
from tierstore.training.gradient import Gradient, native_gradient, set_native_gradient
from tierstore.training.grads import Gradients
from tierstore.training.optimizer import StepsByBundle


class Stepping(enum.Enum):
    """When optimizers step."""

    WHEN_ASKED = enum.auto()  # by `optimizer.step()`
    IN_BACKWARD = enum.auto()  # as soon as a bundle has its gradients


Pending = dict[torch.Tensor, torch.Tensor]


class StepsInBackward:
    """Takes gradients as backward makes them, and steps.

    Args:
        gradients: of the model; those of parameters that no optimizer has are theirs.
        stepped: told of every step that was made, and how long it took.
    """

    def __init__(self, gradients: Gradients, stepped: Callable[[StepsByBundle, float], None]) -> None:
        self._gradients = gradients
        self._stepped = stepped
        self._steps: list[StepsByBundle] = []
        self._owners: dict[Binding, list[StepsByBundle]] = {}
        self._owned: set[torch.Tensor] = set()
        self._groups: list[tuple[int, int]] = []
        self._pending: dict[Binding, Pending] = {}
        self._came: dict[Binding, set[torch.Tensor]] = {}  # in the pass that runs
        self._expected: dict[Binding, set[torch.Tensor]] = {}

    def add(self, steps: StepsByBundle) -> None:
        """Step an optimizer, after those that were added before."""
        self._steps.append(steps)
        self._groups = []

    @property
    def has_pending(self) -> bool:
        """Whether a gradient waits for the rest of its bundle's."""
        return bool(self._pending)

    # --- autograd's turn (accumulation.Keeper) --------------------------------------------------

    def begin_pass(self) -> None:
        """A backward pass begins: take in which parameters the optimizers have now."""
        all_groups = (group for each in self._steps for group in each.optimizer.param_groups)
        groups = [(id(group), len(group["params"])) for group in all_groups]
        if groups == self._groups:
            return
        self._groups = groups
        self._owners.clear()
        self._owned.clear()
        for steps in self._steps:
            for bundle, parameters in steps.learn_members().items():
                self._owners.setdefault(bundle, []).append(steps)
                self._owned.update(parameters)

    def find(self, parameter: torch.Tensor) -> Gradient | None:
        """Return the gradient of a parameter; ``None``: it is not one of the model's."""
        return self._gradients.find(parameter)

    def lend(self, gradient: Gradient) -> bool:
        """Autograd is about to add to a gradient; return whether `take` is due when it is done."""
        if gradient.parameter not in self._owned:
            return self._gradients.lend(gradient)
        if gradient.handle is not None:  # from before this run
            self._gradients.assign(gradient.parameter, gradient.handle.clone())
        return True

    def take(self, gradient: Gradient) -> None:
        """A pass is done with a gradient: step its bundle if that was the last one.  Blocks for hardware."""
        parameter = gradient.parameter
        tenant = guard.tenant_of(parameter)
        if parameter not in self._owned or tenant is None:
            self._gradients.take(gradient)
            return
        native = native_gradient(parameter)
        if native is None:  # somebody else has stepped, and cleared it
            return
        bundle = tenant.binding
        if parameter in self._pending.get(bundle, ()):
            self._step(bundle)
        set_native_gradient(parameter, None)
        self._pending.setdefault(bundle, {})[parameter] = native
        self._came.setdefault(bundle, set()).add(parameter)
        if self._pending[bundle].keys() >= self._wanted(bundle):
            self._step(bundle)

    def end_pass(self) -> None:
        """A pass has ended, or was interrupted: step what is left, and remember which gradients came."""
        for bundle in list(self._pending):
            self._step(bundle)
        self._expected.update(self._came)
        self._came.clear()

    def _wanted(self, bundle: Binding) -> set[torch.Tensor]:
        expected = self._expected.get(bundle)
        if expected is None:
            expected = {each for each in bundle.tensors if each.requires_grad and each in self._owned}
        return expected

    def _step(self, bundle: Binding) -> None:
        pending = self._pending.pop(bundle)
        for parameter, gradient in pending.items():
            set_native_gradient(parameter, gradient)
        try:
            for steps in self._owners.get(bundle, ()):
                begin = time.perf_counter()
                steps.step_alone(bundle, pending.__contains__)
                self._stepped(steps, time.perf_counter() - begin)
        finally:
            for parameter in pending:
                set_native_gradient(parameter, None)
