"""The way between a device and the host for values of modules: bytes under keys of the store.

What crosses is counted in `tierstore.stats.StoreStats.traffic`, takes the time that the store's link takes,
obeys the tiers' quotas, and is ordered with what the device was told.

1. Up: the value is put into host memory, brought to the device and copied there: what is returned is the
   program's own, as anything that the device computes, however long somebody keeps it.
2. Down: the device's memory is adopted as it lies (a value that is not all of its storage is copied first),
   sent to host memory, and leased there; the host waits for it.  What is returned is a storage of its own
   over leased memory.  The lease is held until nothing refers to that storage, and the key goes with it
   (`Link.sweep`).  Either is as dense as ``torch.empty_like`` would make it.
3. Where something fails, nothing is left under the key, and what was to cross is unharmed.
4. What has no plain bytes (sparse, nested, quantised, subclasses) is copied as ``Tensor.to`` does, and no
   store counts it.

Knows nothing of modules.  Every call is safe from any thread, and waits for hardware only.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from tierstore import sides
from tierstore.errors import CapacityError, KeyNotFound, StoreClosed
from tierstore.leases import Lease
from tierstore.planning.homes import CPU
from tierstore.planning.rules import HOST
from tierstore.sides import Side
from tierstore.store import Store
from tierstore.tensors import describe, is_whole
from tierstore.torch_private import TensorBase, innermost_transform, storage_use_count
from tierstore.training import locks
from tierstore.training.bundles.bundle_tiers import is_on_top
from tierstore.training.bundles.lease_room import lease_with_room, let_frames_go
from tierstore.training.bundles.patient_store import patiently
from tierstore.training.bundles.reclaiming import Reclaimer
from tierstore.training.locks import Rank
from tierstore.training.pytorch.own_work import ordinary_mode

PREFIX = "cross/"
"""What the keys of values that cross begin with."""

# As C++ has it: none of these is a guarded parameter, which `torch.Tensor.set_` would look for.
_set = TensorBase.set_
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class LinkHost(Protocol):
    """Who looks after the run whose values cross."""

    @property
    def reclaimer(self) -> Reclaimer:
        """Makes room where leases leave none."""
        ...

    def note_adopted(self, storage: torch.UntypedStorage, is_held: Callable[[], bool]) -> None:
        """Take in that the store has adopted a storage; ``is_held`` says whether it has it still."""
        ...

    def note_lent(self, storage: torch.UntypedStorage) -> None:
        """Take in that a storage lies over leased memory."""
        ...


class _Carried(NamedTuple):
    """A value that has crossed, as long as somebody has it."""

    key: str
    lease: Lease
    storage: torch.UntypedStorage
    baseline: int

    @property
    def is_referred_to(self) -> bool:
        """Whether anything but the link refers to the memory: tensors, and users of the storage object."""
        return storage_use_count(self.storage._cdata) + sys.getrefcount(self.storage) > self.baseline  # noqa: SLF001


class Link:
    """Carries values of one run.

    Args:
        store: of the run.
        host: who looks after it.
        require: raises if nothing may cross now; told what is about to be done.
    """

    def __init__(self, store: Store, host: LinkHost, require: Callable[[str], None]) -> None:
        self._store = store
        self._host = host
        self._require = require
        self._is_emulated = store.device.type == CPU
        self._is_closed = False
        self._numbers = itertools.count()
        self._lock = locks.new_lock(Rank.CROSSINGS)  # guards the next
        self._carried: dict[str, _Carried] = {}

    def device_of(self, side: str) -> torch.device:
        """Return what PyTorch calls a side: ``"cpu"`` or ``"device"``."""
        return torch.device(CPU) if side == CPU else self._store.device

    def is_there(self, tensor: torch.Tensor, side: str) -> bool:
        """Whether a tensor is known to be on a side."""
        if not self._is_emulated:
            return tensor.device.type == self.device_of(side).type
        if innermost_transform() is not None or not _is_plain(tensor):
            return False
        wanted = Side.HOST if side == CPU else Side.DEVICE
        return sides.side_of(tensor.untyped_storage()) is wanted

    def note_lent(self, storage: torch.UntypedStorage, tier: str) -> None:
        """Take in that a storage lies over memory that is leased in a tier."""
        self._host.note_lent(storage)
        if self._is_emulated:
            sides.note(storage, Side.HOST if tier == HOST else Side.DEVICE)

    def note_on_host(self, value: torch.Tensor) -> None:
        """Take in that a value is on the host, and not to be brought there."""
        if self._is_emulated and _is_plain(value):
            sides.note(value.untyped_storage(), Side.HOST)

    def carry(self, tensor: torch.Tensor, side: str) -> torch.Tensor:
        """Return a copy of a tensor's values on a side, without a graph.  Blocks on the way down.

        Args:
            tensor: on the other side.
            side: ``"cpu"`` or ``"device"``.

        Raises:
            CapacityError: a tier has no room for it beside what is in use.
            BackendError: a medium failed.
        """
        if self._is_closed:
            return tensor.to(self.device_of(side), copy=True)
        self._require("a value crosses between the device and the host")
        with torch.no_grad(), ordinary_mode():
            self.sweep()
            if not _is_plain(tensor) or not tensor.numel():
                return tensor.to(self.device_of(side), copy=True)
            if tensor.is_conj() or tensor.is_neg():
                tensor = tensor.resolve_conj().resolve_neg()
            key = f"{PREFIX}{next(self._numbers)}"
            try:
                if side == CPU:
                    self._send_down(key, tensor)
                    return self._lend(key, HOST)
                return self._bring_up(key, tensor)
            except BaseException:
                self._forget(key)
                raise

    def _bring_up(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a value of the host in memory of the device; nothing is left under the key."""
        self._store.put(key, tensor, tier=HOST)
        try:
            lease = self._lease(key, self._store.tier_names[0])
        except CapacityError as error:  # what is leased there leaves no room for it twice
            let_frames_go(error)
            lease = self._lease(key, HOST)
        with lease:
            leased = lease.tensor
            made = torch.empty_strided(
                leased.shape, leased.stride(), dtype=leased.dtype, device=self._store.device
            )
            if self._is_emulated:
                sides.note_allocation(made.untyped_storage(), Side.DEVICE)
            made.copy_(leased)
        self._forget(key)
        return made

    def _send_down(self, key: str, tensor: torch.Tensor) -> None:
        """Bring a value of the device to host memory."""
        if not self._store.can_adopt or tensor.device != self._store.device:
            self._store.put(key, tensor, tier=HOST)
            return
        spec = describe(tensor)
        if not is_whole(tensor, spec):
            whole = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=tensor.device)
            tensor = whole.copy_(tensor)
        try:
            self._host.reclaimer.prepare(tensor.nbytes)
            self._store.adopt(key, tensor)
        except CapacityError as error:  # what is leased leaves no room to charge it there
            let_frames_go(error)
            self._store.put(key, tensor, tier=HOST)
            return
        self._host.note_adopted(tensor.untyped_storage(), lambda: is_on_top(self._store, key))
        patiently(self._store, lambda: self._store.evict(key, to=HOST).result())

    def _lease(self, key: str, tier: str) -> Lease:
        return lease_with_room(
            lambda: self._store.lease(key, tier=tier),
            lambda needed_bytes: self._host.reclaimer.make_room(needed_bytes, self),
        )

    def _lend(self, key: str, tier: str) -> torch.Tensor:
        lease = self._lease(key, tier)
        try:
            leased = lease.tensor
            begin_bytes = int(leased.storage_offset()) * leased.element_size()
            storage = leased.untyped_storage()[begin_bytes : begin_bytes + leased.nbytes]
            baseline = storage_use_count(storage._cdata) + sys.getrefcount(storage)  # noqa: SLF001
            with self._lock:
                self._carried[key] = _Carried(key, lease, storage, baseline)
        except BaseException:
            lease.release(written=False)
            raise
        self.note_lent(storage, tier)
        view = torch.empty(0, dtype=leased.dtype, device=leased.device)
        _set(view, storage, 0, leased.shape, leased.stride())
        return view

    # --- the end ------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Let go of what nobody refers to any more."""
        if not self._carried:
            return
        with self._lock, ordinary_mode():
            for key, carried in list(self._carried.items()):
                if not carried.is_referred_to:
                    self._forget(key)

    @property
    def waiting(self) -> int:
        """How many values somebody has still."""
        self.sweep()
        return len(self._carried)

    def close(self) -> None:
        """The store is about to be closed: let go of what nobody has.

        What somebody has stays as it is, as long as he has it: leased memory outlives its store.  What
        crosses later, as a graph that was kept goes back, is copied as `Tensor.to` does.
        """
        self.sweep()
        self._is_closed = True
        self._carried.clear()

    def _forget(self, key: str) -> None:
        """End a value's lease, if it has one, and leave nothing under its key.  Once more where it failed."""
        with self._lock:
            carried = self._carried.get(key)
            if carried is not None:
                carried.lease.release(written=False)
            with contextlib.suppress(KeyNotFound, StoreClosed):
                self._store.drop(key)
            self._carried.pop(key, None)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has bytes of its own that a store can take."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
    )
