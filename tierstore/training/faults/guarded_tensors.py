"""What is known of guarded tensors: whose each is, and who looks after it.

Nothing is set on users' objects: a tensor is known by its identity.  Nor does anything here keep a run: what
is known lives as long as the binding does.  Where a run is dropped without being closed, and a tensor of it
is kept that does not keep the run, every use of that raises.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from tierstore.training.bundles.binding import Where
from tierstore.training.bundles.bindings import Binding, Bindings, natively
from tierstore.training.bundles.layout import TensorLayout
from tierstore.training.bundles.placeholders import Placeholder, looks_of
from tierstore.training.bundles.tensor_slots import memory_of


class FaultHandler(Protocol):
    """Who looks after guarded tensors: one for each offloaded model."""

    bindings: Bindings

    def watch_saved(self) -> AbstractContextManager[None]:
        """Turn saved aliases of bundles into references, inside the context."""
        ...

    def gradient_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return what ``tensor.grad`` is."""
        ...

    def set_gradient(self, tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Do what ``tensor.grad = gradient`` means."""
        ...

    def entry_of_state_dict(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return an entry for it while a ``state_dict`` is being made, else ``None``."""
        ...

    def entry(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an entry for it, as of a state dict."""
        ...

    def begin_use(self, bindings: Sequence[Binding]) -> None:
        """Tensors of ``bindings`` are about to be used."""
        ...

    def note_write(self) -> None:
        """Tensors may have been written in a way that version counters do not tell."""
        ...

    def requires_grad_changed(self, tensor: torch.Tensor) -> None:
        """Take in that ``requires_grad`` was set."""
        ...


class GuardedTensor(NamedTuple):
    """What is known of one guarded tensor."""

    tensor: torch.Tensor  # keeps its id taken as long as the binding lives
    binding: Binding
    number: int
    fault_handler: FaultHandler

    @property
    def place(self) -> TensorLayout:
        """Where it lies in its bundle."""
        return self.binding.places[self.number]

    @property
    def is_abroad(self) -> bool:
        """Whether its bytes are elsewhere."""
        return self.binding.where[self.number] is Where.ABROAD


Needed = dict[FaultHandler, list[Binding]]
"""Which bundles something needs, by who looks after them."""

_bindings: dict[int, weakref.ref[Binding]] = {}
"""By the tensor's id."""


def enrol(binding: Binding, fault_handler: FaultHandler) -> None:
    """Let the guard know whom to ask about a binding's tensors."""
    left = [
        (id(tensor), weakref.ref(tensor), plain)
        for tensor, plain in zip(binding.tensors, binding.plain, strict=True)
    ]
    home = weakref.ref(binding, functools.partial(_desert, left, binding.places))
    for number, tensor in enumerate(binding.tensors):
        binding.guarded_tensors[id(tensor)] = GuardedTensor(tensor, binding, number, fault_handler)
        _bindings[id(tensor)] = home


def dismiss(binding: Binding) -> None:
    """Forget a binding's tensors."""
    for number in binding.guarded_tensors:
        _bindings.pop(number, None)
    binding.guarded_tensors = {}


def _desert(
    left: Sequence[tuple[int, weakref.ref[torch.Tensor], type]],
    places: Sequence[TensorLayout],
    home: weakref.ref[Binding],
) -> None:
    """A binding has died with tensors that were not given back: whoever has one is told when it is used."""
    for index, (number, reference, plain) in enumerate(left):
        if _bindings.get(number) is not home:
            continue
        del _bindings[number]
        tensor = reference()
        if tensor is not None:
            name = places[index].name
            text = (
                f"the values of {name!r} are gone: the run was dropped without run.close(). "
                "Load them again, or set p.data."
            )
            Placeholder(plain, name, text, looks_of(places)[index], tensor.device).put_on(tensor)


def guarded_tensor_of(tensor: object) -> GuardedTensor | None:
    """Return what is known of a tensor; ``None`` if nobody guards it."""
    number = id(tensor)
    home = _bindings.get(number)
    binding = None if home is None else home()
    guarded_tensor: GuardedTensor | None = None if binding is None else binding.guarded_tensors.get(number)
    return guarded_tensor if guarded_tensor is not None and guarded_tensor.tensor is tensor else None


def is_poisoned(guarded_tensor: GuardedTensor) -> bool:
    """Say whether a tensor's bytes are away: what it has natively is its poison."""
    binding, tensor = guarded_tensor.binding, guarded_tensor.tensor
    poison = next(p for t, p in zip(binding.tensors, binding.poisons, strict=True) if t is tensor)
    with natively():
        return bool(memory_of(tensor).untyped_storage()._cdata == poison.untyped_storage()._cdata)  # noqa: SLF001
