"""Whether a gradient that backward makes becomes the store's, or stays the program's until it is zeroed."""

from __future__ import annotations

from tierstore.planning.homes import CPU, Home, Stashing
from tierstore.planning.rules import HOST


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
