"""Scratch files keep the rules of the seam, through the page cache and past it, whoever moves the bytes."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from tests.files_disk import needs_ring
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
        {"drives": (3, 1), "aio_block_size": "4KiB"},
        {"drives": (1, 1, 1), "direct": False, "enable_aio": False},
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
class TestFiles(BackendConformance):
    """With checksums and without, deep and shallow, in one directory and in several."""

    @pytest.fixture(autouse=True)
    def _with(self, options: dict[str, object], tmp_path: Path) -> None:
        self.options = options
        self.path = tmp_path
        self.opened_stores = 0

    def make(self, capacity_bytes: int) -> Backend:
        self.opened_stores += 1
        path = self.path / str(self.opened_stores)
        options = {"path": str(path), **self.options}
        if rates := cast("tuple[int, ...]", options.pop("drives", ())):
            options["path"] = [{"path": f"{path}-{i}", "bandwidth": rate} for i, rate in enumerate(rates)]
        return open_backend(capacity_bytes=capacity_bytes, options=options)
