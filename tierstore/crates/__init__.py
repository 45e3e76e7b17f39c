"""Small tensors that travel together: many of them under one key of a store.

`Crates` is a mapping above a `tierstore.Store`.  It knows the store's public verbs and nothing below them.
"""

from __future__ import annotations

from tierstore.crates.crates import Crates
from tierstore.crates.leases import CrateLease

__all__ = ["CrateLease", "Crates"]
