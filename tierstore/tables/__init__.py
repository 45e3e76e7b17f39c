"""Rows of embedding tables and the state of optimizers beside them, in pages.

Below modules, optimizers and training, none of which it knows; above the store.  A table costs what was
touched of it, however many rows it has.
"""

from __future__ import annotations

from pathlib import Path

from tierstore import signals
from tierstore.tables.cache_stats import CacheStats
from tierstore.tables.device_home import DeviceHome, RowCarrier
from tierstore.tables.initial_rows import (
    ConstantRows,
    InitialRows,
    NormalRows,
    UniformRows,
    has_drawn_seed,
    seed_of,
    with_seed,
)
from tierstore.tables.layout import PAGE_BYTES, ROWS, Column
from tierstore.tables.own_rows import OwnRows
from tierstore.tables.page_log import BlockMedium, LogPlace, Snapshot
from tierstore.tables.row_stats import RowStats
from tierstore.tables.row_store import RowStore
from tierstore.tables.store_blocks import StoreBlocks
from tierstore.tables.table_home import RowUse, TableHome
from tierstore.tables.visits import Visit

__all__ = [
    "PAGE_BYTES",
    "ROWS",
    "BlockMedium",
    "CacheStats",
    "Column",
    "ConstantRows",
    "DeviceHome",
    "InitialRows",
    "LogPlace",
    "NormalRows",
    "OwnRows",
    "RowCarrier",
    "RowStats",
    "RowStore",
    "RowUse",
    "Snapshot",
    "StoreBlocks",
    "TableHome",
    "UniformRows",
    "Visit",
    "has_drawn_seed",
    "seed_of",
    "with_seed",
]

signals.wait_in(Path(__file__).parent)  # a handler finds no rows in hand
