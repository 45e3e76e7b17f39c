"""What travels together: tensors as bundles.

A *bundle* is one key of the store: one flat buffer of bytes (`tierstore.training.bundles.layout`).  The rules
of grouping:

1. The direct parameters of one module travel together, apart by optimizer and by whether they are
   trained, so that frozen bytes are never written back with trained ones.  What is pinned travels apart from
   what is not, what is used on the host from what is used on the device, what is stepped in one place from
   what is stepped in the other, and what is ignored does not travel.
2. Small modules (below 1 MiB at most, by `tierstore.planning.rules.small_bytes`) travel with other small ones
   of the same parent, up to that size.
3. A parameter that several modules share lies in one bundle, which each of them needs.
4. Parameters whose memory overlaps lie in one bundle, whatever modules and optimizers they belong to.
5. Buffers travel apart from parameters (`tierstore.training.modules.buffers`).
6. What is gathered of several processes together travels together, and its modules do not need it: what they
   compute with is whole, and whoever gathers asks for the parts (`tierstore.training.sharding`).

Knows nothing of stores and tiers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn

from tierstore.training.bundles.layout import lay_out, overlapping, span_of
from tierstore.units import MIB

SMALL_BYTES = MIB


class Content(enum.Enum):
    """What a bundle is made of; the value is what its key begins with."""

    PARAMETERS = "param"
    BUFFERS = "buffer"  # that state dicts and checkpoints hold
    PASSING_BUFFERS = "passing"  # registered with persistent=False: of this run alone


class BundleKind(NamedTuple):
    """What tells parameters apart that must not travel together."""

    optimizer: int | None
    is_trained: bool
    is_pinned: bool
    is_on_host: bool
    target: str | None
    gathered: int | None


@dataclass(slots=True)
class Group:
    """Tensors that travel together.

    Attributes:
        names: the first qualified name of each tensor.
        tensors: in the same order.
        optimizer: the index of the optimizer that trains them; ``None``: none does.
        modules: the modules whose forward needs them.
        is_pinned: whether they stay in the fastest tier.
        content: what they are.
        repeated_bytes: that several of them share, for each beside the first.
        is_on_host: whether these modules compute on the host, beside a device.
        target: where their optimizer computes, if their group of parameters says so.
        gathered: with what else they are gathered, by a number; ``None``: they are whole.
    """

    names: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    optimizer: int | None = None
    modules: list[nn.Module] = field(default_factory=list)
    is_pinned: bool = False
    content: Content = Content.PARAMETERS
    repeated_bytes: int = 0
    is_on_host: bool = False
    target: str | None = None
    gathered: int | None = None

    @property
    def key(self) -> str:
        """The key that they travel under."""
        return f"{self.content.value}/{self.names[0]}"

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        return sum(map(span_of, self.tensors)) - self.repeated_bytes

    def absorb(self, other: Group) -> None:
        """Take in another group's tensors and modules."""
        self.names += other.names
        self.tensors += other.tensors
        self.repeated_bytes += other.repeated_bytes
        self.add_modules(other.modules)

    def add_modules(self, modules: Iterable[nn.Module]) -> None:
        """Take in whose forward needs them."""
        if self.gathered is None:
            self.modules += [module for module in modules if module not in self.modules]


