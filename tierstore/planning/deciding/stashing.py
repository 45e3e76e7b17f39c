"""Whether a gradient that backward makes becomes the store's, or stays the program's until it is zeroed."""

from __future__ import annotations

from tierstore.planning.deciding.device_share import ALIGNMENT_BYTES
from tierstore.planning.homes import CPU, Home, Stashing
from tierstore.planning.rules import HOST
from tierstore.units import align_up


def must_stash(stashing: Stashing, *, has_room: bool) -> bool:
    """Say whether gradients that are stepped on the device go to the store.

    Args:
        stashing: as the placement says.
        has_room: whether all that is trained is known to fit beside the program.
    """
    if stashing is Stashing.WITHOUT_ROOM:
        return not has_room
    return stashing is Stashing.ALWAYS


def is_stashed(home: Home, first_tier: str, *, must: bool) -> bool:
    """Say whether a gradient goes to the store: if the host steps beside a device, it is needed there.

    Args:
        home: the gradient's.
        first_tier: of the store.
        must: see `must_stash`.
    """
    return must or (home.device == CPU and first_tier != HOST)


def room_bytes(home: Home, first_tier: str, nbytes: int) -> int:
    """Return for how much of the first tier room is made before a gradient comes: backward waits for it.

    Beside a device that has a quota of its own nothing is made in good time: how much is the store's changes
    with the step's phases.

    Args:
        home: the gradient's.
        first_tier: of the store.
        nbytes: the gradient's.
    """
    is_there = first_tier == HOST and home.tier in (None, HOST)
    return align_up(nbytes, ALIGNMENT_BYTES) if is_there else 0
