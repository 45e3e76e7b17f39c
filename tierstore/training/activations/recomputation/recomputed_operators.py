"""Outputs of chosen operators that are not kept for backward: backward makes them again.

PyTorch's selective checkpointing keeps the outputs of all *other* operators of a region, also those that
backward never looks at, and runs the region's Python again.  Here nothing is kept beyond what autograd saves:

1. While a layer runs, its operators are watched, and a policy is asked what autograd is to save.
2. What autograd saves of a chosen operator's output is replaced by a reference to that run of the operator.
   Its inputs are then kept, as if autograd had saved them: by whatever hooks are in force, and an input that
   is itself made again by such a reference.
3. Backward runs the operator again when the first reference is followed, with the random state that it had
   and without autocast, which was applied before; what it made is kept until each reference was followed.
4. Views of an output are views of what is made.  What is changed in place is kept as usual from then on, and
   so is what was to be made from something that is changed.
5. Nothing else runs again: no Python of the model, no hook, no update of a running statistic.
6. What leaves the layer is kept as usual by whoever saves it.

Wrapper subclasses (DTensor) and functional tensors are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tierstore.torch_private import OpOverload
from tierstore.training.activations.recomputation.checkpointed_modules import is_idle
from tierstore.training.activations.recomputation.recorded_ops import (
    InputIndex,
    InputRef,
    RandomState,
    RecomputeCounts,
    RecordedOp,
    SavedOutput,
    can_repeat,
    is_unfilled,
    random_state_for,
    updated_unsaid,
)
from tierstore.training.activations.recomputation.scopes import OperatorSelection
from tierstore.training.activations.runtime.activation_runtime import ActivationRuntime
from tierstore.training.activations.runtime.forward_conditions import refuse_forward_mode
from tierstore.training.activations.runtime.module_calls import hook_around
from tierstore.training.activations.runtime.operators import (
    Arguments,
    Named,
    alias_of,
    is_changing,
    is_plain,
    mapped,
    tensors_in,
    written,
)
from tierstore.training.activations.runtime.saved_activations import Turn
from tierstore.training.autograd.saved_tensors import refers
from tierstore.training.pytorch.live_storages import LiveStorages
from tierstore.training.pytorch.saved_tensor_hooks import Hook


class _LiveOutput(NamedTuple):
    """What is known of a storage that is an operator's output as yet."""

    call: RecordedOp
    number: int  # of the operator's outputs
    version: int


class _Beginning(NamedTuple):
    """How a chosen operator began."""

    random: RandomState | None


