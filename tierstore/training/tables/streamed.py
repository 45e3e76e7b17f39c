"""Tables to files and back, a few megabytes at a time: for checkpoints of ``run.save`` and ``run.load``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from tierstore.formats.safetensors_files import TensorFile, TensorSource
from tierstore.nn.row_blocks import parts_of, write_part
from tierstore.nn.table_entry import Table, TableEntry
from tierstore.nn.table_weight import TableWeight
from tierstore.optim.table_optimizer import TableOptimizer
from tierstore.tables import ROWS, Column


def begin_load(tensors: Iterable[torch.Tensor]) -> None:
    """Return when whoever has a part of the rows of tables is about to load them, too.

    Args:
        tensors: among which the tables are.
    """
    for each in tensors:
        if isinstance(each, TableWeight):
            each.rows_for("is loaded").begin_load()


def table_rows(weight: Table, column: str = ROWS) -> Iterator[torch.Tensor]:
    """Yield all rows of a table, or one of its states, in blocks."""
    return (rows for _, rows in weight.access.blocks(column, parts_of(weight.row_store)))


def load_rows(weight: TableWeight, file: TensorSource, name: str, column: str = ROWS) -> None:
    """Write a tensor of a file to a table, in blocks.

    Args:
        weight: of the table.
        file: that has it.
        name: of the tensor, which has the table's shape.
        column: which of the table's.
    """
    with weight.loading() as store:
        for part in parts_of(store):
            write_part(store, column, part, file.read_rows(name, part.start, part.stop))


def load_states(
    parameter: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    file: TensorFile,
    entries: Mapping[str, object],
) -> dict[str, TableEntry]:
    """Write what an optimizer keeps of a table to it, in blocks; return these entries of its state.

    Args:
        parameter: if it is no table there are none.
        optimizer: that steps it.
        file: that has the tensors.
        entries: of the state, as a checkpoint describes them.
    """
    if not isinstance(parameter, TableWeight) or not isinstance(optimizer, TableOptimizer):
        return {}
    group = next(g for g in optimizer.param_groups if any(each is parameter for each in g["params"]))
    found: dict[str, TableEntry] = {}
    parameter.states_begun += 1
    for name, initial in optimizer.initial_state(group).items():
        entry = entries.get(name)
        if isinstance(entry, dict) and "tensor" in entry:
            parameter.row_store.ensure_columns([Column(name, initial)])
            load_rows(parameter, file, entry["tensor"], name)
            found[name] = TableEntry.of(parameter, name)
    return found
