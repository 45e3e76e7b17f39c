"""``state_dict`` and ``load_state_dict``, of model and optimizers, while the bytes are in the store.

1. A state dict holds independent copies in host memory, made bundle by bundle.  Tied parameters give
   one tensor, as they do without offloading.
2. Loading a model's copies into one parameter after another.  Loading an optimizer's takes its tensors
   bundle by bundle, cast as PyTorch casts them; the caller's tensors are not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tierstore.training import guard
from tierstore.training.bundles import Adopter
from tierstore.training.hooks import Hook
from tierstore.training.optimizer import OptimizerSteps

StateDict = dict[str, Any]


class StateDicts:
    """Makes state dicts of what is guarded.

    Args:
        adopter: that copies come from.
    """

    def __init__(self, adopter: Adopter) -> None:
        self._adopter = adopter
        self._depth = 0
        self._copies: dict[int, torch.Tensor] = {}
        self._pending: dict[torch.optim.Optimizer, StateDict] = {}

    # --- the model ----------------------------------------------------------------------------

    def watch_model(self, model: nn.Module) -> list[RemovableHandle]:
        """Hook into the ``state_dict`` of every module."""
        handles: list[RemovableHandle] = []
        for module in model.modules():
            handles.append(module.register_state_dict_pre_hook(_Call(self._begin)))
            handles.append(module.register_state_dict_post_hook(_Call(self._end)))
        return handles

    def copy(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of a guarded tensor while a model's state dict is being made, else ``None``."""
        return self._copy(tensor) if self._depth else None

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor; bundles are read once while their tensors come one after another."""
        if guard.tenant_of(tensor) is not None and id(tensor) not in self._copies:
            self._copies.clear()
        return self._copy(tensor)

    def reset(self) -> None:
        """Forget a state dict that was never finished."""
        self._depth = 0
        self._copies.clear()

    def _begin(self) -> None:
        self._depth += 1

    def _end(self) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self.reset()

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        tenant = guard.tenant_of(tensor)
        if tenant is None:
            return tensor
        if id(tensor) not in self._copies:
            copies = self._adopter.copies(tenant.binding)
            self._copies.update(zip(map(id, tenant.binding.tensors), copies, strict=True))
        return self._copies[id(tensor)]

    # --- optimizers ---------------------------------------------------------------------------

    def watch_optimizer(self, steps: OptimizerSteps) -> list[RemovableHandle]:
        """Hook into ``state_dict`` and ``load_state_dict`` of an optimizer."""
        optimizer = steps.optimizer

        def take(optimizer: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
            self._pending[optimizer] = state_dict
            return {**state_dict, "state": {}}

        def put(optimizer: torch.optim.Optimizer) -> None:
            self._load(steps, self._pending.pop(optimizer, {}))

        return [
            optimizer.register_state_dict_post_hook(lambda _, state_dict: self._copy_state(state_dict)),
            optimizer.register_load_state_dict_pre_hook(take),
            optimizer.register_load_state_dict_post_hook(put),
        ]

    def _copy_state(self, state_dict: StateDict) -> StateDict:
        """Return the state dict with copies in the place of guarded tensors."""
        try:
            state = {
                parameter: {name: self._plain(value) for name, value in entries.items()}
                if isinstance(entries, dict)
                else entries
                for parameter, entries in state_dict["state"].items()
            }
        finally:
            self._copies.clear()
        return {**state_dict, "state": state}

    def _plain(self, value: object) -> object:
        return self._copy(value) if isinstance(value, torch.Tensor) else value

    def _load(self, steps: OptimizerSteps, loaded: StateDict) -> None:
        """Take the tensors of a loaded state dict, bundle by bundle."""
        optimizer = steps.optimizer
        steps.forget_states()
        numbers = [number for group in loaded.get("param_groups", ()) for number in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        number_of = dict(zip(parameters, numbers, strict=True))
        state = dict(loaded.get("state", {}))
        for bundle in steps.bundles:
            for parameter in bundle.tensors:
                self._load_one(optimizer, parameter, number_of.pop(parameter, None), state, loaded)
            steps.take_in_state(bundle)
        for parameter, number in number_of.items():
            self._load_one(optimizer, parameter, number, state, loaded)
        optimizer.state.update(state)  # what belongs to no parameter

    def _load_one(
        self,
        optimizer: torch.optim.Optimizer,
        parameter: torch.Tensor,
        number: object,
        state: dict[Any, Any],
        loaded: StateDict,
    ) -> None:
        entries = state.pop(number, None)
        if entries is None:
            return
        optimizer.state[parameter] = {
            name: _cast(parameter, number, loaded["param_groups"], name, value)
            for name, value in entries.items()
        }


def _cast(parameter: torch.Tensor, number: object, groups: object, name: str, value: object) -> object:
    """Return a loaded value as PyTorch would keep it; the caller's own tensor object is never kept."""
    if isinstance(value, torch.Tensor) and value.dim() > 0 and guard.tenant_of(parameter) is not None:
        cast = value.detach()
        return cast.to(dtype=parameter.dtype) if parameter.is_floating_point() and name != "step" else cast
    if isinstance(value, torch.Tensor):
        policy = torch.optim.Optimizer._process_value_according_to_param_policy  # noqa: SLF001 - the same policy
        return policy(parameter, value, number, groups, name)  # type: ignore[arg-type]
    return value


class _Call(Hook):
    """A hook that has no use for its arguments."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._from_public_api = False  # PyTorch marks post hooks on the hook itself

    def __call__(self, *arguments: object) -> None:
        del arguments
        self._act()
