"""A codec keeps the rules of the seam, around memory and around files, packing a lot and nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.codec_bytes import repeating as counting
from tierstore.codec import Compressed
from tierstore.spi import Backend, Buffer
from tierstore.testing import conformance
from tierstore.testing.batching import Batching
from tierstore.testing.conformance import BackendConformance
from tierstore.units import KIB
from tierstore_backends.files import open_backend as open_files
from tierstore_backends.memory import open_backend as open_memory

_random_pattern = conformance.pattern


def repeating(nbytes: int, seed: int) -> Buffer:
    """Return bytes that differ from those of every other seed, and are mostly alike."""
    return counting(nbytes, seed * 7919)


def mixed(nbytes: int, seed: int) -> Buffer:
    """Return what packs for an even seed, and what does not for an odd one."""
    return repeating(nbytes, seed) if seed % 2 == 0 else _random_pattern(nbytes, seed)


@pytest.mark.parametrize(
    ("inner", "chunk_bytes", "contents"),
    [
        pytest.param("memory", 16 * KIB, mixed, id="memory-small-chunks-mixed"),
        pytest.param("batching", 16 * KIB, mixed, id="batching-small-chunks-mixed"),
        pytest.param("batching", 4096 * KIB, repeating, id="batching-large-chunks-repeating"),
        pytest.param("files", 16 * KIB, mixed, id="files-small-chunks-mixed"),
        pytest.param("files", 4096 * KIB, repeating, id="files-large-chunks-repeating"),
        pytest.param("files-in-the-caller", 16 * KIB, mixed, id="files-in-the-caller"),
    ],
)
class TestCompressed(BackendConformance):
    """Around backends that take one slot at a time and many, at once and later, aligned and not."""

    @pytest.fixture(autouse=True)
    def _with(
        self,
        inner: str,
        chunk_bytes: int,
        contents: object,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(conformance, "pattern", contents)
        self.inner = inner
        self.chunk_bytes = chunk_bytes
        self.path = tmp_path
        self.opened_stores = 0

    def make(self, capacity_bytes: int) -> Backend:
        return Compressed(self.make_inner(capacity_bytes), "lz4", chunk_bytes=self.chunk_bytes)

    def make_inner(self, capacity_bytes: int) -> Backend:
        if self.inner in ("memory", "batching"):
            backend: Backend = open_memory(capacity_bytes=capacity_bytes, options={"storage": True})
            return Batching(backend) if self.inner == "batching" else backend
        self.opened_stores += 1
        path = str(self.path / str(self.opened_stores))
        return open_files(
            capacity_bytes=capacity_bytes, options={"path": path, "enable_aio": self.inner == "files"}
        )
