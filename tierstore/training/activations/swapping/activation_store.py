"""Activations under keys of the store, between forward and backward.

`ActivationStore.keep` takes a tensor's storage over and begins the copy down.  What it returns, a
`OffloadedTensor`, is all that a graph has to refer to: it tells when the device's bytes may go, when they are
wanted again, and gives the tensor back.

1. Identity is the live storage and its version, never an address: what is kept twice is copied once.
2. The bytes are the storage's as a whole, or, if a view touches less than half of it, what it touches.  A
   stride of 0 is kept as what it repeats.
3. A storage must not change while it is kept.  `OffloadedTensor.take` raises what PyTorch raises if it did:
   the version counter is kept without the memory.
4. What nobody refers to any more is dropped, whether it was ever taken or not.  Ends come anywhere, also
   inside the store, so they are only noted, by a function that no interrupt can break;
   `ActivationStore.sweep` and every call of the activation store act on it.
5. A lease that `OffloadedTensor.take` got is held while anything refers to what it returned.  When nothing
   does, and every `OffloadedTensor` of these bytes that is left has been taken since they were last sent
   down, they are sent down again: a graph that is retained when backward has used it holds no device memory.
   While one of them was not taken, they stay until the device's quota demands their room.
6. Whether bytes are on the device is asked of the store, never remembered.
7. Only a storage as a whole is adopted.  A part of one is copied into room that the store has made.
8. Where the fastest tier cannot adopt memory it is host memory itself.  The bytes are copied into it and
   there is nothing to release; the store moves them on when its quota demands.
9. A graph would have kept the memory until backward, so a stream that is given a tensor to save may read it
   after everybody has let go of it.  The memory is free when each such stream has come past that.

Knows nothing of modules, marks and autograd.  Every call is safe from any thread; it waits for hardware only.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from tierstore import forks
from tierstore.errors import CapacityError, KeyExists, KeyNotFound, LeaseError, StoreClosed
from tierstore.leases import Lease
from tierstore.store import Store
from tierstore.tensor_io import current_stream
from tierstore.training.activations.swapping.activation_stats import ActivationCounts, ActivationStats
from tierstore.training.activations.swapping.offloaded_storage import (
    OffloadedStorage,
    StayOnDevice,
    StorageUser,
)
from tierstore.training.autograd.saved_tensors import refuse_if_changed
from tierstore.training.bundles.bindings import (
    Apart,
    MakeRoom,
    lease_with_room,
    let_frames_go,
    set_data,
)
from tierstore.training.pytorch.own_work import ordinary_mode

log = logging.getLogger("tierstore")

NoteAdopted = Callable[[torch.UntypedStorage, Callable[[], bool]], None]

Park = Callable[["OffloadedStorage"], "OffloadedTensor"]

_PART = 2  # a view of less than one part in so many of its storage is kept without the rest


Extent = tuple[int, int]
"""Which bytes of a storage: from the first, to before the second."""


class _KeptStorage(weakref.ref[torch.UntypedStorage]):
    """A live storage, of which some bytes are kept."""

    __slots__ = ("key",)

    key: int


@dataclass(frozen=True, slots=True)
class ViewShape:
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


class OffloadedTensor:
    """A tensor in the store.  Made by `ActivationStore.keep`; the last one of the same bytes drops them."""

    __slots__ = ("__weakref__", "_activation_store", "_shape", "_user", "_version", "_witness")

    def __init__(
        self,
        activation_store: ActivationStore,
        shape: ViewShape,
        witness: torch.Tensor,
        version: int,
        estate: OffloadedStorage,
    ) -> None:
        self._activation_store = activation_store
        self._shape = shape
        self._witness = witness
        self._version = version
        self._user = estate.admit(self, activation_store.note_end)

    @property
    def key(self) -> str:
        """The key in the store."""
        return self._user.estate.key

    @property
    def nbytes(self) -> int:
        """How many bytes are kept: where the tensor is a view, those of its storage."""
        return self._user.estate.nbytes

    @property
    def is_here(self) -> bool:
        """Whether the bytes are on the device: neither given up, nor sent down by a quota."""
        return self._activation_store.is_here(self._user.estate)

    def weakly(self) -> WeakOffloadedTensor:
        """Return what can release these bytes and bring them back, but does not keep them."""
        return WeakOffloadedTensor(self._activation_store, self._user.estate)

    def release(self) -> None:
        """Give the device's memory up; it is free when nobody else refers to it.  Waits for the copy down.

        Nothing happens if they have left, if somebody uses the bytes now, or if they are wanted again
        meanwhile.  If no tier below has room they stay, which `ActivationStats.refused` counts.

        Raises:
            BackendError: the copy failed; the bytes on the device are unharmed.
        """
        self._activation_store.release(self._user.estate)

    def bring(self) -> None:
        """Begin to bring the bytes back to the device, if they are not there.  Does not block.

        It is advice: where there is no room, `take` waits for it.
        """
        self._activation_store.bring(self._user.estate)

    def take(self) -> torch.Tensor:
        """Return the tensor, of the same shape, strides and values.  Blocks until its bytes are there.

        They stay on the device while anything refers to them, and until the device has done what its
        current stream was told with them.

        Raises:
            RuntimeError: it was changed in place since it was kept; the text is PyTorch's.
            CapacityError: what is leased leaves no room for it.
            BackendError: the bytes could not be brought.
        """
        shape = self._shape
        refuse_if_changed(shape.dtype, shape.shape, self._witness._version, self._version)  # noqa: SLF001
        return self._activation_store.take(self._user, shape.view)


class WeakOffloadedTensor:
    """An `OffloadedTensor` for those who tell when it goes and comes.  Nothing happens if it was dropped.

    Attributes:
        key: in the store.
    """

    __slots__ = ("_activation_store", "_estate", "key")

    def __init__(self, activation_store: ActivationStore, estate: OffloadedStorage) -> None:
        self.key = estate.key
        self._activation_store = activation_store
        self._estate = estate

    @property
    def is_here(self) -> bool:
        """See `OffloadedTensor.is_here`."""
        return self._activation_store.is_here(self._estate)

    def leave(self) -> None:
        """Let the device's memory go when the copy down has ended.  Does not wait for it.

        If the bytes are wanted again before that, they stay: no byte comes back.
        """
        self._activation_store.leave(self._estate)

    def release(self) -> None:
        """See `OffloadedTensor.release`."""
        self._activation_store.release(self._estate)

    def bring(self) -> None:
        """See `OffloadedTensor.bring`."""
        self._activation_store.bring(self._estate)


class ActivationStore:
    """Keeps activations in a store.

    Args:
        store: where they go.
        apart: what is allocated inside this context is the store's.
        note_use: told the key of whatever is kept or taken, and its bytes, when they are held.
        make_room: called where leases leave no room on the device for what is taken.
        note_adopted: told of a storage that the store has adopted, and how to ask whether it has it still.
        note_lent: told of a storage that lies over leased memory.
        before_unpacking: what is to be called first whenever backward comes for a tensor.
    """

    def __init__(
        self,
        store: Store,
        apart: Apart = ordinary_mode,
        *,
        note_use: Callable[[str, int], None] = lambda _key, _nbytes: None,
        make_room: MakeRoom = lambda _: False,
        note_adopted: NoteAdopted = lambda _storage, _is_held: None,
        note_lent: Callable[[torch.UntypedStorage], None] = lambda _storage: None,
        before_unpacking: Callable[[], None] = lambda: None,
    ) -> None:
        self.store = store
        self.before_unpacking = before_unpacking
        self._apart = apart
        self._note_use = note_use
        self._make_room = make_room
        self._note_adopted = note_adopted
        self._note_lent = note_lent
        self._counts = ActivationCounts()
        self._can_adopt = store.can_adopt
        self._fastest = store.tier_names[0]
        self._below = store.tier_names[1:] if self._can_adopt else ()
        self._ended: collections.deque[object] = collections.deque()  # users and storages that have died
        self.note_end = self._ended.append
        self._process = forks.here()
        self._lock = forks.free_in_child(threading.Lock())  # guards the rest
        self._restless: dict[OffloadedStorage, None] = {}  # they may have leases, or no users: see `_settle`
        self._known: dict[
            int, dict[Extent, tuple[_KeptStorage, OffloadedStorage]]
        ] = {}  # by the storage's id
        self._estates: dict[str, OffloadedStorage] = {}  # by key, until they are dropped

    @property
    def stats(self) -> ActivationStats:
        """What was done so far."""
        self.sweep()
        with self._lock:
            parked = [estate.nbytes for estate in self._estates.values()]
        return self._counts.read(len(parked), sum(parked))

    # --- keeping ------------------------------------------------------------------------------

    def keep(self, tensor: torch.Tensor, name: str) -> OffloadedTensor:
        """Take over the storage of ``tensor`` and begin to copy it down.

        It waits for room where the device's quota is short: something else leaves then, or these bytes
        go down at once.

        Args:
            tensor: an ordinary tensor with bytes, on the store's device.  It must not change any more.
            name: its key; if that is taken, with a mark behind it, and a number if that is taken too.

        Raises:
            CapacityError: no tier has room for it.
            BackendError: a medium failed.
        """
        version = tensor._version  # noqa: SLF001
        with self._working(), torch.no_grad():
            _note_stream(tensor)
            storage = tensor.untyped_storage()
            low, high = self._extent(tensor, storage)
            offset = int(tensor.storage_offset()) - low // tensor.element_size()
            shape = ViewShape(
                tensor.dtype, tensor.shape, tensor.stride(), offset, tensor.is_conj(), tensor.is_neg()
            )
            witness = tensor.detach()
            # The counter of versions stays, the memory does not.
            set_data(witness, torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            park = functools.partial(OffloadedTensor, self, shape, witness, version)
            parked = self._share(storage, (low, high), version, park)
            return parked or self._keep_anew(storage, (low, high), version, name, park)

    def _extent(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Extent:
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

    def _look_up(self, storage: torch.UntypedStorage, extent: Extent) -> OffloadedStorage | None:
        with self._lock:
            found = self._known.get(id(storage), {}).get(extent)
        is_known = found is not None and found[0]() is storage and self._is_kept(found[1])
        return found[1] if found is not None and is_known else None

    def _is_kept(self, estate: OffloadedStorage) -> bool:
        """Say whether an estate's bytes were not dropped yet.  They are not while its lock is held."""
        return self._estates.get(estate.key) is estate

    def _share(
        self, storage: torch.UntypedStorage, extent: Extent, version: int, park: Park
    ) -> OffloadedTensor | None:
        """Park what is kept of these very bytes; let former ones of another version leave the device."""
        estate = self._look_up(storage, extent)
        if estate is None:
            return None
        if estate.version != version:
            self.release(estate)
            return None
        with estate.lock:
            return park(estate) if self._is_kept(estate) else None

    def _keep_anew(
        self, storage: torch.UntypedStorage, extent: Extent, version: int, name: str, park: Park
    ) -> OffloadedTensor:
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
        flat.set_(storage)
        low, high = extent
        estate = OffloadedStorage(high - low, version)
        known = _KeptStorage(storage, self.note_end)
        known.key = id(storage)
        with estate.lock:
            is_whole = high - low == storage.nbytes()
            self._store(estate, flat if is_whole else flat[low:high], name, is_whole=is_whole)
            parked = park(estate)
        with self._lock:
            self._known.setdefault(id(storage), {})[extent] = (known, estate)
        self._counts.add("kept", estate.nbytes)
        self._note_use(estate.key, estate.nbytes)
        return parked

    def _store(self, estate: OffloadedStorage, flat: torch.Tensor, name: str, *, is_whole: bool) -> None:
        """Put bytes under a key of that name, and begin their way down."""
        while True:
            self._call(estate, name)
            try:
                self._put(estate, flat, is_whole=is_whole)
            except KeyExists:  # somebody else has put it since the store was asked
                del self._estates[estate.key]
            else:
                return

    def _call(self, estate: OffloadedStorage, name: str) -> None:
        """Give an estate a key that nothing is under; from now on it is dropped unless somebody uses it."""
        with self._lock:
            estate.key, number = name, 0
            while estate.key in self._estates or estate.key in self.store:
                number += 1
                estate.key = f"{name}'{number}" if number > 1 else f"{name}'"
            self._estates[estate.key] = estate
            self._restless[estate] = None

    def _put(self, estate: OffloadedStorage, flat: torch.Tensor, *, is_whole: bool) -> None:
        key = estate.key
        if is_whole and self._can_adopt:
            try:
                self.store.adopt(key, flat)
            except CapacityError as error:
                log.debug("%s goes down at once: %s", key, error)
                let_frames_go(error)  # they refer to these bytes
                self.store.put(key, flat)
            else:
                self._note_adopted(flat.untyped_storage(), lambda: self.is_here(estate))
        else:
            self.store.put(key, flat)
        if not self._below:
            return
        if self.is_here(estate):
            self.store.fetch(key, tier=self._below[0])
        else:
            self._counts.add("stalls")
            self._note_away(estate)

    def note_change(self, storage: torch.UntypedStorage) -> None:
        """Take in that a storage changes: what is kept of it is no longer what is there.

        A version alone does not tell: the pieces that ``unsafe_chunk`` returns share a storage, and each
        has a counter of its own.
        """
        with self._lock:
            self._known.pop(id(storage), None)

    # --- what `OffloadedTensor` does -------------------------------------------------------------------

    def is_here(self, estate: OffloadedStorage) -> bool:
        """See `OffloadedTensor.is_here`."""
        with contextlib.suppress(KeyNotFound, StoreClosed):
            return self._is_kept(estate) and self._fastest in self.store.where(estate.key)
        return False

    def release(self, estate: OffloadedStorage) -> None:
        """See `OffloadedTensor.release`."""
        with self._working():
            descent = self._send_down(estate)
            if descent is not None:
                if not descent.done():
                    self._counts.add("stalls")
                descent.result()

    def leave(self, estate: OffloadedStorage) -> None:
        """See `WeakOffloadedTensor.leave`."""
        with self._working():
            self._send_down(estate)

    def _send_down(self, estate: OffloadedStorage) -> Future[None] | None:
        """Begin to free an estate's memory on the device; ``None``: there is none, or it is in use.

        What it comes to is an error only if a medium fails.
        """
        with estate.lock:
            if not self._below or not estate.let_go():
                return None
            estate.turn += 1
            if not self.is_here(estate):
                self._note_away(estate)
                return None
            estate.stay = StayOnDevice.UNTAKEN
        descent: Future[None] = Future()
        self._evict(estate, self._below, descent)
        return descent

    def _evict(self, estate: OffloadedStorage, tiers: Sequence[str], descent: Future[None]) -> None:
        """Evict bytes to the first of ``tiers`` that takes them.  Runs anywhere, without a lock."""
        try:
            leaving = self.store.evict(estate.key, to=tiers[0])
        except Exception as error:  # noqa: BLE001 - whoever waits is told
            self._stays(estate, error, descent)
        else:
            leaving.add_done_callback(lambda: self._has_ended(estate, leaving.result, tiers, descent))

    def _has_ended(
        self,
        estate: OffloadedStorage,
        come_to: Callable[[], object],
        tiers: Sequence[str],
        descent: Future[None],
    ) -> None:
        """Bytes have left, or not.  Runs anywhere, and after an interrupt again."""
        if descent.done():
            return
        try:
            come_to()
        except CapacityError as error:
            if len(tiers) > 1:
                let_frames_go(error)
                self._evict(estate, tiers[1:], descent)
                return
            self._counts.add("refused")
            self._stays(estate, error, descent)
        except Exception as error:  # noqa: BLE001 - whoever waits is told
            self._stays(estate, error, descent)
        else:
            if estate.stay is StayOnDevice.UNTAKEN:  # else somebody has seen it before
                self._note_away(estate)
            descent.set_result(None)

    def _note_away(self, estate: OffloadedStorage) -> None:
        """Count bytes that have left, however they did: once."""
        if estate.stay is not StayOnDevice.AWAY:
            estate.stay = StayOnDevice.AWAY
            self._counts.add("released", estate.nbytes)

    def _stays(self, estate: OffloadedStorage, error: Exception, descent: Future[None]) -> None:
        """Bytes do not leave: they are wanted again, nothing below has room, or a medium failed."""
        log.debug("%s stays on the device: %s", estate.key, error)
        let_frames_go(error)  # those of whoever happened to come by, and their activations
        if isinstance(error, CapacityError | LeaseError | KeyNotFound):
            descent.set_result(None)
        else:
            descent.set_exception(error)

    def bring(self, estate: OffloadedStorage) -> None:
        """See `OffloadedTensor.bring`."""
        with self._working(), contextlib.suppress(KeyNotFound):
            if not self._is_kept(estate) or estate.is_leased:
                return
            if not self.is_here(estate):
                self._note_away(estate)
            self.store.prefetch(estate.key)

    def take(self, user: StorageUser, view: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """See `OffloadedTensor.take`."""
        estate = user.estate
        with self._working(), estate.lock:
            flat = self._lend(estate)
            user.turn = estate.turn
            return view(flat)

    def _lend(self, estate: OffloadedStorage) -> torch.Tensor:
        is_new = not estate.is_leased
        if is_new and not self.is_here(estate):
            self._counts.add("stalls")
            self._note_away(estate)

        def lease() -> Lease:
            return lease_with_room(lambda: self.store.lease(estate.key), self._make_room)

        try:
            flat = estate.lend(lease)
        finally:
            self._restless[estate] = None  # a lease may be held, whatever came between
        if estate.stay is not StayOnDevice.TAKEN:
            self._counts.add(estate.stay.value, estate.nbytes)
            estate.stay = StayOnDevice.TAKEN
        if is_new:
            self._note_lent(flat.untyped_storage())
            self._note_use(estate.key, estate.nbytes)
        return flat

    # --- the end of bytes ---------------------------------------------------------------------

    def sweep(self) -> None:
        """Drop what nobody refers to, and end the leases whose bytes nobody uses."""
        with self._working():
            pass

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Do the activation store's own work: not the program's, and after what is left over from before."""
        forks.require_here(self._process, "the store of swapped activations")
        with self._apart():
            if self._ended:
                self._take_note()
            for estate in list(self._restless):
                self._settle(estate)
            yield

    def _take_note(self) -> None:
        """See to what has died.  What an interrupt leaves is seen to again."""
        with self._lock:
            while self._ended:
                end = self._ended[0]
                if isinstance(end, StorageUser):
                    end.estate.users.pop(id(end), None)
                    self._restless[end.estate] = None
                elif isinstance(end, _KeptStorage):
                    self._known.pop(end.key, None)  # nothing of another storage there was kept before
                self._ended.popleft()

    def _settle(self, estate: OffloadedStorage) -> None:
        """End leases on bytes that nobody uses; drop the key if nobody will."""
        if not estate.lock.acquire(blocking=False):
            return  # somebody is at it
        try:
            if not estate.let_go():
                return
            with self._lock:
                is_wanted = bool(estate.users)
                if is_wanted:
                    self._restless.pop(estate, None)
            if not is_wanted:
                self._drop(estate)
            elif estate.has_been_taken_by_all:
                self._send_down(estate)  # a retained graph; nobody waits for this
        finally:
            estate.lock.release()

    def _drop(self, estate: OffloadedStorage) -> None:
        if self._estates.get(estate.key) is estate:  # else its key may be another's by now
            try:
                self.store.drop(estate.key)
            except LeaseError:
                return  # somebody else leases it: the next sweep tries again
            except (KeyNotFound, StoreClosed):
                pass
            self._estates.pop(estate.key, None)
        self._restless.pop(estate, None)


def _note_stream(tensor: torch.Tensor) -> None:
    """Let memory be handed out again only when the current stream has done what it is told before that."""
    stream = current_stream(tensor.device)
    if stream is not None:
        tensor.record_stream(stream)
