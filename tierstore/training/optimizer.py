"""Steps any ``torch.optim`` optimizer a bundle at a time, from inside its own ``step``.

The user's optimizer stays in charge: a step pre-hook does the work and leaves the outer step nothing
to do: its groups name only the parameters that are not offloaded, until a post-hook restores them.

1. For one bundle after another, parameters, gradients and state are brought together, the
   optimizer's ``param_groups`` name only the bundle's parameters, and its own ``step`` runs.
2. State tensors that a step created or replaced become a bundle of the store under the parameters'
   own; scalars (0-d tensors) stay where they are.
3. Bundles whose step was made during backward (`tierstore.training.ahead`) take its outcome over; the
   others go in the order of the forward pass: backward has left the first ones resident.
4. Parameters that are not offloaded are left to the outer step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch

from tierstore.errors import UsageError
from tierstore.training import guard
from tierstore.training.ahead import StepsAhead
from tierstore.training.binding import Binding, Bindings
from tierstore.training.bundles import Adopter
from tierstore.training.grads import Gradients, native_gradient, set_native_gradient
from tierstore.training.groups import Place
from tierstore.training.tiers import Placement
from tierstore.training.turns import Group, Parameters, Turn, only, own_step, placed


class OptimizerSteps:
    """Does the steps of one optimizer.

    Args:
        optimizer: whose.
        index: which of the model's optimizers it is.
        bundles: the parameter bundles, in the order of the forward pass.
        bindings, gradients, adopter: of the model.
        placement: of the state.
        prefetch: advises that keys are needed soon.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        index: int,
        bundles: Sequence[Binding],
        bindings: Bindings,
        gradients: Gradients,
        adopter: Adopter,
        placement: Placement,
        prefetch: Callable[[Sequence[str]], None],
    ) -> None:
        self.optimizer = optimizer
        self.index = index
        self.bundles = tuple(bundles)
        self._bindings = bindings
        self._gradients = gradients
        self._adopter = adopter
        self._placement = placement
        self._prefetch = prefetch
        self._withheld: list[tuple[Group, Parameters]] = []
        self._is_partial = False
        self.states: dict[Binding, Binding] = {}
        self.own_seconds = 0.0
        self.ahead = StepsAhead(optimizer, bindings, gradients, self._turn_of, self.states.get)
        self.on_begin: Callable[[], None] | None = None

    @property
    def seconds(self) -> float:
        """How long all steps took, with those that were made ahead."""
        return self.own_seconds + self.ahead.seconds

    # --- hooks --------------------------------------------------------------------------------

    def before(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Do the step; return what the outer step is called with instead."""
        if _is_nested(self.optimizer):  # a subclass calls the step of its base class
            return None
        self.after()
        closure, others = _split_closure(args, kwargs)
        loss: object = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        begin = time.perf_counter()
        self._bindings.sweep()
        if self.on_begin is not None:
            self.on_begin()  # after the closure, which runs the model
        self._step_all(others)
        self._leave_the_rest()
        self.own_seconds += time.perf_counter() - begin
        return None if closure is None else ((self.optimizer, lambda: loss), others)

    def _leave_the_rest(self) -> None:
        """Let the outer step see only parameters that are not offloaded."""
        for group in self.optimizer.param_groups:
            self._withheld.append((group, group["params"]))
            group["params"] = [p for p in group["params"] if guard.tenant_of(p) is None]

    def after(self) -> bool:
        """Give the groups their parameters back; return whether a step has ended."""
        if not self._withheld or _is_nested(self.optimizer):
            return False
        for group, parameters in self._withheld:
            group["params"] = parameters
        self._withheld.clear()
        return True

    def require_whole(self) -> None:
        """Make sure that parameters and state are those of whole steps.

        Raises:
            UsageError: a step is under way, or the last one failed in its midst.
        """
        if self._withheld and not _runs_of_step(self.optimizer):
            self.after()  # of a step that an exception has ended
        if self._withheld or self._is_partial:
            raise UsageError(
                f"a step of {type(self.optimizer).__name__} is under way, or failed in its midst: some of "
                "its parameters are stepped and others are not. Make a checkpoint between steps; after a "
                "failed step resume from the former checkpoint, or make a whole step first."
            )

    # --- the step -----------------------------------------------------------------------------

    def _step_all(self, kwargs: dict[str, Any]) -> None:
        self.ahead.learn()
        try:
            turns = [turn for turn in self._turns() if not self._take_ahead(turn)]
            for number, turn in enumerate(turns):
                if number + 1 < len(turns):
                    self._prefetch(self._keys(turns[number + 1]))
                self._step(turn, kwargs)
            self._is_partial = False
        finally:
            self.ahead.end_step()

    def _take_ahead(self, turn: Turn) -> bool:
        is_taken = self.ahead.take(turn)
        self._is_partial |= is_taken
        return is_taken

    def _turn_of(self, bundle: Binding) -> Turn | None:
        """Return what the step of one bundle is about."""
        return next((turn for turn in self._turns() if turn.bundle is bundle), None)

    def _turns(self) -> list[Turn]:
        """Split the optimizer's groups by bundle, as they are now; leave out what has no gradient."""
        members: dict[Binding, list[tuple[Group, Parameters]]] = {}
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                tenant = guard.tenant_of(parameter)
                if tenant is None or not self._gradients.has(parameter):
                    continue
                parts = members.setdefault(tenant.binding, [])
                if not parts or parts[-1][0] is not group:
                    parts.append((group, []))
                parts[-1][1].append(parameter)
        return [Turn(bundle, members[bundle]) for bundle in self.bundles if bundle in members]

    def _keys(self, turn: Turn) -> list[str]:
        keys = [turn.bundle.key]
        keys += [binding.key for _, binding in self._gradients.bindings_of(turn.parameters)]
        state = self.states.get(turn.bundle)
        return keys if state is None else [*keys, state.key]

    def _step(self, turn: Turn, kwargs: dict[str, Any]) -> None:
        stashed = self._gradients.bindings_of(turn.parameters)
        state = self.states.get(turn.bundle)
        needed = [turn.bundle, *(binding for _, binding in stashed), *([state] if state else [])]
        with placed(self._bindings, needed, self.ahead.tier), self._bindings.window(needed):
            turn.bundle.is_dirty = True
            if state is not None:
                state.is_dirty = True
            is_unscaling = getattr(self.optimizer, "grad_scale", None) is not None
            for parameter, binding in stashed:
                binding.is_dirty |= is_unscaling  # fused steps do that in place, unseen
                set_native_gradient(parameter, binding.tensors[0])
            self._is_partial = True
            try:
                with only(self.optimizer, turn):
                    own_step(self.optimizer)(self.optimizer, **kwargs)
            finally:
                changed = _take_back(stashed)
        for parameter, value in changed:  # the step itself forgot or replaced them
            self._gradients.assign(parameter, value)
        self.take_in_state(turn.bundle)
        self.ahead.push_down(turn)

    # --- state --------------------------------------------------------------------------------

    def adopt_existing(self) -> None:
        """Take in the state that the optimizer has already."""
        for bundle in self.bundles:
            self.take_in_state(bundle)

    def state_of(self, parameters: Sequence[torch.Tensor]) -> dict[tuple[torch.Tensor, str], torch.Tensor]:
        """Return the state tensors of ``parameters`` that have a size."""
        return {
            (parameter, name): value
            for parameter in parameters
            for name, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and value.dim() > 0 and value.layout is torch.strided
        }

    def take_in_state(self, bundle: Binding) -> None:
        """Adopt state of a bundle that was created or replaced since it was last looked at."""
        state = self.states.get(bundle)
        found = self.state_of(bundle.tensors)
        known = () if state is None else state.tensors
        if len(found) == len(known) and all(a is b for a, b in zip(found.values(), known, strict=True)):
            return
        if state is not None:
            # It is laid out anew: until then its tensors are ordinary ones.
            self._adopter.restore(self.states.pop(bundle))
        self._adopt(bundle, found)

    def _adopt(self, bundle: Binding, fresh: dict[tuple[torch.Tensor, str], torch.Tensor]) -> None:
        if not fresh:
            return
        named = [(f"the optimizer's {name!r} of {_name(p)}", value) for (p, name), value in fresh.items()]
        self._own(bundle, self._adopter.adopt(state_key(self.index, bundle.key), named, self._placement))

    def bind_state(self, bundle: Binding, places: Sequence[Place], origins: list[torch.device]) -> None:
        """Tie the state of a bundle to bytes that are in the store already.

        Args:
            bundle: whose state the optimizer has by now, without bytes.
            places: of its tensors, in the same order.
            origins: where each of them goes in the end.
        """
        key = state_key(self.index, bundle.key)
        tensors = list(self.state_of(bundle.tensors).values())
        self._own(bundle, self._adopter.bind(key, places, tensors, self._placement, origins))

    def _own(self, bundle: Binding, state: Binding) -> None:
        state.is_saved_by_reference = False
        self.states[bundle] = state

    def forget_states(self) -> None:
        """Drop all state keys; the optimizer's own dict is the caller's business."""
        for state in self.states.values():
            self._adopter.forget(state)
        self.states.clear()


def _name(parameter: torch.Tensor) -> str:
    tenant = guard.tenant_of(parameter)
    return repr(tenant.place.name) if tenant is not None else "a parameter"


def _take_back(
    stashed: Sequence[tuple[torch.Tensor, Binding]],
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Leave no stash in the parameters' hands; return what is in its place where that was changed."""
    changed: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    for parameter, binding in stashed:
        gradient = native_gradient(parameter)
        if gradient is not binding.tensors[0]:
            changed.append((parameter, gradient))
        set_native_gradient(parameter, None)
    return changed


def _split_closure(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Callable[[], object] | None, dict[str, Any]]:
    """Return the closure that ``step`` was called with, and its other arguments."""
    others = dict(kwargs)
    closure = others.pop("closure", None)
    if len(args) > 1:
        closure = args[1]
    return closure, others


def state_key(index: int, bundle_key: str) -> str:
    """Return the key of the state that an optimizer keeps for a bundle."""
    return f"state/{index}/{bundle_key.removeprefix('param/')}"


def _is_nested(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a hooked step of the optimizer runs inside another one."""
    return _runs_of_step(optimizer) > 1


def _runs_of_step(optimizer: torch.optim.Optimizer) -> int:
    """Count the hooked steps of the optimizer that run now, one inside another; 2 stands for more."""
    code = getattr(type(optimizer).step, "__code__", None)
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - PyTorch has no mark for it
    found = 0
    while frame is not None and found < 2:
        found += frame.f_code is code and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return found
