"""How bytes come and go under tensors that stay.

A `Binding` ties the tensors of one bundle to one key of the store.  While the bundle is away, each
tensor's data is one NaN, expanded: shape and dtype are right, nothing is held, nothing can crash.
While it is here, each tensor's data is a view into the leased bytes.

1. A binding holds at most one lease, for writing; what changed is told at its release.
2. Tensors have their bytes only while a *window* is open.  Outside they wear a guard's class, so that
   every use is seen (`tierstore.training.guard`).
3. The lease is held while a window is open *or anything else refers to the storage*: an alias that a
   user keeps, a saved tensor that backward unpacked, a view that a module returned.  The storage's use
   count tells; `Bindings.sweep` releases what nobody refers to any more.

Knows nothing of modules and optimizers.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from tierstore.errors import CapacityError, KeyNotFound, LeaseError
from tierstore.leases import Lease
from tierstore.store import Store
from tierstore.training.groups import Place

Access = Callable[["Binding"], None]
Apart = Callable[[], AbstractContextManager[object]]
Classes = Callable[["Binding"], Sequence[type]]
MakeRoom = Callable[[int], bool]
"""Lets go of what nobody uses, and raises a quota that leaves no room for so many bytes; says if it did."""

_Tensor: Any = torch.Tensor  # its properties, seen as the descriptors that they are
_set_data: Callable[[torch.Tensor, torch.Tensor], None] = _Tensor.data.__set__
_use_count: Callable[[int], int] = torch._C._storage_Use_Count  # noqa: SLF001
_Natively = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001
_AS_IT_IS = contextlib.nullcontext()


def natively() -> AbstractContextManager[None]:
    """Let guarded tensors be treated as the tensors they are, inside the context."""
    return _Natively()


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Point ``tensor`` at the memory of ``data``; autograd's version counter stays."""
    _set_data(tensor, data)


class _OwnWork(threading.local):
    """How deep this thread is in the library's own work."""

    def __init__(self) -> None:
        self.depth = 0


_own_work = _OwnWork()


@contextlib.contextmanager
def ordinary_mode() -> Iterator[None]:
    """Do the library's own work inside the context: what happens is no part of the model.

    Inference mode is left: slots and views made under it could never be trained.
    """
    _own_work.depth += 1
    try:
        with torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else _AS_IT_IS:
            yield
    finally:
        _own_work.depth -= 1


def is_own_work() -> bool:
    """Say whether this thread does the library's own work, such as moving bytes for the store."""
    return _own_work.depth > 0


class Binding:
    """The tensors of one bundle and the key that their bytes are under.

    Args:
        key: in the store.
        places: where each tensor lies in the bundle.
        tensors: in the same order; they are given a guard's class by whoever calls `Bindings.adopt`.
        guards: the class that each wears while it has no bytes.
        tier: where it is leased.
        uses: how often it was used.
        writes: how often its bytes were changed.
    """

    __slots__ = (
        "after_use",
        "baseline",
        "flat",
        "guards",
        "is_dirty",
        "is_saved_by_reference",
        "key",
        "lease",
        "nbytes",
        "places",
        "plain",
        "poisons",
        "storage",
        "tensors",
        "tier",
        "uses",
        "versions",
        "windows",
        "writes",
    )

    def __init__(
        self,
        key: str,
        places: Sequence[Place],
        nbytes: int,
        tensors: Sequence[torch.Tensor],
        guards: Sequence[type],
        poisons: Sequence[torch.Tensor],
    ) -> None:
        self.key = key
        self.places = tuple(places)
        self.nbytes = nbytes
        self.tensors = tuple(tensors)
        self.plain = tuple(type(tensor) for tensor in tensors)
        self.guards = tuple(guards)
        self.poisons = tuple(poisons)
        self.tier = "device"
        self.uses = 0
        self.writes = 0
        self.windows = 0
        self.is_dirty = False
        self.is_saved_by_reference = True
        self.after_use: Access | None = None
        self.lease: Lease | None = None
        self.flat: torch.Tensor | None = None
        self.storage: torch.UntypedStorage | None = None
        self.baseline = 0
        self.versions: list[int] = []

    @property
    def is_referred_to(self) -> bool:
        """Whether anything but the store and the binding refers to the leased bytes."""
        return self.storage is not None and self.references() > self.baseline

    def references(self) -> int:
        """Count who refers to the leased bytes: tensors, and users of the storage object itself."""
        assert self.storage is not None
        return _use_count(self.storage._cdata) + sys.getrefcount(self.storage)  # noqa: SLF001


