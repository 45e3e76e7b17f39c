"""Wrappers keep the rules of the seam: those that tiers are given, and those that tests use."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import pytest

from tierstore.errors import BackendError
from tierstore.spi import Backend, DurableBackend
from tierstore.testing.batching import Batching
from tierstore.testing.conformance import BackendConformance
from tierstore.testing.durability import DurableBackendSuite
from tierstore.testing.faults import Faulty, Gate, Slow
from tierstore.wrappers.bandwidth import BandwidthLimited
from tierstore.wrappers.retrying import Retrying
from tierstore_backends.files import open_backend as open_files
from tierstore_backends.memory import open_backend as open_memory

AWAY = BackendError("away for a moment", transient=True)
FAST = 1 << 40


def flaky(backend: Backend) -> Backend:
    """Let every third operation fail once, and be tried again."""
    faulty = Faulty(backend, error=AWAY, on=["read", "write", "free"], fail_at=range(3, 10**6, 3))
    return Retrying(faulty, 30, first_wait_s=1e-6)  # with threads, one may be the third again and again


WRAPPERS: Mapping[str, Callable[[Backend], Backend]] = {
    "retrying": lambda backend: Retrying(backend, 3),
    "flaky": flaky,
    "flaky batches": lambda backend: Batching(flaky(backend)),
    "limited": lambda backend: BandwidthLimited(backend, FAST),
    "slow": lambda backend: BandwidthLimited(backend, (200 << 20, 150 << 20)),
    "both": lambda backend: flaky(BandwidthLimited(backend, FAST)),
    "faulty": Faulty,
    "gate": lambda backend: Gate(backend, holds=()),
    "at its pace": lambda backend: Slow(backend, (0,)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("medium", ["memory", "files"])
class TestWrapped(BackendConformance):
    """Around a backend that does everything at once, and one that does it later and in batches."""

    @pytest.fixture(autouse=True)
    def _with(self, wrapper: str, medium: str, tmp_path: Path) -> None:
        self.wrap = WRAPPERS[wrapper]
        self.medium = medium
        self.path = tmp_path
        self.opened_stores = 0

    def make(self, capacity_bytes: int) -> Backend:
        if self.medium == "memory":
            return self.wrap(open_memory(capacity_bytes=capacity_bytes, options={"storage": True}))
        self.opened_stores += 1
        options = {"path": str(self.path / str(self.opened_stores))}
        return self.wrap(open_files(capacity_bytes=capacity_bytes, options=options))


@pytest.mark.parametrize("wrapper", ["retrying", "limited", "both"])
class TestWrappedDurable(DurableBackendSuite):
    """Around files that are found again."""

    @pytest.fixture(autouse=True)
    def _with(self, wrapper: str, tmp_path: Path) -> None:
        self.wrap = WRAPPERS[wrapper]
        self.path = tmp_path / "0"

    def open(self, capacity_bytes: int) -> DurableBackend:
        options = {"path": str(self.path), "durable": True}
        return cast("DurableBackend", self.wrap(open_files(capacity_bytes=capacity_bytes, options=options)))

    def lose_power(self, backend: DurableBackend) -> None:
        copy = self.path.with_name(str(int(self.path.name) + 1))
        shutil.copytree(self.path, copy)
        backend.close()
        self.path = copy
