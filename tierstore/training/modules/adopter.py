"""Into the store and out of it: tensors become bundles, and ordinary tensors again.

What is given back lies in host memory that no tensor library allocated, so that a meter of device
memory does not take it for the device's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType

import torch

from tierstore.errors import BackendError, CapacityError, KeyNotFound
from tierstore.output_buffers import host_memory
from tierstore.planning import Home
from tierstore.planning.homes import CPU
from tierstore.planning.rules import HOST
from tierstore.store import Store
from tierstore.training.autograd.shared_memory import aliases_of, has_bytes
from tierstore.training.bundles.binding import Where
from tierstore.training.bundles.bindings import Binding, Bindings, natively, set_data
from tierstore.training.bundles.bundle_tiers import access_after_use
from tierstore.training.bundles.ending import RunEnding
from tierstore.training.bundles.layout import (
    OverlapRegion,
    TensorLayout,
    fill,
    flat_bytes,
    lay_out,
    pack,
    place_of,
    raw_bytes,
    unpack,
)
from tierstore.training.bundles.memory_parts import MemoryPart, ground_of
from tierstore.training.bundles.placeholders import Placeholder, looks_of, origin_of, placeholder_of
from tierstore.training.bundles.poisons import Poisons, poison_for
from tierstore.training.bundles.reclaimed_tensors import that_may_return
from tierstore.training.bundles.tensor_slots import memory_of, sharded_like, swap
from tierstore.training.faults import guard, guarded_classes, state_dict_entries


def materialise(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Turn a parameter or buffer without bytes into one with ``values``: the same object.

    Args:
        tensor: that is to have them.
        values: of it, or of its part that this process has, which its other parts are not asked about.
    """
    if memory_of(tensor) is not tensor:
        swap(tensor, torch.nn.Parameter(sharded_like(tensor, values), requires_grad=tensor.requires_grad))
        return
    fresh = torch.empty(0, dtype=values.dtype, device=values.device)
    if isinstance(tensor, torch.nn.Parameter):
        fresh = torch.nn.Parameter(fresh, requires_grad=tensor.requires_grad)
    set_data(fresh, values)
    swap(tensor, fresh)


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
            fill(memory_of(tensor), values)