class Bindings:
    """All bindings of one model: takes and gives back their leases.  Safe from any thread.

    Args:
        store: where the bytes are.
        note_access: told of every use, when its bytes are held.
        apart: what is allocated inside this context is the store's.
    """

    def __init__(self, store: Store, note_access: Access, apart: Apart = ordinary_mode) -> None:
        self.store = store
        self._note_access = note_access
        self.apart = apart
        self.prepare: Callable[[int], None] = lambda _: None  # makes room for as much; may refuse
        self.ask_for_more: MakeRoom = lambda _: False
        self._lock = threading.RLock()  # guards all bindings and the next two
        self._by_storage: dict[int, Binding] = {}
        self._lingering: dict[Binding, None] = {}

    def note_access(self, binding: Binding) -> None:
        """Take in that a binding is used now."""
        binding.uses += 1
        self._note_access(binding)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Let no other thread open a window, inside the context."""
        with self._lock, self.apart():
            yield

    # --- windows ------------------------------------------------------------------------------

    def open(self, binding: Binding, classes: Sequence[type] | None = None) -> None:
        """Open a window: the tensors have their bytes until `close`.  Blocks for hardware.

        Args:
            binding: whose.
            classes: what the tensors wear meanwhile; ``None``: what they wore before all this.

        Raises:
            CapacityError: there is no room for it beside what is in use.
            BackendError: its bytes could not be brought.
        """
        with self._lock, self.apart():
            if binding.lease is None:
                self._acquire(binding)
            if binding.windows == 0:
                self._lingering[binding] = None  # until the window is open: the next may fail
            # Held first: what the plan has passed is what prefetches push out.
            self.note_access(binding)
            binding.windows += 1
            if binding.windows == 1:
                self._lingering.pop(binding, None)
                _dress(binding, classes or binding.plain)

    def close(self, binding: Binding) -> None:
        """Close a window; after the last one the bytes may go."""
        with self._lock, self.apart():
            binding.windows -= 1
            if binding.windows == 0:
                _undress(binding)
                self._settle(binding)

    def open_all(self, bindings: Sequence[Binding], classes: Classes | None = None) -> None:
        """Open windows on all ``bindings``, or on none.  Blocks for hardware.

        Args:
            bindings: whose.
            classes: what the tensors of one wear meanwhile; ``None``: what they wore before all this.

        Raises:
            CapacityError: they cannot be here together beside what is in use.
            BackendError: some bytes could not be brought.
        """
        # Large pieces first: what is leased cannot be moved to make room in one piece.
        order = sorted(bindings, key=lambda binding: -binding.nbytes) if len(bindings) > 1 else bindings
        try:
            self._open_or_none(order, classes)
        except CapacityError as error:
            if len(order) == 1:
                raise
            let_frames_go(error)
            self._empty(order[0].tier)
            self._open_or_none(order, classes)

    def _open_or_none(self, bindings: Sequence[Binding], classes: Classes | None) -> None:
        opened: list[Binding] = []
        try:
            for binding in bindings:
                self.open(binding, None if classes is None else classes(binding))
                opened.append(binding)
        except BaseException:
            self.close_all(opened)
            raise

    def close_all(self, bindings: Sequence[Binding]) -> None:
        """Close windows on all ``bindings``."""
        for binding in reversed(bindings):
            self.close(binding)

    @contextlib.contextmanager
    def window(self, bindings: Sequence[Binding]) -> Iterator[None]:
        """Keep windows on all ``bindings`` open, inside the context."""
        self.open_all(bindings)
        try:
            yield
        finally:
            self.close_all(bindings)

    def reach(self, binding: Binding) -> torch.Tensor:
        """Return the bundle's flat bytes.  They stay while anything refers to their storage."""
        with self._lock, self.apart():
            if binding.lease is None:
                self._acquire(binding)
            if binding.windows == 0:
                self._lingering[binding] = None
            self.note_access(binding)
            assert binding.flat is not None
            return binding.flat

    def find(self, tensor: torch.Tensor) -> Binding | None:
        """Return the binding whose leased bytes ``tensor`` lies in."""
        if not self._by_storage:
            return None
        return self._by_storage.get(tensor.untyped_storage()._cdata)  # noqa: SLF001

    def sweep(self) -> None:
        """Release every lease that no window needs and nothing refers to."""
        if not self._lingering:
            return
        with self._lock, self.apart():
            for binding in list(self._lingering):
                self._settle(binding)

    def release_idle(self, binding: Binding) -> bool:
        """Release the binding's lease if nothing needs it; return whether it holds none now."""
        with self._lock, self.apart():
            if binding.windows == 0 and binding.lease is not None:
                self._settle(binding)
            return binding.lease is None

    # --- leases -------------------------------------------------------------------------------

    def _acquire(self, binding: Binding) -> None:
        self.sweep()
        try:
            self._prepare(binding)
            lease = self.store.lease(binding.key, tier=binding.tier, write=True)
        except CapacityError as error:
            let_frames_go(error)
            lease = self._lease_after_making_room(binding)
        flat = lease.tensor
        storage = flat.untyped_storage()
        self._by_storage[storage._cdata] = binding  # noqa: SLF001
        binding.lease, binding.flat, binding.storage = lease, flat, storage
        del storage
        binding.baseline = binding.references()
        binding.versions = _versions(binding)
        binding.is_dirty = False

    def _lease_after_making_room(self, binding: Binding) -> Lease:
        """Lease a bundle that there was no room for, with every means that there is."""
        # What an error's traceback or a cycle refers to holds its lease: let those go first.
        gc.collect()
        self.sweep()
        self._empty(binding.tier)
        self._prepare(binding)
        return lease_with_room(
            lambda: self.store.lease(binding.key, tier=binding.tier, write=True), self.ask_for_more
        )

    def _prepare(self, binding: Binding) -> None:
        if binding.tier not in self.store.tier_names[1:]:
            self.prepare(binding.nbytes)

    def _empty(self, tier: str) -> None:
        """Push everything that is not leased out of a tier, so that its free bytes are in one piece."""
        names = self.store.tier_names
        index = names.index(tier) if tier in names else 0
        if index + 1 == len(names):
            return
        for key in self.store:
            try:
                if names[index] in self.store.where(key):
                    self.store.evict(key, to=names[index + 1]).result()
            except (KeyNotFound, LeaseError, CapacityError) as error:
                let_frames_go(error)

    def _settle(self, binding: Binding) -> None:
        """A binding has no window: release its lease, or let it linger while it is referred to."""
        if binding.is_referred_to:
            self._lingering[binding] = None
            return
        self._lingering.pop(binding, None)
        self._release(binding)

    def _release(self, binding: Binding) -> None:
        lease, storage = binding.lease, binding.storage
        if lease is None or storage is None:
            return
        is_written = binding.is_dirty or _versions(binding) != binding.versions
        binding.writes += is_written
        del self._by_storage[storage._cdata]  # noqa: SLF001
        binding.lease = binding.flat = binding.storage = None
        del storage
        lease.release(written=is_written)
        if binding.after_use is not None:
            binding.after_use(binding)

    def forsake(self, binding: Binding) -> None:
        """End the binding's lease whoever refers to its bytes, and open no window again."""
        with self._lock, self.apart():
            binding.windows = 0
            self._lingering.pop(binding, None)
            self._release(binding)