class _LayerForward:
    """One forward of a layer, a `SavePolicy`, which watches its operators: an `OperatorWatcher`."""

    turn = Turn.RECOMPUTE

    def __init__(
        self,
        runtime: ActivationRuntime,
        selection: OperatorSelection,
        givens: InputIndex,
        counts: RecomputeCounts,
    ) -> None:
        self._runtime = runtime
        self._counts = counts
        self._selection = selection
        self._live: LiveStorages[_LiveOutput] = LiveStorages()
        self._givens = givens

    def begin(self) -> None:
        """Come into force in this thread."""
        self._runtime.saved.begin(self)
        self._runtime.operators.begin(self)

    def end(self) -> None:
        """Be in force no more: what is saved from now on is kept as usual."""
        self._runtime.operators.end(self)
        self._runtime.saved.end(self)
        self._live.clear()

    @property
    def is_for_repetition(self) -> bool:
        """See `SavePolicy`: all operators that run now are to run again."""
        return self._selection.scope.is_whole

    def lets_see(self, hook: Hook) -> bool:
        """See `SavePolicy`: nobody sees what is not kept."""
        del hook
        return False

    def pack(self, tensor: torch.Tensor) -> SavedOutput | None:
        """See `SavePolicy`: return a reference to the run that made ``tensor``."""
        live = self._look_up(tensor)
        if live is None:
            return None
        self._counts.saved += 1
        made = SavedOutput(live.call, live.number, tensor, is_saved=True)
        if not live.call.is_packed:
            live.call.pack()
        return made

    def _look_up(self, tensor: torch.Tensor) -> _LiveOutput | None:
        live = self._live.get(tensor.untyped_storage()) if is_plain(tensor) else None
        if live is None or live.call.is_over:
            return None
        return live if live.version == tensor._version else None  # noqa: SLF001

    def before(self, func: OpOverload, args: Arguments, kwargs: Named) -> object:
        """See `OperatorWatcher`: note the random state of a chosen operator."""
        refuse_forward_mode()
        if is_changing(func):
            self._before_change(written(func, args, kwargs))
            return None
        is_chosen = torch.is_grad_enabled() and self._selection.means(func) and not is_unfilled(func)
        if not is_chosen or not can_repeat(args, kwargs):
            return None
        return _Beginning(random_state_for(func, args, kwargs))

    def after(
        self, noted: _Beginning, func: OpOverload, args: Arguments, kwargs: Named, result: object
    ) -> None:
        """See `OperatorWatcher`: remember how a chosen operator is run."""
        self._remember(func, args, kwargs, result, noted.random)

    def _remember(
        self, func: OpOverload, args: Arguments, kwargs: Named, result: object, random: RandomState | None
    ) -> None:
        given = {id(tensor.untyped_storage()) for tensor in tensors_in((args, kwargs))}
        fresh = [
            (index, tensor)
            for index, tensor in enumerate(tensors_in(result))
            if is_plain(tensor) and id(tensor.untyped_storage()) not in given
        ]
        if not fresh:
            return
        cloned = updated_unsaid(func)
        inputs = tuple(self._taken(each, is_cloned=place in cloned) for place, each in enumerate(args))
        named = {name: self._taken(each, is_cloned=name in cloned) for name, each in kwargs.items()}
        call = RecordedOp(func, inputs, named, random, self._counts)
        self._givens.add(call)
        for index, tensor in fresh:
            output = _LiveOutput(call, index, tensor._version)  # noqa: SLF001
            self._live.put(tensor.untyped_storage(), output)

    def _taken(self, argument: object, *, is_cloned: bool) -> object:
        """Return an argument with an `InputRef` for each tensor."""

        def taken(tensor: torch.Tensor) -> InputRef:
            live = self._look_up(tensor)
            if live is not None:
                made = SavedOutput(live.call, live.number, tensor, is_saved=False)
                return InputRef(made, SavedOutput.tensor, is_cloned=is_cloned)
            reference = None if saved is None else saved.refer(tensor)
            if saved is not None and reference is not None:
                return InputRef(reference, saved.unpack, is_cloned=is_cloned)
            # What is updated without a trace is taken as it is now: who evaluates reads it.
            return InputRef(
                tensor.detach().clone() if is_cloned else alias_of(tensor), None, is_cloned=is_cloned
            )

        saved = refers()
        return mapped(argument, torch.Tensor, taken)

    def _before_change(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if is_plain(tensor):
                storage = tensor.untyped_storage()
                self._live.discard(storage)
                self._givens.settle(storage)


class RecomputedOperators:
    """A layer with chosen operators.

    Args:
        module: the layer.
        runtime: of its model.
        selection: its operators.
        givens: of all layers of the model.
        counts: to tell of what came of it.
    """

    def __init__(
        self,
        module: nn.Module,
        runtime: ActivationRuntime,
        selection: OperatorSelection,
        givens: InputIndex,
        counts: RecomputeCounts,
    ) -> None:
        self.module = module
        self._runtime = runtime
        self._selection = selection
        self._givens = givens
        self._counts = counts

    def register(self) -> list[RemovableHandle]:
        """Hook it to its module, around the hooks that it has."""
        return hook_around(self.module, self._enter, self._leave)

    def _enter(self, *_: object) -> None:
        """The layer begins to run."""
        self._runtime.discard_interrupted()
        if not is_idle():
            run = _LayerForward(self._runtime, self._selection, self._givens, self._counts)
            run.begin()
            self._runtime.calls.begin(self, run, run.end)

    def _leave(self, *_: object) -> None:
        """The layer has run, well or badly."""
        run = self._runtime.calls.end(self, _LayerForward)
        if run is not None:
            run.end()
