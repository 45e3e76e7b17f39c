"""What ``offload(model, optimizer, config)`` is given: refused by name where it is something else."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from tierstore.config import OffloadConfig
from tierstore.errors import UsageError

log = logging.getLogger("tierstore")


def check_is_model(given: object) -> None:
    """Refuse what is no module.

    Raises:
        UsageError: it says what it is.
    """
    if not isinstance(given, nn.Module):
        raise UsageError(
            f"the first argument is the model, an instance of torch.nn.Module: {_what(given)} is none."
        )


def optimizers_of(given: object, model: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that the second argument is: one, several or none.

    One that has no parameter of the model is named in a warning: it steps as without the library.

    Raises:
        UsageError: something is no optimizer; the message says what to pass.
    """
    found = tuple(_each(given))
    own = set(model.parameters())
    for optimizer in found:
        if own and own.isdisjoint(each for group in optimizer.param_groups for each in group["params"]):
            log.warning(
                "%s trains no parameter of the %s that is offloaded: its state stays where it is",
                type(optimizer).__name__,
                type(model).__name__,
            )
    return found


def _each(given: object) -> Iterator[torch.optim.Optimizer]:
    if given is None:
        return
    if isinstance(given, Mapping | str | Path | OffloadConfig):
        raise UsageError(
            f"the second argument is the optimizer, not the configuration ({_what(given)}): "
            "offload(model, optimizer, config), or offload(model, None, config) without one."
        )
    for each in given if isinstance(given, Sequence) else (given,):
        if not isinstance(each, torch.optim.Optimizer):
            raise UsageError(_why_not(each))
        yield each


def _why_not(given: object) -> str:
    if isinstance(given, type) and issubclass(given, torch.optim.Optimizer):
        return f"{given.__name__} is a class. Pass an optimizer: {given.__name__}(model.parameters(), ...)."
    inner = getattr(given, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):
        return f"{_what(given)} is no torch.optim.Optimizer. Pass the {_what(inner)} in its `.optimizer`."
    return (
        f"{_what(given)} is no torch.optim.Optimizer. Pass the optimizer that it works with: "
        "what it does beside with parameters, gradients and state is served as it uses them."
    )


def _what(given: object) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
