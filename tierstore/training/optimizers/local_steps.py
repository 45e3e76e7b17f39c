"""Steps of shards, made on their local tensors.

What treats each element by itself, as all does that may step shards (`tierstore.training.sharding.refusals`),
does to a ``DTensor`` what it does to its local tensor, and asks each operation how it lies for nothing.  That
is so where parameters, gradients and state lie alike; where they do not, the step is PyTorch's as it is.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from tierstore.training.bundles.tensor_slots import is_sharded_kind, lies_as, memory_of, sharded_like
from tierstore.training.optimizers.doubles import Entries, is_large, is_scaled, is_special
from tierstore.training.optimizers.step_units import StepUnit, only
from tierstore.training.pytorch.own_work import are_modes_on

GradientOf = Callable[[torch.Tensor], torch.Tensor | None]


def is_of_shards(turn: StepUnit) -> bool:
    """Whether all of a bundle's parameters are ``DTensor``s."""
    return all(map(is_sharded_kind, turn.bundle.plain))


def lie_alike(optimizer: torch.optim.Optimizer, turn: StepUnit, gradient_of: GradientOf) -> bool:
    """Whether gradients and state of shards lie as the shards themselves do.

    Args:
        optimizer: with the state.
        turn: of a bundle of shards.
        gradient_of: returns the gradient of a parameter, with its bytes or without.
    """
    return all(
        lies_as(gradient, parameter)
        and all(lies_as(each, parameter) for each in _large(optimizer, parameter))
        for parameter in turn.parameters
        if (gradient := gradient_of(parameter)) is not None
    )


def _large(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> list[torch.Tensor]:
    entries: Mapping[str, Any] = optimizer.state.get(parameter, {})
    return [value for value in entries.values() if is_large(value)]


def may_be_local(optimizer: torch.optim.Optimizer, turn: StepUnit, gradient_of: GradientOf) -> bool:
    """Whether a bundle's step can be made on local tensors: all that it works on has its bytes.

    Args:
        optimizer: whose step.
        turn: of the bundle.
        gradient_of: returns the gradient of a parameter.
    """
    return (
        is_of_shards(turn)
        and not any(is_special(group) for group, _ in turn.groups)
        and not is_scaled(optimizer)
        and not are_modes_on()  # which would see operators of local tensors
        and lie_alike(optimizer, turn, gradient_of)
    )


@contextlib.contextmanager
def only_local(optimizer: torch.optim.Optimizer, turn: StepUnit, gradient_of: GradientOf) -> Iterator[None]:
    """Let the optimizer see local tensors of one bundle instead of its parameters, inside the context.

    Args:
        optimizer: whose groups and state.
        turn: of the bundle, as `may_be_local` has accepted it.
        gradient_of: returns the gradient of a parameter.
    """
    locals_of = {parameter: memory_of(parameter) for parameter in turn.parameters}
    groups = [(group, [locals_of[each] for each in members]) for group, members in turn.groups]
    former_state = optimizer.state
    shown: defaultdict[torch.Tensor, Entries] = defaultdict(dict)
    for parameter, local in locals_of.items():
        gradient = gradient_of(parameter)
        local.grad = None if gradient is None else memory_of(gradient)
        if parameter in former_state:
            shown[local] = {name: _local(value) for name, value in former_state[parameter].items()}
    optimizer.state = shown
    try:
        with only(optimizer, groups, turn.one_by_one):
            yield
    finally:
        optimizer.state = former_state
        for parameter, local in locals_of.items():
            local.grad = None
            if local in shown:
                _take_over(former_state[parameter], shown[local], parameter)
        torch.autograd.graph.increment_version(
            [each for p in turn.parameters for each in (p, *_large(optimizer, p))]
        )


def _local(value: object) -> object:
    return memory_of(value) if isinstance(value, torch.Tensor) else value


def _take_over(entries: Entries, left: Entries, parameter: torch.Tensor) -> None:
    """Let a parameter's state be what a step has left on its local tensor."""
    for name in [name for name in entries if name not in left]:
        del entries[name]
    for name, value in left.items():
        if name in entries and _local(entries[name]) is value:
            continue
        entries[name] = sharded_like(parameter, value) if is_large(value) else value
