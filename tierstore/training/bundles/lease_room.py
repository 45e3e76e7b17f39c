"""What is done where a lease finds no room: others let go of what nobody uses, and it is asked for again."""

from __future__ import annotations

from collections.abc import Callable

from tierstore.errors import CapacityError
from tierstore.leases import Lease

MakeRoom = Callable[[int], bool]
"""Lets go of what nobody uses, and raises a quota that leaves no room for so many bytes; says if it did."""


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
