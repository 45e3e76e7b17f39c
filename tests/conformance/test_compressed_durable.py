"""A codec around durable files keeps the rules of the seam for media that survive."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.test_compressed import mixed
from tests.files_disk import ScriptedKernel, failing, open_durable
from tierstore.codec import DurableCompressed
from tierstore.spi import DurableBackend
from tierstore.testing import durability
from tierstore.testing.durability import DurableBackendSuite
from tierstore.units import KIB


@pytest.mark.parametrize("codec", ["lz4", None])
class TestDurableCompressed(DurableBackendSuite):
    """With a codec, in many chunks, and without one."""

    @pytest.fixture(autouse=True)
    def _with(self, codec: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(durability, "pattern", mixed)
        self.codec = codec
        self.path = tmp_path / "0"
        self.kernel = ScriptedKernel()

    def open(self, capacity_bytes: int) -> DurableBackend:
        files = open_durable(self.path, capacity_bytes, syscalls=self.kernel, options={})
        return DurableCompressed(files, self.codec, chunk_bytes=16 * KIB)

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
