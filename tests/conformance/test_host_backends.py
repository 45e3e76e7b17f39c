"""The backends in host memory keep the rules of the seam."""

from __future__ import annotations

import pytest

from tierstore.spi import Backend
from tierstore.testing.conformance import BackendConformance
from tierstore_backends.memory import open_backend as open_memory
from tierstore_backends.pinned import open_backend as open_pinned


@pytest.mark.parametrize("options", [{}, {"storage": True}, {"durable": True}], ids=str)
class TestMemory(BackendConformance):
    """Plain memory."""

    @pytest.fixture(autouse=True)
    def _with(self, options: dict[str, object]) -> None:
        self.options = options

    def make(self, capacity_bytes: int) -> Backend:
        return open_memory(capacity_bytes=capacity_bytes, options=self.options)


@pytest.mark.parametrize(
    "options",
    [{}, {"host_mem_block_size": "1MB"}, {"host_mem_block_size": 8192, "enable_pinned_mem": False}],
    ids=str,
)
class TestPinned(BackendConformance):
    """The block pool, with one block, with a few and with as many as slots."""

    @pytest.fixture(autouse=True)
    def _with(self, options: dict[str, object]) -> None:
        self.options = options

    def make(self, capacity_bytes: int) -> Backend:
        return open_pinned(capacity_bytes=capacity_bytes, options=self.options)
