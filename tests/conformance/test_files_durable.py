"""Durable files keep the rules of the seam for media that survive."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.files_disk import ScriptedKernel, failing, open_durable
from tierstore.spi import DurableBackend
from tierstore.testing.durability import DurableBackendSuite


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"checksum": False},
        {"direct": False, "enable_aio": False},
        {"aio_block_size": "64KiB", "aio_queue_depth": 2},
    ],
    ids=str,
)
class TestDurableFiles(DurableBackendSuite):
    """With checksums and without, with workers and without."""

    @pytest.fixture(autouse=True)
    def _with(self, options: dict[str, object], tmp_path: Path) -> None:
        self.options = options
        self.path = tmp_path / "0"
        self.kernel = ScriptedKernel()

    def open(self, capacity_bytes: int) -> DurableBackend:
        return open_durable(self.path, capacity_bytes, syscalls=self.kernel, options=self.options)

    def lose_power(self, backend: DurableBackend) -> None:
        copy = self.path.with_name(str(int(self.path.name) + 1))
        shutil.copytree(self.path, copy)
        backend.close()
        self.path = copy

    @contextlib.contextmanager
    def failing_commits(self) -> Iterator[None]:
        fail = failing(errno.EIO)
        self.kernel.twist = lambda kind, offset, nbytes: fail(nbytes) if kind == "sync" else None
        yield
        self.kernel.twist = None
