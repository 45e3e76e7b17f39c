"""How a table comes to its rows: all that it asks of where they lie.

`tierstore.nn.local_rows` answers for rows that are all here.  Others may have a part of them: the table that
asks does not know.  Whoever keeps rows elsewhere gives the table another access: ``weight.access``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from tierstore.tables import RowStore


class RowAccess(Protocol):
    """The rows of one table, and where gradients of them go.

    Where others have a part of the rows, all of them call the same, and each call waits for theirs.

    Attributes:
        store: the rows that are here.
        are_all_here: whether there are no others.
    """

    @property
    def store(self) -> RowStore: ...  # noqa: D102 - see above

    @property
    def are_all_here(self) -> bool: ...  # noqa: D102 - see above

    # --- rows ---------------------------------------------------------------------------------

    def look_up(self, ids: torch.Tensor, more: int, *, keeps: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of rows, and their ids, where the table is computed with.

        Args:
            ids: int64 in host memory, ascending, distinct, in range.
            more: how many rows of zeros to put behind them.
            keeps: whether a step of the same rows may have the copies, and change them.

        Returns:
            ``[len(ids) + more, width]``, and ``[len(ids)]``.
        """
        ...

    def read(self, ids: torch.Tensor, more: int) -> torch.Tensor:
        """Return copies of rows in host memory; otherwise as `look_up`."""
        ...

    def write(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Write rows; of an id that is there several times, the last one stays.

        Args:
            ids: int64 in host memory, ``[n]``, in range.
            values: ``[n, width]``, of any type of numbers and on any device.
        """
        ...

    def grow(self, num_rows: int) -> None:
        """Have more rows; raises as `RowStore.grow`."""
        ...

    # --- all rows -----------------------------------------------------------------------------

    def begin_load(self) -> None:
        """Files are about to be read into the table."""
        ...

    def begin_copy(self) -> None:
        """The rows of a state dict are about to be written to the table."""
        ...

    def exporting(self) -> AbstractContextManager[bool]:
        """Return a context that says whether `blocks` yields all rows here, or others write them."""
        ...

    def blocks(self, column: str, parts: Iterable[slice]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield all rows of a column in some spans of ids, which ascend."""
        ...

    # --- gradients ----------------------------------------------------------------------------

    def is_synced(self) -> bool:
        """Whether gradients of a lookup that is made now are averaged, if others have some, in backward."""
        ...

    def begin_backward(self, *, is_synced: bool) -> None:
        """Backward has come to a lookup, whose gradient is about to be accumulated."""
        ...

    def show_gradient(self) -> None:
        """Somebody asks for the gradient of the table."""
        ...

    def forget_gradient(self) -> None:
        """Somebody sets the gradient of the table, or clears it."""
        ...

    def own_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return what of the table's gradient is of the rows that are here.

        Raises:
            UsageError: others have a part of it, which has not come.
        """
        ...

    def named(self, ids: torch.Tensor, named: torch.Tensor | None) -> torch.Tensor | None:
        """Return ids of a gradient as often as each was named, in any order; ``None``: each once.

        Args:
            ids: of `own_gradient`, ascending.
            named: the same as it names them itself.
        """
        ...
