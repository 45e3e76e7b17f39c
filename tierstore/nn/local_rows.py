"""Rows of a table that are all here, in one `RowStore`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from tierstore import sides
from tierstore.modes import Unseen
from tierstore.nn.row_blocks import blocks_of
from tierstore.sides import Side
from tierstore.tables import ROWS, RowStore


def read_rows(store: RowStore, ids: torch.Tensor, more: int = 0, *, keeps: bool = False) -> torch.Tensor:
    """Return copies of rows.

    Args:
        store: of the table.
        ids: int64 in host memory, ascending, distinct, in range.
        more: how many rows of zeros to put behind them.
        keeps: whether a step of the same rows may have the copy, and change it.

    Returns:
        ``[len(ids) + more, width]``.
    """
    with (
        store.lock,
        Unseen(),
    ):  # frames, and what is read on the way, are nothing that a program makes
        rows = torch.empty(len(ids) + more, store.width, dtype=store.dtype, device="cpu")
        for visit in store.visit(ids):
            part = visit.gather(out=rows[: len(ids)][visit.part])
            if keeps:
                visit.keep(part)
        rows[len(ids) :].zero_()
    sides.note(rows.untyped_storage(), Side.HOST)
    return rows


def write_rows(store: RowStore, ids: torch.Tensor, values: torch.Tensor) -> None:
    """Write rows; of an id that is there several times, the last one stays.

    Args:
        store: of the table.
        ids: int64 in host memory, ``[n]``, in range.
        values: ``[n, width]``, of any type of numbers and on any device.
    """
    with store.lock, Unseen():
        distinct, inverse = torch.unique(ids, return_inverse=True)
        last = torch.zeros(len(distinct), dtype=torch.int64, device="cpu")
        last.scatter_reduce_(0, inverse, torch.arange(len(ids), device="cpu"), "amax")
        rows = values.detach()[last.to(values.device)].to("cpu", store.dtype)
        for visit in store.visit(distinct):
            visit.scatter(ROWS, rows[visit.part])


class LocalRows:
    """The rows of a table, all of which are here; see `tierstore.nn.row_access.RowAccess`.

    Args:
        store: where they are.

    Attributes:
        store: see there.
        are_all_here: they are.
    """

    are_all_here = True

    def __init__(self, store: RowStore) -> None:
        self.store = store

    def look_up(self, ids: torch.Tensor, more: int, *, keeps: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of rows, and their ids, where the table is computed with."""
        store = self.store
        with store.lock, Unseen():
            if store.device is not None:
                numbers = store.bring_numbers(ids)
                rows = store.gather(ids, more=more, is_lookup=True)[ROWS]
                sides.note_allocation(rows.untyped_storage(), Side.DEVICE)
                return rows, numbers
        return read_rows(store, ids, more, keeps=keeps), ids

    def read(self, ids: torch.Tensor, more: int) -> torch.Tensor:
        """Return copies of rows; see `read_rows`."""
        return read_rows(self.store, ids, more)

    def write(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Write rows; see `write_rows`."""
        write_rows(self.store, ids, values)

    def grow(self, num_rows: int) -> None:
        """Have more rows."""
        self.store.grow(num_rows)

    def begin_load(self) -> None:
        """Nobody has to know."""

    def begin_copy(self) -> None:
        """Nobody has to know."""

    def exporting(self) -> contextlib.AbstractContextManager[bool]:
        """Return a context that says that all rows can be read."""
        return contextlib.nullcontext(enter_result=True)

    def blocks(self, column: str, parts: Iterable[slice]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield all rows of a column in some spans of ids, which ascend."""
        return blocks_of(self.store, column, parts)

    def is_synced(self) -> bool:
        """There are no gradients of others."""
        return True

    def begin_backward(self, *, is_synced: bool) -> None:
        """Nobody has to know."""

    def show_gradient(self) -> None:
        """It is there."""

    def forget_gradient(self) -> None:
        """Nobody has to know."""

    def own_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient."""
        return gradient

    def named(self, ids: torch.Tensor, named: torch.Tensor | None) -> torch.Tensor | None:
        """Return what the gradient itself names."""
        del ids
        return named