def first_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return every parameter once, under the first of its names."""
    return {parameter: name for name, parameter in model.named_parameters()}


def group_parameters(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    small_bytes: int = SMALL_BYTES,
    *,
    ignored: Container[torch.Tensor] = (),
    pinned: Container[torch.Tensor] = (),
    on_host: Container[torch.Tensor] = (),
    targets: Mapping[torch.Tensor, str] = MappingProxyType({}),
    gathered: Mapping[torch.Tensor, int] = MappingProxyType({}),
) -> list[Group]:
    """Group the parameters of ``model``, in the order of its modules.

    Args:
        model: whose parameters.
        optimizers: parameters of different ones travel apart.
        small_bytes: modules below it travel with others, until they have that many bytes together.
        ignored: parameters that are left out.
        pinned: parameters that stay in the fastest tier.
        on_host: parameters that are used on the host, beside a device.
        targets: where parameters are stepped, of those whose group says so.
        gathered: of parameters of which each process has a part, the number of those gathered together.
    """
    names = first_names(model)
    owners = _optimizer_of_each(optimizers)

    def kind_of(parameter: nn.Parameter) -> BundleKind | None:
        if parameter in ignored:
            return None
        return BundleKind(
            owners.get(parameter),
            parameter.requires_grad,
            parameter in pinned,
            parameter in on_host,
            targets.get(parameter),
            gathered.get(parameter),
        )

    groups: list[Group] = []
    home: dict[torch.Tensor, Group] = {}
    kin = _overlapping([parameter for parameter in names if parameter not in ignored])
    small: dict[tuple[str, BundleKind], Group] = {}
    for path, module in model.named_modules():
        for each, part in _split(module, names, home, kind_of, kin).items():
            kind = (path.rpartition(".")[0], each)
            group = small.get(kind)
            if group is not None and part.nbytes + group.nbytes <= small_bytes:
                group.absorb(part)
            else:
                group = part
                groups.append(group)
                if group.nbytes < small_bytes:
                    small[kind] = group
            home.update(dict.fromkeys(part.tensors, group))
            group.add_modules([module])
    _note_sharers(model, home)
    return groups


def _split(
    module: nn.Module,
    names: Mapping[nn.Parameter, str],
    home: Mapping[torch.Tensor, Group],
    kind_of: Callable[[nn.Parameter], BundleKind | None],
    kin: Mapping[nn.Parameter, Sequence[nn.Parameter]],
) -> dict[BundleKind, Group]:
    """Split the direct parameters of a module that travel and have no group yet, with what shares memory."""
    parts: dict[BundleKind, Group] = {}
    known: set[nn.Parameter] = set()
    for parameter in direct_parameters(module):
        together = () if parameter in home or parameter in known else kin.get(parameter, (parameter,))
        kinds = [kind for kind in map(kind_of, together) if kind is not None]
        if not kinds:
            continue
        kind = _joint(kinds)
        group = parts.setdefault(kind, _group_of(kind))
        group.names += [names[each] for each in together]
        group.tensors += together
        if len(together) > 1:
            group.repeated_bytes += sum(map(span_of, together)) - lay_out(("", each) for each in together)[1]
        known.update(together)
    return parts


def _group_of(kind: BundleKind) -> Group:
    return Group(
        optimizer=kind.optimizer,
        is_pinned=kind.is_pinned,
        is_on_host=kind.is_on_host,
        target=kind.target,
        gathered=kind.gathered,
    )


def _joint(kinds: Sequence[BundleKind]) -> BundleKind:
    """Return the kind of parameters that have to travel together."""
    optimizers = [kind.optimizer for kind in kinds if kind.optimizer is not None]
    return BundleKind(
        optimizers[0] if optimizers else None,
        any(kind.is_trained for kind in kinds),
        any(kind.is_pinned for kind in kinds),
        any(kind.is_on_host for kind in kinds),
        next((kind.target for kind in kinds if kind.target is not None), None),
        kinds[0].gathered,
    )


def _overlapping(parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, list[nn.Parameter]]:
    """Return for each parameter that shares memory with others all of those, itself among them."""
    if not parameters:
        return {}
    parts = [[parameters[number] for number in part] for part in overlapping(parameters)]
    return {parameter: part for part in parts if len(part) > 1 for parameter in part}


def _note_sharers(model: nn.Module, home: Mapping[torch.Tensor, Group]) -> None:
    """Add to each group the modules that share its parameters."""
    for module in model.modules():
        for parameter in direct_parameters(module):
            group = home.get(parameter)
            if group is not None:
                group.add_modules([module])


def direct_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that belong to the module itself."""
    yield from module.parameters(recurse=False)


def _optimizer_of_each(optimizers: Sequence[torch.optim.Optimizer]) -> dict[nn.Parameter, int]:
    owners: dict[nn.Parameter, int] = {}
    for index, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owners.setdefault(parameter, index)
    return owners
