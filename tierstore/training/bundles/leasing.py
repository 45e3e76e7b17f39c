"""Whether bundles may be leased at all: while a run is suspended none is, and who needs one is told so."""

from __future__ import annotations

import enum

from tierstore import forks
from tierstore.errors import UsageError


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
