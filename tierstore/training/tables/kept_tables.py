"""What a checkpoint keeps of tables: how each looks, and beside its blocks which page is where."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from tierstore.formats.safetensors_files import HeaderEntry, pack, unpack
from tierstore.nn.initializers import CheckedRows
from tierstore.nn.table_weight import TableWeight
from tierstore.tables import Column, InitialRows, RowStore, Snapshot
from tierstore.training.tables.found_tables import Tables

PREFIX = "table/"
"""What keys of tables begin with."""

_TENSORS = ("numbers", "sizes", "pages", "places", "checks")
_METADATA = "tierstore"


def map_key(name: str) -> str:
    """Return the key that says where the pages of a table are."""
    return f"{PREFIX}{name}/map"


@dataclass(frozen=True)
class TableLook:
    """What a table is, whatever its rows are.

    Attributes:
        num_rows: how many.
        width: elements of a row.
        dtype: of an element, without ``torch.``.
        begins: what rows are that nobody has written.
    """

    num_rows: int
    width: int
    dtype: str
    begins: str

    @classmethod
    def of(cls, store: RowStore) -> TableLook:
        """Return what a table is."""
        dtype = str(store.dtype).removeprefix("torch.")
        return cls(store.num_rows, store.width, dtype, _begins(store.initial_rows))

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
        elif (begins := _begins(mine[name].row_store.initial_rows)) != saved[name].begins:
            yield f"the rows of the table {name} begin as {begins}, saved was {saved[name].begins}"


def packed(snapshot: Snapshot) -> torch.Tensor:
    """Return a snapshot as bytes, in host memory."""
    tensors = {name: getattr(snapshot, name) for name in _TENSORS}
    said = {
        "num_rows": snapshot.num_rows,
        "columns": [list(column) for column in snapshot.columns],
        "blocks": list(snapshot.blocks),
        "next_block": snapshot.next_block,
    }
    entries = [HeaderEntry.of(name, tensor) for name, tensor in tensors.items()]
    return pack(entries, tensors.values(), {_METADATA: json.dumps(said)})


def unpacked(flat: torch.Tensor) -> Snapshot:
    """Return what `packed` was given.

    Raises:
        UsageError: these bytes are something else.
    """
    tensors, metadata = unpack(flat)
    said = json.loads(metadata[_METADATA])
    return Snapshot(
        num_rows=said["num_rows"],
        columns=tuple(Column(*each) for each in said["columns"]),
        blocks=tuple(said["blocks"]),
        next_block=said["next_block"],
        **{name: tensors[name] for name in _TENSORS},
    )
