"""Into the store and out of it: tensors become bundles, and ordinary tensors again.

What is given back lies in host memory that no tensor library allocated, so that a meter of device
memory does not take it for the device's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tierstore.store import Store
from tierstore.training import guard
from tierstore.training.binding import Binding, Bindings, natively, set_data
from tierstore.training.grads import flat_bytes, poison_for
from tierstore.training.groups import Place, lay_out
from tierstore.training.tiers import Placement


def materialise(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Turn a parameter without bytes into one with ``values``: the same object."""
    fresh = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, fresh)


def host_memory(nbytes: int) -> torch.Tensor:
    """Return fresh host memory as a one-dimensional uint8 tensor."""
    return torch.from_numpy(np.empty(nbytes, dtype=np.uint8))


class Adopter:
    """Takes tensors into the store and gives them back.

    Args:
        store: where the bytes go.
        bindings: that the new ones belong to.
        warden: who looks after the tensors.
    """

    def __init__(self, store: Store, bindings: Bindings, warden: guard.Warden) -> None:
        self._store = store
        self._bindings = bindings
        self._warden = warden
        self._scratch = host_memory(0)
        self.nbytes: dict[str, int] = {}
        self._origins: dict[Binding, list[torch.device]] = {}

    def adopt(
        self,
        key: str,
        named: Sequence[tuple[str, torch.Tensor]],
        placement: Placement,
        values: Sequence[torch.Tensor] | None = None,
    ) -> Binding:
        """Put tensors under ``key`` as one bundle, and let a guard watch them.

        Their memory is given back, unless somebody else refers to it.

        Args:
            key: in the store.
            named: the tensors, with what messages call them.
            placement: where they go.
            values: other values for them; those on the meta device have none of their own.
        """
        places, nbytes = lay_out(named)
        tensors = [tensor for _, tensor in named]
        origins = [tensor.device for tensor in tensors]
        with self._bindings.apart():
            self._store.put(key, self._gather(places, nbytes, values or tensors), tier=placement.start)
        return self.bind(key, places, tensors, placement, origins)

    def adopt_held(
        self, key: str, named: Sequence[tuple[str, torch.Tensor]], placement: Placement
    ) -> Binding:
        """Let tensors have the bytes that are under ``key`` already, laid out as `adopt` would.

        Args:
            key: in the store.
            named: the tensors, with what messages call them.
            placement: where the bytes go after use.
        """
        places, _ = lay_out(named)
        tensors = [tensor for _, tensor in named]
        return self.bind(key, places, tensors, placement, [tensor.device for tensor in tensors])

    def bind(
        self,
        key: str,
        places: Sequence[Place],
        tensors: Sequence[torch.Tensor],
        placement: Placement,
        origins: list[torch.device],
    ) -> Binding:
        """Tie tensors to bytes that are under ``key`` already, and let a guard watch them.

        Args:
            key: in the store.
            places: where each tensor lies in its bytes.
            tensors: in the same order; their memory is given back.
            placement: where the bytes go after use.
            origins: where each tensor goes in the end.
        """
        nbytes = self._store.spec(key).nbytes
        for place, tensor in zip(places, tensors, strict=True):
            if tensor.is_meta:
                materialise(tensor, poison_for(place, self._store.device))
        poisons = [poison_for(place, self._store.device) for place in places]
        guards = [guard.guard_of(type(tensor)) for tensor in tensors]
        binding = Binding(key, places, nbytes, tensors, guards, poisons)
        binding.after_use = placement.after_use
        self.nbytes[key] = nbytes
        self._origins[binding] = origins
        guard.enrol(binding, self._warden)
        for tensor, poison, kind in zip(tensors, poisons, guards, strict=True):
            set_data(tensor, poison)
            tensor.__class__ = kind
        return binding

    def _gather(self, places: Sequence[Place], nbytes: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the bytes of a bundle; they are valid until the next call."""
        if len(tensors) == 1:
            return flat_bytes(tensors[0], places[0], nbytes)
        if self._scratch.numel() < nbytes:
            self._scratch = host_memory(nbytes)
        flat = self._scratch[:nbytes]
        with torch.no_grad():
            for place, tensor in zip(places, tensors, strict=True):
                place.view(flat).copy_(tensor)
        return flat

    def copies(self, binding: Binding) -> list[torch.Tensor]:
        """Return independent copies of a bundle's tensors, in host memory."""
        flat = self._store.get(binding.key, device="cpu") if binding.flat is None else binding.flat
        is_alone = len(binding.places) == 1 and binding.flat is None
        cpu = torch.device("cpu")
        return [_own(place, flat, cpu, is_alone=is_alone) for place in binding.places]

    def origins(self) -> dict[torch.Tensor, torch.device]:
        """Return where each tensor goes in the end."""
        return {
            tensor: device
            for binding, devices in self._origins.items()
            for tensor, device in zip(binding.tensors, devices, strict=True)
        }

    def end_adoption(self) -> None:
        """Give the scratch memory back."""
        self._scratch = host_memory(0)

    # --- back ---------------------------------------------------------------------------------

    def restore(self, binding: Binding) -> None:
        """Make a bundle's tensors ordinary ones with their values, where they were before; drop the key."""
        self._bindings.forsake(binding)
        with self._bindings.apart():
            flat = self._store.get(binding.key, device="cpu")
            self._hand_out(binding, flat)
            self._store.drop(binding.key)
        self.nbytes.pop(binding.key, None)

    def _hand_out(self, binding: Binding, flat: torch.Tensor) -> None:
        guard.dismiss(binding)
        devices = self._origins.pop(binding)
        for tensor, place, plain, device in zip(
            binding.tensors, binding.places, binding.plain, devices, strict=True
        ):
            with natively():
                set_data(tensor, _own(place, flat, device, is_alone=len(binding.tensors) == 1))
            tensor.__class__ = plain

    def forget(self, binding: Binding) -> None:
        """Drop a bundle's key; its tensors are nobody's any more."""
        guard.dismiss(binding)
        self._bindings.forsake(binding)
        self._store.drop(binding.key)
        self.nbytes.pop(binding.key, None)
        self._origins.pop(binding, None)


def _own(place: Place, flat: torch.Tensor, device: torch.device, *, is_alone: bool) -> torch.Tensor:
    """Return a tensor's bytes in memory of its own."""
    view = place.view(flat)
    if device.type not in ("cpu", "meta"):  # what had no memory before gets the host's
        return view.to(device)
    if is_alone:
        return view
    memory = host_memory(place.nbytes)
    own = memory.view(place.dtype).as_strided(place.shape, place.stride)
    return own.copy_(view)
