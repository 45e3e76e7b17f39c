"""One bundle's tensors, and where the bytes of each are.

A `Binding` ties the tensors of one bundle to one key of the store.  While the bundle is away, each
tensor's data is one element that cannot be read, expanded: shape and dtype are right, and nothing is held.
While it is here, each tensor's data is a view into the leased bytes.

1. A tensor is *at home* if its bytes are the bundle's.  Whoever points it at other memory (``p.data = x``,
   ``p.set_(x)``, and whatever is made of them) finds it there: it is *abroad*, and keeps that memory, window
   or not.
2. Where a tensor is is looked at when its window closes, and when one opens if its version tells that
   something happened in between.
3. What is abroad comes home when nobody else refers to its memory
   (`tierstore.training.bundles.bindings.Bindings`).

Knows nothing of stores.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef

from tierstore.leases import Lease
from tierstore.torch_private import storage_use_count, tensor_use_count
from tierstore.training.bundles.layout import TensorLayout, regions_of
from tierstore.training.bundles.lease_storages import LeaseStorages, pieces_of
from tierstore.training.bundles.memory_parts import MemoryPart, part_of, storage_of
from tierstore.training.bundles.tensor_slots import memory_of, slot_of
from tierstore.training.pytorch.function_modes import are_function_modes_on

_Natively = torch.DisableTorchFunctionSubclass
_NoFunctions: Callable[[], AbstractContextManager[None]] = torch.DisableTorchFunction

Access = Callable[["Binding"], None]


def natively() -> AbstractContextManager[None]:
    """Let guarded tensors be treated as the tensors they are, inside the context, and modes see nothing."""
    return _NoFunctions() if are_function_modes_on() else _Natively()


def natively_in_sight() -> AbstractContextManager[None]:
    """Do what `natively` does for what the program itself runs: its modes see that."""
    return _Natively()


def references(tensor: torch.Tensor) -> int:
    """Count who refers to a tensor's storage: tensors, and users of the storage object itself.

    The storage is handed to no function of Python: where frames are evaluated by somebody else, as once
    ``torch.compile`` was used, an argument is counted twice.
    """
    storage = tensor.untyped_storage()
    return storage_use_count(storage._cdata) + sys.getrefcount(storage)  # noqa: SLF001


def _references_of_one() -> int:
    tensor = torch.empty(1)
    return references(tensor)


REFERENCES_OF_ONE = _references_of_one()
"""What `references` is for the storage of one tensor that nobody else refers to."""


class Residency(enum.Enum):
    """Whether a bundle's bytes are where they are computed with, and whether its tensors have them."""

    AWAY = enum.auto()  # they are the store's alone, wherever it has them: nothing is held
    LEASED = enum.auto()  # held, for aliases, saved tensors or a pin: what they cost is leased bytes
    OPEN = enum.auto()  # held, and its tensors at home have them, for a window


_MAY_BECOME = {
    Residency.AWAY: {Residency.AWAY, Residency.LEASED},
    Residency.LEASED: {Residency.LEASED, Residency.OPEN, Residency.AWAY},
    Residency.OPEN: {Residency.OPEN, Residency.LEASED},
}
"""By what it is; the same again is what was interrupted and is done once more."""


class Where(enum.Enum):
    """Where a tensor's bytes are."""

    HOME = enum.auto()  # in the bundle: they come and go with its windows
    ABROAD = enum.auto()  # in other memory that somebody pointed it at: it keeps them, window or not


class Move(enum.Enum):
    """What happened to a tensor."""

    POINTED_ELSEWHERE = enum.auto()
    POINTED_BACK = enum.auto()
    TAKEN_IN = enum.auto()


_NEXT = {
    (Where.HOME, Move.POINTED_ELSEWHERE): Where.ABROAD,
    (Where.ABROAD, Move.POINTED_BACK): Where.HOME,
    (Where.ABROAD, Move.TAKEN_IN): Where.HOME,
}


