"""What a program's function returned: a model, and what else is needed to train it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tierstore.errors import UsageError
from tierstore.torch_private import tree_map_only
from tierstore.training.tracing.example_inputs import Inputs, example_inputs

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
Built = nn.Module | tuple[nn.Module, Inputs] | tuple[nn.Module, Inputs, Optimizers]
"""What a function returns that builds a model: it, with inputs, and with optimizers."""
Loss = Callable[[nn.Module, Inputs], torch.Tensor]
MakeOptimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]

_RETURNS = "a model, (model, inputs) or (model, inputs, optimizer)"


@dataclass(frozen=True)
class ModelInTraining:
    """A model on the meta device, with all that a step needs.

    Attributes:
        model: it.
        inputs: of one step.
        optimizers: that train it.
    """

    model: nn.Module
    inputs: Inputs
    optimizers: tuple[torch.optim.Optimizer, ...]


def trained_of(
    built: object, make_optimizer: MakeOptimizer | None, batch: int, sequence: int | None
) -> ModelInTraining:
    """Return what was built, whole and on the meta device.

    Args:
        built: what the program's function returned.
        make_optimizer: makes one of the parameters that are trained, if none was returned.
        batch: of inputs that are made up.
        sequence: their length.

    Raises:
        UsageError: it is something else, or what its model is given cannot be made up.
    """
    parts = built if isinstance(built, tuple) else (built,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        raise UsageError(f"it returned {_named(built)}; accepted: {_RETURNS}.")
    model = parts[0]
    optimizers = _optimizers_of(parts[2]) if len(parts) == 3 else ()
    theirs = {id(each) for each in model.parameters()}
    for each in optimizers:
        if not any(id(one) in theirs for group in each.param_groups for one in group["params"]):
            raise UsageError(
                f"{type(each).__name__} trains no parameter of {type(model).__name__}: make it of "
                "model.parameters(), after the model is as it is to be."
            )
    if any(map(is_lazy, model.parameters())):
        raise UsageError(
            f"{type(model).__name__} has parameters without a size: call it once before it is returned."
        )
    if not all(each.is_meta for each in (*model.parameters(), *model.buffers())):
        if optimizers:
            raise UsageError(
                f"parameters or buffers of {type(model).__name__} are not on the meta device, though it was "
                "made under torch.device('meta'): leave out device= and .to() in it."
            )
        model = model.to("meta")
    inputs = _to_meta(parts[1]) if len(parts) > 1 else example_inputs(model, batch, sequence)
    trained = [each for each in model.parameters() if each.requires_grad]
    if not optimizers and make_optimizer is not None and trained:
        optimizers = (make_optimizer(trained),)
    return ModelInTraining(model, inputs, optimizers)


def _named(built: object) -> str:
    if isinstance(built, tuple):
        return f"({', '.join(type(each).__name__ for each in built)})"
    return type(built).__name__


def _optimizers_of(given: object) -> tuple[torch.optim.Optimizer, ...]:
    found = tuple(given) if isinstance(given, list | tuple) else (given,)
    for each in found:
        if not isinstance(each, torch.optim.Optimizer):
            raise UsageError(f"an optimizer is a {type(each).__name__}; accepted: {_RETURNS}.")
    return found


def _to_meta(inputs: object) -> Inputs:
    if not isinstance(inputs, torch.Tensor | list | tuple | Mapping):
        raise UsageError(f"the inputs are {type(inputs).__name__}; accepted: a tensor, a tuple or a mapping.")
    found: Inputs = tree_map_only(
        torch.Tensor, lambda each: each if each.is_meta else each.to("meta"), inputs
    )
    return found


def called_with(model: nn.Module, inputs: Inputs) -> object:
    """Call a model."""
    if isinstance(inputs, torch.Tensor):
        return model(inputs)
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
