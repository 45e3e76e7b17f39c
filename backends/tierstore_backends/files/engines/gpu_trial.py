"""kvikio's way to cuFile, opened once: run by a process of its own, for it may die of it.

See `tierstore.alone`.  Imports nothing of ours.  That a call raises is no matter here: `gpu` meets it, too.
"""

from __future__ import annotations

import importlib


def use() -> None:
    """Open the driver, as is done before a page is moved."""
    importlib.import_module("kvikio")
    importlib.import_module("kvikio.cufile_driver").driver_open()


use()
