"""All rows of a table, a few megabytes at a time; what they come to, and whether there is room for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import torch

from tierstore.config.host_memory import host_rooms
from tierstore.errors import CapacityError
from tierstore.modes import Unseen
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


def blocks_of(
    store: RowStore, column: str = ROWS, parts: Iterable[slice] | None = None
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield copies of the rows of a column, in the order of their ids.

    Rows that were never written are computed, and take no room in the table.

    Args:
        store: of the table; nothing is written to it meanwhile.
        column: which.
        parts: spans of ids, ascending; ``None``: `parts_of` all.

    Yields:
        each span, and the rows of its ids: ``[n, width]``.

    Raises:
        UsageError: other processes have a part of the rows.
    """
    store.require_whole(f"all rows of {column!r}")
    for part, _, rows in own_blocks_of(store, column, parts_of(store) if parts is None else parts):
        yield part, rows


def own_blocks_of(
    store: RowStore, column: str, parts: Iterable[slice]
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield copies of the rows that are here, as `blocks_of`.

    Yields:
        each span, the ids in it that are here, and the rows of these.
    """
    initial = {each.name: each.initial for each in store.columns}[column]
    written = _Written(store)
    for part in parts:
        with store.lock, Unseen():
            ids = own_of(store, torch.arange(part.start, part.stop, device="cpu"))
            if column == ROWS:
                rows = store.initial_rows(ids).clone()
            else:
                rows = torch.full((len(ids), store.width), initial, dtype=store.dtype, device="cpu")
            changed = own_of(store, written.within(part))
            places = torch.searchsorted(ids, changed)
            for visit in store.visit(changed):
                rows[places[visit.part]] = visit.gather(column)
        yield part, ids, rows


def own_of(store: RowStore, ids: torch.Tensor) -> torch.Tensor:
    """Return those of some ids whose rows are here."""
    return ids if store.own_rows is None else ids[store.own_rows.own(ids)]


class _Written:
    """The ids of rows that were written, taken span by span."""

    def __init__(self, store: RowStore) -> None:
        self._more = store.written_ids()
        self._ids = torch.empty(0, dtype=torch.int64, device="cpu")

    def within(self, part: slice) -> torch.Tensor:
        """Return those in a span, which begins where the last one ended or later."""
        while not len(self._ids) or self._ids[-1] < part.stop:
            more = next(self._more, None)
            if more is None:
                break
            self._ids = torch.cat([self._ids, more])
        begin, end = torch.searchsorted(
            self._ids, torch.tensor([part.start, part.stop], device="cpu")
        ).tolist()
        found, self._ids = self._ids[begin:end], self._ids[end:]
        return found


def write_part(store: RowStore, column: str, part: slice, rows: torch.Tensor) -> None:
    """Write the rows of a span of ids, those that are here: ``[n, width]``, of any type and on any device."""
    rows = rows.detach().to("cpu", store.dtype)
    with store.lock, Unseen():
        ids = torch.arange(part.start, part.stop, device="cpu")
        if store.own_rows is not None:
            is_own = store.own_rows.own(ids)
            ids, rows = ids[is_own], rows[is_own]
        for visit in store.visit(ids):
            visit.scatter(column, rows[visit.part])


def read_all(store: RowStore, column: str) -> torch.Tensor:
    """Return a copy of all rows of a column as one tensor, in host memory.

    Raises:
        CapacityError: that is more than there is; nothing was allocated.
        UsageError: other processes have a part of the rows.
    """
    store.require_whole(f"all rows of {column!r}")
    check_room(store, column)
    made = torch.empty(store.num_rows, store.width, dtype=store.dtype, device="cpu")
    for part, rows in blocks_of(store, column):
        made[part] = rows
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