class Adopter:
    """Takes tensors into the store and gives them back.

    Args:
        store: where the bytes go.
        bindings: that the new ones belong to.
        fault_handler: who looks after the tensors.
        nbytes: is told the bytes of each bundle, by its key.
    """

    def __init__(
        self, store: Store, bindings: Bindings, fault_handler: guard.FaultHandler, nbytes: dict[str, int]
    ) -> None:
        self._store = store
        self._bindings = bindings
        self._fault_handler = fault_handler
        self._scratch: list[torch.Tensor] = []  # that nobody uses now
        self._poisons: dict[torch.device, Poisons] = {}
        self._nbytes = nbytes
        self._origins: dict[Binding, list[torch.device]] = {}
        self._released: dict[Binding, dict[int, Placeholder]] = {}  # what had no bytes before, by its number
        self._given: dict[Binding, list[torch.device]] = {}  # what `bring_back` was called for, in that order

    def adopt(
        self,
        key: str,
        named: Sequence[tuple[str, torch.Tensor]],
        home: Home,
        values: Sequence[torch.Tensor] | None = None,
        origins: list[torch.device] | None = None,
        owner: Binding | None = None,
    ) -> Binding:
        """Put tensors under ``key`` as one bundle, and let a guard watch them.

        Their memory is given back, unless somebody else refers to it.

        Args:
            key: in the store.
            named: the tensors, with what messages call them.
            home: where they go.
            values: other values for them; those on the meta device have none of their own.
            origins: where each tensor goes in the end; ``None``: where it is.
            owner: of what an optimizer keeps, the bundle that it is for; ``None``: it is a bundle itself.
        """
        with self._bindings.apart():
            places, nbytes = lay_out(named)
            tensors = [tensor for _, tensor in named]
            origins = origins or [origin_of(tensor) for tensor in tensors]
            with self._gathered(places, nbytes, values or tensors) as flat:
                self._store.put(key, flat, tier=home.tier)
        return self.bind(key, places, tensors, home, origins, owner)

    def adopt_held(self, key: str, named: Sequence[tuple[str, torch.Tensor]], home: Home) -> Binding:
        """Let tensors have the bytes that are under ``key`` already, laid out as `adopt` would.

        Args:
            key: in the store.
            named: the tensors, with what messages call them.
            home: where the bytes go after use.
        """
        places, _ = lay_out(named)
        tensors = [tensor for _, tensor in named]
        return self.bind(key, places, tensors, home, [origin_of(tensor) for tensor in tensors])

    def bind(
        self,
        key: str,
        places: Sequence[TensorLayout],
        tensors: Sequence[torch.Tensor],
        home: Home,
        origins: list[torch.device],
        owner: Binding | None = None,
    ) -> Binding:
        """Tie tensors to bytes that are under ``key`` already, and let a guard watch them.

        Args:
            key: in the store.
            places: where each tensor lies in its bytes.
            tensors: in the same order; their memory is given back.
            home: where the bytes go after use.
            origins: where each tensor goes in the end.
            owner: of what an optimizer keeps, the bundle that it is for; ``None``: it is a bundle itself.
        """
        with self._bindings.apart():
            return self._bind(key, places, tensors, home, origins, owner)

    def _bind(
        self,
        key: str,
        places: Sequence[TensorLayout],
        tensors: Sequence[torch.Tensor],
        home: Home,
        origins: list[torch.device],
        owner: Binding | None,
    ) -> Binding:
        device, confined_to = self._side_of(home) if owner is None else (owner.device, owner.confined_to)
        nbytes = self._store.spec(key).nbytes
        released = {number: own for number, each in enumerate(tensors) if (own := placeholder_of(each))}
        for number, own in released.items():
            own.take_off(tensors[number])
        poisons = self._poisons_for(places, tensors, device)
        guards = [guarded_classes.guard_of(type(tensor)) for tensor in tensors]
        binding = Binding(key, places, nbytes, tensors, guards, poisons)
        binding.after_use = access_after_use(home, self._store)
        binding.confined_to = confined_to
        for number in released:
            binding.parts.pop(number, None)  # of what stood in its place
        if released:
            self._released[binding] = released
        if confined_to is None:
            self._nbytes[key] = nbytes
        self._origins[binding] = origins  # from here on `restore_all` gives them back
        for place, tensor in zip(places, tensors, strict=True):
            if tensor.is_meta:
                materialise(tensor, poison_for(place, device))
        guard.enrol(binding, self._fault_handler)
        for number, (tensor, kind) in enumerate(zip(tensors, guards, strict=True)):
            binding.detach(number)
            tensor.__class__ = kind
        return binding

    def _side_of(self, home: Home) -> tuple[torch.device, str | None]:
        """Return where a bundle's tensors are, and the tier that they are confined to, if to one."""
        if home.device == CPU and self._store.tier_names[0] != HOST:
            return torch.device(CPU), HOST
        return self._store.device, None

    def _poisons_for(
        self, places: Sequence[TensorLayout], tensors: Sequence[torch.Tensor], device: torch.device
    ) -> list[torch.Tensor]:
        own = self._poisons.get(device)
        if own is None:
            own = self._poisons[device] = Poisons(device)
        return [
            own.like(place) if isinstance(tensor, torch.nn.Parameter) else poison_for(place, device)
            for place, tensor in zip(places, tensors, strict=True)
        ]

    @contextmanager
    def _gathered(
        self, places: Sequence[TensorLayout], nbytes: int, tensors: Sequence[torch.Tensor]
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
                found[number] = memory_of(binding.tensors[number]).detach().to(cpu, copy=True)
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

    def has(self, binding: Binding) -> bool:
        """Whether a bundle's bytes are in the store."""
        return binding in self._origins

    def end_adoption(self) -> None:
        """Give the scratch memory back."""
        self._scratch.clear()

    # --- back ---------------------------------------------------------------------------------

    def restore(self, binding: Binding) -> None:
        """Make a bundle's tensors ordinary ones with their values, where they were before; drop the key.

        Where it fails or is interrupted it may be called again: what it had not done is done then.
        """
        aliases: Sequence[tuple[torch.Tensor, TensorLayout]] = ()
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

    def restore_all(self, first: Sequence[Binding], ending: RunEnding) -> None:
        """Restore everything that was adopted; what cannot be is lost, and the rest goes on.

        Args:
            first: the bundles that matter most.
            ending: that this is a part of.
        """
        ending.attempt(self.note_parts_abroad)
        for binding in self.adopted(first):
            had_none = binding in self._released or all(
                each.type == "meta" for each in self._origins[binding]
            )
            bring = self._without_values_again if had_none else self.restore
            failure = ending.attempt(functools.partial(bring, binding))
            if failure is not None:
                ending.attempt(functools.partial(self.lose, binding, ending, failure))

    def _without_values_again(self, binding: Binding) -> None:
        """Let tensors that had no values before be without them again: those on the meta device are there."""
        released = self._released.get(binding, {})
        texts = {own.name: own.text for own in released.values()}
        self.release(binding, lambda place: texts.get(place.name, f"{place.name!r} has no values."))
        for number, tensor in enumerate(binding.tensors):
            own = placeholder_of(tensor)
            if own is not None and number not in released:
                own.take_off(tensor)
                try:
                    materialise(tensor, own.looks)
                except RuntimeError:  # a weak reference is to it: it goes on to say that it has no values
                    own.put_on(tensor)

    def adopted(self, first: Sequence[Binding]) -> list[Binding]:
        """Return every bundle that is in the store, those first that matter most."""
        there = [binding for binding in first if binding in self._origins]
        known = set(there)
        return [*there, *(each for each in list(self._origins) if each not in known)]

    def note_parts_abroad(self) -> None:
        """Know which tensors that have their own bytes are parts of one memory, before one of them moves."""
        for binding in list(self._origins):
            abroad = [number for number in binding.abroad if has_bytes(memory_of(binding.tensors[number]))]
            binding.note_parts(abroad, is_larger=False)

    def _hand_out(
        self, binding: Binding, flat: torch.Tensor, aliases: Sequence[tuple[torch.Tensor, TensorLayout]]
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
                    binding.slots[number].attach(tensor, values[number])
                elif devices[number].type not in (tensor.device.type, "meta"):
                    set_data(tensor, _moved(tensor, binding.parts.get(number), devices[number]))
            tensor.__class__ = plain
        state_dict_entries.release(binding)
        guard.dismiss(binding)
        del self._origins[binding]

    def lose(self, binding: Binding, ending: RunEnding, reason: BaseException) -> None:
        """Let the tensors of a bundle that cannot be brought back say so when they are used.

        Args:
            binding: of the bundle; if it is not in the store any more, nothing happens.
            ending: that this is a part of.
            reason: why it cannot.
        """
        self._leave_behind(
            binding,
            lambda number, kind, looks: ending.lose(
                binding.tensors[number], kind, binding.places[number].name, looks, reason
            ),
        )

    def release(self, binding: Binding, text_of: Callable[[TensorLayout], str]) -> None:
        """Let the tensors of a bundle be placeholders; no byte of it is read.  Aliases of them are, too.

        Args:
            binding: of the bundle; if it is not in the store any more, nothing happens.
            text_of: returns what a placeholder says.
        """
        origins = self._origins.get(binding, [])

        def put_on(number: int, kind: type, looks: torch.Tensor) -> None:
            place = binding.places[number]
            own = Placeholder(kind, place.name, text_of(place), looks, origins[number])
            own.put_on(binding.tensors[number])

        aliases: Sequence[torch.Tensor] = ()
        try:
            if binding in self._origins:
                with natively():
                    aliases = aliases_of(binding)
                self._bindings.forsake(binding)
        finally:
            for alias in aliases:
                _release_alias(alias, text_of(binding.places[0]))
            self._leave_behind(binding, put_on)

    def _leave_behind(self, binding: Binding, put_on: Callable[[int, type, torch.Tensor], None]) -> None:
        """Part with a bundle's tensors: those that have no bytes of their own are given no others."""
        if binding not in self._origins:
            return
        guard.dismiss(binding)
        state_dict_entries.release(binding)
        looks = looks_of(binding.places)
        for number, (tensor, plain) in enumerate(zip(binding.tensors, binding.plain, strict=True)):
            if binding.where[number] is Where.ABROAD:  # it has its bytes
                tensor.__class__ = plain
                continue
            with natively():
                binding.detach(number)  # it may show bytes of a lease that has ended
            put_on(number, plain, looks[number])
        self._origins.pop(binding, None)

    # --- there and back again -----------------------------------------------------------------

    def bring_back(self, binding: Binding) -> None:
        """Do what `restore` does, and remember it: see `take_back`."""
        if binding in self._origins:
            self._given.setdefault(binding, self._origins[binding])
        self.restore(binding)

    @property
    def given(self) -> list[Binding]:
        """The bundles that were brought back, and not taken back since; the last ones first."""
        return list(reversed(self._given))

    def forget_given(self) -> None:
        """What was brought back stays so."""
        self._given.clear()

    def take_back(self, binding: Binding) -> None:
        """Let the tensors of a bundle that `bring_back` gave have their bytes in the store again.  Blocks.

        Those whose memory somebody else refers to keep it as long as that is so: see
        `tierstore.training.bundles.reclaimed_tensors`.  Where it fails or is interrupted, what was brought
        back stays so, and it may be called again.

        Raises:
            CapacityError: no tier has room for it.
            BackendError: a medium failed.
        """
        with self._bindings.alone():
            if binding not in self._origins:  # else bringing it back has failed, or this was interrupted
                self._put_again(binding)
            guard.enrol(binding, self._fault_handler)
            for tensor, kind in zip(binding.tensors, binding.guards, strict=True):
                tensor.__class__ = kind
            self._bindings.note_return(binding)
            self._given.pop(binding, None)

    def _put_again(self, binding: Binding) -> None:
        named = [(place.name, each) for place, each in zip(binding.places, binding.tensors, strict=True)]
        places, nbytes = lay_out(named)
        with self._gathered(places, nbytes, binding.tensors) as flat:
            put_somewhere(self._store, binding.key, flat, binding.confined_to)
        self._scratch.clear()
        poisons = self._poisons_for(places, binding.tensors, binding.device)
        binding.lay(places, nbytes, poisons)
        alone = self._that_come_home(binding)
        if binding.confined_to is None:
            self._nbytes[binding.key] = nbytes
        self._origins[binding] = self._given[binding]
        binding.come_home(alone)

    def _that_come_home(self, binding: Binding) -> list[int]:
        """Return the numbers of tensors whose memory nobody else has, or cannot be computed with."""
        binding.where = [Where.ABROAD] * len(binding.tensors)
        alone = that_may_return([binding], from_anywhere=True).get(binding, [])
        with natively():
            elsewhere = [n for n, each in enumerate(binding.tensors) if each.device != binding.device]
        return sorted({*alone, *elsewhere})

    def _drop(self, binding: Binding) -> None:
        with self._bindings.apart(), suppress(KeyNotFound):
            self._store.drop(binding.key)
        self._nbytes.pop(binding.key, None)

    def forget(self, binding: Binding) -> None:
        """Drop a bundle's key; its tensors are nobody's any more."""
        state_dict_entries.part_with(binding)
        guard.dismiss(binding)
        self._bindings.forsake(binding)
        self._origins.pop(binding, None)
        self._drop(binding)


def _release_alias(alias: torch.Tensor, text: str) -> None:
    with natively():
        place = place_of("an alias", alias)
        set_data(alias, poison_for(place, alias.device))
    kind = guard.plain_classes.get(type(alias), type(alias))
    Placeholder(kind, place.name, text, looks_of([place])[0], alias.device).put_on(alias)


def put_somewhere(store: Store, key: str, flat: torch.Tensor, tier: str | None = None) -> None:
    """Put bytes where they take the least memory: the last tier, or else ``tier``, or whichever has room.

    Raises:
        CapacityError: none has.
        BackendError: a medium failed.
    """
    try:
        store.put(key, flat, tier=store.tier_names[-1], replace=True)
    except (CapacityError, BackendError):
        store.put(key, flat, tier=tier, replace=True)


def is_deserted(binding: Binding) -> bool:
    """Whether nobody but the library has a bundle's tensors, or refers to its bytes, any more."""
    numbers = range(len(binding.tensors))
    return not binding.is_referred_to and all(
        sys.getrefcount(binding.tensors[number]) <= _OWN_REFERENCES for number in numbers
    )


def _count_own_references() -> int:
    """Return what ``sys.getrefcount(binding.tensors[0])`` is when nobody has the tensor any more.

    The binding's tuple, the guard's table of guarded tensors, and the call's own argument.
    """
    holder = (object(),)
    table = {0: holder[0]}
    count = sys.getrefcount(holder[0])
    del table
    return count


_OWN_REFERENCES = _count_own_references()


def _unpack(
    flat: torch.Tensor,
    places: Sequence[TensorLayout],
    devices: Sequence[torch.device],
    *,
    is_fresh: bool,
    parts: Mapping[int, MemoryPart | None] = MappingProxyType({}),
) -> list[torch.Tensor]:
    """Return a bundle's tensors in memory of their own; in ``flat`` itself if it is fresh, of one region.

    Args:
        flat: the bundle's bytes.
        places: where each tensor lies in them.
        devices: where each is to be.
        is_fresh: whether nobody else has ``flat``.
        parts: of which larger memory some are parts, and are in it again.
    """

    def own(part: torch.Tensor, region: OverlapRegion) -> tuple[torch.Tensor, int]:
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
    places: Sequence[TensorLayout],
    region: OverlapRegion,
    parts: Mapping[int, MemoryPart | None],
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


def _moved(tensor: torch.Tensor, part: MemoryPart | None, device: torch.device) -> torch.Tensor:
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
