"""Who makes room where a lease finds none: given to whoever leases, when it is made."""

from __future__ import annotations

from typing import Protocol


class Reclaimer(Protocol):
    """Makes room on the device."""

    def prepare(self, needed_bytes: int) -> None:
        """See to it that so many bytes can be leased beside what is.

        Raises:
            CapacityError: the program uses what they would need.
        """
        ...

    def make_room(self, needed_bytes: int, asking: object) -> bool:
        """Let go of what nobody uses, and raise a quota that leaves no room for so many bytes.

        Args:
            needed_bytes: of the lease that found no room.
            asking: who leases: it has let go of its own before.

        Returns:
            Whether the quota was raised.

        Raises:
            CapacityError: the program uses what would be given.
        """
        ...


class NothingToReclaim:
    """A `Reclaimer` where there is no quota to raise, and nobody else to ask."""

    def prepare(self, needed_bytes: int) -> None:
        """See `Reclaimer.prepare`."""

    def make_room(self, needed_bytes: int, asking: object) -> bool:
        """See `Reclaimer.make_room`."""
        del needed_bytes, asking
        return False
