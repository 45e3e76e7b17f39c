"""A store in which others have leases of whom nobody is to know.

1. What is refused because of leases that a *lessee* holds waits for their end, and is tried again then.  The
   lessee holds none for longer than hardware, and what it computes, take; meanwhile it takes no lock of a
   run, so that whoever has some may wait for it.  Where room is short, what it has made is given up.
2. A *keeper* has leases that nobody needs.  It ends that of a key which somebody asks for, and all where room
   is short, so that none of them is named among those that stand in the way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import torch

from tierstore import Transfer
from tierstore.errors import CapacityError, LeaseError
from tierstore.leases import Lease
from tierstore.part_reader import PartReader
from tierstore.store import FASTEST, Store

Result = TypeVar("Result")


class Lessee(Protocol):
    """Who leases keys of a run's store for a while, and of whom nobody else is to know."""

    @property
    def releases(self) -> int:
        """How often leases were held, and have ended."""
        ...

    def wait_for_release(self, seen: int) -> bool:
        """Wait until no leases are held; return whether some have ended since `releases` was ``seen``."""
        ...

    def make_room(self) -> bool:
        """Let go of what was made and is not needed; return whether there was something."""
        ...


class LeaseKeeper(Protocol):
    """Who keeps leases that nobody needs."""

    def let_go(self, key: str | None) -> bool:
        """End the lease of a key, if it is such a one; ``None``: all of them; say if there was one."""
        ...


class PatientStore(Store):
    """A `tierstore.Store` that waits for one lessee, if it is given one, and asks one keeper for leases."""

    _lessee: weakref.ref[Lessee] | None = None
    _keeper: weakref.ref[LeaseKeeper] | None = None

    def be_patient_with(self, lessee: Lessee, keeper: LeaseKeeper) -> None:
        """Take in who leases for a while, and who longer than is needed; neither is kept."""
        self._lessee = weakref.ref(lessee)
        self._keeper = weakref.ref(keeper)

    def patiently(self, act: Callable[[], Result]) -> Result:
        """Return what ``act`` returns; where it is refused because of others' leases, try again."""
        lessee = None if self._lessee is None else self._lessee()
        keeper = None if self._keeper is None else self._keeper()
        if lessee is None or keeper is None:
            return act()
        while True:
            seen = lessee.releases
            try:
                return act()
            except LeaseError as error:
                if not (keeper.let_go(error.key) or lessee.wait_for_release(seen)):
                    raise
            except CapacityError as error:
                if keeper.let_go(None):  # or they would be taken for what is in the way
                    continue
                is_ours = self._is_short_below(error)
                if not (is_ours and (lessee.wait_for_release(seen) or lessee.make_room())):
                    raise

    def _is_short_below(self, error: CapacityError) -> bool:
        """Whether room is short where a lessee leases: never in the fastest tier, but maybe below it.

        What the fastest tier gives up finds no room there, or none in one piece: the error has a cause then.
        """
        fastest, *below = self.tier_names
        if error.tier != fastest or not below or error.__cause__ is not None:
            return True
        tier = self.stats().tiers[below[0]]
        return tier.capacity_bytes - tier.charged_bytes < (error.needed_bytes or 0)

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
        self.patiently(lambda: Store.put(self, key, tensor, tier=tier, replace=replace, adopt=adopt))

    def adopt(self, key: str, tensor: torch.Tensor) -> None:
        """See `tierstore.Store.adopt`."""
        self.patiently(lambda: Store.adopt(self, key, tensor))

    def get(self, key: str, *, device: torch.device | str | None = None) -> torch.Tensor:
        """See `tierstore.Store.get`."""
        return self.patiently(lambda: Store.get(self, key, device=device))

    def lease(self, *keys: str, tier: str = FASTEST, write: bool = False) -> Lease:
        """See `tierstore.Store.lease`."""
        return self.patiently(lambda: Store.lease(self, *keys, tier=tier, write=write))

    def reader(self) -> PartReader:
        """See `tierstore.Store.reader`."""
        return self._reader(self.patiently)

    def fetch(self, *keys: str, tier: str = FASTEST) -> Transfer[None]:
        """See `tierstore.Store.fetch`."""
        return self.patiently(lambda: Store.fetch(self, *keys, tier=tier))

    def evict(self, *keys: str, to: str | None = None) -> Transfer[None]:
        """See `tierstore.Store.evict`."""
        return self.patiently(lambda: Store.evict(self, *keys, to=to))

    def flush(self, *keys: str, keep: str = "", release: str = "") -> None:
        """See `tierstore.Store.flush`."""
        self.patiently(lambda: Store.flush(self, *keys, keep=keep, release=release))

    def drop(self, *keys: str) -> None:
        """See `tierstore.Store.drop`."""
        self.patiently(lambda: Store.drop(self, *keys))

    def rename(self, names: Mapping[str, str], *, replace: bool = False) -> None:
        """See `tierstore.Store.rename`."""
        self.patiently(lambda: Store.rename(self, names, replace=replace))

    def resize(
        self, tier: str, capacity: int | str, *, high: float | None = None, low: float | None = None
    ) -> None:
        """See `tierstore.Store.resize`."""
        self.patiently(lambda: Store.resize(self, tier, capacity, high=high, low=low))


def patiently(store: Store, act: Callable[[], Result]) -> Result:
    """Return what ``act`` returns: see `PatientStore.patiently`."""
    return store.patiently(act) if isinstance(store, PatientStore) else act()
