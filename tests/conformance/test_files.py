"""Scratch files keep the rules of the seam, through the page cache and past it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierstore.spi import Backend
from tierstore.testing.conformance import BackendConformance
from tierstore_backends.files import open_backend


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"checksum": False},
        {"direct": False},
        {"direct": False, "checksum": False, "enable_aio": False},
        {"aio_block_size": "64KiB", "aio_queue_depth": 2},
        {"durable": True},
        {"durable": True, "checksum": False, "direct": False, "enable_aio": False},
    ],
    ids=str,
)
class TestFiles(BackendConformance):
    """With checksums and without, with workers and without."""

    @pytest.fixture(autouse=True)
    def _with(self, options: dict[str, object], tmp_path: Path) -> None:
        self.options = options
        self.path = tmp_path
        self.opened_stores = 0

    def make(self, capacity_bytes: int) -> Backend:
        self.opened_stores += 1
        path = self.path / str(self.opened_stores)
        return open_backend(capacity_bytes=capacity_bytes, options={"path": str(path), **self.options})
