"""Durable files keep the rules of the seam for media that survive."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from tests.files_disk import PowerKernel, failing, no_file_grows, open_durable
from tierstore.spi import DurableBackend
from tierstore.testing.durability import DurableBackendSuite


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"checksum": False},
        {"direct": False, "enable_aio": False},
        {"aio_block_size": "64KiB", "aio_queue_depth": 2},
        {"path": ("a", "b"), "aio_block_size": "4KiB"},
    ],
    ids=str,
)
class TestDurableFiles(DurableBackendSuite):
    """With checksums and without, with workers and without, in one directory and in several."""

    @pytest.fixture(autouse=True)
    def _with(self, options: dict[str, object], tmp_path: Path) -> None:
        self.options = options
        self.path = tmp_path / "0"
        self.kernel = PowerKernel(self.path)

    def open(self, capacity_bytes: int) -> DurableBackend:
        options = dict(self.options)
        if drives := cast("tuple[str, ...]", options.get("path", ())):
            options["path"] = [{"path": self.path / name, "bandwidth": 1} for name in drives]
        return open_durable(self.path, capacity_bytes, syscalls=self.kernel, options=options)

    def lose_power(self, backend: DurableBackend) -> None:
        self.path = self.path.with_name(str(int(self.path.name) + 1))
        self.kernel = self.kernel.lose_power(self.path)
        backend.close()

    @contextlib.contextmanager
    def failing_commits(self) -> Iterator[None]:
        if self.options.get("checksum") is False:  # a failed sync would leave bytes that nobody can judge
            with no_file_grows():
                yield
            return
        fail = failing(errno.EIO)
        self.kernel.twist = lambda kind, offset, nbytes: fail(nbytes) if kind == "sync" else None
        yield
        self.kernel.twist = None
