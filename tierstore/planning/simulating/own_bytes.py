"""The program's own bytes on the first tier: what it has, makes and computes with, within its share."""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.planning.program import ByteKind, Datum, Moment
from tierstore.planning.simulating.dividing import DividedDevice
from tierstore.planning.simulating.holdings import LIVE, STANDING, WORKSPACE, Holdings
from tierstore.planning.simulating.lanes import Lanes
from tierstore.planning.simulating.queue import EventQueue


class OwnBytes:
    """Lets the program have bytes, and compute with them.

    Args:
        holdings: who holds what.
        device: divides the first tier; ``None``: nobody does.
        lanes: what computes.
        queue: the clock.
    """

    def __init__(
        self, holdings: Holdings, device: DividedDevice | None, lanes: Lanes, queue: EventQueue
    ) -> None:
        self._holdings = holdings
        self._device = device
        self._lanes = lanes
        self._queue = queue

    def stand(self, nbytes: int) -> None:
        """So many bytes are there all the time."""
        self._set(STANDING, ByteKind.INPUT, nbytes)

    def has(self, key: str) -> bool:
        """Say whether a datum is the program's own."""
        return self._holdings.owned(key) > 0

    def take(self, datum: Datum) -> None:
        """A datum is the program's own from now on.

        Raises:
            CapacityError: there is no room for it.
        """
        self._set(datum.key, datum.kind, datum.nbytes)
        if datum.kind is ByteKind.GRADIENT and self._device is not None:
            self._device.staying_bytes += datum.nbytes

    def give_up(self, datum: Datum) -> None:
        """A datum is needed no more, if it is the program's."""
        if not self.has(datum.key):
            return
        self._set(datum.key, datum.kind, 0)
        if datum.kind is ByteKind.GRADIENT and self._device is not None:
            self._device.staying_bytes -= datum.nbytes

    def begin_phase(self, moment: Moment) -> None:
        """Another phase begins with a moment: nothing is live any more that only the former phase needed.

        Raises:
            CapacityError: there is no room for what is.
        """
        self._set(LIVE, ByteKind.ACTIVATION, moment.live_bytes)

    def compute(self, moment: Moment, keys: Sequence[str]) -> None:
        """Let the device compute a moment with keys that are leased.

        Raises:
            CapacityError: there is no room for what is live meanwhile.
        """
        self._set(LIVE, ByteKind.ACTIVATION, moment.live_bytes)
        self._set(WORKSPACE, ByteKind.WORKSPACE, moment.workspace_bytes)
        self._lanes.compute(moment, keys)
        self._set(WORKSPACE, ByteKind.WORKSPACE, 0)

    def _set(self, name: str, kind: ByteKind, nbytes: int) -> None:
        more_bytes = nbytes - self._holdings.owned(name)
        if more_bytes > 0 and self._device is not None:
            self._device.require(more_bytes)
        self._holdings.own(name, kind, nbytes, self._queue.now_s)
