"""What makes room on a run's device: leases that nobody needs any more end, then the quota is raised."""

from __future__ import annotations

import weakref
from typing import Protocol

from tierstore.training.budgets.device_quota import DeviceQuota


class Sweeper(Protocol):
    """Somebody who leases, and may hold leases that nobody needs any more."""

    def sweep(self) -> None:
        """End those."""
        ...


class Reclaimers:
    """A `tierstore.training.bundles.reclaiming.Reclaimer` of one run.  Safe from any thread.

    It is made before those who lease, and given to them; it keeps none of them alive.

    Args:
        quota: of the device; ``None``: it has none that could be raised.
    """

    def __init__(self, quota: DeviceQuota | None) -> None:
        self._quota = quota
        self._sweepers: weakref.WeakSet[Sweeper] = weakref.WeakSet()

    def add(self, sweeper: Sweeper) -> None:
        """Ask somebody, too, from now on, as long as it is there."""
        self._sweepers.add(sweeper)

    def sweep(self, *, but: object = None) -> None:
        """Let everybody end what nobody needs any more.

        Args:
            but: who is not asked.
        """
        for sweeper in list(self._sweepers):
            if sweeper is not but:
                sweeper.sweep()

    def prepare(self, needed_bytes: int) -> None:
        """See `tierstore.training.bundles.reclaiming.Reclaimer.prepare`."""
        if self._quota is not None:
            self._quota.prepare(needed_bytes)

    def make_room(self, needed_bytes: int, asking: object) -> bool:
        """See `tierstore.training.bundles.reclaiming.Reclaimer.make_room`."""
        self.sweep(but=asking)
        return self._quota is not None and self._quota.grow(needed_bytes)
