"""What ``offload(model, optimizer, config)`` is given: refused by name where it is something else."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

import torch
from torch import nn

from tierstore.config import OffloadConfig
from tierstore.errors import UsageError
from tierstore.training.activations import Sections, read_sections, sections_of
from tierstore.training.activations.config.sections import SECTIONS

Config = OffloadConfig | Mapping[str, object] | str | Path | None
log = logging.getLogger("tierstore")

_OF_MANY_PROCESSES = "torch.distributed."
_EVALUATION = "evaluation"  # the folder of runs that only compute, beside what is durable
_HOOKS = "_optimizer_step_pre_hooks"  # which every optimizer of PyTorch has from its __init__ on


class Together(nn.Module):
    """Several models that are offloaded as one: in one store, under one set of quotas.  It is never called.

    Args:
        models: whose names begin with their number: ``0.layers.1.weight``.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        for number, model in enumerate(models):
            self.add_module(str(number), model)


def model_of(given: object) -> nn.Module:
    """Return the model that the first argument is; several are one.

    Raises:
        UsageError: it is something else; the message says what.
    """
    if isinstance(given, Sequence) and given and all(isinstance(each, nn.Module) for each in given):
        models = tuple(dict.fromkeys(given))
        return models[0] if len(models) == 1 else Together(models)
    check_is_model(given)
    assert isinstance(given, nn.Module)
    return given


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

    One that has no parameter of the model is named in a warning: it steps as without the library.  One that
    only shows another's groups and state, as ``accelerate`` puts around them, is that other one.

    Raises:
        UsageError: something is no optimizer; the message says what to pass.
    """
    found = tuple(dict.fromkeys(_each(given)))  # who passes a wrapper and what it shows means one
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
        yield _checked(each)


def _checked(given: object) -> torch.optim.Optimizer:
    """Return the optimizer that is given, or the one that it only shows.

    Raises:
        UsageError: it is none, or not all of one.
    """
    if not isinstance(given, torch.optim.Optimizer):
        raise UsageError(_why_not(given))
    if any(kind.__module__.startswith(_OF_MANY_PROCESSES) for kind in type(given).__mro__):
        raise UsageError(
            f"{_what(given)} steps or averages parameters of several processes by itself, which the store "
            "does not see. Pass an optimizer of torch.optim, whose state is offloaded; to train in several "
            "processes wrap the model in DistributedDataParallel."
        )
    if _HOOKS in vars(given):  # whoever was made as an optimizer steps by itself
        return given
    name, inner = _held_by(given)
    if inner is None:
        raise UsageError(
            f"{_what(given)} has not called the __init__ of torch.optim.Optimizer: nobody can tell when it "
            "steps."
        )
    if given.param_groups is inner.param_groups and given.state is inner.state:
        return _checked(inner)
    raise UsageError(
        f"{_what(given)} has state or groups beside those of the {_what(inner)} in its `.{name}`, and has "
        f"not called the __init__ of torch.optim.Optimizer. Pass that {_what(inner)}: what the wrapper does "
        "beside with parameters is served as it uses them, and its own state stays where it is."
    )


def _held_by(given: object) -> tuple[str, torch.optim.Optimizer | None]:
    """Return the optimizer that an object holds, and under which name."""
    held = vars(given).items() if hasattr(given, "__dict__") else ()
    for name, value in held:
        if isinstance(value, torch.optim.Optimizer):
            return name, value
    return "", None


def _why_not(given: object) -> str:
    if isinstance(given, type) and issubclass(given, torch.optim.Optimizer):
        return f"{given.__name__} is a class. Pass an optimizer: {given.__name__}(model.parameters(), ...)."
    name, inner = ("", None) if isinstance(given, type) else _held_by(given)
    if inner is not None:
        return f"{_what(given)} is no torch.optim.Optimizer. Pass the {_what(inner)} in its `.{name}`."
    return (
        f"{_what(given)} is no torch.optim.Optimizer. Pass the optimizer that it works with: "
        "what it does beside with parameters, gradients and state is served as it uses them."
    )


def _what(given: object) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__


def settings_of(config: Config) -> tuple[OffloadConfig, Sections]:
    """Return what a configuration says, whatever form it came in."""
    if config is None:
        return OffloadConfig(), Sections()
    if isinstance(config, OffloadConfig):
        return config, Sections()
    if isinstance(config, str | Path):
        return OffloadConfig.from_yaml(config), read_sections(config)
    if any(section in config for section in SECTIONS):
        return OffloadConfig.from_document(config), sections_of(config)
    return OffloadConfig.from_mapping(config), Sections()


def for_evaluation(settings: OffloadConfig) -> OffloadConfig:
    """Return the configuration of a run that only computes: it leaves what is durable alone."""
    if not settings.durable:
        return settings
    given = settings.offload_path
    path = Path(given if isinstance(given, str | PurePath) else given[0]) / _EVALUATION
    return replace(settings, durable=False, offload_path=str(path))
