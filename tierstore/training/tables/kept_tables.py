"""What a checkpoint keeps of tables: how each looks, and beside its blocks which page is where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tierstore.errors import UsageError
from tierstore.nn.initializers import CheckedRows
from tierstore.nn.table_weight import TableWeight
from tierstore.tables import Column, InitialRows, RowStore, Snapshot, seed_of, with_seed
from tierstore.training.tables.found_tables import Tables

PREFIX = "table/"
"""What keys of tables begin with."""


def log_prefix(name: str) -> str:
    """Return what the keys of the blocks of a table begin with."""
    return f"{PREFIX}{name}/log/"


def map_key(name: str) -> str:
    """Return the key that says where the pages of a table are."""
    return f"{PREFIX}{name}/map"


def cache_key(name: str) -> str:
    """Return the key of the rows of a table that are kept on the device."""
    return f"{PREFIX}{name}/cache"


@dataclass(frozen=True)
class TableLook:
    """What a table is, whatever its rows are.

    Attributes:
        num_rows: how many.
        width: elements of a row.
        dtype: of an element, without ``torch.``.
        begins: what rows are that nobody has written.
        columns: names of the rows and of what optimizers keep beside them, each with what it begins with.
        seed: of the rows; ``None``: they have none.
        part: which of the rows these are: rank, number of processes, and how many consecutive ids go
            together; ``None``: all.
    """

    num_rows: int
    width: int
    dtype: str
    begins: str
    columns: Sequence[Sequence[Any]]
    seed: int | None = None
    part: Sequence[int] | None = None

    @classmethod
    def of(cls, store: RowStore) -> TableLook:
        """Return what a table is."""
        dtype = str(store.dtype).removeprefix("torch.")
        columns = [list(column) for column in store.columns]
        begins = store.initial_rows
        part = None if store.own_rows is None else list(store.own_rows.as_numbers())
        return cls(store.num_rows, store.width, dtype, _begins(begins), columns, seed_of(begins), part)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the parameter."""
        return self.num_rows, self.width

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the parameter."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


def _begins(initial_rows: InitialRows) -> str:
    """Say what rows are in the beginning; a function of the program's is not looked into."""
    return "a function" if isinstance(initial_rows, CheckedRows) else repr(initial_rows)


def table_differences(saved: Mapping[str, TableLook], tables: Tables) -> Iterator[str]:
    """Say how tables differ from those of a checkpoint in what their shape does not tell.

    Args:
        saved: the checkpoint's, by name.
        tables: the model's.
    """
    mine: dict[str, TableWeight] = {name: weight for weight, name in tables.items()}
    for name in (*saved, *(name for name in mine if name not in saved)):
        if name not in mine:
            yield f"the parameter {name} is no table, saved was one"
        elif name not in saved:
            yield f"the parameter {name} is a table, saved was none"
        else:
            begins = _begins(with_seed(mine[name].row_store.initial_rows, saved[name].seed))
            if begins != saved[name].begins:
                yield f"the rows of the table {name} begin as {begins}, saved was {saved[name].begins}"


class FormerTable(NamedTuple):
    """A table of a checkpoint.

    Attributes:
        snapshot: where its rows are.
        seed: of those that nobody has written; ``None``: they have none.
    """

    snapshot: Snapshot
    seed: int | None


def refuse_parts(saved: Mapping[str, TableLook]) -> None:
    """Raise where a checkpoint has a part of a table, and this process would take it for all of it.

    Args:
        saved: the checkpoint's tables, by name.

    Raises:
        UsageError: it says who has the rest.
    """
    for name, look in saved.items():
        if look.part is not None:
            raise UsageError(
                f"the checkpoint has the rows of the table {name} that were those of rank {look.part[0]} of "
                f"{look.part[1]}, and this is one process: start {look.part[1]}, write all rows with "
                "table.export(path) or run.save(path) there, and read them here."
            )


def snapshot_of(name: str, look: TableLook, kept: torch.Tensor) -> Snapshot:
    """Return where the rows of a table are.

    Args:
        name: of the table.
        look: what it is.
        kept: what is under `map_key`.

    Raises:
        IntegrityError: that is something else.
    """
    return Snapshot.from_tensor(kept, log_prefix(name), [Column(*each) for each in look.columns])
