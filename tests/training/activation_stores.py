"""Tensors to keep, and stores to keep them in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.training.twins import LATE_AND_OVERWRITTEN
from tierstore.config import StoreConfig, TierConfig
from tierstore.store import Store
from tierstore.units import MIB
from tierstore_backends.device import open_backend as open_device
from tierstore_backends.memory import open_backend as open_memory


def emulated(capacity_bytes: int = MIB, **options: object) -> TierConfig:
    """Return a device tier."""
    device = open_device(capacity_bytes=capacity_bytes, options={"device": "emulated", **options})
    return TierConfig("device", device, capacity_bytes)


def host(capacity_bytes: int = MIB) -> TierConfig:
    """Return a tier of host memory."""
    return TierConfig("host", open_memory(capacity_bytes=capacity_bytes, options={}), capacity_bytes)


def late_store() -> Store:
    """Return a store whose completions come late, and whose freed memory is overwritten."""
    return Store(StoreConfig([emulated(**LATE_AND_OVERWRITTEN), host()]))


def narrow_store(host_bytes: int, disk_bytes: int) -> Store:
    """Return a store with little room below the device."""
    disk = open_memory(capacity_bytes=disk_bytes, options={"storage": True})
    return Store(StoreConfig([emulated(), host(host_bytes), TierConfig("disk", disk, disk_bytes)]))


def base(count: int = 4096) -> Tensor:
    """Return a tensor of some bytes."""
    return torch.arange(float(count))


KINDS: dict[str, Callable[[], Tensor]] = {
    "whole": base,
    "turned": lambda: base().view(64, 64).t(),
    "a large part": lambda: base()[1000:],
    "a small part": lambda: base()[1000:1100],
    "a column": lambda: base().view(64, 64)[:, 3],
    "a corner": lambda: base().view(64, 64)[60:, 60:],
    "repeated": lambda: base(64).expand(64, 64),
    "a repeated part": lambda: base()[7:8].expand(100),
    "overlapping": lambda: base().unfold(0, 8, 2),
    "of no dimension": lambda: base()[5],
    "empty": lambda: base()[:0],
    "bytes": lambda: torch.arange(255, dtype=torch.uint8)[3:],
    "bfloat": lambda: base().bfloat16()[1:],
    "bools": lambda: base() > 5,
    "complex": lambda: torch.complex(base(), base()),
    "conjugated": lambda: torch.complex(base(), base()).conj(),
    "negated": lambda: torch.complex(base(), base()).conj().imag,
    "with an odd number of bytes": lambda: torch.empty(0, dtype=torch.int16).set_(
        torch.arange(101, dtype=torch.uint8).untyped_storage(), 1, (20,), (2,)
    ),
}