class Binding:
    """The tensors of one bundle and the key that their bytes are under.

    Args:
        key: in the store.
        places: where each tensor lies in the bundle.
        tensors: in the same order; they are given a guard's class by whoever makes the binding.
        guards: the class that each wears while it has no bytes.
        poisons: what each shows while it is at home and has none.

    Attributes:
        tier: where it is leased.
        confined_to: the tier that it is leased in whatever ``tier`` says, as its modules compute on the host;
            ``None``: there is none.
        slots: how each tensor is given its bytes.
        residency: whether its bytes are where they are computed with, and its tensors have them.
        dtypes: of the tensors.
        worn: the classes that the tensors wear now.
        uses: how often it was used.
        writes: how often its bytes were changed.
        where: the bytes of each tensor are.
        departures: how often each was pointed elsewhere.
        parts: of which larger memory each was a part when it came home, by its number.
        pickled: copies of regions that are pickled just now, by where they begin.
        is_watched: whether other code than PyTorch's has had its hands on the leased bytes.
        is_in_graphs: whether graphs may have saved its tensors themselves, and need their bytes in them.
        holders: how many objects of C++ refer to each tensor for good
            (`tierstore.training.pytorch.torchscript`).
        has_bases: whether tensors that others are views of have their bytes, with no window open.
        digest: what `writes` was when they were read last, and their digest
            (`tierstore.training.bundles.unseen_writes`).
        offsets: of each tensor in the storage that it is shown in, in elements.
        pieces: what of its bytes is shown as a storage of its own.
        storages: the leased bytes, as its tensors show them.
        twins: on the meta device, with the true strides, each where it is in its storage.
        guarded_tensors: what is known of its tensors, by their ids
            (`tierstore.training.faults.guarded_tensors`).
    """

    __slots__ = (
        "__weakref__",
        "after_use",
        "baseline",
        "confined_to",
        "departures",
        "digest",
        "dtypes",
        "flat",
        "guarded_tensors",
        "guards",
        "has_bases",
        "holders",
        "idle_versions",
        "is_dirty",
        "is_in_graphs",
        "is_saved_by_reference",
        "is_watched",
        "key",
        "lease",
        "nbytes",
        "offsets",
        "parts",
        "pickled",
        "pieces",
        "places",
        "plain",
        "poisons",
        "regions",
        "residency",
        "slots",
        "storages",
        "tensors",
        "tier",
        "twins",
        "uses",
        "versions",
        "where",
        "windows",
        "worn",
        "writes",
    )

    def __init__(
        self,
        key: str,
        places: Sequence[TensorLayout],
        nbytes: int,
        tensors: Sequence[torch.Tensor],
        guards: Sequence[type],
        poisons: Sequence[torch.Tensor],
    ) -> None:
        self.key = key
        self.tensors = tuple(tensors)
        self.plain = tuple(type(tensor) for tensor in tensors)
        self.slots = tuple(map(slot_of, self.plain))
        self.guards: Sequence[type] = tuple(guards)
        self.worn: Sequence[type] = self.guards
        self.lay(places, nbytes, poisons)
        self.where = [Where.HOME] * len(self.tensors)
        self.departures = [0] * len(self.tensors)
        self.parts: dict[int, MemoryPart] = {}
        self.pickled: dict[int, StorageWeakRef] = {}
        self.note_parts(range(len(self.tensors)))
        self.tier = "device"
        self.confined_to: str | None = None
        self.uses = 0
        self.writes = 0
        self.windows = 0
        self.is_dirty = False
        self.residency = Residency.AWAY
        self.is_saved_by_reference = True
        self.is_watched = False
        self.is_in_graphs = False
        self.holders = [0] * len(self.tensors)
        self.has_bases = False
        self.digest: tuple[int, int] | None = None
        self.after_use: Access | None = None
        self.lease: Lease | None = None
        self.flat: torch.Tensor | None = None
        self.storages: LeaseStorages | None = None
        self.baseline = 0
        self.versions: list[int] = []
        self.guarded_tensors: dict[int, Any] = {}
        self.idle_versions = versions_of(self)

    def lay(self, places: Sequence[TensorLayout], nbytes: int, poisons: Sequence[torch.Tensor]) -> None:
        """Take in where each tensor lies in the bundle."""
        self.places = tuple(places)
        self.dtypes = frozenset(place.dtype for place in places)
        self.regions = tuple(sorted(regions_of(places)))
        self.pieces = pieces_of(self.places, self.regions)
        self.nbytes = nbytes
        self.poisons = tuple(poisons)
        self.offsets = self.pieces.offsets(self.places)
        self.twins = tuple(map(_twin, self.places, self.offsets))

    def become(self, residency: Residency) -> None:
        """Take in that the bytes came, went, or are the tensors' now, or no more."""
        assert residency in _MAY_BECOME[self.residency], (self.key, self.residency, residency)
        self.residency = residency

    @property
    def device(self) -> torch.device:
        """Where its tensors are, as whoever asks them is told, wherever their bytes are."""
        return self.poisons[0].device

    @property
    def is_referred_to(self) -> bool:
        """Whether anything but the store and the binding refers to the leased bytes."""
        if self.flat is None or self.storages is None:
            return False
        return self.count_references() > self.baseline

    def count_references(self) -> int:
        """Count who refers to the leased bytes: see `references`."""
        assert self.storages is not None
        count = 0
        for storage in self.storages.all:
            count += storage_use_count(storage._cdata) + sys.getrefcount(storage)  # noqa: SLF001
        return count

    def begin_bytes(self, tensor: torch.Tensor) -> int:
        """Return where an alias of the leased bytes begins in the bundle.  Called natively."""
        assert self.storages is not None
        before_bytes = tensor.untyped_storage().data_ptr() - self.storages.all[0].data_ptr()
        return before_bytes + int(tensor.storage_offset()) * tensor.element_size()

    @property
    def abroad(self) -> list[int]:
        """The numbers of the tensors whose bytes are elsewhere."""
        return [number for number, where in enumerate(self.where) if where is Where.ABROAD]

    @property
    def is_whole(self) -> bool:
        """Whether the bytes of all its tensors are the bundle's."""
        return Where.ABROAD not in self.where

    def move(self, number: int, move: Move) -> None:
        """Take in what happened to a tensor."""
        self.where[number] = _NEXT[self.where[number], move]
        self.departures[number] += move is Move.POINTED_ELSEWHERE

    def has_company(self, number: int) -> bool:
        """Whether other tensors have bytes that one has, too."""
        return len(self.regions[self.pieces.owners[number]].members) > 1

    def copied_region(self, number: int) -> tuple[torch.Tensor, int]:
        """Return a copy of the leased bytes that a tensor has with others, and where in the bundle it begins.

        It is the former one while something refers to that and the bytes are the same.
        """
        assert self.flat is not None
        region = self.regions[self.pieces.owners[number]]
        current = self.flat[region.begin_bytes : region.end_bytes]
        known = self.pickled.get(region.begin_bytes)
        former = None if known is None else storage_of(known)
        if former is not None and former.device == current.device:
            found = torch.empty(0, dtype=torch.uint8, device=current.device).set_(former)
            if torch.equal(found, current):
                return found, region.begin_bytes
        found = current.clone()
        self.pickled[region.begin_bytes] = StorageWeakRef(found.untyped_storage())
        return found, region.begin_bytes

    def note_parts(self, numbers: Iterable[int], *, is_larger: bool = True) -> None:
        """Take in of which memory some tensors are parts, while they have their own bytes: see `part_of`."""
        with _Natively():
            for number in numbers:
                self.parts.pop(number, None)
                part = part_of(memory_of(self.tensors[number]), is_larger=is_larger)
                if part is not None:
                    self.parts[number] = part

    def come_home(self, numbers: Sequence[int]) -> None:
        """The bytes of some tensors are the bundle's now: they need no others."""
        self.note_parts(numbers)
        with _Natively():
            for number in numbers:
                self.move(number, Move.TAKEN_IN)
                self.detach(number)

    def detach(self, number: int) -> None:
        """Take a tensor's bytes: it shows its poison.  Called natively."""
        self.slots[number].detach(self.tensors[number], self.poisons[number])


