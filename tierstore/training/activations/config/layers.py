"""The repeated layers of a model: what layer numbers in a configuration mean.

They are found as an ``nn.ModuleList`` or ``nn.Sequential`` of modules of one class, or named.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tierstore.errors import UsageError

Names = str | Sequence[str] | None
"""Names of containers, such as ``"model.layers"``; ``None``: to be found."""


def find_layers(model: nn.Module, names: Names = None) -> dict[str, nn.Module]:
    """Return the layers of ``model`` in their order, by their names in it.

    Args:
        model: any module.
        names: of the containers that have the layers as children, one after another.

    Raises:
        UsageError: a name is not there or has no children; or none was given and not exactly one
            container fits: the message names those that do.
    """
    if names is None:
        names = (_the_only_one(model),)
    found: dict[str, nn.Module] = {}
    for name in (names,) if isinstance(names, str) else names:
        found.update(_children(model, name))
    if not found:
        raise UsageError("no container of layers is named: give layers='model.layers', for example.")
    return found


def _children(model: nn.Module, name: str) -> dict[str, nn.Module]:
    try:
        container = model.get_submodule(name)
    except AttributeError as cause:
        near = ", ".join(map(repr, _candidates(model))) or "none that is a list of like modules"
        raise UsageError(f"layers={name!r}: {cause}; containers there are: {near}.", key=name) from cause
    prefix = f"{name}." if name else ""
    children = {prefix + child: module for child, module in container.named_children()}
    if not children:
        raise UsageError(
            f"layers={name!r} is a {type(container).__name__} without children; name the container that "
            "has the layers as its children.",
            key=name,
        )
    return children


def _the_only_one(model: nn.Module) -> str:
    found = _candidates(model)
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(
            f"no nn.ModuleList or nn.Sequential of like modules is in this {type(model).__name__}; name the "
            "container of its layers: layers='model.layers', for example."
        )
    raise UsageError(
        f"several containers of this {type(model).__name__} could be its layers: "
        f"{', '.join(map(repr, found))}. Say which: layers={found[0]!r}, or a list for one after another."
    )


def _candidates(model: nn.Module) -> list[str]:
    """Return the outermost containers of like modules; of blocks, if there are blocks."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if not is_inside and _is_list_of_like(module):
            found[name] = module
    of_blocks = [name for name, each in found.items() if any(True for _ in next(each.children()).children())]
    return of_blocks or list(found)


def _is_list_of_like(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    kinds = {type(child) for child in module}
    least = 1 if isinstance(module, nn.ModuleList) else 2
    return len(kinds) == 1 and len(module) >= least
