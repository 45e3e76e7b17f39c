"""The locks of a run, and the order in which a thread may take them while it has others.

A thread that has a lock takes only such as come after it here; one that it has already it may take again.
Whoever takes locks in this order never waits for somebody who waits for him.  Those of the store come after
all of these.

Where a lock before those that a thread has is wanted all the same, it is tried without waiting
(`tierstore.training.activations.swapping.activation_store.ActivationStore`).
"""

from __future__ import annotations

import enum
import threading
from types import TracebackType
from typing import Protocol, Self

from tierstore import forks


class Rank(enum.IntEnum):
    """What a lock guards, first to last."""

    STEP_IN_BACKWARD = enum.auto()  # an optimizer's groups, while it steps in the midst of backward
    RECORDED_OP = (
        enum.auto()
    )  # the values of an operator that is run again: what it was given may have to be brought
    GRADIENT = enum.auto()  # one gradient's state
    OFFLOADED_STORAGE = enum.auto()  # one storage of an activation, in the store
    BINDINGS = enum.auto()  # leases and windows of bundles
    DEVICE_QUOTA = enum.auto()  # what the store has of the device
    PREFETCHER = enum.auto()  # where in the plan a step is
    ACTIVATION_STORE = enum.auto()  # which activations there are
    CROSSINGS = enum.auto()  # which values have crossed between the device and the host
    COUNTS = enum.auto()  # what was done so far


NESTED = frozenset({Rank.GRADIENT, Rank.RECORDED_OP})
"""Of these a thread may have several: of a gradient and the one whose place it takes, of all gradients while
a run is suspended; of an operator and of those that have made its inputs."""


class RunLock(Protocol):
    """A lock that a thread may take again."""

    def acquire(self, blocking: bool = True) -> bool:
        """Take it; return whether it was taken."""
        ...

    def release(self) -> None:
        """Give it back."""
        ...

    def __enter__(self) -> bool | Self:
        """Take it."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Give it back."""
        ...


def new_lock(rank: Rank) -> RunLock:
    """Return a lock, which is free in the child of a fork.

    Args:
        rank: its place in the order, which tests check (``tests.lock_order``).
    """
    del rank
    return forks.free_in_child(threading.RLock())
