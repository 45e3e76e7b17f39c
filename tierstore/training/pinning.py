"""What decides whether bundles may be leased at all, and which never lose their lease.

1. While a run is suspended nothing is leased: whoever needs bytes is told so (`Leasing.require`).
2. A pinned bundle keeps the lease that it has got until it is unpinned, restored, or the run is suspended.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tierstore import forks
from tierstore.errors import UsageError

if TYPE_CHECKING:
    from tierstore.training.binding import Binding, Bindings


class LeasingState(enum.Enum):
    """What may be done with the bytes of a model."""

    ALLOWED = enum.auto()  # brought, leased, computed with
    SUSPENDED = enum.auto()  # copied out of the store, dropped: nothing where computing happens


_MOVES = {(LeasingState.ALLOWED, LeasingState.SUSPENDED), (LeasingState.SUSPENDED, LeasingState.ALLOWED)}


class Leasing:
    """Whether bundles of one model may be leased.

    Attributes:
        state: changed by `move`, under the lock of the bindings.
    """

    def __init__(self) -> None:
        self.state = LeasingState.ALLOWED
        self._process = forks.here()

    def move(self, state: LeasingState) -> None:
        """Change what may be done; to nothing only while nothing is leased."""
        assert (self.state, state) in _MOVES, (self.state, state)
        self.state = state

    def require(self, what: str) -> None:
        """Raise if bytes may not be used where computing happens.

        Args:
            what: is about to be done, as a clause.

        Raises:
            UsageError: the run is suspended.
            StoreForked: this is the child of a fork.
        """
        forks.require_here(self._process, f"the offloaded model ({what})")
        if self.state is LeasingState.SUSPENDED:
            raise UsageError(f"the run is suspended, and {what}: call run.resume() first.")


def pin(bindings: Bindings, binding: Binding) -> None:
    """Bring a bundle to where it is computed with, and let it keep its lease.

    Raises:
        CapacityError: there is no room for it beside what is in use.
        BackendError: its bytes could not be brought.
    """
    with bindings.alone():
        bindings.reach(binding)
        bindings.pinned.add(binding)


def unpin_all(bindings: Bindings) -> list[Binding]:
    """Let everything travel; return what was pinned."""
    with bindings.alone():
        pinned = list(bindings.pinned)
        bindings.pinned.clear()
        for binding in pinned:
            bindings.release_idle(binding)
        return pinned


@contextlib.contextmanager
def all_unpinned(bindings: Bindings) -> Iterator[None]:
    """Let everything travel, inside the context; bring back what was pinned after it.  Blocks.

    Raises:
        CapacityError, BackendError: something could not be brought back.
    """
    with contextlib.ExitStack() as pinned_again:
        for binding in unpin_all(bindings):
            pinned_again.callback(pin, bindings, binding)
        yield
