"""An optimizer's double, which steps on stand-ins, in whatever memory they are: nobody sees it.

It has groups and state of its own; the tensors of its state are found by what guards the user's.  What a
step depends on beside tensors is compared here, too: options, settings of PyTorch, small state.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tierstore.training.faults import guard
from tierstore.training.optimizers.step_units import Group, options_of, own_step
from tierstore.training.pytorch.own_work import ordinary_mode

Entries = dict[str, Any]
Flat = Callable[[str], torch.Tensor]
"""Returns the bytes that stand for those of a key."""

log = logging.getLogger("tierstore")

_FIXED = frozenset({bool, int, float, complex, str, type(None)})
_SUBNORMAL = sys.float_info.min * sys.float_info.epsilon
_ONE = float(1)  # by a name, so that the product is made when it is asked for


class UnsuitableError(Exception):
    """An optimizer cannot be run ahead."""


def copied(options: Group) -> Group:
    """Return a copy of a group's options: lists among them can be changed in place."""
    return {**options} if all(map(_is_fixed, options.values())) else copy.deepcopy(options)


def _is_fixed(value: object) -> bool:
    """Say whether a value can not be changed in place, as those of nearly all options: no copy is needed."""
    parts = value if type(value) is tuple else (value,)
    return all(type(each) in _FIXED for each in parts)


def is_scaled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scaler has told the optimizer to unscale, or to skip, by itself."""
    return any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))


def settings(device: torch.device) -> tuple[object, ...]:
    """Return what, beside their inputs, may decide about the bits of this thread's operations on a device."""
    kinds = {"cpu", *([kind.type] if (kind := torch.accelerator.current_accelerator()) else [])}
    found = (
        [torch.is_autocast_enabled(kind) for kind in sorted(kinds)],
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
    )
    if device.type != "cpu":
        return found
    # What adds up in parallel does so in the order of threads; flushing of subnormals is a thread's own, too.
    return (*found, torch.get_num_threads(), _SUBNORMAL * _ONE == 0.0)


def double_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer that is as one is now, but for groups and state, which it has none of."""
    double: torch.optim.Optimizer = object.__new__(type(optimizer))
    double.__dict__.update(optimizer.__dict__)
    return double


def step_double(
    double: torch.optim.Optimizer, groups: list[Group], state: dict[torch.Tensor, Entries]
) -> None:
    """Let a double step, with groups and state of its own, which it keeps no longer."""
    double.param_groups = groups
    own_state: defaultdict[torch.Tensor, Entries] = defaultdict(dict, state)
    double.state = own_state
    try:
        own_step(double)(double)
    finally:
        double.param_groups, double.state = [], defaultdict(dict)
    state.clear()
    state.update(own_state)


def step_alone(
    optimizer: torch.optim.Optimizer, groups: list[Group], state: dict[torch.Tensor, Entries]
) -> None:
    """Let a double of the optimizer step, with groups and state of its own: nobody sees it."""
    step_double(double_of(optimizer), groups, state)


def ways_of(group: Group) -> list[tuple[str, object]]:
    """Return what of a group's options decides what its step does, rather than by how much."""
    return [
        (name, value if isinstance(value, bool | str | None) else bool(value))
        for name, value in options_of(group).items()
    ]


def writes_to_gradients(
    optimizer: torch.optim.Optimizer, group: Group, like: torch.Tensor, entries: Entries
) -> bool:
    """Say whether a step writes to gradients, which a step of one element tells.

    Args:
        optimizer: whose double steps.
        group: with the options.
        like: a parameter of one element.
        entries: of the state of a parameter such as that.
    """
    if group.get("fused"):
        return False  # unless a scaler has told it to unscale; by its signature it always does
    name = type(optimizer).__name__
    with ordinary_mode():
        stand_in = torch.nn.Parameter(like)
        stand_in.grad = gradient = like.clone()
        state: dict[torch.Tensor, Entries] = {}
        state[stand_in] = {each: _of_one_element(value, like) for each, value in entries.items()}
        try:
            step_alone(optimizer, [{**copied(options_of(group)), "params": [stand_in]}], state)
        except Exception:
            log.debug("%s takes no %s of one element: no step ahead", name, like.dtype, exc_info=True)
            return True
        return gradient._version > 0  # noqa: SLF001


def _of_one_element(value: object, like: torch.Tensor) -> object:
    """Return what stands for an entry of state where a parameter has one element."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 0:
        return value.clone()
    return like.new_ones([1] * value.dim(), dtype=value.dtype)


def is_special(group: Group) -> bool:
    """Whether a group has options that a step ahead cannot honour: tensors, or steps with a graph."""
    is_tensor = any(isinstance(value, torch.Tensor) for value in options_of(group).values())
    return is_tensor or bool(group.get("differentiable")) or bool(group.get("capturable"))


def _view(tensor: torch.Tensor, flat_of: Flat) -> torch.Tensor | None:
    """Return what stands for the bytes of a guarded tensor, like it; ``None``: nobody guards it."""
    guarded_tensor = guard.guarded_tensor_of(tensor)
    return None if guarded_tensor is None else guarded_tensor.place.view(flat_of(guarded_tensor.binding.key))


def stand_in_of(parameter: torch.Tensor, flat_of: Flat, gradient: torch.Tensor) -> torch.Tensor:
    """Return what stands for a parameter of the store, with a gradient."""
    view = _view(parameter, flat_of)
    assert view is not None
    stand_in = torch.nn.Parameter(view)
    stand_in.grad = gradient
    return stand_in


def entries_in(entries: Entries, flat_of: Flat) -> Entries:
    """Return a parameter's state with its large tensors in other bytes, and copies of the small ones.

    Raises:
        UnsuitableError: a large one is not in the store.
    """
    found: Entries = {}
    for name, value in entries.items():
        if not isinstance(value, torch.Tensor):
            found[name] = value
        elif value.dim() == 0:
            found[name] = value.clone()
        elif (view := _view(value, flat_of)) is not None:
            found[name] = view
        else:
            raise UnsuitableError(f"its {name!r} is not in the store")
    return found


def is_large(value: object) -> bool:
    """Whether a value of a parameter's state belongs into the store."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def snapshot(entries: Mapping[str, Any]) -> Entries:
    """Return a parameter's state as it is: the large tensors themselves, copies of the small ones."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
        for name, value in entries.items()
    }


def put_small(entries: Entries, later: Entries) -> None:
    """Give a parameter's small state its new values: tensors stay the same objects."""
    for name, value in later.items():
        own = entries[name]
        if isinstance(own, torch.Tensor):
            own.copy_(value)
        else:
            entries[name] = value


def is_alike(given: Entries, left: Mapping[str, Any]) -> bool:
    """Whether a step has kept the tensors that it was given, and made none."""
    return given.keys() == left.keys() and all(
        left[name] is value if isinstance(value, torch.Tensor) else not isinstance(left[name], torch.Tensor)
        for name, value in given.items()
    )


def is_equal(entries: Mapping[str, Any], former: Entries) -> bool:
    """Whether a parameter's state is what it was; what large tensors hold is known elsewhere."""
    return entries.keys() == former.keys() and all(
        value is entries[name] or (not is_large(value) and _is_same(value, entries[name]))
        for name, value in former.items()
    )


def _is_same(value: object, other: Any) -> bool:  # noqa: ANN401 - an optimizer's own
    return torch.equal(value, other) if isinstance(value, torch.Tensor) else bool(value == other)
