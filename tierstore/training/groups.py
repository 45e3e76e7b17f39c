"""What travels together: parameters as bundles, and where each tensor lies in its bundle.

A *bundle* is one key of the store: one flat buffer of bytes in which each tensor begins at a multiple
of 64 bytes.  The rules of grouping:

1. The direct parameters of one module travel together, apart by optimizer and by whether they are
   trained, so that frozen bytes are never written back with trained ones.
2. Small modules (below 1 MiB) travel with other small ones of the same parent, up to that size.
3. A parameter that several modules share lies in one bundle, which each of them needs.

Knows nothing of stores and tiers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from tierstore.units import MIB, align_up

ALIGNMENT_BYTES = 64
SMALL_BYTES = MIB

Stride = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor lies in a bundle, and what it looks like.

    Attributes:
        name: what messages call the tensor.
        shape: its sizes.
        dtype: its element type.
        stride: in elements; dense.
        offset: of its first element from the start of the bundle, in elements.
        nbytes: its bytes.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    stride: Stride
    offset: int
    nbytes: int

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view into the bundle's flat bytes."""
        return flat.view(self.dtype).as_strided(self.shape, self.stride, self.offset)

    @property
    def offset_bytes(self) -> int:
        """Where it begins in the bundle."""
        return self.offset * self.dtype.itemsize


def lay_out(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[tuple[Place, ...], int]:
    """Place tensors one after another; return the places and the bytes of the bundle.

    A tensor alone takes its own bytes and no more, so that it can be stored without a copy.
    """
    places: list[Place] = []
    end_bytes = 0
    for name, tensor in named:
        begin_bytes = align_up(end_bytes, ALIGNMENT_BYTES)
        nbytes = tensor.numel() * tensor.element_size()
        offset = begin_bytes // tensor.element_size()
        places.append(Place(name, tensor.shape, tensor.dtype, dense_stride(tensor), offset, nbytes))
        end_bytes = begin_bytes + nbytes
    return tuple(places), end_bytes if len(places) == 1 else align_up(end_bytes, ALIGNMENT_BYTES)


def dense_stride(tensor: torch.Tensor) -> Stride:
    """Return the tensor's strides if it is dense without overlap, else those of a contiguous one."""
    if tensor.is_contiguous():
        return tensor.stride()
    # `empty_like` preserves the strides of a dense tensor, and makes a contiguous one of any other.
    return torch.empty_like(tensor, device="meta").stride()


def next_version(key: str) -> str:
    """Return the key that a bundle's new values are under until they take the place of the old ones."""
    return f"{key}~next"


@dataclass(slots=True)
class ParameterGroup:
    """Parameters that travel together.

    Attributes:
        names: the first qualified name of each parameter.
        parameters: in the same order.
        optimizer: the index of the optimizer that trains them; ``None``: none does.
        modules: the modules whose forward needs them.
    """

    names: list[str] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)
    optimizer: int | None = None
    modules: list[nn.Module] = field(default_factory=list)

    @property
    def key(self) -> str:
        """The key that they travel under."""
        return f"param/{self.names[0]}"

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        return sum(p.numel() * p.element_size() for p in self.parameters)

    def absorb(self, other: ParameterGroup) -> None:
        """Take in another group's parameters and modules."""
        self.names += other.names
        self.parameters += other.parameters
        self.modules += [module for module in other.modules if module not in self.modules]


def first_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return every parameter once, under the first of its names."""
    return {parameter: name for name, parameter in model.named_parameters()}


def group_parameters(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], small_bytes: int = SMALL_BYTES
) -> list[ParameterGroup]:
    """Group all parameters of ``model``, in the order of its modules.

    Args:
        model: whose parameters.
        optimizers: parameters of different ones travel apart.
        small_bytes: modules below it travel with others, until they have that many bytes together.
    """
    names = first_names(model)
    owners = _optimizer_of_each(optimizers)
    groups: list[ParameterGroup] = []
    home: dict[nn.Parameter, ParameterGroup] = {}
    small: dict[tuple[str, int | None, bool], ParameterGroup] = {}
    for path, module in model.named_modules():
        for is_trained, part in _split(module, names, owners, home):
            kind = (path.rpartition(".")[0], part.optimizer, is_trained)
            group = small.get(kind)
            if group is not None and part.nbytes + group.nbytes <= small_bytes:
                group.absorb(part)
            else:
                group = part
                groups.append(group)
                if group.nbytes < small_bytes:
                    small[kind] = group
            home.update(dict.fromkeys(part.parameters, group))
            group.modules += [module] if module not in group.modules else []
    _note_sharers(model, home)
    return groups


def _split(
    module: nn.Module,
    names: Mapping[nn.Parameter, str],
    owners: Mapping[nn.Parameter, int],
    home: Mapping[nn.Parameter, ParameterGroup],
) -> list[tuple[bool, ParameterGroup]]:
    """Split the direct parameters of a module that have no group yet."""
    parts: dict[tuple[int | None, bool], ParameterGroup] = {}
    for parameter in dict.fromkeys(direct_parameters(module)):
        if parameter in home:
            continue
        kind = (owners.get(parameter), parameter.requires_grad)
        group = parts.setdefault(kind, ParameterGroup(optimizer=kind[0]))
        group.names.append(names[parameter])
        group.parameters.append(parameter)
    return [(kind[1], group) for kind, group in parts.items()]


def _note_sharers(model: nn.Module, home: Mapping[nn.Parameter, ParameterGroup]) -> None:
    """Add to each group the modules that share its parameters."""
    for module in model.modules():
        for parameter in direct_parameters(module):
            if module not in home[parameter].modules:
                home[parameter].modules.append(module)


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
