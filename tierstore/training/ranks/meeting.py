"""Where the processes tell each other something.

1. It works over host memory (gloo), whatever carries gradients: in the default process group where that can
   do it, with the timeout that the program gave it, else in a group beside it.
2. Who meets waits for the others.  One that has ended is noticed by all that wait, and raised.
"""

from __future__ import annotations

import contextlib
from typing import TypeVar

from torch import distributed

from tierstore.errors import TierStoreError
from tierstore.training.ranks.where import RankPlace

T = TypeVar("T")


class Meeting:
    """Meets the others.  Every process makes one at the same point, and calls the same in the same order.

    Args:
        where: which process this is.

    Raises:
        TierStoreError: another process has ended.
    """

    def __init__(self, where: RankPlace) -> None:
        self._where = where
        self._own: distributed.ProcessGroup | None = None
        if "cpu:gloo" in distributed.get_backend_config():
            return
        try:
            self._own = distributed.new_group(backend="gloo")
        except (RuntimeError, ValueError) as cause:
            raise self._lost("offload(...)", cause) from cause

    def exchange(self, mine: T, what: str) -> list[T]:
        """Return what each process gave, by rank.  Blocks until all have.

        Args:
            mine: what this one gives; it is pickled.
            what: they all do, for messages.

        Raises:
            TierStoreError: another process has ended, or did not come in time.
        """
        found: list[T | None] = [None] * self._where.world_size
        try:
            distributed.all_gather_object(found, mine, group=self._own)
        except (RuntimeError, ValueError) as cause:
            raise self._lost(what, cause) from cause
        return [each for each in found if each is not None]

    def _lost(self, what: str, cause: BaseException) -> TierStoreError:
        return TierStoreError(
            f"{self._where.name} waited for the others in {what}, and one of them has ended, is in something "
            f"else, or did not come in time: {cause}"
        )

    def close(self) -> None:
        """Meet no more.  Idempotent."""
        own, self._own = self._own, None
        if own is None:
            return
        # The program may have ended all groups before its run.
        with contextlib.suppress(ValueError, RuntimeError, AssertionError):
            distributed.destroy_process_group(own)
