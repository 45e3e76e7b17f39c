r"""What is treated otherwise than the rest: ``ignored=[patterns]`` and ``pinned=[patterns]``.

1. An *ignored* parameter is none of the store's: it stays the ordinary tensor that it is, where it is, and so
   do its gradient and its optimizer state.  On the device they count as the program's.
2. A *pinned* parameter is the store's and never leaves the fastest tier.  Its gradient and its optimizer
   state travel as others do.
3. Patterns are those of swap marks (`tierstore.training.activations.config.patterns`), read from the model
   down: levels separated by ``\.``, each a regular expression that matches a name fully.  A pattern means the
   parameter or buffer that it matches, and all of them below a module that it matches.  One name of what is
   shared is enough.  An ignored buffer does not travel, and a pinned one that does stays where it computes.
4. A pattern that means nothing is logged, as swap marks do.  What is both ignored and pinned is refused.
5. An optimizer that is stepped as a whole sees all its parameters in one place.  If that is host memory, it
   can train nothing that stays on a device: that is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from tierstore.errors import UsageError
from tierstore.quoting import quoted
from tierstore.training.activations.config.patterns import Path, Pattern
from tierstore.training.bundles.grouping import Group
from tierstore.training.modules.buffers import names_of_buffers
from tierstore.training.modules.tensor_names import all_names
from tierstore.training.optimizers.registered import is_per_parameter
from tierstore.training.tables.found_tables import Tables, refuse_pinned, tables_in

log = logging.getLogger("tierstore")

Names = Mapping[torch.Tensor, Sequence[str]]
"""Every name of each tensor."""


@dataclass(frozen=True)
class SelectedTensors:
    """What patterns mean in one model.

    Attributes:
        ignored: the first name of each parameter that the store does not touch.
        pinned: likewise of parameters and buffers that never leave the fastest tier.
        ignored_buffers: likewise of buffers that the store does not touch.
        tables: the first name of each table; they are among what is ignored, as only their rows are the
            store's.
    """

    ignored: Mapping[torch.Tensor, str] = field(default_factory=dict)
    pinned: Mapping[torch.Tensor, str] = field(default_factory=dict)
    ignored_buffers: Mapping[torch.Tensor, str] = field(default_factory=dict)
    tables: Tables = field(default_factory=dict)


def select(model: nn.Module, ignored: Sequence[str], pinned: Sequence[str]) -> SelectedTensors:
    """Return what patterns mean in ``model``; log those that mean nothing.

    Raises:
        ConfigError: a text is no pattern.
        UsageError: something is both ignored and pinned, a table is pinned, two parameters are one table, or
            a pattern names operators.
    """
    tables = tables_in(model)
    parameters = all_names(model) if ignored or pinned else {}
    buffers = names_of_buffers(model) if ignored or pinned else {}
    names: Names = {tensor: each for part in (parameters, buffers) for tensor, each in part.items()}
    left = _meant("ignored", ignored, names)
    selection = SelectedTensors(
        {each: name for each, name in [*left.items(), *tables.items()] if each not in buffers},
        _meant("pinned", pinned, names),
        {each: name for each, name in left.items() if each in buffers},
        tables,
    )
    refuse_pinned(tables, selection.pinned)
    both = [name for each, name in left.items() if each in selection.pinned]
    if both:
        some = ", ".join(map(repr, both[:4]))
        kinds = "parameters and buffers" if any(each in buffers for each in left) else "parameters"
        raise UsageError(
            f"{len(both)} {kinds} are both ignored and pinned ({some}{', ...' if len(both) > 4 else ''}): "
            "the store cannot leave alone what it is to keep on the device. Take them out of one list.",
            key=both[0],
        )
    return selection


def require_one_place(
    ignored: Mapping[torch.Tensor, str],
    groups: Sequence[Group],
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Make sure that optimizers which compute in host memory, beside a device, can step what they train.

    Args:
        ignored: by name.
        groups: of what travels together, which say what is pinned.
        optimizers: that compute there.

    Raises:
        UsageError: one is stepped as a whole and trains what stays on the device.
    """
    pinned = {
        tensor: name
        for group in groups
        if group.is_pinned
        for tensor, name in zip(group.tensors, group.names, strict=True)
    }
    there = dict.fromkeys(pinned, "pinned") | {
        p: "ignored" for p in ignored if p.device.type not in ("cpu", "meta")
    }
    for optimizer in optimizers:
        if not there or is_per_parameter(optimizer):
            continue
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if parameter in there:
                name = {**ignored, **pinned}[parameter]
                kind = type(optimizer).__name__
                raise UsageError(
                    f"{name!r} is {there[parameter]} and stays on the device, and {kind} would step it in "
                    "host memory, together with all others (optimizer_target='cpu'). Set optimizer_target to "
                    f"'device', take it out of the patterns, or, if {kind} treats each parameter by itself, "
                    f"say so before offload(...): tierstore.training.register_optimizer({kind}).",
                    key=name,
                )


def patterns(what: str, given: Sequence[str]) -> Sequence[str]:
    """Return a list of patterns as it was given.

    Raises:
        UsageError: it is one text, not a list.
    """
    if isinstance(given, str):
        raise UsageError(
            f"{what}={quoted(given)}: accepted is a list of patterns, such as [{quoted(given)}]."
        )
    return given


def _meant(what: str, texts: Sequence[str], names: Names) -> dict[torch.Tensor, str]:
    """Return the parameters and buffers that one list of patterns means, in the order of the model."""
    meant = [_pattern(what, text) for text in dict.fromkeys(texts)]
    idle = dict.fromkeys(meant)
    found: dict[torch.Tensor, str] = {}
    for tensor, each in names.items():
        paths = [tuple(name.split(".")) for name in each]
        for pattern in meant:
            if _is_meant(pattern, paths):
                idle.pop(pattern, None)
                found[tensor] = each[0]
    known = {name for each in names.values() for name in each}
    for pattern in idle:
        log.warning(
            "%s '%s' means no parameter or buffer of the model%s",
            what,
            pattern.text,
            _hint(pattern.text, known),
        )
    return found


def _pattern(what: str, text: str) -> Pattern:
    pattern = Pattern(text)
    if pattern.is_aten:
        raise UsageError(f"{what}={text!r} names operators; accepted are patterns of modules and parameters.")
    return pattern


def _is_meant(pattern: Pattern, paths: Iterable[Path]) -> bool:
    """Say whether a pattern matches one of a tensor's names, or a module that it is below."""
    depth = len(pattern.levels)
    return any(pattern.matches(path[:depth]) for path in paths)


def _hint(text: str, known: Iterable[str]) -> str:
    """Say what was probably meant by a name with points."""
    if "." in text and any(name == text or name.startswith(f"{text}.") for name in known):
        return ": levels are separated by a backslash and a point, '{}'".format(text.replace(".", r"\."))
    return ""
