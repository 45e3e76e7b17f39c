"""Which modules of a model are its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from tierstore.errors import UsageError


@dataclass(frozen=True, slots=True)
class Layers:
    """The repeated layers of a model, in order.

    Attributes:
        name: of the module that holds them; "" is the model itself.
        modules: one a layer.
    """

    name: str
    modules: tuple[nn.Module, ...]

    def paths(self, layer_id: int) -> list[tuple[str, ...]]:
        """Return the path of every submodule of a layer: names counted from the layer."""
        named = self.modules[layer_id].named_modules(remove_duplicate=False)
        return [tuple(name.split(".")) for name, _ in named if name]


def find_layers(model: nn.Module, name: str | None = None) -> Layers:
    """Find the layers of a model.

    Args:
        model: any module.
        name: of the module whose children they are; ``None``: the ``nn.ModuleList`` or ``nn.Sequential``
            of children of one class that has the most parameters, the outermost of those.

    Raises:
        UsageError: there is none, or nothing of that name; the message says what there is.
    """
    if name is not None:
        return _named(model, name)
    found: tuple[int, str, Sequence[nn.Module]] | None = None
    for path, module in model.named_modules():
        if not _is_of_like_modules(module):
            continue
        count = sum(parameter.numel() for parameter in module.parameters())
        if found is None or count > found[0]:
            found = (count, path, list(module.children()))
    if found is None:
        raise UsageError(
            "no repeated layers were found: there is no nn.ModuleList or nn.Sequential of modules of one "
            f"class. Name what holds them, as in layers='model.layers'; {_offered(model)}"
        )
    return Layers(found[1], tuple(found[2]))


def _named(model: nn.Module, name: str) -> Layers:
    try:
        holder = model.get_submodule(name)
    except AttributeError as cause:
        raise UsageError(f"the model has no module {name!r}; {_offered(model)}", key=name) from cause
    modules = tuple(holder.children())
    if not modules:
        raise UsageError(
            f"the module {name!r} holds no layers: it has no submodules; {_offered(model)}", key=name
        )
    return Layers(name, modules)


def _is_of_like_modules(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    children = list(module.children())
    is_trained = any(True for _ in module.parameters())
    return is_trained and len(children) > 0 and len({type(child) for child in children}) == 1


def _offered(model: nn.Module) -> str:
    names = [
        name
        for name, module in model.named_modules()
        if name and isinstance(module, nn.ModuleList | nn.Sequential)
    ]
    return f"lists of modules in it: {', '.join(names) or 'none'}"
