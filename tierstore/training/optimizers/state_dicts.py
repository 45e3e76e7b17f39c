"""``state_dict`` and ``load_state_dict``, of model and optimizers, while the bytes are in the store.

1. A state dict holds copies in host memory, made bundle by bundle, that stay one with the parameters, or with
   the optimizer's state (`tierstore.training.faults.state_dict_entries`).  Tied parameters give one tensor.
   Of sharded ones it shows the originals (`tierstore.training.faults.sharded_entries`).
2. Loading a model's copies into one parameter after another.  Loading an optimizer's takes its tensors
   bundle by bundle, cast as PyTorch casts them.  As in PyTorch, a tensor that needs no cast is the state from
   then on; one that shares memory with others is copied.
3. For a writer that takes one tensor after another entries are read when they are used (`StateDicts.late`).
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tierstore.torch_private import RecursiveScriptModule, process_loaded_state
from tierstore.training.budgets.memory_meters import tensors_in
from tierstore.training.bundles.bindings import Bindings, natively
from tierstore.training.bundles.tensor_slots import memory_of
from tierstore.training.faults import guard, late_entries
from tierstore.training.faults.late_entries import late_entry
from tierstore.training.faults.sharded_entries import original_of, sharded_entry_of
from tierstore.training.faults.state_dict_entries import entry_for, whole_of
from tierstore.training.modules.adopter import Adopter
from tierstore.training.modules.hooks import Hook
from tierstore.training.optimizers.adapters import Taken
from tierstore.training.optimizers.kept_numbers import KeptNumbers
from tierstore.training.optimizers.state import OptimizerState, is_unshared, order_entries
from tierstore.training.pytorch.function_modes import out_of_sight
from tierstore.training.pytorch.own_work import ordinary_mode

StateDict = dict[str, Any]


class _Making(threading.local):
    """The state dict that is being made in this thread, and whether entries are late ones."""

    def __init__(self) -> None:
        self.depth = 0
        self.copies: dict[int, torch.Tensor] = {}
        self.entries: dict[int, torch.Tensor] = {}
        self.late_place: str | None = None


class StateDicts:
    """Makes state dicts of what is guarded.

    Args:
        adopter: that copies come from.
        bindings: of what is guarded.
    """

    def __init__(self, adopter: Adopter, bindings: Bindings) -> None:
        self._adopter = adopter
        self._bindings = bindings
        self._making = _Making()
        self._pending: dict[torch.optim.Optimizer, StateDict] = {}
        self._numbers: dict[torch.optim.Optimizer, KeptNumbers] = {}

    # --- the model ----------------------------------------------------------------------------

    def watch_model(self, model: nn.Module) -> Iterator[RemovableHandle]:
        """Hook into the ``state_dict`` of every module; yield each hook's handle when it is there."""
        for module in model.modules():
            if isinstance(module, RecursiveScriptModule):  # it takes none, and nothing of it is offloaded
                continue
            yield module.register_state_dict_pre_hook(_CallHook(self._begin))
            yield module.register_state_dict_post_hook(_CallHook(self._end))

    def entry(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return an entry for a guarded tensor while a model's state dict is being made, else ``None``."""
        if not self._making.depth:
            return None
        if self._making.late_place is not None and memory_of(tensor) is tensor:
            return late_entry(tensor, self.entry_alone, self._making.late_place)
        if id(tensor) not in self._making.entries:
            self._making.entries[id(tensor)] = self._new_entry(tensor)
        return self._making.entries[id(tensor)]

    def entry_alone(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an entry for a tensor whose bundle is not read for others; of an ordinary one, an alias."""
        if guard.guarded_tensor_of(tensor) is None:
            return tensor.detach()
        try:
            return self._new_entry(tensor)
        finally:
            self._making.copies.clear()

    def _new_entry(self, tensor: torch.Tensor) -> torch.Tensor:
        guarded_tensor = guard.guarded_tensor_of(tensor)
        assert guarded_tensor is not None
        if guarded_tensor.is_abroad:
            with natively():
                return tensor.detach()
        if memory_of(tensor) is not tensor:
            return sharded_entry_of(tensor)
        with ordinary_mode():  # what is made in inference mode does not tell when it is written
            return entry_for(guarded_tensor, self._copy(tensor))

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor; bundles are read once while their tensors come one after another."""
        if guard.guarded_tensor_of(tensor) is not None and id(tensor) not in self._making.copies:
            self._making.copies.clear()
        return self._copy(tensor)

    @contextlib.contextmanager
    def late(self, place: str) -> Iterator[None]:
        """Let entries of state dicts that this thread makes be read when they are used.

        Args:
            place: the device that they say they are on.
        """
        former, self._making.late_place = self._making.late_place, place
        try:
            yield
        finally:
            self._making.late_place = former

    def reset(self) -> None:
        """Forget a state dict that was never finished."""
        self._making.depth = 0
        self._making.copies.clear()
        self._making.entries.clear()

    def _begin(self) -> None:
        self._bindings.note_thread()
        self._making.depth += 1

    def _end(self) -> None:
        self._making.depth -= 1
        if self._making.depth <= 0:
            self.reset()

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        guarded_tensor = guard.guarded_tensor_of(tensor)
        if guarded_tensor is None:
            return tensor
        if id(tensor) not in self._making.copies:
            copies = self._adopter.copies(guarded_tensor.binding)
            self._making.copies.update(zip(map(id, guarded_tensor.binding.tensors), copies, strict=True))
        return self._making.copies[id(tensor)]

    # --- optimizers ---------------------------------------------------------------------------

    def watch_optimizer(self, kept: OptimizerState) -> Iterator[RemovableHandle]:
        """Hook into ``state_dict`` and ``load_state_dict`` of an optimizer; yield as `watch_model` does."""
        optimizer = kept.optimizer

        def take(optimizer: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
            self._pending[optimizer] = state_dict
            return {**state_dict, "state": {}}

        def put(optimizer: torch.optim.Optimizer) -> None:
            self._load(kept, self._pending.pop(optimizer, {}))

        yield optimizer.register_state_dict_post_hook(self._copy_state)
        yield optimizer.register_load_state_dict_pre_hook(take)
        yield optimizer.register_load_state_dict_post_hook(put)

    def _copy_state(self, optimizer: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
        """Return the state dict with entries in the place of guarded tensors."""
        with out_of_sight():
            return self._with_entries(optimizer, state_dict)

    def _with_entries(self, optimizer: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
        numbers = self._numbers.setdefault(optimizer, KeptNumbers())
        numbers.refresh()
        state = dict(state_dict["state"])
        try:
            for parameter, entries in state_dict["state"].items():
                linked = state[parameter] = self._linked_entries(entries)
                if linked is not entries:
                    numbers.follow(optimizer, entries, linked)
        finally:
            self._making.copies.clear()
        return {**state_dict, "state": state}

    def _linked_entries(self, entries: Any) -> Any:  # noqa: ANN401 - whatever an optimizer keeps
        """Return the state of a parameter; the optimizer's own dict where nothing in it is the store's."""
        if not isinstance(entries, dict):
            return entries
        linked = {name: self._linked(value) for name, value in entries.items()}
        return entries if all(linked[name] is value for name, value in entries.items()) else linked

    def _linked(self, value: object) -> object:
        if not isinstance(value, torch.Tensor) or guard.guarded_tensor_of(value) is None:
            return value
        place = self._making.late_place
        if place is None or memory_of(value) is not value:  # those of sharded ones are late, in any case
            return self._new_entry(value)
        return late_entry(value, self.entry_alone, place)

    def _load(self, kept: OptimizerState, loaded: StateDict) -> None:
        """Take the tensors of a loaded state dict, bundle by bundle."""
        optimizer = kept.optimizer
        numbers = [number for group in loaded.get("param_groups", ()) for number in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        number_of = dict(zip(parameters, numbers, strict=True))
        parameter_of = dict(zip(numbers, parameters, strict=True))
        places = [parameter_of.get(number, number) for number in loaded.get("state", {})]
        state = dict(loaded.get("state", {}))
        cast = _Cast(loaded, kept)
        for bundle in kept.bundles():
            for parameter in bundle.tensors:
                self._load_one(optimizer, parameter, number_of.pop(parameter, None), state, cast)
            kept.take_in_loaded(bundle)
        for parameter, number in number_of.items():
            self._load_one(optimizer, parameter, number, state, cast)
        kept.forget_others()
        optimizer.state.update(state)  # what belongs to no parameter
        order_entries(optimizer, places)  # in which they were loaded
        self._let_convert(kept)

    def _let_convert(self, kept: OptimizerState) -> None:
        """Let an optimizer's ``__setstate__`` see what was loaded; in PyTorch's own call there was nothing.

        Those of ``torch.optim`` make tensors of steps that PyTorch before 1.12 wrote as numbers.
        """
        optimizer = kept.optimizer
        if type(optimizer).__setstate__ is torch.optim.Optimizer.__setstate__:
            return
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
        for bundle in kept.bundles():
            kept.take_in_loaded(bundle)

    def _load_one(
        self,
        optimizer: torch.optim.Optimizer,
        parameter: torch.Tensor,
        number: object,
        state: dict[Any, Any],
        cast: _Cast,
    ) -> None:
        entries = state.pop(number, None)
        if isinstance(entries, dict):
            optimizer.state[parameter] = {
                name: cast(parameter, number, name, value) for name, value in entries.items()
            }
        elif entries is not None:
            optimizer.state[parameter] = entries


class _Cast:
    """Returns loaded values as PyTorch would keep them.

    Args:
        loaded: the state dict.
        kept: the state of the optimizer that loads it; where it takes only tensors that share no memory,
            others share it still.
    """

    def __init__(self, loaded: StateDict, kept: OptimizerState) -> None:
        self._groups = loaded.get("param_groups", ())
        self._kept = kept
        self._memo: dict[int, object] = {}
        self._shared: set[int] = set()
        self._is_copied = kept.taken is Taken.UNSHARED
        if self._is_copied:
            tensors = {id(tensor): tensor for tensor in tensors_in([loaded.get("state", {})])}.values()
            read = (tensor for tensor in tensors if late_entries.original_of(tensor) is None)
            plain = [tensor for tensor in read if tensor.layout is torch.strided]
            counts = Counter(tensor.untyped_storage()._cdata for tensor in plain)  # noqa: SLF001
            self._shared = {id(t) for t in plain if counts[t.untyped_storage()._cdata] > 1}  # noqa: SLF001

    def __call__(self, parameter: torch.Tensor, number: object, name: str, value: object) -> object:
        """Return one entry of a parameter's state."""
        if not isinstance(value, torch.Tensor):
            return value
        for one_with in (whole_of, original_of, late_entries.original_of):
            whole = one_with(value)
            value = value if whole is None else whole
        guarded_tensor = guard.guarded_tensor_of(parameter)
        if value.dim() == 0 or guarded_tensor is None or id(value) in self._shared:
            own = copy.deepcopy(value, self._memo) if id(value) in self._shared else value
            return process_loaded_state(parameter, own, number, self._groups, name)
        is_cast = parameter.is_floating_point() and name != "step" and value.dtype != parameter.dtype
        is_as_it_is = not is_cast and value.device == parameter.device
        if is_as_it_is and (self._kept.has(guarded_tensor.binding, value) or is_unshared(value)):
            return value
        cast = value.detach()
        if is_cast:
            cast = cast.to(dtype=parameter.dtype)
        if not self._is_copied:
            return cast
        return cast.to(device=parameter.device, copy=True)


class _CallHook(Hook):
    """A hook that has no use for its arguments."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._from_public_api = False  # PyTorch marks post hooks on the hook itself

    def __call__(self, *arguments: object) -> None:
        del arguments
        self._act()
