"""Into the store and out of it: tensors become bundles, and ordinary tensors again.

What is given back lies in host memory that no tensor library allocated, so that a meter of device
memory does not take it for the device's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType

import torch

from tierstore.errors import KeyNotFound
from tierstore.outputs import host_memory
from tierstore.store import Store
from tierstore.training import entries, guard, guarded
from tierstore.training.binding import Binding, Bindings, natively, set_data
from tierstore.training.ending import Ending
from tierstore.training.homes import Where
from tierstore.training.identity import aliases_of, has_bytes
from tierstore.training.layout import (
    Place,
    Region,
    fill,
    flat_bytes,
    lay_out,
    pack,
    place_of,
    raw_bytes,
    unpack,
)
from tierstore.training.parts import Part, ground_of
from tierstore.training.poisons import Poisons, poison_for
from tierstore.training.tiers import Placement


def materialise(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Turn a parameter or buffer without bytes into one with ``values``: the same object."""
    fresh = torch.empty(0, dtype=values.dtype, device=values.device)
    if isinstance(tensor, torch.nn.Parameter):
        fresh = torch.nn.Parameter(fresh, requires_grad=tensor.requires_grad)
    set_data(fresh, values)
    torch.utils.swap_tensors(tensor, fresh)


def part_from_base(tensor: torch.Tensor) -> None:
    """Turn a tensor that is a view into one that is none, the same object: its base keeps the memory."""
    if tensor._base is not None:  # noqa: SLF001 - there is no other way to ask
        materialise(tensor, tensor.detach())


