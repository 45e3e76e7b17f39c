"""Hooks around the steps of optimizers: ours is the last before a step and the first after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tierstore import signals
from tierstore.training.optimizers.step_units import Steps, runs_of_step
from tierstore.training.pytorch.function_modes import out_of_sight
from tierstore.training.pytorch.global_hooks import HookEverywhere, Removable


class StepHooks:
    """Watches the steps of a run's optimizers.

    Args:
        require: raises if no optimizer may step.
        prepare: called before a step begins.
        end: called when a step has ended.
        hold: is given each hook, to be removed with the others.
    """

    def __init__(
        self,
        require: Callable[[], None],
        prepare: Callable[[], None],
        end: Callable[[Steps], None],
        hold: Callable[[Removable], None],
    ) -> None:
        self._require = require
        self._prepare = prepare
        self._end = end
        self._hold = hold
        self._own: dict[int, int] = {}  # the number of our hook before a step, by the optimizer's id

    def watch_all(self) -> None:
        """See every optimizer's step begin: to be called once.

        PyTorch calls hooks of all optimizers before those that one of them has.
        """
        self._hold(HookEverywhere(register_optimizer_step_pre_hook, self._come_last))

    def watch(self, steps: Steps) -> None:
        """Register the hooks of one optimizer."""
        optimizer = steps.optimizer

        def before(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
            with out_of_sight():
                return begin(args, kwargs)

        def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
            self._require()
            if runs_of_step(optimizer) > 1:  # a subclass calls the step of its base class
                return None
            self._prepare()
            return steps.before(args, kwargs)

        def after(*_: object) -> None:
            with out_of_sight():
                if runs_of_step(optimizer) <= 1 and steps.after():
                    self._end(steps)

        # Between these hooks the groups name only what is not offloaded.
        if hasattr(type(optimizer).step, "__code__"):
            signals.in_one_piece(type(optimizer).step)
        first = optimizer.register_step_pre_hook(before)  # type: ignore[arg-type]
        self._hold(first)
        self._own[id(optimizer)] = first.id
        last = optimizer.register_step_post_hook(after)
        self._hold(last)
        # Gradients are shown again before users' own hooks look at them.
        post_hooks: Any = optimizer._optimizer_step_post_hooks  # noqa: SLF001
        post_hooks.move_to_end(last.id, last=False)

    def _come_last(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Let our hook be the last before a step: users' own hooks may change gradients, or refuse."""
        own = self._own.get(id(optimizer))
        step_hooks: Any = optimizer._optimizer_step_pre_hooks  # noqa: SLF001
        if own is not None and next(reversed(step_hooks)) != own:
            step_hooks.move_to_end(own)
