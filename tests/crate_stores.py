"""Crates for tests: a durable store of plain memory that outlives its openings, and tensors of all kinds."""

from __future__ import annotations

from collections.abc import Callable

import torch

import tierstore as ts
from tests.stores import make_store
from tierstore.crates import Crates
from tierstore.crates.index import Crate, CrateIndex
from tierstore.spi import Backend
from tierstore.units import KIB
from tierstore_backends.memory import MemoryBackend

CRATE_BYTES = 1024


class CrateDisk:
    """What outlives stores: the image that the last commit left.

    Args:
        host_bytes: of the tier above it.
        disk_bytes: of itself.
    """

    def __init__(self, host_bytes: int = 8_000, disk_bytes: int = 100_000) -> None:
        self._host_bytes = host_bytes
        self._disk_bytes = disk_bytes
        self.backend = MemoryBackend(disk_bytes, is_durable=True, is_storage=True)

    def open(self, wrap: Callable[[Backend], Backend] = lambda backend: backend) -> ts.Store:
        """Return a store as another process would open it."""
        image = dict(self.backend.image)
        self.backend = MemoryBackend(self._disk_bytes, is_durable=True, is_storage=True, image=image)
        host = ts.TierConfig("host", MemoryBackend(self._host_bytes), self._host_bytes)
        return ts.Store(ts.StoreConfig([host, ts.TierConfig("disk", wrap(self.backend), self._disk_bytes)]))


def make_crates(*capacities: int, crate_bytes: int = CRATE_BYTES) -> Crates:
    """Return crates over tiers of plain memory; without capacities, over three that have room."""
    return Crates(make_store(*(capacities or (8 * KIB, 16 * KIB, 200 * KIB))), crate_bytes=crate_bytes)


def small(number: int, nbytes: int = 100) -> torch.Tensor:
    """Return bytes that tell which tensor they are of."""
    return torch.full((nbytes,), number % 251, dtype=torch.uint8)


def of_all_kinds() -> dict[str, torch.Tensor]:
    """Return tensors of every dtype, shape and layout that crates take."""
    chance = torch.Generator().manual_seed(0)
    floats = torch.randn(6, 4, generator=chance)
    dtypes: tuple[torch.dtype, ...] = (
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int8,
        torch.bool,
        torch.complex64,
    )
    dtypes += (torch.complex128, torch.float8_e4m3fn, torch.uint16)
    kinds = {str(dtype): floats.to(dtype) for dtype in dtypes}
    return kinds | {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "no elements of three": torch.empty(3, 0, 2, dtype=torch.bfloat16),
        "transposed": floats.t(),
        "with gaps": floats[::2, 1::2],
        "expanded": floats[:1].expand(5, 4),
        "conjugate": torch.randn(3, dtype=torch.complex64, generator=chance).conj(),
        "channels last": torch.randn(2, 3, 4, 5, generator=chance).to(memory_format=torch.channels_last),
        "with a gradient": torch.randn(3, generator=chance).requires_grad_(),
        "one byte": torch.tensor([True]),
    }


def check_index(crates: Crates) -> None:
    """Fail if the index is not what the crates' records say when they are read one after the other."""
    index = crates._sharing.index
    assert {crate.name for crate in index.crates.values()} <= set(crates.store)
    places: dict[str, Crate] = {}
    for _, crate in sorted(index.crates.items()):
        for key, record in crate.records.items():
            if record.spec is None:
                places.pop(key, None)
            else:
                places[key] = crate
    assert places == index.places
    again = CrateIndex(crates.crate_bytes)
    for number, crate in sorted(index.crates.items()):
        again.add(Crate(number, crate.name, dict(crate.records)))
    assert {number: crate.live_bytes for number, crate in again.crates.items()} == {
        number: crate.live_bytes for number, crate in index.crates.items()
    }
    assert {key: crate.number for key, crate in again.notes.items()} == {
        key: crate.number for key, crate in index.notes.items()
    }


def check_waste(crates: Crates) -> None:
    """Fail if what does not count takes more than what does, or many crates are small; none is leased."""
    index = crates._sharing.index
    every = index.crates.values()
    assert sum(crate.all_bytes for crate in every) <= 2 * sum(crate.live_bytes for crate in every)
    assert sum(2 * crate.all_bytes < crates.crate_bytes for crate in every) <= 3 * 15
