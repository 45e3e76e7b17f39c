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
   there is nothing to release, unless a tier was named; the store moves them on when its quota demands.
9. A graph would have kept the memory until backward, so a stream that is given a tensor to save may read it
   after everybody has let go of it.  The memory is free when each such stream has come past that.

Knows nothing of modules, marks and autograd.  Every call is safe from any thread; it waits for hardware only.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import torch

from tierstore import forks
from tierstore.errors import CapacityError, KeyExists, KeyNotFound, LeaseError, StoreClosed
from tierstore.leases import Lease
from tierstore.store import Store
from tierstore.tensor_io import current_stream
from tierstore.training import locks
from tierstore.training.activations.runtime.tensor_views import TensorView
from tierstore.training.activations.swapping.activation_stats import ActivationCounts, ActivationStats
from tierstore.training.activations.swapping.offloaded_storage import (
    OffloadedStorage,
    StayOnDevice,
    StorageUser,
)
from tierstore.training.activations.swapping.run_store import ActivationHost, host_of
from tierstore.training.autograd.saved_tensors import refuse_if_changed
from tierstore.training.bundles.bindings import set_data
from tierstore.training.bundles.bundle_tiers import is_on_top
from tierstore.training.bundles.lease_room import lease_with_room, let_frames_go
from tierstore.training.locks import Rank

log = logging.getLogger("tierstore")

Admit = Callable[["OffloadedStorage"], "OffloadedTensor"]

_PART = 2  # a view of less than one part in so many of its storage is kept without the rest


Extent = tuple[int, int]
"""Which bytes of a storage: from the first, to before the second."""


class _KeptStorage(weakref.ref[torch.UntypedStorage]):
    """A live storage, of which some bytes are kept."""

    __slots__ = ("key",)

    key: int


class OffloadedTensor:
    """A tensor in the store.  Made by `ActivationStore.keep`; the last one of the same bytes drops them."""

    __slots__ = ("__weakref__", "_activation_store", "_user", "_version", "_view", "_witness")

    def __init__(
        self,
        activation_store: ActivationStore,
        view: TensorView,
        witness: torch.Tensor,
        version: int,
        offloaded_storage: OffloadedStorage,
    ) -> None:
        self._activation_store = activation_store
        self._view = view
        self._witness = witness
        self._version = version
        self._user = offloaded_storage.admit(self, activation_store.note_end)

    @property
    def key(self) -> str:
        """The key in the store."""
        return self._user.offloaded_storage.key

    @property
    def nbytes(self) -> int:
        """How many bytes are kept: where the tensor is a view, those of its storage."""
        return self._user.offloaded_storage.nbytes

    @property
    def is_here(self) -> bool:
        """Whether the bytes are on the device: neither given up, nor sent down by a quota."""
        return self._activation_store.is_here(self._user.offloaded_storage)

    def weakly(self) -> WeakOffloadedTensor:
        """Return what can release these bytes and bring them back, but does not keep them."""
        return WeakOffloadedTensor(self._activation_store, self._user.offloaded_storage)

    def release(self) -> None:
        """Give the device's memory up; it is free when nobody else refers to it.  Waits for the copy down.

        Nothing happens if they have left, if somebody uses the bytes now, or if they are wanted again
        meanwhile.  If no tier below has room they stay, which `ActivationStats.refused` counts.

        Raises:
            BackendError: the copy failed; the bytes on the device are unharmed.
        """
        self._activation_store.release(self._user.offloaded_storage)

    def bring(self) -> None:
        """Begin to bring the bytes back to the device, if they are not there.  Does not block.

        It is advice: where there is no room, `take` waits for it.
        """
        self._activation_store.bring(self._user.offloaded_storage)

    def take(self) -> torch.Tensor:
        """Return the tensor, of the same shape, strides and values.  Blocks until its bytes are there.

        They stay on the device while anything refers to them, and until the device has done what its
        current stream was told with them.

        Raises:
            RuntimeError: it was changed in place since it was kept; the text is PyTorch's.
            CapacityError: what is leased leaves no room for it.
            BackendError: the bytes could not be brought.
        """
        view = self._view
        refuse_if_changed(view.dtype, view.shape, self._witness._version, self._version)  # noqa: SLF001
        return self._activation_store.take(self._user, view)


