"""Initial values as ``weights``: a model without values is initialised one module at a time.

A model of random initial values need not be whole in memory either.  A copy of it without any memory stands
for it: a module of the copy whose parameters go into the store next gets memory, is initialised by its own
code and by that of the modules around it, and loses it again.  What this code writes elsewhere is lost.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

import torch
from torch import nn

from tierstore.errors import UsageError
from tierstore.training.bundles.tensor_slots import is_sharded_kind
from tierstore.training.modules.tensor_names import all_names, persistent_buffers

Initialise = Callable[[nn.Module], object]


def reset_parameters(module: nn.Module) -> None:
    """Give a module's parameters their initial values, as PyTorch's modules do it, if it does."""
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, name, None)
        if callable(reset):
            reset()
            return


class InitialValues:
    """What ``weights`` of `tierstore.training.offload` may be: values that a model's own code makes.

    Random numbers are drawn in the order in which parameters go into the store, so that the same seed gives
    the same model, though not that of a model which was built whole.

    Args:
        model: whose parameters have no values.
        initialise: gives the parameters and buffers of a module values; by default its ``reset_parameters``.
            It is called with a module that has parameters of its own, and then with each module around it.

    Attributes:
        path: what messages name.
        names: of all parameters and persistent buffers.
        faults: none.

    Raises:
        UsageError: ``fully_shard`` has sharded the model.
    """

    path = Path("initial values")
    faults: Sequence[str] = ()

    def __init__(self, model: nn.Module, initialise: Initialise = reset_parameters) -> None:
        if any(is_sharded_kind(type(each)) for each in model.parameters()):
            raise UsageError(
                "the model is sharded by fully_shard: InitialValues(...) cannot be used with it, as FSDP "
                "lets nobody copy it. Call model.to_empty(device='cpu') and initialise it before "
                "offload(...), or pass files as weights=..."
            )
        self._initialise = initialise
        self._tensors: dict[str, torch.Tensor] = {each[0]: p for p, each in all_names(model).items()}
        self._tensors |= persistent_buffers(model)
        self.names: Sequence[str] = tuple(self._tensors)
        self._twin = _without_memory(model)
        self._made: dict[str, torch.Tensor] = {}  # of one module, by name

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's sizes."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype | None:
        """Return a tensor's element type."""
        return self._tensors[name].dtype

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor's initial values; one that has values keeps them.

        Raises:
            UsageError: nobody gives it any.
        """
        tensor = self._tensors[name]
        if not tensor.is_meta:
            return tensor.detach().to("cpu", copy=True)
        if name not in self._made:
            self._made = self._initialised(name.rpartition(".")[0])
        return self._made.pop(name)

    def read_rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Refuse to: see `read`."""
        del begin, end
        raise UsageError(f"{name} is read by rows, which nobody initialises by themselves.", key=name)

    def _initialised(self, path: str) -> dict[str, torch.Tensor]:
        """Return what a module's own tensors are initialised to, by name.

        Raises:
            UsageError: nobody gives one of them values.
        """
        module = self._twin.get_submodule(path)
        around = path
        with _lent_memory(module) as lent, torch.no_grad():
            self._initialise(module)
            while around:
                around = around.rpartition(".")[0]
                self._initialise(self._twin.get_submodule(around))
        prefix = f"{path}." if path else ""
        return {prefix + name: _checked(prefix + name, each.detach(), module) for name, each in lent.items()}

    def __enter__(self) -> Self:
        """Return the values."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Forget what was made."""
        self._made = {}


def _without_memory(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters are on the meta device."""
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        looks = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(looks, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


def _checked(name: str, values: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """Return values that somebody has made.

    Raises:
        UsageError: they are those that memory was lent with.
    """
    if values.is_floating_point() and bool(values.isnan().any()):
        raise UsageError(
            f"nobody gives {name!r} initial values: {type(module).__name__} has no reset_parameters() that "
            f"does. "
            "Pass InitialValues(model, initialise) with a function that gives the parameters of a module "
            "values.",
            key=name,
        )
    return values


@contextlib.contextmanager
def _lent_memory(module: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Let a module have other tensors than its own, with memory that says nothing; give them by name."""
    own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    lent: dict[str, torch.Tensor] = {}
    for name, tensor in own.items():
        if tensor.is_meta:
            memory = torch.empty_like(tensor, device="cpu")
            memory.fill_(float("nan")) if tensor.is_floating_point() else memory.zero_()
            is_parameter = isinstance(tensor, nn.Parameter)
            lent[name] = nn.Parameter(memory, tensor.requires_grad) if is_parameter else memory
    try:
        for name, tensor in lent.items():
            setattr(module, name, tensor)
        yield lent
    finally:
        for name in lent:
            setattr(module, name, own[name])
