"""The backend that the how-to guide writes passes the suite, as the guide says."""

from __future__ import annotations

import contextlib
import functools
import tempfile

from tests.docs import blocks
from tierstore.spi import Backend
from tierstore.testing.conformance import BackendConformance


@functools.cache
def _names() -> dict[str, object]:
    """Run the page once, elsewhere; return what it defines."""
    with tempfile.TemporaryDirectory() as elsewhere, contextlib.chdir(elsewhere):
        return blocks.run(blocks.ROOT / "docs" / "how-to" / "write-a-backend.md")


class TestPackedMemory(BackendConformance):
    """The page's own factory."""

    def make(self, capacity_bytes: int) -> Backend:
        factory = _names()["open_backend"]
        assert callable(factory)
        backend: Backend = factory(capacity_bytes=capacity_bytes, options={})
        return backend


class TestPackedMemoryWithParts(BackendConformance):
    """The same with the capability that the page adds."""

    def make(self, capacity_bytes: int) -> Backend:
        factory = _names()["PackedMemoryWithParts"]
        assert callable(factory)
        backend: Backend = factory(capacity_bytes)
        return backend
