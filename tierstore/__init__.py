"""tierstore: a tiered key-value store for tensors, over device memory, host memory and disk.

`Store` keeps tensors under keys within quotas; `tierstore.training.offload` trains models larger than
the device with it.  This module holds the public names and nothing else; `tierstore.planning`,
`tierstore.testing` and `tierstore.training` are imported when they are first used.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from tierstore.config import OffloadConfig, StoreConfig, TierConfig
from tierstore.engine.transfer import Transfer
from tierstore.errors import (
    BackendError,
    CapacityError,
    ConfigError,
    IntegrityError,
    InvariantError,
    KeyExists,
    KeyNotFound,
    LeaseError,
    NotResident,
    StoreClosed,
    StoreForked,
    TierStoreError,
    UsageError,
)
from tierstore.leases import Lease
from tierstore.part_reader import PartReader
from tierstore.store import Store
from tierstore.tensors import TensorSpec

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "CapacityError",
    "ConfigError",
    "IntegrityError",
    "InvariantError",
    "KeyExists",
    "KeyNotFound",
    "Lease",
    "LeaseError",
    "NotResident",
    "OffloadConfig",
    "PartReader",
    "Store",
    "StoreClosed",
    "StoreConfig",
    "StoreForked",
    "TensorSpec",
    "TierConfig",
    "TierStoreError",
    "Transfer",
    "UsageError",
]


def __getattr__(name: str) -> ModuleType:
    """Import a subpackage at its first use."""
    if name in {"planning", "testing", "training"}:
        return importlib.import_module(f"tierstore.{name}")
    raise AttributeError(f"module 'tierstore' has no attribute {name!r}")
