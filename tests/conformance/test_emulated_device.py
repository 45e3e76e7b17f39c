"""The emulated device keeps the rules of the seam, however it is set."""

from __future__ import annotations

import pytest

from tierstore.spi import Backend
from tierstore.testing.conformance import BackendConformance
from tierstore_backends.device import open_backend


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overwrite_freed": True},
        {"stream_ordered": True},
        {"late_events": 1},
        {"late_events": 2, "stream_ordered": True, "overwrite_freed": True},
        {"link_bandwidth": "40GB", "link_latency_s": 1e-5},
    ],
    ids=str,
)
class TestEmulatedDevice(BackendConformance):
    """Prompt and late, fast and slow, kind and unkind to those who use freed bytes."""

    @pytest.fixture(autouse=True)
    def _with(self, options: dict[str, object]) -> None:
        self.options = options

    def make(self, capacity_bytes: int) -> Backend:
        return open_backend(capacity_bytes=capacity_bytes, options={"device": "emulated", **self.options})
