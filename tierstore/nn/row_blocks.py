"""All rows of a table, a few megabytes at a time; what they come to, and whether there is room for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from tierstore.config.host_memory import host_rooms
from tierstore.errors import CapacityError
from tierstore.tables import ROWS, RowStore
from tierstore.units import format_bytes

_AT_A_TIME: Final = 1 << 22
"""Bytes of rows that are read or written in one call."""


def table_bytes(store: RowStore) -> int:
    """Return what all rows come to."""
    return store.num_rows * store.width * store.dtype.itemsize


def described(store: RowStore) -> str:
    """Name a table in messages, with its shape and size."""
    return f"table {store.name!r} of [{store.num_rows}, {store.width}] ({format_bytes(table_bytes(store))})"


def parts_of(store: RowStore, span: slice | None = None) -> Iterator[slice]:
    """Yield spans of ids, of all or of those in ``span``, whose rows come to a few megabytes."""
    begin, end = (0, store.num_rows) if span is None else (span.start, span.stop)
    step = max(1, _AT_A_TIME // (store.width * store.dtype.itemsize))
    for first in range(begin, end, step):
        yield slice(first, min(first + step, end))


def blocks_of(store: RowStore, column: str = ROWS) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield all rows of a column in the order of their ids, with which ids they are of."""
    for part in parts_of(store):
        yield part, read_part(store, column, part)


def read_part(store: RowStore, column: str, part: slice) -> torch.Tensor:
    """Return copies of the rows of a span of ids: ``[n, width]``."""
    rows = torch.empty(part.stop - part.start, store.width, dtype=store.dtype, device="cpu")
    for visit in store.visit(torch.arange(part.start, part.stop)):
        visit.gather(column, out=rows[visit.part])
    return rows


def write_part(store: RowStore, column: str, part: slice, rows: torch.Tensor) -> None:
    """Write the rows of a span of ids: ``[n, width]``, of any type and on any device."""
    rows = rows.detach().to("cpu", store.dtype)
    for visit in store.visit(torch.arange(part.start, part.stop)):
        visit.scatter(column, rows[visit.part])


def read_all(store: RowStore, column: str) -> torch.Tensor:
    """Return a copy of all rows of a column as one tensor, in host memory.

    Raises:
        CapacityError: that is more than there is; nothing was allocated.
    """
    check_room(store, column)
    made = torch.empty(store.num_rows, store.width, dtype=store.dtype, device="cpu")
    for part in parts_of(store):
        for visit in store.visit(torch.arange(part.start, part.stop)):
            visit.gather(column, out=made[part][visit.part])
    return made


def write_all(store: RowStore, column: str, values: torch.Tensor) -> None:
    """Write all rows of a column: ``[num_rows, width]``, of any type and on any device."""
    for part in parts_of(store):
        write_part(store, column, part, values[part])


def check_room(store: RowStore, what: str, num_rows: int | None = None) -> None:
    """Raise unless all rows fit into host memory once more.

    Args:
        store: of the table.
        what: of the rows is to be there, for the message.
        num_rows: how many there would be; ``None``: as many as there are.

    Raises:
        CapacityError: they do not.
    """
    needed = (num_rows or store.num_rows) * store.width * store.dtype.itemsize
    room = min(host_rooms(), key=lambda each: each.nbytes)
    if needed > room.nbytes:
        raise CapacityError(
            f"{what!r} of the {described(store)} needs {format_bytes(needed)} as one tensor, of "
            f"{format_bytes(room.nbytes)} ({room.name}). Use table.export(path), or run.save(path), which "
            "read a block at a time.",
            needed_bytes=needed,
            free_bytes=room.nbytes,
        )
