"""What is asked of one kind of optimizer: which tensors it keeps for parameters, and the bytes of those.

Who takes state into the store, moves or counts it asks an adapter.  State dicts, checkpoints and what
compares state before and after a step read each parameter's entries, as PyTorch lays them out: what an
adapter yields has to stand there too, under any parameter.

1. A unit is the parameters of one bundle.  Whether an optimizer may be stepped a unit at a time is
   `tierstore.training.optimizers.registered`' to say.
2. What has no adapter of its own keeps tensors in each parameter's entries, as those of ``torch.optim`` do.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from tierstore.optim import FTRL, SGD, Adagrad, LazyAdam, SparseAdam
from tierstore.training.bundles import layout
from tierstore.training.bundles.tensor_slots import memory_of
from tierstore.training.optimizers import registered
from tierstore.units import align_up

Optimizer = torch.optim.Optimizer
Options = Mapping[str, object]


class Taken(enum.Enum):
    """Which tensors of an optimizer's go into the store."""

    ALL = enum.auto()  # the optimizer is known: it makes each for itself
    UNSHARED = enum.auto()  # those that nobody else has an alias of


class StateTensor(NamedTuple):
    """A tensor that an optimizer keeps.

    Attributes:
        parameter: whose bundle's state it is a part of.
        name: of it, among those of the parameter.
        tensor: it.
    """

    parameter: torch.Tensor
    name: str
    tensor: torch.Tensor


class OptimizerAdapter(Protocol):
    """What is asked of one kind of optimizer.  Nothing is changed, and no byte is read."""

    def taken(self, optimizer: Optimizer) -> Taken:
        """Return which of its tensors go into the store."""
        ...

    def state_tensors(self, optimizer: Optimizer, unit: Sequence[torch.Tensor]) -> Iterator[StateTensor]:
        """Yield the tensors with a size that are kept for some parameters."""
        ...

    def state_bytes(self, optimizer: Optimizer, parameter: torch.Tensor, options: Options) -> int:
        """Return the bytes of a parameter's state in the store: as it is, or as it most likely will be.

        Args:
            optimizer: whose.
            parameter: of which.
            options: of its group.
        """
        ...

    def certain_bytes(self, optimizer: Optimizer, parameter: torch.Tensor, options: Options) -> int:
        """Return the least bytes of a parameter's state: what there is, or what a step makes for certain."""
        ...


class EntriesAdapter:
    """Of optimizers that keep tensors in each parameter's entries (``optimizer.state[p]["momentum"]``)."""

    def taken(self, optimizer: Optimizer) -> Taken:
        """See `OptimizerAdapter.taken`."""
        return Taken.ALL if registered.is_per_parameter(optimizer) else Taken.UNSHARED

    def state_tensors(self, optimizer: Optimizer, unit: Sequence[torch.Tensor]) -> Iterator[StateTensor]:
        """See `OptimizerAdapter.state_tensors`."""
        for parameter in unit:
            entries = optimizer.state.get(parameter)
            if isinstance(entries, dict):
                for name, value in entries.items():
                    if isinstance(value, torch.Tensor) and value.dim() > 0:
                        yield StateTensor(parameter, name, value)

    def state_bytes(self, optimizer: Optimizer, parameter: torch.Tensor, options: Options) -> int:
        """See `OptimizerAdapter.state_bytes`."""
        if _has_entries(optimizer, parameter):
            tensors = self.state_tensors(optimizer, [parameter])
            return sum(_aligned(each.tensor, memory_of(each.tensor).numel()) for each in tensors)
        return sum(_aligned(parameter, numel) for numel in _expected(optimizer, parameter, options))

    def certain_bytes(self, optimizer: Optimizer, parameter: torch.Tensor, options: Options) -> int:
        """See `OptimizerAdapter.certain_bytes`.

        Of optimizers that are neither PyTorch's nor ours, and of those whose state may be smaller, nothing is
        certain.
        """
        if _has_entries(optimizer, parameter):
            tensors = [memory_of(each.tensor) for each in self.state_tensors(optimizer, [parameter])]
            return sum(min(each.nbytes, each.untyped_storage().nbytes()) for each in tensors)
        is_certain = type(optimizer) in _CERTAIN and registered.is_known(optimizer)
        memory = memory_of(parameter)
        return _copies(optimizer, options) * memory.nbytes if is_certain and 0 not in memory.stride() else 0


_ENTRIES = EntriesAdapter()
_adapters: dict[type[Optimizer], OptimizerAdapter] = {}


def add_adapter(kind: type[Optimizer], adapter: OptimizerAdapter) -> None:
    """Let what is asked of optimizers of a class be asked of an adapter; subclasses are not covered."""
    _adapters[kind] = adapter


def adapter_of(optimizer: Optimizer) -> OptimizerAdapter:
    """Return the adapter of an optimizer."""
    return _adapters.get(type(optimizer), _ENTRIES)


def _has_entries(optimizer: Optimizer, parameter: torch.Tensor) -> bool:
    entries = optimizer.state.get(parameter)
    return isinstance(entries, dict) and bool(entries)


def _aligned(like: torch.Tensor, numel: int) -> int:
    return align_up(numel * like.element_size(), layout.ALIGNMENT_BYTES)


def _expected(optimizer: Optimizer, parameter: torch.Tensor, options: Options) -> list[int]:
    """Return how many elements each tensor has that an optimizer most likely makes for a parameter."""
    if isinstance(optimizer, torch.optim.Adafactor) and parameter.dim() > 1:
        *batch, rows, columns = parameter.shape
        return [math.prod((*batch, rows)), math.prod((*batch, columns))]  # a mean of each row and column
    return [memory_of(parameter).numel()] * _copies(optimizer, options)


def _copies(optimizer: Optimizer, options: Options) -> int:
    return next((count for kind, count in _STATE_COPIES.items() if isinstance(optimizer, kind)), _two)(
        options
    )


def _two(options: Options) -> int:
    del options
    return 2


def _of_momentum(options: Options) -> int:
    return 1 if options.get("momentum") else 0


_STATE_COPIES: dict[type[Optimizer], Callable[[Options], int]] = {
    torch.optim.SGD: _of_momentum,
    SGD: _of_momentum,
    torch.optim.Adam: lambda options: 3 if options.get("amsgrad") else 2,
    torch.optim.RMSprop: lambda options: 1 + bool(options.get("momentum")) + bool(options.get("centered")),
    torch.optim.Adagrad: lambda _: 1,
    Adagrad: lambda _: 1,
    torch.optim.ASGD: lambda _: 1,
    torch.optim.Adafactor: lambda _: 1,  # of a vector
    torch.optim.LBFGS: lambda _: 0,
    torch.optim.Muon: lambda _: 1,
}
"""How many tensors of the parameter's size an optimizer keeps; others are taken to keep two."""

_CERTAIN = frozenset(
    {
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad),
        *(torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Rprop),
        *(FTRL, SGD, Adagrad, LazyAdam, SparseAdam),
    }
)
"""Those that keep as many tensors of the parameter's size and type, whatever its shape."""
