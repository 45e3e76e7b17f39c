"""Activations under keys of the store, between forward and backward.

`Vault.keep` takes a tensor's storage over and begins the copy down.  What it returns, a `Parked`, is all that
a graph has to refer to: it tells when the device's bytes may go, when they are wanted again, and gives the
tensor back.

1. Identity is the live storage and its version, never an address: what is kept twice is copied once.
2. The bytes are the storage's as a whole, or, if a view touches less than half of it, what it touches.  A
   stride of 0 is kept as what it repeats.
3. A storage must not change while it is kept.  `Parked.take` raises what PyTorch raises if it did: the
   version counter is kept without the memory.
4. What nobody refers to any more is dropped, whether it was ever taken or not.  Finalisers run anywhere, also
   inside the store, so they only make a note; `Vault.sweep` and every call of the vault act on it.
5. A lease that `Parked.take` got is held while anything refers to the bytes: the storage's use count tells.
   When every `Parked` of some bytes was taken once, and they are still referred to, they go down again: a
   retained graph holds no device memory.
6. Where the fastest tier cannot adopt memory it is host memory itself.  The bytes are copied into it and
   there is nothing to release; the store moves them on when its quota demands.

Knows nothing of modules, marks and autograd.  Every call is safe from any thread; it waits for hardware only.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tierstore.errors import CapacityError, KeyExists, KeyNotFound, LeaseError, StoreClosed, TierStoreError
from tierstore.leases import Lease
from tierstore.store import Store
from tierstore.training.activations.vault_stats import Counts, VaultStats
from tierstore.training.binding import (
    Apart,
    MakeRoom,
    lease_with_room,
    let_frames_go,
    ordinary_mode,
    set_data,
)
from tierstore.training.saved import refuse_if_changed

log = logging.getLogger("tierstore")

_use_count: Callable[[int], int] = torch._C._storage_Use_Count  # noqa: SLF001
NoteAdopted = Callable[[torch.UntypedStorage, Callable[[], bool]], None]

_PART = 2  # a view of less than one part in so many of its storage is kept without the rest


class _Estate:
    """What one key has in the store, and what is left to do when nobody refers to its bytes."""

    __slots__ = (
        "baseline",
        "flat",
        "is_dropped",
        "is_released",
        "key",
        "lease",
        "lock",
        "nbytes",
        "storage",
        "takes",
        "uses",
    )

    def __init__(self, key: str, nbytes: int) -> None:
        self.key = key
        self.nbytes = nbytes
        self.lock = threading.RLock()  # guards all below; held while hardware is waited for
        self.is_released = False
        self.is_dropped = False
        self.lease: Lease | None = None
        self.flat: torch.Tensor | None = None
        self.storage: torch.UntypedStorage | None = None
        self.baseline = 0
        self.uses = 0  # how many `Parked` there were
        self.takes = 0  # how often they were taken since the last release

    def references(self) -> int:
        """Count who refers to the leased bytes: tensors, and users of the storage object itself."""
        assert self.storage is not None
        return _use_count(self.storage._cdata) + sys.getrefcount(self.storage)  # noqa: SLF001

    def hold(self, lease: Lease) -> None:
        """Keep a lease until nobody refers to its bytes."""
        self.lease = lease
        self.flat = lease.tensor
        self.storage = self.flat.untyped_storage()
        self.baseline = self.references()

    def let_go(self) -> bool:
        """End the lease unless something refers to its bytes; return whether none is held."""
        if self.lease is None:
            return True
        if self.references() > self.baseline:
            return False
        lease, self.lease, self.flat, self.storage = self.lease, None, None, None
        lease.release()
        return True


class _Bytes:
    """Some kept bytes, which any number of `Parked` refer to.  Their end is only noted."""

    __slots__ = ("__weakref__", "_note_end", "estate", "vault", "version")

    def __init__(
        self, vault: Vault, estate: _Estate, version: int, note_end: Callable[[_Estate], None]
    ) -> None:
        self.vault = vault
        self.estate = estate
        self.version = version
        self._note_end = note_end

    def __del__(self) -> None:
        self._note_end(self.estate)


class _Known(weakref.ref[torch.UntypedStorage]):
    """A live storage, of which some bytes are kept."""

    __slots__ = ("key",)

    key: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Shape:
    """How a tensor lies in kept bytes."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the bytes that it was kept with."""
        whole_bytes = flat.numel() - flat.numel() % self.dtype.itemsize
        typed = flat.narrow(0, 0, whole_bytes).view(self.dtype)
        view = typed.as_strided(self.shape, self.stride, int(typed.storage_offset()) + self.offset)
        if self.is_conj:
            view = torch._conj(view)  # noqa: SLF001 - sets the bit, as the kept tensor had it
        return torch._neg_view(view) if self.is_neg else view  # noqa: SLF001