class WeakOffloadedTensor:
    """An `OffloadedTensor` for those who tell when it goes and comes.  Nothing happens if it was dropped.

    Attributes:
        key: in the store.
    """

    __slots__ = ("_activation_store", "_offloaded_storage", "key")

    def __init__(self, activation_store: ActivationStore, offloaded_storage: OffloadedStorage) -> None:
        self.key = offloaded_storage.key
        self._activation_store = activation_store
        self._offloaded_storage = offloaded_storage

    @property
    def is_here(self) -> bool:
        """See `OffloadedTensor.is_here`."""
        return self._activation_store.is_here(self._offloaded_storage)

    def leave(self) -> None:
        """Let the device's memory go when the copy down has ended.  Does not wait for it.

        If the bytes are wanted again before that, they stay: no byte comes back.
        """
        self._activation_store.leave(self._offloaded_storage)

    def release(self) -> None:
        """See `OffloadedTensor.release`."""
        self._activation_store.release(self._offloaded_storage)

    def bring(self) -> None:
        """See `OffloadedTensor.bring`."""
        self._activation_store.bring(self._offloaded_storage)


class ActivationStore:
    """Keeps activations in a store.

    Args:
        store: where they go.
        host: who looks after the store; ``None``: the run that it is of, if it is of one.

    Attributes:
        host: who looks after the store.
    """

    def __init__(self, store: Store, host: ActivationHost | None = None) -> None:
        self.store = store
        self.host = host_of(store) if host is None else host
        self._counts = ActivationCounts()
        self._can_adopt = store.can_adopt
        self._fastest = store.tier_names[0]
        self._below = store.tier_names[1:] if self._can_adopt else ()
        self._ended: collections.deque[object] = collections.deque()  # users and storages that have died
        self.note_end = self._ended.append
        self._process = forks.here()
        self._lock = locks.new_lock(Rank.ACTIVATION_STORE)  # guards the rest
        self._restless: dict[OffloadedStorage, None] = {}  # they may have leases, or no users: see `_settle`
        self._known: dict[
            int, dict[Extent, tuple[_KeptStorage, OffloadedStorage]]
        ] = {}  # by the storage's id
        self._offloaded_storages: dict[str, OffloadedStorage] = {}  # by key, until they are dropped
        self.host.add_activation_store(self)

    @property
    def stats(self) -> ActivationStats:
        """What was done so far."""
        self.sweep()
        with self._lock:
            offloaded = [offloaded_storage.nbytes for offloaded_storage in self._offloaded_storages.values()]
        return self._counts.read(len(offloaded), sum(offloaded))

    # --- keeping ------------------------------------------------------------------------------

    def keep(self, tensor: torch.Tensor, name: str, tier: str | None = None) -> OffloadedTensor:
        """Take over the storage of ``tensor`` and begin to copy it down.

        It waits for room where the device's quota is short: something else leaves then, or these bytes
        go down at once.

        Args:
            tensor: an ordinary tensor with bytes, on the store's device.  It must not change any more.
            name: its key; if that is taken, with a mark behind it, and a number if that is taken too.
            tier: below the fastest one, where the bytes go; ``None``: to the next one.  If it has no room
                they go to one below it.  Where bytes that are kept already go is settled.

        Raises:
            CapacityError: no tier has room for it.
            BackendError: a medium failed.
        """
        version = tensor._version  # noqa: SLF001
        with self._working(), torch.no_grad():
            _note_stream(tensor)
            storage = tensor.untyped_storage()
            low, high = self._extent(tensor, storage)
            view = TensorView.of(tensor, low)
            witness = tensor.detach()
            # The counter of versions stays, the memory does not.
            set_data(witness, torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            admit = functools.partial(OffloadedTensor, self, view, witness, version)
            offloaded = self._share(storage, (low, high), version, admit)
            if offloaded is None:
                below = (
                    self._below
                    if tier is None
                    else self.store.tier_names[self.store.tier_names.index(tier) :]
                )
                made = OffloadedStorage(high - low, version, below)
                offloaded = self._keep_anew(storage, (low, high), made, name, admit)
            return offloaded

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

    def _is_kept(self, offloaded_storage: OffloadedStorage) -> bool:
        """Say whether a storage's bytes were not dropped yet.  They are not while its lock is held."""
        return self._offloaded_storages.get(offloaded_storage.key) is offloaded_storage

    def _share(
        self, storage: torch.UntypedStorage, extent: Extent, version: int, admit: Admit
    ) -> OffloadedTensor | None:
        """Admit a user of what is kept of these very bytes; let those of another version leave the device."""
        offloaded_storage = self._look_up(storage, extent)
        if offloaded_storage is None:
            return None
        if offloaded_storage.version != version:
            self.release(offloaded_storage)
            return None
        with offloaded_storage.lock:
            return admit(offloaded_storage) if self._is_kept(offloaded_storage) else None

    def _keep_anew(
        self,
        storage: torch.UntypedStorage,
        extent: Extent,
        offloaded_storage: OffloadedStorage,
        name: str,
        admit: Admit,
    ) -> OffloadedTensor:
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
        flat.set_(storage)
        low, high = extent
        known = _KeptStorage(storage, self.note_end)
        known.key = id(storage)
        with offloaded_storage.lock:
            is_whole = high - low == storage.nbytes()
            self._store(offloaded_storage, flat if is_whole else flat[low:high], name, is_whole=is_whole)
            offloaded = admit(offloaded_storage)
        with self._lock:
            self._known.setdefault(id(storage), {})[extent] = (known, offloaded_storage)
        self._counts.add("kept", offloaded_storage.nbytes)
        self.host.note_activation(offloaded_storage.key, offloaded_storage.nbytes)
        return offloaded

    def _store(
        self, offloaded_storage: OffloadedStorage, flat: torch.Tensor, name: str, *, is_whole: bool
    ) -> None:
        """Put bytes under a key of that name that nothing is under, and begin their way down."""
        for number in itertools.count():
            key = name + ("" if number == 0 else "'" if number == 1 else f"'{number}")
            with self._lock:
                if key in self._offloaded_storages:
                    continue
                offloaded_storage.key = key
                self._offloaded_storages[key] = offloaded_storage
                self._restless[offloaded_storage] = None  # from now on it is dropped unless somebody uses it
            try:
                self._put(offloaded_storage, flat, is_whole=is_whole)
            except KeyExists:  # somebody else's
                del self._offloaded_storages[key]
            else:
                return

    def _put(self, offloaded_storage: OffloadedStorage, flat: torch.Tensor, *, is_whole: bool) -> None:
        key, is_adopted = offloaded_storage.key, False
        if is_whole and self._can_adopt:
            try:
                self.store.adopt(key, flat)
            except CapacityError as error:
                log.debug("%s goes down at once: %s", key, error)
                let_frames_go(error)  # they refer to these bytes
                self.store.put(key, flat)
            else:
                is_adopted = True
                self.host.note_adopted(flat.untyped_storage(), lambda: self.is_here(offloaded_storage))
        else:
            self.store.put(key, flat)
        if not offloaded_storage.below:
            return
        if is_adopted or self.is_here(offloaded_storage):
            self.store.fetch(key, tier=offloaded_storage.below[0])
        else:
            self._counts.add("stalls")
            self._note_away(offloaded_storage)

    def note_change(self, storage: torch.UntypedStorage) -> None:
        """Take in that a storage changes: what is kept of it is no longer what is there.

        A version alone does not tell: the pieces that ``unsafe_chunk`` returns share a storage, and each
        has a counter of its own.
        """
        with self._lock:
            self._known.pop(id(storage), None)

    # --- what `OffloadedTensor` does -------------------------------------------------------------------

    def is_here(self, offloaded_storage: OffloadedStorage) -> bool:
        """See `OffloadedTensor.is_here`."""
        return self._is_kept(offloaded_storage) and is_on_top(self.store, offloaded_storage.key)

    def release(self, offloaded_storage: OffloadedStorage) -> None:
        """See `OffloadedTensor.release`."""
        with self._working():
            descent = self._send_down(offloaded_storage)
            if descent is not None:
                if not descent.done():
                    self._counts.add("stalls")
                descent.result()

    def leave(self, offloaded_storage: OffloadedStorage) -> None:
        """See `WeakOffloadedTensor.leave`."""
        with self._working():
            self._send_down(offloaded_storage)

    def _send_down(self, offloaded_storage: OffloadedStorage) -> Future[None] | None:
        """Begin to free a storage's memory on the device; ``None``: there is none, or it is in use.

        What it comes to is an error only if a medium fails.
        """
        with offloaded_storage.lock:
            if not offloaded_storage.below or not self._is_kept(offloaded_storage):
                return None
            if not offloaded_storage.let_go():
                return None
            offloaded_storage.turn += 1
            if not self.is_here(offloaded_storage):
                self._note_away(offloaded_storage)
                return None
            offloaded_storage.move(StayOnDevice.UNTAKEN)
        descent: Future[None] = Future()
        self._evict(offloaded_storage, offloaded_storage.below, descent)
        return descent

    def _evict(
        self, offloaded_storage: OffloadedStorage, tiers: Sequence[str], descent: Future[None]
    ) -> None:
        """Evict bytes to the first of ``tiers`` that takes them.  Runs anywhere, without a lock."""
        try:
            leaving = self.store.evict(offloaded_storage.key, to=tiers[0])
        except Exception as error:  # noqa: BLE001 - whoever waits is told
            self._stays(offloaded_storage, error, descent)
        else:
            leaving.add_done_callback(
                lambda: self._has_ended(offloaded_storage, leaving.result, tiers, descent)
            )

    def _has_ended(
        self,
        offloaded_storage: OffloadedStorage,
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
                self._evict(offloaded_storage, tiers[1:], descent)
                return
            self._counts.add("refused")
            self._stays(offloaded_storage, error, descent)
        except Exception as error:  # noqa: BLE001 - whoever waits is told
            self._stays(offloaded_storage, error, descent)
        else:
            if offloaded_storage.stay is StayOnDevice.UNTAKEN:  # else somebody has seen it before
                self._note_away(offloaded_storage)
            descent.set_result(None)

    def _note_away(self, offloaded_storage: OffloadedStorage) -> None:
        """Count bytes that have left, however they did: once."""
        if offloaded_storage.stay is not StayOnDevice.AWAY:
            offloaded_storage.move(StayOnDevice.AWAY)
            self._counts.add("released", offloaded_storage.nbytes)

    def _stays(self, offloaded_storage: OffloadedStorage, error: Exception, descent: Future[None]) -> None:
        """Bytes do not leave: they are wanted again, nothing below has room, or a medium failed."""
        log.debug("%s stays on the device: %s", offloaded_storage.key, error)
        let_frames_go(error)  # those of whoever happened to come by, and their activations
        if isinstance(error, CapacityError | LeaseError | KeyNotFound):
            descent.set_result(None)
        else:
            descent.set_exception(error)

    def bring(self, offloaded_storage: OffloadedStorage) -> None:
        """See `OffloadedTensor.bring`."""
        with self._working(), contextlib.suppress(KeyNotFound):
            if not self._is_kept(offloaded_storage) or offloaded_storage.is_leased:
                return
            if offloaded_storage.stay is not StayOnDevice.AWAY and not self.is_here(offloaded_storage):
                self._note_away(offloaded_storage)
            self.store.prefetch(offloaded_storage.key)

    def take(self, user: StorageUser, view: TensorView) -> torch.Tensor:
        """See `OffloadedTensor.take`."""
        offloaded_storage = user.offloaded_storage
        with self._working(), offloaded_storage.lock:
            flat = self._lend(offloaded_storage)
            user.turn = offloaded_storage.turn
            return view.over(flat.untyped_storage(), int(flat.storage_offset()))

    def _lend(self, offloaded_storage: OffloadedStorage) -> torch.Tensor:
        is_new = not offloaded_storage.is_leased
        if is_new and not self.is_here(offloaded_storage):
            self._counts.add("stalls")
            self._note_away(offloaded_storage)

        def lease() -> Lease:
            return lease_with_room(
                lambda: self.store.lease(offloaded_storage.key),
                lambda needed_bytes: self.host.reclaimer.make_room(needed_bytes, self),
            )

        try:
            flat = offloaded_storage.lend(lease)
        finally:
            self._restless[offloaded_storage] = None  # a lease may be held, whatever came between
        if offloaded_storage.stay is not StayOnDevice.TAKEN:
            self._counts.add(offloaded_storage.stay.value, offloaded_storage.nbytes)
            offloaded_storage.move(StayOnDevice.TAKEN)
        if is_new:
            self.host.note_lent(flat.untyped_storage())
            self.host.note_activation(offloaded_storage.key, offloaded_storage.nbytes)
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
        with self.host.apart():
            if self._ended:
                self._take_note()
            for offloaded_storage in list(self._restless):
                self._settle(offloaded_storage)
            yield

    def _take_note(self) -> None:
        """See to what has died.  What an interrupt leaves is seen to again."""
        with self._lock:
            while self._ended:
                end = self._ended[0]
                if isinstance(end, StorageUser):
                    end.offloaded_storage.users.pop(id(end), None)
                    self._restless[end.offloaded_storage] = None
                elif isinstance(end, _KeptStorage):
                    self._known.pop(end.key, None)  # nothing of another storage there was kept before
                self._ended.popleft()

    def _settle(self, offloaded_storage: OffloadedStorage) -> None:
        """End leases on bytes that nobody uses; drop the key if nobody will."""
        if not offloaded_storage.lock.acquire(blocking=False):
            return  # somebody is at it
        try:
            if not offloaded_storage.let_go():
                return
            with self._lock:
                is_wanted = bool(offloaded_storage.users)
                if is_wanted:
                    self._restless.pop(offloaded_storage, None)
            if not is_wanted:
                self._drop(offloaded_storage)
            elif offloaded_storage.has_been_taken_by_all:
                self._send_down(offloaded_storage)  # a retained graph; nobody waits for this
        finally:
            offloaded_storage.lock.release()

    def _drop(self, offloaded_storage: OffloadedStorage) -> None:
        if (
            self._offloaded_storages.get(offloaded_storage.key) is offloaded_storage
        ):  # else its key may be another's by now
            try:
                self.store.drop(offloaded_storage.key)
            except LeaseError:
                return  # somebody else leases it: the next sweep tries again
            except (KeyNotFound, StoreClosed):
                pass
            self._offloaded_storages.pop(offloaded_storage.key, None)
        self._restless.pop(offloaded_storage, None)


def _note_stream(tensor: torch.Tensor) -> None:
    """Let memory be handed out again only when the current stream has done what it is told before that."""
    stream = current_stream(tensor.device)
    if stream is not None:
        tensor.record_stream(stream)