def _twin(place: TensorLayout, offset: int) -> torch.Tensor:
    if offset == 0:
        return torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device="meta")
    elements = offset + place.nbytes // place.dtype.itemsize
    return torch.empty(elements, dtype=place.dtype, device="meta").as_strided(
        place.shape, place.stride, offset
    )


def versions_of(binding: Binding) -> list[int]:
    """Return how often each tensor was written to, as far as autograd knows."""
    with _Natively():
        return [slot.writes(tensor) for slot, tensor in zip(binding.slots, binding.tensors, strict=True)]


# ---------------------------------------------------------------------- windows


def dress(binding: Binding, classes: Sequence[type]) -> None:
    """Give the tensors a class each, and their bytes."""
    shown = binding.storages
    assert shown is not None
    if versions_of(binding) != binding.idle_versions:
        _look_at_poisons(binding)
    binding.become(Residency.OPEN)
    with _Natively():  # the classes may be guards
        wear(binding, classes)
        for slot, tensor, view, where in zip(
            binding.slots, binding.tensors, shown.views, binding.where, strict=True
        ):
            if where is Where.HOME:
                slot.attach(tensor, view)


def wear(binding: Binding, classes: Sequence[type]) -> None:
    """Give the tensors a class each; their bytes stay where they are."""
    binding.worn = classes
    for tensor, kind in zip(binding.tensors, classes, strict=True):
        tensor.__class__ = kind


