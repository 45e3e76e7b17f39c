"""What a program's function returned: a model, and what else is needed to train it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tierstore.errors import UsageError
from tierstore.torch_private import tree_map_only

Inputs = torch.Tensor | Sequence[object] | Mapping[str, object]
"""What a model is called with: one value, values by position, or by name."""
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
Built = nn.Module | tuple[nn.Module, Inputs] | tuple[nn.Module, Inputs, Optimizers]
"""What a function returns that builds a model: it, with inputs, and with optimizers."""
Loss = Callable[[nn.Module, Inputs], torch.Tensor]
MakeOptimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]

_RETURNS = "a model, (model, inputs) or (model, inputs, optimizer)"


@dataclass(frozen=True)
class Trained:
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
) -> Trained:
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
    return Trained(model, inputs, optimizers)


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


# ---------------------------------------------------------------------- inputs that nobody gave


def example_inputs(model: nn.Module, batch: int, sequence: int | None) -> Inputs:
    """Return inputs of a model that came without.

    Args:
        model: one of transformers', or one that begins with an embedding or a linear layer.
        batch: how many.
        sequence: how long each is; ``None``: 1 token, or no such dimension.

    Raises:
        UsageError: what it is given cannot be told from it.
    """
    taken = _names_taken(model)
    if "input_ids" in taken:
        tokens = torch.zeros((batch, sequence or 1), dtype=torch.int64, device="meta")
        return {"input_ids": tokens, **({"labels": tokens} if "labels" in taken else {})}
    first = next((each for each in model.modules() if isinstance(each, _BEGINNINGS)), None)
    if isinstance(first, nn.Linear):
        length = () if sequence is None else (sequence,)
        return (torch.zeros((batch, *length, first.in_features), device="meta", dtype=first.weight.dtype),)
    if isinstance(first, nn.Embedding):
        return (torch.zeros((batch, sequence or 1), dtype=torch.int64, device="meta"),)
    raise UsageError(
        f"what {type(model).__name__} is given cannot be told from it: let the function return "
        "(model, inputs)."
    )


_BEGINNINGS = (
    nn.Linear,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.RNNBase,
    nn.MultiheadAttention,
)


def _names_taken(model: nn.Module) -> set[str]:
    try:
        return set(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        return set()