class Parked:
    """A tensor in the store.  Made by `Vault.keep`; the last one of the same bytes drops them."""

    __slots__ = ("_bytes", "_shape", "_version", "_witness")

    def __init__(self, held: _Bytes, shape: _Shape, witness: torch.Tensor, version: int) -> None:
        held.estate.uses += 1
        self._bytes = held
        self._shape = shape
        self._witness = witness
        self._version = version

    @property
    def key(self) -> str:
        """The key in the store."""
        return self._bytes.estate.key

    @property
    def nbytes(self) -> int:
        """How many bytes are kept: where the tensor is a view, those of its storage."""
        return self._bytes.estate.nbytes

    @property
    def is_released(self) -> bool:
        """Whether the device's memory was given up, and nobody took the tensor since."""
        return self._bytes.estate.is_released

    def weakly(self) -> WeakParked:
        """Return what can release these bytes and bring them back, but does not keep them."""
        return WeakParked(self._bytes)

    def release(self) -> None:
        """Give the device's memory up; it is free when nobody else refers to it.  Waits for the copy down.

        Nothing happens if it was released, if somebody uses the bytes now, or if they are wanted again
        meanwhile.  If no tier below has room they stay, which `VaultStats.refused` counts.

        Raises:
            BackendError: the copy failed; the bytes on the device are unharmed.
        """
        self._bytes.vault.release(self._bytes.estate)

    def bring(self) -> None:
        """Begin to bring the bytes back to the device, if they are not there.  Does not block.

        It is advice: where there is no room, `take` waits for it.
        """
        self._bytes.vault.bring(self._bytes.estate)

    def take(self) -> torch.Tensor:
        """Return the tensor, of the same shape, strides and values.  Blocks until its bytes are there.

        They stay on the device while anything refers to them.

        Raises:
            RuntimeError: it was changed in place since it was kept; the text is PyTorch's.
            CapacityError: what is leased leaves no room for it.
            BackendError: the bytes could not be brought.
        """
        shape = self._shape
        refuse_if_changed(shape.dtype, shape.shape, self._witness._version, self._version)  # noqa: SLF001
        return self._bytes.vault.take(self._bytes, shape.view)


class WeakParked:
    """Bytes of a `Parked`, for those who tell when they go and come.  Nothing happens if they were dropped.

    Attributes:
        key: in the store.
    """

    __slots__ = ("_bytes", "key")

    def __init__(self, held: _Bytes) -> None:
        self.key = held.estate.key
        self._bytes = weakref.ref(held)

    @property
    def is_here(self) -> bool:
        """Whether the bytes are kept and on the device: neither given up, nor sent down by a quota."""
        held = self._bytes()
        return held is not None and not held.estate.is_released and held.vault.is_here(self.key)

    def leave(self) -> None:
        """Let the device's memory go when the copy down has ended.  Does not wait for it.

        If the bytes are wanted again before that, they stay: no byte comes back.
        """
        held = self._bytes()
        if held is not None:
            held.vault.leave(held.estate)

    def release(self) -> None:
        """See `Parked.release`."""
        held = self._bytes()
        if held is not None:
            held.vault.release(held.estate)

    def bring(self) -> None:
        """See `Parked.bring`."""
        held = self._bytes()
        if held is not None:
            held.vault.bring(held.estate)


