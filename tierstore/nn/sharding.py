"""What a table asks whose rows are spread over several processes; with one process nobody answers."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn


class Act(enum.IntEnum):
    """What all processes do together."""

    LOOKUP = 0
    ROWS = 1
    SET_ROWS = 2
    GRADIENTS = 3
    GROW = 4
    LOAD = 5
    COPY = 6
    EXPORT = 7
    SAVE = 8


class Sharding(Protocol):
    """Brings rows from the processes that have them, and gradients to these.

    What says "all processes" waits for the others, and raises in all of them if they call something else.
    """

    def read(self, weight: nn.Parameter, ids: torch.Tensor, more: int, act: Act) -> torch.Tensor:
        """Return copies of rows; all processes, each with ids of its own.

        Args:
            weight: of the table.
            ids: int64 in host memory, ascending, distinct, in range.
            more: how many rows of zeros to put behind them.
            act: what it is for: `Act.LOOKUP` or `Act.ROWS`.

        Returns:
            ``[len(ids) + more, width]``.
        """
        ...

    def write(self, weight: nn.Parameter, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Write rows; all processes, each with its own.  Where several name an id, the last one's stays.

        Args:
            weight: of the table.
            ids: int64 in host memory, in range; of one that is there several times, the last one stays.
            values: ``[len(ids), width]`` of the table's type, in host memory.
        """
        ...

    def agree(self, weight: nn.Parameter, act: Act) -> None:
        """Return when all processes have come to call the same."""
        ...

    def reading(self, weight: nn.Parameter | None, act: Act) -> AbstractContextManager[bool]:
        """Return a context in which the first process may read `blocks`, and the others serve it.

        Args:
            weight: of the table; ``None``: of several.
            act: what it is for: `Act.EXPORT` or `Act.SAVE`.

        Returns:
            with whether this is the first process.  The others come to it when that one is done.
        """
        ...

    def blocks(
        self, weight: nn.Parameter, column: str, parts: Sequence[slice]
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield all rows of some spans of ids, ascending, in the first process; see `reading`."""
        ...

    def is_synced(self) -> bool:
        """Whether gradients of a lookup that is made now are averaged in backward: not inside ``no_sync``."""
        ...

    def begin_backward(self, weight: nn.Parameter, *, is_synced: bool) -> None:
        """Backward has come to a lookup, whose gradient is about to be accumulated."""
        ...

    def forget_gradient(self, weight: nn.Parameter) -> None:
        """Somebody sets the gradient of a table, or clears it."""
        ...

    def own_gradient(self, weight: nn.Parameter) -> torch.Tensor:
        """Return the averaged gradient of the rows that this process has: sparse, coalesced.

        Raises:
            UsageError: it was not averaged.
        """
        ...

    def occurrences(self, weight: nn.Parameter, ids: torch.Tensor) -> torch.Tensor:
        """Return how often all processes have named each of ``ids`` in what `own_gradient` is of."""
        ...
