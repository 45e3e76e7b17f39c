"""Scratch files keep the rules of the seam, whoever moves the bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.files_disk import needs_ring
from tierstore.spi import Backend
from tierstore.testing.conformance import BackendConformance
from tierstore_backends.files import open_backend


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "plain"},
        {"engine": "aiofiles"},
        {"engine": "aiofiles", "checksum": False, "threads": 1},
        {"engine": "aiofiles", "aio_block_size": "64KiB", "aio_queue_depth": 2},
        pytest.param({"engine": "io_uring"}, marks=needs_ring),
        pytest.param({"engine": "io_uring", "checksum": False, "aio_queue_depth": 1}, marks=needs_ring),
        pytest.param({"engine": "io_uring", "direct": False}, marks=needs_ring),
        pytest.param(
            {"engine": "io_uring", "aio_block_size": "64KB", "aio_queue_depth": 2}, marks=needs_ring
        ),
        {"engine": "threads", "aio_block_size": "64KiB", "aio_queue_depth": 1},
    ],
    ids=str,
)
class TestEngines(BackendConformance):
    """With checksums and without, deep and shallow."""

    @pytest.fixture(autouse=True)
    def _with(self, options: dict[str, object], tmp_path: Path) -> None:
        self.options = options
        self.path = tmp_path
        self.opened_stores = 0

    def make(self, capacity_bytes: int) -> Backend:
        self.opened_stores += 1
        path = self.path / str(self.opened_stores)
        return open_backend(capacity_bytes=capacity_bytes, options={"path": str(path), **self.options})
