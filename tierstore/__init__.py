"""tierstore: a tiered key-value store for tensors, over device memory, host memory and disk.

`Store` keeps tensors under keys within quotas; `tierstore.training.offload` trains models larger than
the device with it.  This module holds the public names and nothing else.  They are imported when they are
first used, as are `tierstore.planning`, `tierstore.testing` and `tierstore.training`: until then
``import tierstore`` does not even import PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_ROOMS = frozenset({"planning", "testing", "training"})
_HOMES = {
    "Lease": "leases",
    "OffloadConfig": "config",
    "PartReader": "part_reader",
    "Store": "store",
    "StoreConfig": "config",
    "TensorSpec": "tensors",
    "TierConfig": "config",
    "Transfer": "engine.transfer",
}
"""Where each public name is from that is no error's."""


def __getattr__(name: str) -> Any:  # noqa: ANN401 - classes and modules
    """Import a public name, or a subpackage, at its first use."""
    if name in _ROOMS:
        return importlib.import_module(f"tierstore.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'tierstore' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"tierstore.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
