"""Rows of embedding tables and the state of optimizers beside them, in pages.

Below modules, optimizers and training, none of which it knows; above the store.  A table costs what was
touched of it, however many rows it has.
"""

from __future__ import annotations

from tierstore.tables.initial_rows import ConstantRows, InitialRows, NormalRows, UniformRows
from tierstore.tables.layout import ROWS, Column
from tierstore.tables.row_store import RowStats, RowStore, Visit

__all__ = [
    "ROWS",
    "Column",
    "ConstantRows",
    "InitialRows",
    "NormalRows",
    "RowStats",
    "RowStore",
    "UniformRows",
    "Visit",
]
