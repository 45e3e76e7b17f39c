"""The store of a run, and who looks after what activations do in it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from tierstore.config import StoreConfig
from tierstore.leases import Lease
from tierstore.store import FASTEST, Store
from tierstore.training.budgets.reclaimers import Sweeper
from tierstore.training.bundles.patient_store import LeaseKeeper, Lessee, PatientStore
from tierstore.training.bundles.reclaiming import NothingToReclaim, Reclaimer
from tierstore.training.pytorch.own_work import ordinary_mode


class ActivationHost(Protocol):
    """Who looks after a store that activations are kept in, its quotas and what it is told in advance."""

    @property
    def reclaimer(self) -> Reclaimer:
        """Makes room where leases leave none on the device for what is taken."""
        ...

    def asking(self) -> AbstractContextManager[None]:
        """Return a context in which somebody asks the store for something, and may have to wait."""
        ...

    def apart(self) -> AbstractContextManager[object]:
        """Return a context in which what is allocated is the store's."""
        ...

    def add_activation_store(self, activation_store: Sweeper) -> None:
        """Take in that there is one more, whose leases end when its ``sweep`` is called."""
        ...

    def note_activation(self, key: str, nbytes: int) -> None:
        """Take in that bytes are kept or taken, when they are held."""
        ...

    def note_adopted(self, storage: torch.UntypedStorage, is_held: Callable[[], bool]) -> None:
        """Take in that the store has adopted a storage; ``is_held`` says whether it has it still."""
        ...

    def note_lent(self, storage: torch.UntypedStorage) -> None:
        """Take in that a storage lies over leased memory."""
        ...

    def before_unpacking(self) -> None:
        """Backward comes for a tensor."""
        ...


class NoHost:
    """An `ActivationHost` of a store that nobody looks after."""

    @property
    def reclaimer(self) -> Reclaimer:
        """See `ActivationHost.reclaimer`."""
        return NothingToReclaim()

    def asking(self) -> AbstractContextManager[None]:
        """See `ActivationHost.asking`."""
        return contextlib.nullcontext()

    def apart(self) -> AbstractContextManager[object]:
        """See `ActivationHost.apart`."""
        return ordinary_mode()

    def add_activation_store(self, activation_store: Sweeper) -> None:
        """See `ActivationHost.add_activation_store`."""

    def note_activation(self, key: str, nbytes: int) -> None:
        """See `ActivationHost.note_activation`."""

    def note_adopted(self, storage: torch.UntypedStorage, is_held: Callable[[], bool]) -> None:
        """See `ActivationHost.note_adopted`."""

    def note_lent(self, storage: torch.UntypedStorage) -> None:
        """See `ActivationHost.note_lent`."""

    def before_unpacking(self) -> None:
        """See `ActivationHost.before_unpacking`."""


class RunStore(PatientStore):
    """A `tierstore.Store` that a run looks after: whoever keeps activations in it does so under its quotas.

    Args:
        config: of the store.
    """

    def __init__(self, config: StoreConfig) -> None:
        super().__init__(config)
        self._host: weakref.ref[ActivationHost] | None = None

    def begin_hosting(self, host: ActivationHost, lessee: Lessee, keeper: LeaseKeeper) -> None:
        """Take in who looks after the store, and who leases in it; it keeps none of them."""
        assert self._host is None
        self._host = weakref.ref(host)
        self.be_patient_with(lessee, keeper)

    @property
    def host(self) -> ActivationHost:
        """Who looks after it."""
        return (None if self._host is None else self._host()) or NoHost()

    def put(
        self,
        key: str,
        tensor: torch.Tensor,
        *,
        tier: str | None = None,
        replace: bool = False,
        adopt: bool = False,
    ) -> None:
        """See `tierstore.Store.put`."""
        with self.host.asking():
            super().put(key, tensor, tier=tier, replace=replace, adopt=adopt)

    def adopt(self, key: str, tensor: torch.Tensor) -> None:
        """See `tierstore.Store.adopt`."""
        with self.host.asking():
            super().adopt(key, tensor)

    def get(self, key: str, *, device: torch.device | str | None = None) -> torch.Tensor:
        """See `tierstore.Store.get`."""
        with self.host.asking():
            return super().get(key, device=device)

    def lease(self, *keys: str, tier: str = FASTEST, write: bool = False) -> Lease:
        """See `tierstore.Store.lease`."""
        with self.host.asking():
            return super().lease(*keys, tier=tier, write=write)

    def resize(
        self, tier: str, capacity: int | str, *, high: float | None = None, low: float | None = None
    ) -> None:
        """See `tierstore.Store.resize`."""
        with self.host.asking():
            super().resize(tier, capacity, high=high, low=low)


def host_of(store: Store) -> ActivationHost:
    """Return who looks after the activations in a store."""
    return store.host if isinstance(store, RunStore) else NoHost()
