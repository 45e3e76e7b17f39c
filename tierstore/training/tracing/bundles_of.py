"""What of a model would travel together, as `tierstore.training.offload` groups it: the data of a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tierstore.errors import UsageError
from tierstore.planning import ByteKind, Datum
from tierstore.planning.fingerprints import fingerprint
from tierstore.planning.rules import small_bytes
from tierstore.training.activations.config.layers import Names, find_layers
from tierstore.training.bundles.grouping import SMALL_BYTES, Content, Group, group_parameters
from tierstore.training.bundles.layout import lay_out
from tierstore.training.modules.buffers import group_buffers
from tierstore.training.modules.forward_needs import needs_of
from tierstore.units import MIB


@dataclass(frozen=True, slots=True)
class Grouping:
    """What decides which tensors travel together.

    Attributes:
        small_bytes: modules below it travel with others of the same parent; small models take less, by
            `tierstore.planning.rules.small_bytes`.
        buffer_min_bytes: what a buffer takes at least that travels; ``None``: none does.
        left_bytes: the room of the fastest tier: with little of it they take less, too; ``None``: enough.
    """

    small_bytes: int = SMALL_BYTES
    buffer_min_bytes: int | None = MIB
    left_bytes: int | None = None

    def __call__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Sequence[Group]:
        """Return the groups of a model: of parameters, then of buffers."""
        model_bytes = sum(each.nbytes for each in model.parameters())
        most_bytes = min(self.small_bytes, small_bytes(self.left_bytes, model_bytes))
        parameters = group_parameters(model, optimizers, most_bytes)
        return [*parameters, *group_buffers(model, self.buffer_min_bytes)]


GroupsOf = Callable[[nn.Module, Sequence[torch.optim.Optimizer]], Sequence[Group]]
"""Returns what of a model travels together: `Grouping` is one; another may know the groups of a run."""


@dataclass(frozen=True)
class Bundles:
    """Groups of a model, and who needs them.

    Attributes:
        groups: by key.
        data: of the groups, by key.
        owners: the key of the bundle of each tensor in one.
        needs: the keys that each module's forward needs, the largest first.
        layers: the number of each repeated layer.
        layer_of: of each key, the layer that its first module belongs to.
    """

    groups: Mapping[str, Group]
    data: Mapping[str, Datum]
    owners: Mapping[torch.Tensor, str]
    needs: Mapping[nn.Module, Sequence[str]]
    layers: Mapping[nn.Module, int]

    @property
    def nbytes(self) -> int:
        """The bytes of all of them."""
        return sum(each.nbytes for each in self.data.values())


def bundles_of(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    grouping: GroupsOf,
    layers: Names,
) -> Bundles:
    """Group a model's tensors.

    Args:
        model: on the meta device.
        optimizers: that train it.
        grouping: what travels together.
        layers: the container of its repeated layers; ``None``: the one that there is, if it is one.

    Raises:
        UsageError: no container is called so.
    """
    groups = {group.key: group for group in grouping(model, optimizers)}
    numbers = _layers_of(model, layers)
    of_module = _numbers_inside(numbers)
    data: dict[str, Datum] = {}
    for key, group in groups.items():
        nbytes = lay_out(zip(group.names, group.tensors, strict=True))[1]
        kind = ByteKind.PARAMETERS if group.content is Content.PARAMETERS else ByteKind.BUFFER
        layer = of_module.get(group.modules[0]) if group.modules else None
        data[key] = Datum(key, nbytes, kind, layer=layer)
    needs = {
        module: sorted((*always, *(() if module.training else beside)), key=lambda key: -data[key].nbytes)
        for module, (always, beside) in needs_of(model, groups).items()
    }
    owners = {tensor: key for key, group in groups.items() for tensor in group.tensors}
    return Bundles(groups, data, owners, needs, numbers)


def fingerprint_of(model: nn.Module) -> str:
    """Return what tells programs of a model from others': by its parameters and buffers."""
    return fingerprint(_named(model))


def _named(model: nn.Module) -> Iterator[tuple[str, int, ByteKind]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.numel() * parameter.element_size(), ByteKind.PARAMETERS
    for name, buffer in model.named_buffers():
        yield name, buffer.numel() * buffer.element_size(), ByteKind.BUFFER


def _layers_of(model: nn.Module, names: Names) -> dict[nn.Module, int]:
    """Return the number of each layer: those named, those that `swap` and `recompute` find, or none."""
    try:
        found = find_layers(model, names)
    except UsageError:
        if names is not None:
            raise
        return {}
    return {module: number for number, module in enumerate(found.values())}


def _numbers_inside(numbers: Mapping[nn.Module, int]) -> dict[nn.Module, int]:
    return {inner: number for layer, number in numbers.items() for inner in layer.modules()}