def _look_at_poisons(binding: Binding) -> None:
    """Take in which tensors were pointed elsewhere by what no guard sees."""
    assert binding.flat is not None
    begin = binding.flat.data_ptr()
    with _Natively():
        for number, (tensor, poison) in enumerate(zip(binding.tensors, binding.poisons, strict=True)):
            local = binding.slots[number].local(tensor)
            is_home = _is_view_of(local, poison) or _is_at(local, binding.places[number], begin)
            if binding.where[number] is Where.HOME and not is_home:
                binding.move(number, Move.POINTED_ELSEWHERE)


def _is_view_of(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    return bool(tensor.untyped_storage()._cdata == memory.untyped_storage()._cdata)  # noqa: SLF001


def undress(binding: Binding) -> None:
    """Take the bytes from the tensors that have them from the bundle, and let a guard watch all.

    Those that a graph has saved itself keep theirs, and with them the lease, until it is called again.
    Where it was interrupted, or where `dress` was, it may be called again.
    """
    assert binding.flat is not None
    begin = binding.flat.data_ptr()
    are_needed = False
    with _Natively():
        for number, (tensor, place, poison, guard) in enumerate(
            zip(binding.tensors, binding.places, binding.poisons, binding.guards, strict=True)
        ):
            local = binding.slots[number].local(tensor)
            is_here = _is_at(local, place, begin) or _is_view_of(local, poison)
            if is_here is not (binding.where[number] is Where.HOME):
                binding.move(number, Move.POINTED_BACK if is_here else Move.POINTED_ELSEWHERE)
            if is_here and binding.is_in_graphs and _is_saved(binding, number):
                are_needed = True
            elif is_here:
                binding.detach(number)
            tensor.__class__ = guard
    binding.is_in_graphs = are_needed
    binding.has_bases = False
    binding.worn = binding.guards
    binding.become(Residency.LEASED)
    binding.idle_versions = versions_of(binding)


def keep_bases(binding: Binding) -> None:
    """Let tensors that others are differentiable views of have their bytes, with no window open.

    A view whose base was written to since asks the base for its strides, and derives the gradient from these
    (``AsStridedBackward``).  `undress` takes the bytes when it is called again.
    """
    shown = binding.storages
    assert shown is not None
    with _Natively():
        for number, (tensor, view) in enumerate(zip(binding.tensors, shown.views, strict=True)):
            if binding.where[number] is Where.HOME and tensor.requires_grad and _is_saved(binding, number):
                binding.slots[number].attach(tensor, view)
                binding.has_bases = True


def _is_saved(binding: Binding, number: int) -> bool:
    """Whether a graph has saved a tensor itself: more than its objects and its node refer to it.

    So does a differentiable view of it, which refers to its base.

    The node that accumulates its gradient outlives every graph where somebody keeps it, as hooks on it do.
    """
    tensor = binding.tensors[number]
    objects = 1 + binding.holders[number]
    uses = tensor_use_count(tensor)
    if uses <= objects or not tensor.requires_grad:
        return uses > objects
    node = get_gradient_edge(tensor)  # a new one, if it has none: now it has one for certain
    uses = tensor_use_count(tensor)
    del node
    return uses > objects + 1


def _is_at(tensor: torch.Tensor, place: TensorLayout, begin: int) -> bool:
    """Whether a tensor is the view of a bundle's bytes that its place says, as far as matters."""
    if place.nbytes:
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # a poison that cannot be read has none
            return False
        if address != begin + place.begin_bytes:
            return False
    return place.is_of(tensor)


def values_of(binding: Binding, flat: torch.Tensor) -> list[torch.Tensor]:
    """Return the memory of a bundle's tensors as views of its flat bytes; those abroad have their own."""
    with _Natively():
        return [
            place.view(flat) if where is Where.HOME else memory_of(tensor).detach()
            for tensor, place, where in zip(binding.tensors, binding.places, binding.where, strict=True)
        ]
