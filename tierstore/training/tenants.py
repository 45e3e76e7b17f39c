"""What is known of guarded tensors: whose each is, and who looks after it.

Nothing is set on users' objects: a tensor is known by its identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from tierstore.training.binding import Binding, Bindings, natively
from tierstore.training.homes import Where
from tierstore.training.layout import Place


class Warden(Protocol):
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


class Tenant(NamedTuple):
    """What is known of one guarded tensor."""

    tensor: torch.Tensor  # keeps its id taken
    binding: Binding
    number: int
    warden: Warden

    @property
    def place(self) -> Place:
        """Where it lies in its bundle."""
        return self.binding.places[self.number]

    @property
    def is_abroad(self) -> bool:
        """Whether its bytes are elsewhere."""
        return self.binding.where[self.number] is Where.ABROAD


Needed = dict[Warden, list[Binding]]
"""Which bundles something needs, by who looks after them."""

_tenants: dict[int, Tenant] = {}
"""By the tensor's id.  Nothing is set on users' objects."""


def enrol(binding: Binding, warden: Warden) -> None:
    """Let the guard know whom to ask about a binding's tensors."""
    for number, tensor in enumerate(binding.tensors):
        _tenants[id(tensor)] = Tenant(tensor, binding, number, warden)


def dismiss(binding: Binding) -> None:
    """Forget a binding's tensors."""
    for tensor in binding.tensors:
        _tenants.pop(id(tensor), None)


def tenant_of(tensor: object) -> Tenant | None:
    """Return what is known of a tensor; ``None`` if nobody guards it."""
    tenant = _tenants.get(id(tensor))
    return tenant if tenant is not None and tenant.tensor is tensor else None


def is_poisoned(tenant: Tenant) -> bool:
    """Say whether a tensor's bytes are away: what it has natively is its poison."""
    binding, tensor = tenant.binding, tenant.tensor
    poison = next(p for t, p in zip(binding.tensors, binding.poisons, strict=True) if t is tensor)
    with natively():
        return bool(tensor.untyped_storage()._cdata == poison.untyped_storage()._cdata)  # noqa: SLF001
