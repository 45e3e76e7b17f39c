"""What training keeps beside large tensors, as JSON: options, scalars, and what a caller adds.

Values are plain ones, lists, tuples, dicts and tensors of them.  JSON has neither tuples nor keys that
are no text, and tensors go elsewhere: each of these becomes a mapping that says what it is.  Nothing is
pickled, so that reading a checkpoint runs no code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch

from tierstore.errors import UsageError
from tierstore.quoting import quoted

Sources = dict[str, torch.Tensor]
"""Tensors that a document refers to, by name."""

_MOST_LEVELS = 100  # of what a document may nest

Encode = Callable[[object, str], object]
Groups = list[list[str]]

_KINDS: dict[str, Callable[[Any], object]] = {"tuple": tuple, "list": list, "dict": dict, "counter": Counter}


def encode(value: object, name: str, sources: Sources) -> object:
    """Return a value as JSON; a tensor goes to ``sources`` and is referred to by its name.

    Args:
        value: to be encoded.
        name: what messages call it.
        sources: of tensors.

    Raises:
        UsageError: a value that a checkpoint cannot hold; the message names it.
    """
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        unique = name
        while unique in sources:  # keys of dicts may be anything
            unique += "'"
        sources[unique] = value
        return {"tensor": unique, "device": "cpu" if value.dim() else str(value.device)}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [encode(each, f"{name}/{number}", sources) for number, each in enumerate(value)]}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[_plain(k, name), encode(each, f"{name}/{k}", sources)] for k, each in value.items()]}
    return _plain(value, name)


def _plain(value: object, name: str) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(f"{name!r} is a {type(value).__name__}, which a checkpoint cannot hold.")


def why_not_decodable(value: object, tensors: Container[str], levels: int = _MOST_LEVELS) -> str | None:
    """Say why `decode` cannot read what somebody hands in; ``None``: it can.

    Args:
        value: JSON.
        tensors: names of those that can be read.
        levels: how deep it may nest.
    """
    if not isinstance(value, dict):
        return None if _is_plain(value) else f"{quoted(value)} is no encoded value"
    if levels == 0:
        return f"it nests more than {_MOST_LEVELS} levels deep"
    if value.keys() == {"tensor", "device"}:
        return _why_no_tensor(value["tensor"], value["device"], tensors)
    kind, members = next(iter(value.items())) if len(value) == 1 else (None, None)
    if kind not in _KINDS or not isinstance(members, list):
        return f"{quoted(value)} is no encoded value"
    if kind in ("dict", "counter"):
        if not all(isinstance(pair, list) and len(pair) == 2 and _is_plain(pair[0]) for pair in members):
            return f"{quoted(value)} is no encoded mapping"
        members = [each for _, each in members]
    faults = (why_not_decodable(each, tensors, levels - 1) for each in members)
    return next((fault for fault in faults if fault is not None), None)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _why_no_tensor(name: object, device: object, tensors: Container[str]) -> str | None:
    if not isinstance(name, str) or name not in tensors:
        return f"no tensor {quoted(name)} can be read"
    try:
        if not isinstance(device, str):
            return f"{quoted(device)} is no device"
        torch.empty(0, device=torch.device(device))
    except (
        RuntimeError,
        AssertionError,
        ModuleNotFoundError,
        AttributeError,
        ImportError,
        NotImplementedError,
    ):
        return f"the device {quoted(device)} of {quoted(name)} is not there"
    return None


def decode(value: object, read: Callable[[str], torch.Tensor]) -> object:
    """Return what `encode` was given.

    Args:
        value: JSON.
        read: returns a tensor by its name, wherever it is to be.
    """
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return read(value["tensor"]).to(value["device"])
    ((kind, members),) = value.items()
    if kind in ("tuple", "list"):
        return _KINDS[kind](decode(each, read) for each in members)
    return _KINDS[kind]({key: decode(each, read) for key, each in members})


def describe_optimizer(
    index: int,
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[torch.Tensor],
    name_of: Callable[[torch.Tensor], str],
    encode_one: Encode,
) -> dict[str, object]:
    """Return an optimizer's groups and state as JSON.

    Args:
        index: which of the model's optimizers it is.
        optimizer: to be described.
        parameters: those that have state, in order.
        name_of: returns a parameter's name.
        encode_one: encodes one value, by what messages call it.
    """
    groups = [
        {
            "params": [name_of(p) for p in group["params"]],
            "options": {
                name: encode_one(value, f"{index}/group {number}/{name}")
                for name, value in group.items()
                if name != "params"
            },
        }
        for number, group in enumerate(optimizer.param_groups)
    ]
    state = {
        name_of(parameter): {
            key: encode_one(value, f"{index}/{name_of(parameter)}/{key}")
            for key, value in optimizer.state[parameter].items()
        }
        for parameter in parameters
    }
    return {"groups": groups, "state": state}


def parameters_by_group(optimizer: torch.optim.Optimizer, name_of: Callable[[torch.Tensor], str]) -> Groups:
    """Return the names of the parameters that an optimizer trains, group by group."""
    return [[name_of(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


def not_in_the_model(parameter: object) -> UsageError:
    """Return the refusal of what an optimizer trains and a checkpoint cannot name."""
    what = (
        f"a parameter of shape {list(parameter.shape)}" if isinstance(parameter, torch.Tensor) else parameter
    )
    return UsageError(f"an optimizer trains {what} that is not in the model; a checkpoint cannot name it.")
