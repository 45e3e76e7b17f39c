"""Scratch arrays keep the rules of the seam: in a directory, in memory, on a file system of fsspec."""

from __future__ import annotations

from pathlib import Path

import pytest
from zarr.storage import MemoryStore

from tierstore.spi import Backend
from tierstore.testing.conformance import BackendConformance
from tierstore_backends.zarr import open_backend


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"store": "memory://"},
        {"store": "memory://", "chunk_bytes": "64KiB", "concurrency": 2},
        {"chunk_bytes": "100KB", "codec": "zstd"},
        {"codec": "lz4", "checksum": False},
        {
            "store": "local://{path}",
            "storage_options": {"auto_mkdir": True},
            "chunk_bytes": 70_000,
            "concurrency": 1,
        },
    ],
    ids=str,
)
class TestZarr(BackendConformance):
    """With codecs and without, with many chunks and with one."""

    @pytest.fixture(autouse=True)
    def _with(self, options: dict[str, object], tmp_path: Path) -> None:
        self.options = options
        self.path = tmp_path
        self.opened_stores = 0

    def make(self, capacity_bytes: int) -> Backend:
        self.opened_stores += 1
        path = self.path / str(self.opened_stores)
        store = str(self.options.get("store", path)).format(path=path)
        return open_backend(capacity_bytes=capacity_bytes, options={**self.options, "store": store})


class TestZarrStoreObject(BackendConformance):
    """A store that keeps the very memory it is given."""

    def make(self, capacity_bytes: int) -> Backend:
        return open_backend(
            capacity_bytes=capacity_bytes, options={"store": MemoryStore(), "chunk_bytes": "1MiB"}
        )