def lease_with_room(lease: Callable[[], Lease], make_room: MakeRoom) -> Lease:
    """Return what ``lease`` returns, with as much room made for it as can be.

    Raises:
        CapacityError: it finds none.
    """
    is_second = False
    while True:
        try:
            return lease()
        except CapacityError as error:
            let_frames_go(error)
            if not make_room(error.needed_bytes or 0) and is_second:
                raise
            is_second = True


def let_frames_go(error: BaseException) -> None:
    """Free what the frames of a handled error refer to, which may be activations, now and not by chance."""
    error.__traceback__ = None
    error.__context__ = None


def _versions(binding: Binding) -> list[int]:
    with natively():
        return [tensor._version for tensor in binding.tensors]  # noqa: SLF001


def _dress(binding: Binding, classes: Sequence[type]) -> None:
    """Give the tensors their bytes and a class that does not look."""
    assert binding.flat is not None
    for tensor, place, kind in zip(binding.tensors, binding.places, classes, strict=True):
        tensor.__class__ = kind
        _set_data(tensor, place.view(binding.flat))


def _undress(binding: Binding) -> None:
    """Take the bytes from the tensors and let a guard watch them."""
    for tensor, poison, guard in zip(binding.tensors, binding.poisons, binding.guards, strict=True):
        _set_data(tensor, poison)
        tensor.__class__ = guard
