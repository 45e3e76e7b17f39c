"""Inputs of a model that came without any: their form alone, as nothing has values here."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from tierstore.errors import UsageError

Inputs = torch.Tensor | Sequence[object] | Mapping[str, object]
"""What a model is called with: one value, values by position, or by name."""

_LABELS_OF_TOKENS = (
    "LMHeadModel",
    "LM",
    "ForConditionalGeneration",
    "ForTokenClassification",
    "ForPreTraining",
)
_LABELS_OF_ALL = ("ForSequenceClassification", "ForImageClassification")
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


def example_inputs(model: nn.Module, batch: int, sequence: int | None) -> Inputs:
    """Return inputs of a model that came without.

    Args:
        model: one of transformers' that takes tokens or images, or one that begins with an embedding or a
            linear layer.
        batch: how many.
        sequence: how long each is; ``None``: 1 token, or no such dimension.

    Raises:
        UsageError: what it is given cannot be told from it.
    """
    taken = _names_taken(model)
    if "input_ids" in taken:
        return _tokens(model, taken, batch, sequence or 1)
    if "pixel_values" in taken:
        return _images(model, taken, batch)
    first = next((each for each in model.modules() if isinstance(each, _BEGINNINGS)), None)
    if isinstance(first, nn.Linear):
        length = () if sequence is None else (sequence,)
        return (torch.zeros((batch, *length, first.in_features), device="meta", dtype=first.weight.dtype),)
    if isinstance(first, nn.Embedding):
        return (torch.zeros((batch, sequence or 1), dtype=torch.int64, device="meta"),)
    raise _not_told(model)


def _not_told(model: nn.Module) -> UsageError:
    return UsageError(
        f"what {type(model).__name__} is given cannot be told from it: let a function of yours return "
        "(model, inputs)."
    )


def _names_taken(model: nn.Module) -> set[str]:
    try:
        return set(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        return set()


def _tokens(model: nn.Module, taken: set[str], batch: int, sequence: int) -> Inputs:
    tokens = torch.zeros((batch, sequence), dtype=torch.int64, device="meta")
    return {"input_ids": tokens, **_labels(model, taken, tokens)}


def _images(model: nn.Module, taken: set[str], batch: int) -> Inputs:
    config: object = getattr(model, "config", None)
    side, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
    if not isinstance(side, int) or not isinstance(channels, int):
        raise _not_told(model)
    dtype = next((each.dtype for each in model.parameters()), torch.get_default_dtype())
    images = torch.zeros((batch, channels, side, side), device="meta", dtype=dtype)
    return {"pixel_values": images, **_labels(model, taken, images)}


def _labels(model: nn.Module, taken: set[str], values: torch.Tensor) -> dict[str, object]:
    """Return labels where a model's class says which form they have."""
    name = type(model).__name__
    if "labels" not in taken:
        return {}
    if name.endswith(_LABELS_OF_TOKENS) and values.dim() == 2:
        return {"labels": values}
    if name.endswith(_LABELS_OF_ALL):
        return {"labels": torch.zeros((values.shape[0],), dtype=torch.int64, device="meta")}
    return {}