def give_values(tensor: torch.Tensor, values: torch.Tensor, device: torch.device) -> None:
    """Give an ordinary tensor values; one on the meta device gets its memory on ``device``."""
    if tensor.is_meta:
        materialise(tensor, values.to(device, tensor.dtype, copy=True))
    else:
        with torch.no_grad():
            fill(tensor, values)


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
        self._scratch: list[torch.Tensor] = []  # that nobody uses now
        self._poisons = Poisons(store.device)
        self.nbytes: dict[str, int] = {}
        self._origins: dict[Binding, list[torch.device]] = {}

    def adopt(
        self,
        key: str,
        named: Sequence[tuple[str, torch.Tensor]],
        placement: Placement,
        values: Sequence[torch.Tensor] | None = None,
        origins: list[torch.device] | None = None,
    ) -> Binding:
        """Put tensors under ``key`` as one bundle, and let a guard watch them.

        Their memory is given back, unless somebody else refers to it.

        Args:
            key: in the store.
            named: the tensors, with what messages call them.
            placement: where they go.
            values: other values for them; those on the meta device have none of their own.
            origins: where each tensor goes in the end; ``None``: where it is.
        """
        with self._bindings.apart():
            places, nbytes = lay_out(named)
            tensors = [tensor for _, tensor in named]
            origins = origins or [tensor.device for tensor in tensors]
            with self._gathered(places, nbytes, values or tensors) as flat:
                self._store.put(key, flat, tier=placement.start)
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
        with self._bindings.apart():
            return self._bind(key, places, tensors, placement, origins)

    def _bind(
        self,
        key: str,
        places: Sequence[Place],
        tensors: Sequence[torch.Tensor],
        placement: Placement,
        origins: list[torch.device],
    ) -> Binding:
        nbytes = self._store.spec(key).nbytes
        poisons = [
            self._poisons.like(place)
            if isinstance(tensor, torch.nn.Parameter)
            else poison_for(place, self._store.device)
            for place, tensor in zip(places, tensors, strict=True)
        ]
        guards = [guarded.guard_of(type(tensor)) for tensor in tensors]
        binding = Binding(key, places, nbytes, tensors, guards, poisons)
        binding.after_use = placement.after_use
        self.nbytes[key] = nbytes
        self._origins[binding] = origins  # from here on `restore_all` gives them back
        for place, tensor in zip(places, tensors, strict=True):
            if tensor.is_meta:
                materialise(tensor, poison_for(place, self._store.device))
        guard.enrol(binding, self._warden)
        for tensor, poison, kind in zip(tensors, poisons, guards, strict=True):
            set_data(tensor, poison)
            tensor.__class__ = kind
        return binding

    @contextmanager
    def _gathered(
        self, places: Sequence[Place], nbytes: int, tensors: Sequence[torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        """Give the bytes of a bundle; they are valid inside the context.  Safe from any thread."""
        if len(tensors) == 1:
            yield flat_bytes(tensors[0], places[0], nbytes)
            return
        try:
            scratch = self._scratch.pop()
        except IndexError:
            scratch = host_memory(0)
        if scratch.numel() < nbytes:
            scratch = host_memory(nbytes)
        flat = scratch[:nbytes]
        with torch.no_grad():
            pack(flat, places, tensors)
        yield flat
        self._scratch.append(scratch)

    def copies(self, binding: Binding) -> list[torch.Tensor]:
        """Return independent copies of a bundle's tensors, in host memory."""
        flat = self._bindings.leased(binding)
        is_fresh = flat is None
        if flat is None:
            flat = self._store.get(binding.key, device="cpu")
        cpu = torch.device("cpu")
        found = _unpack(flat, binding.places, [cpu] * len(binding.places), is_fresh=is_fresh)
        with natively():
            for number in binding.abroad:
                found[number] = binding.tensors[number].detach().to(cpu, copy=True)
        return found

    def origins(self) -> dict[torch.Tensor, torch.device]:
        """Return where each tensor goes in the end."""
        return {
            tensor: device
            for binding, devices in self._origins.items()
            for tensor, device in zip(binding.tensors, devices, strict=True)
        }

    def origins_of(self, binding: Binding) -> dict[torch.Tensor, torch.device]:
        """Return where each tensor of one bundle goes in the end."""
        return dict(zip(binding.tensors, self._origins[binding], strict=True))

    def end_adoption(self) -> None:
        """Give the scratch memory back."""
        self._scratch.clear()

    # --- back ---------------------------------------------------------------------------------

    def restore(self, binding: Binding) -> None:
        """Make a bundle's tensors ordinary ones with their values, where they were before; drop the key.

        Where it fails or is interrupted it may be called again: what it had not done is done then.
        """
        aliases: Sequence[tuple[torch.Tensor, Place]] = ()
        try:
            with natively():
                aliases = [
                    (each, place_of("", each, binding.begin_bytes(each))) for each in aliases_of(binding)
                ]
            self._bindings.forsake(binding)
        finally:  # whatever failed at the end of a lease, the bytes may be there
            if binding in self._origins:
                with self._bindings.apart():
                    self._hand_out(binding, self._store.get(binding.key, device="cpu"), aliases)
        self._drop(binding)

    def restore_all(self, first: Sequence[Binding], ending: Ending) -> None:
        """Restore everything that was adopted; what cannot be is lost, and the rest goes on.

        Args:
            first: the bundles that matter most.
            ending: that this is a part of.
        """
        ending.attempt(self._note_parts_abroad)
        for binding in [*first, *(each for each in list(self._origins) if each not in first)]:
            failure = ending.attempt(functools.partial(self.restore, binding))
            if failure is not None and binding in self._origins:
                ending.attempt(functools.partial(self._lose, binding, ending, failure))

    def _note_parts_abroad(self) -> None:
        for binding in list(self._origins):
            abroad = [number for number in binding.abroad if has_bytes(binding.tensors[number])]
            binding.note_parts(abroad, is_larger=False)

    def _hand_out(
        self, binding: Binding, flat: torch.Tensor, aliases: Sequence[tuple[torch.Tensor, Place]]
    ) -> None:
        """Give tensors their bytes for good; what else is a view of these bytes is one of them then."""
        devices = self._origins[binding]
        others = [place for _, place in aliases]
        everywhere = [*devices, *(torch.device("cpu") for _ in aliases)]
        # All of them are made first: where there is no memory for one, none is pointed at other bytes.
        parts = {
            number: binding.parts.get(number)
            for number, where in enumerate(binding.where)
            if where is Where.HOME
        }
        values = _unpack(flat, [*binding.places, *others], everywhere, is_fresh=True, parts=parts)
        with natively():
            for (alias, _), value in zip(aliases, values[len(devices) :], strict=True):
                set_data(alias, value)
        for number, (tensor, plain) in enumerate(zip(binding.tensors, binding.plain, strict=True)):
            with natively():
                if binding.where[number] is Where.HOME:
                    set_data(tensor, values[number])
                elif devices[number].type not in (tensor.device.type, "meta"):
                    set_data(tensor, _moved(tensor, binding.parts.get(number), devices[number]))
            tensor.__class__ = plain
        entries.release(binding)
        guard.dismiss(binding)
        del self._origins[binding]

    def _lose(self, binding: Binding, ending: Ending, reason: BaseException) -> None:
        guard.dismiss(binding)
        entries.release(binding)
        for tensor, place, plain, poison, where in zip(
            binding.tensors, binding.places, binding.plain, binding.poisons, binding.where, strict=True
        ):
            if where is Where.ABROAD:  # it has its bytes
                tensor.__class__ = plain
                continue
            with natively():
                set_data(tensor, poison)  # it may show bytes of a lease that has ended
            ending.lose(tensor, plain, place.name, reason)
        self._origins.pop(binding, None)

    def _drop(self, binding: Binding) -> None:
        with self._bindings.apart(), suppress(KeyNotFound):
            self._store.drop(binding.key)
        self.nbytes.pop(binding.key, None)

    def forget(self, binding: Binding) -> None:
        """Drop a bundle's key; its tensors are nobody's any more."""
        entries.part_with(binding)
        guard.dismiss(binding)
        self._bindings.forsake(binding)
        self._origins.pop(binding, None)
        self._drop(binding)


def is_deserted(binding: Binding) -> bool:
    """Whether nobody but the library has a bundle's tensors, or refers to its bytes, any more."""
    numbers = range(len(binding.tensors))
    return not binding.is_referred_to and all(
        sys.getrefcount(binding.tensors[number]) <= _OWN_REFERENCES for number in numbers
    )


def _count_own_references() -> int:
    """Return what ``sys.getrefcount(binding.tensors[0])`` is when nobody has the tensor any more.

    The binding's tuple, the guard's table of tenants, and the call's own argument.
    """
    holder = (object(),)
    table = {0: holder[0]}
    count = sys.getrefcount(holder[0])
    del table
    return count


_OWN_REFERENCES = _count_own_references()


def _unpack(
    flat: torch.Tensor,
    places: Sequence[Place],
    devices: Sequence[torch.device],
    *,
    is_fresh: bool,
    parts: Mapping[int, Part | None] = MappingProxyType({}),
) -> list[torch.Tensor]:
    """Return a bundle's tensors in memory of their own; in ``flat`` itself if it is fresh, of one region.

    Args:
        flat: the bundle's bytes.
        places: where each tensor lies in them.
        devices: where each is to be.
        is_fresh: whether nobody else has ``flat``.
        parts: of which larger memory some are parts, and are in it again.
    """

    def own(part: torch.Tensor, region: Region) -> tuple[torch.Tensor, int]:
        device = devices[region.members[0]]
        if device.type == "meta":  # what had no memory before gets the host's
            device = torch.device("cpu")
        if parts and (larger := _in_larger_memory(flat, places, region, parts, device)) is not None:
            return larger
        if device.type != "cpu":
            return part.to(device), region.begin_bytes
        if is_fresh and len(part) == len(flat):
            return part, region.begin_bytes
        return host_memory(len(part)).copy_(part), region.begin_bytes

    return unpack(flat, places, own)


def _in_larger_memory(
    flat: torch.Tensor,
    places: Sequence[Place],
    region: Region,
    parts: Mapping[int, Part | None],
    device: torch.device,
) -> tuple[torch.Tensor, int] | None:
    """Bring a region to the larger memory that its tensors are parts of; return that and where it begins."""
    members = [places[number] for number in region.members]
    theirs = {i: parts[number] for i, number in enumerate(region.members) if number in parts}
    ground = ground_of(members, theirs, device)
    if ground is None:
        return None
    memory, begin_bytes = ground
    with torch.no_grad():
        for place in members:
            raw_bytes(place.view(memory, begin_bytes)).copy_(raw_bytes(place.view(flat)))
    return ground


def _moved(tensor: torch.Tensor, part: Part | None, device: torch.device) -> torch.Tensor:
    """Return a tensor in memory of another device, and there in one with those that share its memory.

    Called natively.
    """
    if part is not None:
        place = place_of("", tensor, part.begin_bytes)
        ground = ground_of([place], {0: part}, device)
        if ground is not None:
            moved = place.view(*ground)
            raw_bytes(moved).copy_(raw_bytes(tensor))
            return moved
    return tensor.detach().to(device)
