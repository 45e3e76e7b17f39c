"""Modules whose forward backward runs again, by PyTorch's own non-reentrant checkpoint.

1. ``forward`` is not replaced: PyTorch's checkpoint is begun by a pre-hook and ended by a hook.  Hooks that a
   module has besides are inside, and run again with it.
2. Nothing happens where nothing is kept for backward (`torch.no_grad`), inside a forward that is recomputed
   anyway, by us or by the program, where an argument can be read only once, and where `is_idle` says so.
3. Random numbers and autocast are as they were: PyTorch sees to it.  So is what else a forward saw, which is
   not changed a second time (`ForwardSnapshot`); lists, dicts and dataclasses among the arguments are copies.
4. Whatever ends a forward ends the region: an exception at once, a ``KeyboardInterrupt``, for which PyTorch
   calls no hooks, at the latest when a region begins or ends, or the model runs the next time.
5. What is kept of a region is what it is given, which a save policy may take (`InputPolicies`).
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import checkpoint
from torch.utils.hooks import RemovableHandle

from tierstore.torch_private import (
    begin_checkpoint,
    innermost_transform,
    tree_flatten,
    tree_unflatten,
)
from tierstore.training.activations.recomputation import sliced_inputs
from tierstore.training.activations.recomputation.forward_snapshot import ForwardSnapshot, has_lazy
from tierstore.training.activations.runtime.activation_runtime import ActivationRuntime
from tierstore.training.activations.runtime.forward_conditions import is_saving
from tierstore.training.activations.runtime.module_calls import QuietHook, hook_around
from tierstore.training.activations.runtime.saved_activations import SavePolicy
from tierstore.training.pytorch.saved_tensor_hooks import (
    InForce,
    push_hooks,
    take_out_of_force,
    top_hooks,
)

log = logging.getLogger("tierstore")

Context = AbstractContextManager[object]
Contexts = Callable[[], tuple[Context, Context]]
"""Makes what a forward runs in, and what its repetitions run in."""

InputPolicies = Callable[[int], SavePolicy]
"""Makes what is asked for the inputs of a module, by its number, that begins to run."""


class _RunningRegion(NamedTuple):
    """A module that is being run."""

    running: Generator[None]
    before: ForwardSnapshot
    hooks: InForce  # of the checkpoint
    end_inputs: Callable[[], None]  # the policy that took them is asked no more

    def close(self) -> None:
        """End the region where others may have come into force since: PyTorch takes what did so last."""
        take_out_of_force(self.hooks)
        push_hooks(self.hooks.own, self.hooks.own)
        self.abandon()

    def abandon(self) -> None:
        """End the region before its module has run."""
        try:
            self.running.close()
        finally:
            self.end_inputs()


def is_idle() -> bool:
    """Whether nothing that begins now in this thread is to be recomputed.

    Nothing of it is ours (`is_saving`), or it is seen through a transform of ``torch.func`` or by
    ``torch.jit.trace``: its operators would be others than those of its repetition.
    """
    if not is_saving() or innermost_transform() is not None:
        return True
    return torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call,no-any-return]


class CheckpointedModule:
    """One module that is recomputed as a whole.

    Args:
        module: whose forward is run again.
        runtime: of its model.
        contexts: what it runs in; made anew for each forward.
        groups: processes that keep a slice each of what the module is given (`sliced_inputs`).
        begin_inputs: makes the policy for what it is given, for each forward; ``None``: that is kept.

    Attributes:
        forwards: how many forwards were entered.
        repetitions: how many of them were run again.
    """

    def __init__(
        self,
        module: nn.Module,
        runtime: ActivationRuntime,
        contexts: Contexts | None = None,
        groups: Sequence[sliced_inputs.Group] = (),
        begin_inputs: Callable[[], SavePolicy] | None = None,
    ) -> None:
        self.module = module
        self._calls = runtime.calls
        self._saved = runtime.saved
        self._begin_inputs = begin_inputs
        self.forwards = 0
        self.repetitions = 0
        self._contexts = contexts or checkpoint.noop_context_fn
        self._groups = groups
        self._has_said = False

    def register(self) -> list[RemovableHandle]:
        """Hook it to its module, around the hooks that it has."""
        leave = self.module.register_forward_hook(QuietHook(self._leave))
        return [leave, *hook_around(self.module, self._enter, self._abandon)]

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The module begins to run, or a copy that shares its hooks."""
        self._calls.discard_interrupted()
        if is_idle() or has_lazy(module):
            return
        values, shape = tree_flatten((args, dict(kwargs)))
        if any(isinstance(value, Iterator) for value in values):
            self._say_what_is_read_once()
            return
        self.forwards += 1
        before = ForwardSnapshot(module, values)

        def contexts() -> tuple[Context, Context]:
            forward, again = self._contexts()
            return forward, _Again(self, before, again)

        each = {id(value): value for value in values}  # what is given twice is one object when it runs again
        places = [list(each).index(id(value)) for value in values]
        kept = [_copied(value) for value in each.values()]
        kept, cuts = sliced_inputs.cut(kept, self._groups) if self._groups else (kept, [None] * len(kept))

        def run(*given: Any) -> object:  # noqa: ANN401 - what was kept
            whole = [one if how is None else how.whole(one) for one, how in zip(given, cuts, strict=True)]
            whole = [_copied(value) for value in whole]
            positions, names = tree_unflatten([whole[place] for place in places], shape)
            return module(*positions, **names)

        # Everything goes as a position: PyTorch looks there for tensors, which it has saved, and for devices
        # whose random state it keeps.
        running = begin_checkpoint(run, True, contexts, "default", False, True, *kept)  # noqa: FBT003
        end_inputs = self._ask_for_inputs()
        outer = top_hooks()
        try:
            next(running)
        except BaseException:
            end_inputs()
            raise
        hooks = top_hooks()
        assert hooks is not None
        region = _RunningRegion(running, before, InForce(hooks[0], outer), end_inputs)
        self._calls.begin(self, region, region.close)

    def _ask_for_inputs(self) -> Callable[[], None]:
        """Ask a policy, until the module has run: then the checkpoint's own hooks are above it."""
        if self._begin_inputs is None:
            return _nothing
        policy = self._begin_inputs()
        self._saved.begin(policy)
        return functools.partial(self._saved.end, policy)

    def _say_what_is_read_once(self) -> None:
        if not self._has_said:
            self._has_said = True
            log.warning(
                "a %s was given an iterator, which can be read once: it is not recomputed",
                type(self.module).__name__,
            )

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        """The module has run."""
        del module, args, output
        region = self._calls.end(self, _RunningRegion)
        if region is not None:
            region.before.end()
            next(region.running, None)
            region.end_inputs()

    def _abandon(self, module: nn.Module, args: object, output: object) -> None:
        """The module has run, or an exception ended it: then the region is still open."""
        del module, args, output
        region = self._calls.end(self, _RunningRegion)
        if region is not None:
            region.abandon()


def _nothing() -> None:
    """Where no policy is asked, none ends."""


def _copied(value: Any) -> Any:  # noqa: ANN401 - an argument
    """Return a copy of what a forward may set attributes of."""
    return copy.copy(value) if is_dataclass(value) and not isinstance(value, type) else value


class _Again:
    """What a repetition runs in: what the forward saw, then whatever else.  As often as wanted."""

    def __init__(self, region: CheckpointedModule, before: ForwardSnapshot, inner: Context) -> None:
        self._region = region
        self._before = before
        self._inner = inner

    def __enter__(self) -> None:
        self._before.__enter__()
        self._region.repetitions += 1
        try:
            self._inner.__enter__()
        except BaseException:
            self._before.__exit__()
            raise

    def __exit__(self, *error: Any) -> None:  # noqa: ANN401 - what ended it, passed on
        try:
            self._inner.__exit__(*error)
        finally:
            self._before.__exit__()
