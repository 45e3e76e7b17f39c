"""Gradients that wait for the optimizer in the store.

1. Where gradients are stashed, each parameter's gradient is one key, put there as soon as backward has
   accumulated it.  Later backward passes add to it in place, in the order in which PyTorch would.
2. ``p.grad`` is then a *handle*: a guarded tensor over that key, the same object until it is zeroed.
   Nothing is brought before it is used.
3. A gradient that somebody assigned, that is sparse, or that has a graph of its own stays an ordinary
   tensor; so does one that there was room for where backward made it, until it is zeroed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch

from tierstore.store import Store
from tierstore.training import guard
from tierstore.training.binding import Access, Binding, Bindings, natively
from tierstore.training.groups import Place, lay_out
from tierstore.training.tiers import Placement

_Tensor: Any = torch.Tensor  # its properties, seen as the descriptors that they are
_get_grad = _Tensor.grad.__get__
_set_grad = _Tensor.grad.__set__


def native_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that autograd itself sees."""
    with natively():
        return cast("torch.Tensor | None", _get_grad(parameter))


def set_native_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Set the gradient that autograd itself sees."""
    with natively():
        _set_grad(parameter, gradient)


class Gradient:
    """The gradient of one parameter.

    Attributes:
        name: the parameter's.
        binding: ties the handle to the key, while a stash exists.
        stays: whether somebody set it, or it was not stashed at first: it is an ordinary tensor then.
        accumulations: how many backward passes have added to it since the last step.
        known_uses: of the binding, by accumulation and by the optimizer.
    """

    __slots__ = ("accumulations", "binding", "known_uses", "name", "parameter", "stays")

    def __init__(self, name: str, parameter: torch.nn.Parameter) -> None:
        self.name = name
        self.parameter = parameter
        self.binding: Binding | None = None
        self.stays = False
        self.accumulations = 0
        self.known_uses = 0

    @property
    def is_untouched(self) -> bool:
        """Whether it waits in the store and nobody has looked at it since."""
        return self.binding is not None and self.binding.uses == self.known_uses

    def know_uses(self) -> None:
        """Take the uses until now for our own."""
        assert self.binding is not None
        self.known_uses = self.binding.uses

    @property
    def handle(self) -> torch.Tensor | None:
        """What ``p.grad`` is while it is stashed."""
        return None if self.binding is None else self.binding.tensors[0]

    @property
    def usual_key(self) -> str:
        """The key that it is under: the same one in every step, as plans know it by name."""
        return f"grad/{self.name}"

    def new_key(self, store: Store) -> str:
        """Return a key that nothing is under."""
        key = self.usual_key
        while key in store:  # somebody still has an alias of an older gradient
            key += "'"
        return key


class Gradients:
    """All gradients of one model.

    Args:
        store: where they are stashed.
        bindings: that handles belong to.
        warden: who looks after handles.
        placement: of what is stashed.
    """

    def __init__(self, store: Store, bindings: Bindings, warden: guard.Warden, placement: Placement) -> None:
        self._store = store
        self._bindings = bindings
        self._warden = warden
        self._placement = placement
        self._of: dict[torch.Tensor, Gradient] = {}
        self.must_stash: Callable[[], bool] = lambda: False
        self.note_put: Access | None = None
        self.note_change: Callable[[torch.Tensor], None] = lambda _: None  # before a stash changes or goes

    def add(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Look after one parameter's gradient; one that is there already becomes a stash."""
        gradient = Gradient(name, parameter)
        self._of[parameter] = gradient
        self.stash(parameter)

    def find(self, parameter: torch.Tensor) -> Gradient | None:
        """Return the gradient of a parameter; ``None``: it is not one of the model's."""
        return self._of.get(parameter)

    def are_untouched(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether all of their gradients wait in the store and nobody has looked at one since."""
        return all(self._of[parameter].is_untouched for parameter in parameters)

    def staying_bytes(self) -> int:
        """Return the bytes of those that are ordinary tensors until they are zeroed."""
        natives = [native_gradient(each.parameter) for each in self._of.values() if each.stays]
        return sum(native.nbytes for native in natives if native is not None)

    def know_uses(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take all uses until now for our own."""
        for parameter in parameters:
            self._of[parameter].know_uses()

    def __iter__(self) -> Iterator[Gradient]:
        return iter(self._of.values())

    # --- what p.grad means --------------------------------------------------------------------

    def get(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return ``p.grad``."""
        native = native_gradient(parameter)
        if native is not None:
            return native
        gradient = self._of.get(parameter)
        return None if gradient is None else gradient.handle

    def assign(self, parameter: torch.Tensor, value: torch.Tensor | None) -> None:
        """Do what ``p.grad = value`` means."""
        gradient = self._of.get(parameter)
        if gradient is None:
            set_native_gradient(parameter, value)
            return
        if value is not None and value is gradient.handle:
            return
        if value is not None:
            # A guard's class must not get in autograd's way: take the bytes of another's handle.
            value = value.clone() if guard.tenant_of(value) is not None else value
        set_native_gradient(parameter, value)
        gradient.stays = value is not None
        self._forget(gradient)

    # --- stashing -----------------------------------------------------------------------------

    def stash(self, parameter: torch.Tensor) -> None:
        """Bring a gradient that autograd has just accumulated to its key, if it is to wait there."""
        gradient = self._of[parameter]
        fresh = native_gradient(parameter)
        if fresh is None:
            return
        if not self._is_stashable(gradient, fresh):
            gradient.stays = True  # the same object until it is zeroed
            return
        if gradient.binding is None:
            self._put(gradient, fresh)
        elif fresh.requires_grad:
            self._join_graph(gradient, fresh)
            return
        else:
            self.note_change(parameter)
            self._accumulate(gradient.binding, fresh)
        set_native_gradient(parameter, None)
        gradient.accumulations += 1
        gradient.know_uses()

    def _is_stashable(self, gradient: Gradient, fresh: torch.Tensor) -> bool:
        if gradient.binding is not None:
            return True
        return (
            self.must_stash()
            and not gradient.stays
            and not fresh.requires_grad
            and fresh.layout is torch.strided
        )

    def _put(self, gradient: Gradient, fresh: torch.Tensor) -> None:
        key = gradient.new_key(self._store)
        places, nbytes = lay_out([(f"the gradient of {gradient.name}", fresh)])
        poison = poison_for(places[0], fresh.device)
        handle = poison.as_strided(poison.size(), poison.stride())
        binding = Binding(key, places, nbytes, [handle], [guard.guard_of(torch.Tensor)], [poison])
        binding.is_saved_by_reference = False
        binding.after_use = self._placement.after_use
        flat = flat_bytes(fresh, places[0], nbytes)
        with self._bindings.apart():
            if self.note_put is not None:
                self.note_put(binding)
            self._store.put(key, flat, tier=self._placement.start)
        guard.enrol(binding, self._warden)
        handle.__class__ = guard.guard_of(torch.Tensor)
        gradient.binding = binding

    def _accumulate(self, binding: Binding, fresh: torch.Tensor) -> None:
        self._bindings.open(binding)
        try:
            with torch.no_grad():
                binding.tensors[0].add_(fresh)
            binding.is_dirty = True
        finally:
            self._bindings.close(binding)

    def _join_graph(self, gradient: Gradient, fresh: torch.Tensor) -> None:
        """A gradient with a graph of its own is added to a stash: the sum is an ordinary tensor."""
        handle = gradient.handle
        assert handle is not None
        with torch.enable_grad():
            total = handle.clone() + fresh
        set_native_gradient(gradient.parameter, total)
        self._forget(gradient)

    def _forget(self, gradient: Gradient) -> None:
        """Drop the stash; a handle that somebody else still has becomes an ordinary tensor."""
        if gradient.binding is None:
            return
        self.note_change(gradient.parameter)
        binding, gradient.binding = gradient.binding, None
        is_kept = sys.getrefcount(binding.tensors[0]) > _OWN_REFERENCES
        if is_kept:
            with natively():
                kept = binding.places[0].view(self._copy(binding))
        guard.dismiss(binding)
        if is_kept:
            if binding.windows:  # whose end would take the bytes from the handle again
                self._bindings.forsake(binding)
            binding.tensors[0].__class__ = torch.Tensor
            binding.tensors[0].data = kept
        if not self._bindings.release_idle(binding):
            binding.after_use = self._drop  # an alias of it lives on: drop it when that is gone
            return
        self._store.drop(binding.key)

    def _copy(self, binding: Binding) -> torch.Tensor:
        if binding.flat is not None:
            return binding.flat.clone()
        return self._store.get(binding.key)

    def _drop(self, binding: Binding) -> None:
        self._store.drop(binding.key)

    def restore(self) -> None:
        """Make every stashed gradient an ordinary one."""
        for gradient in self._of.values():
            binding = gradient.binding
            if binding is None:
                continue
            gradient.binding = None
            guard.dismiss(binding)
            self._bindings.forsake(binding)
            handle = binding.tensors[0]
            handle.__class__ = torch.Tensor
            handle.data = binding.places[0].view(self._store.get(binding.key))
            set_native_gradient(gradient.parameter, handle)
            self._store.drop(binding.key)

    # --- for the optimizer --------------------------------------------------------------------

    def bindings_of(self, parameters: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, Binding]]:
        """Return the stashes of those parameters that have one."""
        return [
            (parameter, gradient.binding)
            for parameter in parameters
            if (gradient := self._of.get(parameter)) is not None and gradient.binding is not None
        ]

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter has a gradient, wherever it is."""
        gradient = self._of.get(parameter)
        return (gradient is not None and gradient.binding is not None) or native_gradient(
            parameter
        ) is not None


def poison_for(place: Place, device: torch.device) -> torch.Tensor:
    """Return one NaN (or the largest number, where there is none) that looks like the tensor."""
    dtype = place.dtype
    is_inexact = dtype.is_floating_point or dtype.is_complex
    value = float("nan") if is_inexact else True if dtype is torch.bool else torch.iinfo(dtype).max
    try:
        single = torch.full((), value, dtype=dtype, device=device)
    except NotImplementedError:  # the fp8 kinds without a NaN, or without a fill
        single = torch.full((dtype.itemsize,), 0xFF, dtype=torch.uint8, device=device).view(dtype)[0]
    return single.expand(place.shape)


def flat_bytes(tensor: torch.Tensor, place: Place, nbytes: int) -> torch.Tensor:
    """Return a tensor's bytes as a bundle of its own: a view where its memory allows it."""
    tensor = tensor.detach()
    exact = tensor.numel() * tensor.element_size()
    if tensor.stride() == place.stride and exact == nbytes and not (tensor.is_conj() or tensor.is_neg()):
        return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    flat = torch.empty(nbytes, dtype=torch.uint8, device=tensor.device)
    place.view(flat).copy_(tensor)
    return flat


def _count_own_references() -> int:
    """Return what ``sys.getrefcount(binding.tensors[0])`` is when nobody else has the handle.

    The binding's tuple, the guard's table of tenants, and the call's own argument.
    """
    holder = (object(),)
    table = {0: holder[0]}
    count = sys.getrefcount(holder[0])
    del table
    return count


_OWN_REFERENCES = _count_own_references()