class Vault:
    """Keeps activations in a store.

    Args:
        store: where they go.
        apart: what is allocated inside this context is the store's.
        note_use: told the key of whatever is kept or taken, and its bytes.
        make_room: called where leases leave no room on the device for what is taken.
        note_adopted: told of a storage that the store has adopted, and how to ask whether it has it still.
    """

    def __init__(
        self,
        store: Store,
        apart: Apart = ordinary_mode,
        *,
        note_use: Callable[[str, int], None] = lambda _key, _nbytes: None,
        make_room: MakeRoom = lambda _: False,
        note_adopted: NoteAdopted = lambda _storage, _is_held: None,
    ) -> None:
        self.store = store
        self._apart = apart
        self._note_use = note_use
        self._make_room = make_room
        self._note_adopted = note_adopted
        self._counts = Counts()
        self._can_adopt = store.can_adopt
        self._below = store.tier_names[1:] if self._can_adopt else ()
        self._heirless: collections.deque[_Estate] = collections.deque()  # nobody refers to their bytes
        self._lock = threading.Lock()  # guards the rest
        self._known: dict[tuple[int, int, int], tuple[_Known, weakref.ref[_Bytes]]] = {}
        self._lent: dict[_Estate, weakref.ref[_Bytes] | None] = {}  # None: to be dropped
        self._parked: dict[str, int] = {}

    @property
    def stats(self) -> VaultStats:
        """What was done so far."""
        self.sweep()
        with self._lock:
            parked = list(self._parked.values())
        return self._counts.read(len(parked), sum(parked))

    # --- keeping ------------------------------------------------------------------------------

    def keep(self, tensor: torch.Tensor, name: str) -> Parked:
        """Take over the storage of ``tensor`` and begin to copy it down.

        It waits for room where the device's quota is short: something else leaves then, or these bytes
        go down at once.

        Args:
            tensor: an ordinary tensor with bytes, on the store's device.  It must not change any more.
            name: its key; if that is taken, with a mark behind it.

        Raises:
            CapacityError: no tier has room for it.
            BackendError: a medium failed.
        """
        version = tensor._version  # noqa: SLF001
        with self._working(), torch.no_grad():
            storage = tensor.untyped_storage()
            low, high = self._extent(tensor, storage)
            held = self._find(storage, (low, high), version)
            if held is None:
                held = self._keep_anew(storage, (low, high), version, name)
            witness = tensor.detach()
            # The counter of versions stays, the memory does not.
            set_data(witness, torch.empty(0, dtype=tensor.dtype, device=tensor.device))
        offset = int(tensor.storage_offset()) - low // tensor.element_size()
        shape = _Shape(tensor.dtype, tensor.shape, tensor.stride(), offset, tensor.is_conj(), tensor.is_neg())
        return Parked(held, shape, witness, version)

    def _extent(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> tuple[int, int]:
        """Return which of a storage's bytes to keep: what a small view touches, or all."""
        whole = (0, storage.nbytes())
        if tensor.numel() == 0:
            return whole
        item_bytes = tensor.element_size()
        first = int(tensor.storage_offset())
        last = first + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        part = (first * item_bytes, (last + 1) * item_bytes)
        is_large = (part[1] - part[0]) * _PART >= whole[1]
        return whole if is_large or self._look_up(storage, whole) is not None else part

    def _look_up(self, storage: torch.UntypedStorage, extent: tuple[int, int]) -> _Bytes | None:
        with self._lock:
            found = self._known.get((id(storage), *extent))
        return found[1]() if found is not None and found[0]() is storage else None

    def _find(self, storage: torch.UntypedStorage, extent: tuple[int, int], version: int) -> _Bytes | None:
        """Return what is kept of these very bytes; let former ones of another version leave the device."""
        held = self._look_up(storage, extent)
        if held is None or held.version == version:
            return held
        self._release(held.estate)
        return None

    def _keep_anew(
        self, storage: torch.UntypedStorage, extent: tuple[int, int], version: int, name: str
    ) -> _Bytes:
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
        flat.set_(storage)
        low, high = extent
        if high - low < storage.nbytes():
            flat = flat[low:high].clone()
        estate = self._store(flat, name)
        self._note_use(estate.key, estate.nbytes)
        held = _Bytes(self, estate, version, self._heirless.append)
        known = _Known(storage, self._forget)
        known.key = (id(storage), low, high)
        with self._lock:
            self._known[known.key] = (known, weakref.ref(held))
            self._parked[estate.key] = estate.nbytes
        self._counts.add("kept", estate.nbytes)
        return held

    def _store(self, flat: torch.Tensor, name: str) -> _Estate:
        """Put bytes under a key of that name, and begin their way down."""
        while True:
            estate = _Estate(name, flat.numel())
            with contextlib.suppress(KeyExists):
                self._store_as(flat, estate)
                return estate
            name += "'"

    def _store_as(self, flat: torch.Tensor, estate: _Estate) -> None:
        if not self._can_adopt:
            self.store.put(estate.key, flat)
            return
        try:
            self.store.adopt(estate.key, flat)
        except CapacityError as error:
            if not self._below:
                raise
            log.debug("%s goes down at once: %s", estate.key, error)
            let_frames_go(error)  # they refer to these bytes
            self._counts.add("stalls")
            self._put_below(estate.key, flat)
            estate.is_released = True
            self._counts.add("released", estate.nbytes)
            return
        self._note_adopted(flat.untyped_storage(), lambda: self._is_adopted(estate))
        if self._below:
            self.store.fetch(estate.key, tier=self._below[0])

    def _is_adopted(self, estate: _Estate) -> bool:
        """Say whether the memory that the program allocated is on the device for the store."""
        with contextlib.suppress(KeyNotFound, StoreClosed):
            return not estate.is_dropped and self.is_here(estate.key)
        return False

    def _put_below(self, key: str, flat: torch.Tensor) -> None:
        for tier in self._below[:-1]:
            try:
                self.store.put(key, flat, tier=tier)
            except CapacityError as error:
                let_frames_go(error)
            else:
                return
        self.store.put(key, flat, tier=self._below[-1])

    def note_change(self, storage: torch.UntypedStorage) -> None:
        """Take in that a storage changes: what is kept of it is no longer what is there.

        A version alone does not tell: the pieces that ``unsafe_chunk`` returns share a storage, and each
        has a counter of its own.
        """
        with self._lock:
            for key in [key for key in self._known if key[0] == id(storage)]:
                del self._known[key]

    def _forget(self, known: weakref.ref[torch.UntypedStorage]) -> None:
        """A storage has died.  Runs anywhere: a dictionary's pop is one step."""
        assert isinstance(known, _Known)
        self._known.pop(known.key, None)

    # --- what `Parked` does -------------------------------------------------------------------

    def release(self, estate: _Estate) -> None:
        """See `Parked.release`."""
        with self._working():
            self._release(estate)

    def _release(self, estate: _Estate) -> None:
        with estate.lock:
            if estate.is_released or estate.is_dropped or not self._below or not estate.let_go():
                return
            estate.takes = 0
            estate.is_released = self._send_down(estate.key)
            if estate.is_released:
                self._counts.add("released", estate.nbytes)

    def _send_down(self, key: str) -> bool:
        """Free a key's memory on the device, when its copy has arrived; return whether it is free."""
        for tier in self._below:
            try:
                leaving = self.store.evict(key, to=tier)
                if not leaving.done():
                    self._counts.add("stalls")
                leaving.result()
            except LeaseError as error:  # it is wanted again: whoever asks last is heard
                let_frames_go(error)
                return False
            except CapacityError as error:
                log.debug("%s does not go to %s: %s", key, tier, error)
                let_frames_go(error)
            else:
                return True
        self._counts.add("refused")
        return False

    def leave(self, estate: _Estate) -> None:
        """See `WeakParked.leave`."""
        with self._working(), estate.lock:
            if estate.is_released or estate.is_dropped or not self._below or not estate.let_go():
                return
            estate.takes = 0
            with contextlib.suppress(LeaseError):  # somebody else uses the bytes
                leaving = self.store.evict(estate.key, to=self._below[0])
                leaving.add_done_callback(lambda: self._has_left(estate, leaving.result))

    def _has_left(self, estate: _Estate, come_to: Callable[[], object]) -> None:
        """The copy down has ended; runs in any thread, and without the estate's lock."""
        try:
            come_to()
        except TierStoreError as error:  # wanted again, or no room below: it stays where it is
            log.debug("%s stays on the device: %s", estate.key, error)
            let_frames_go(error)  # those of whoever happened to come by, and their activations
            return
        if estate.lease is None and estate.takes == 0:
            estate.is_released = True
        self._counts.add("released", estate.nbytes)

    def bring(self, estate: _Estate) -> None:
        """See `Parked.bring`."""
        with self._working():
            if estate.lease is None:
                self.store.prefetch(estate.key)

    def take(self, held: _Bytes, view: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """See `Parked.take`."""
        estate = held.estate
        with self._working(), estate.lock:
            if estate.lease is None:
                self._lend(held)
            estate.takes += 1
            assert estate.flat is not None
            return view(estate.flat)

    def _lend(self, held: _Bytes) -> None:
        estate = held.estate
        is_here = self.is_here(estate.key)
        if not is_here:
            self._counts.add("stalls")
        lease = lease_with_room(lambda: self.store.lease(estate.key), self._make_room)
        self._note_use(estate.key, estate.nbytes)
        estate.hold(lease)
        del lease
        if estate.takes == 0:
            is_back = estate.is_released or not is_here
            self._counts.add("brought" if is_back else "handed_over", estate.nbytes)
        estate.is_released = False
        with self._lock:
            self._lent[estate] = weakref.ref(held)

    def is_here(self, key: str) -> bool:
        """Say whether a key's bytes are in the fastest tier."""
        return self.store.tier_names[0] in self.store.where(key)

    # --- the end of bytes ---------------------------------------------------------------------

    def sweep(self) -> None:
        """Drop what nobody refers to, and end the leases whose bytes nobody uses."""
        with self._working():
            pass

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Do the vault's own work: not the program's, and after what is left over from before."""
        with self._apart():
            if self._heirless or self._lent:
                self._sweep()
            yield

    def _sweep(self) -> None:
        with self._lock:
            while self._heirless:
                self._lent[self._heirless.popleft()] = None
            lent = list(self._lent.items())
        for estate, held in lent:
            self._settle(estate, None if held is None else held())

    def _settle(self, estate: _Estate, held: _Bytes | None) -> None:
        """End a lease whose bytes nobody uses; drop the key if nobody will."""
        if not estate.lock.acquire(blocking=False):
            return  # somebody is at it
        try:
            if not estate.let_go():
                return
            with self._lock:
                self._lent.pop(estate, None)
            if held is None:
                self._drop(estate)
            elif estate.takes >= estate.uses and self._below:
                # Whoever refers to it still has a graph that is retained.  Nobody waits for this.
                self.store.evict(estate.key, to=self._below[0])
                estate.takes = 0
                estate.is_released = True
                self._counts.add("released", estate.nbytes)
        finally:
            estate.lock.release()

    def _drop(self, estate: _Estate) -> None:
        if estate.is_dropped:
            return  # its key may be another's by now
        estate.is_dropped = True
        with self._lock:
            self._parked.pop(estate.key, None)
        with contextlib.suppress(KeyNotFound, StoreClosed):
            self.store.drop(estate.key)
