"""The whole store against a dict: engine, ledger and backends, with faults and held copies."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tierstore.spi import Backend
from tierstore.testing.batching import Batching
from tierstore.testing.strategies import StoreMachine
from tierstore_backends.memory import open_backend as open_memory
from tierstore_backends.pinned import open_backend as open_pinned


class MemoryStoreMachine(StoreMachine):
    """Three tiers of plain memory, the last behind I/O."""

    def make(self, capacities: Sequence[int]) -> Sequence[Backend]:
        options: list[dict[str, object]] = [{}, {}, {"storage": True}]
        return [open_memory(capacity_bytes=c, options=o) for c, o in zip(capacities, options, strict=True)]


class BatchingStoreMachine(MemoryStoreMachine):
    """The same where small tensors travel together: what fails or stands still is in a batch."""

    def outermost(self, backend: Backend) -> Backend:
        return Batching(backend)


class NextUseStoreMachine(MemoryStoreMachine):
    """The same with next-use eviction, which without a plan is least recently used."""

    eviction = "next-use"


class SizeClassPinnedStoreMachine(StoreMachine):
    """Pools, whose granule is 512 bytes, and size-class eviction."""

    eviction = "size-class"

    def make(self, capacities: Sequence[int]) -> Sequence[Backend]:
        return [
            open_pinned(capacity_bytes=capacities[0], options={"enable_pinned_mem": False}),
            open_pinned(capacity_bytes=capacities[1], options={"enable_pinned_mem": False}),
            open_memory(capacity_bytes=capacities[2], options={"storage": True}),
        ]


TestMemoryStore = pytest.mark.timeout(600)(MemoryStoreMachine.TestCase)
TestBatchingStore = pytest.mark.timeout(600)(BatchingStoreMachine.TestCase)
TestNextUseStore = pytest.mark.timeout(600)(NextUseStoreMachine.TestCase)
TestSizeClassPinnedStore = pytest.mark.timeout(600)(SizeClassPinnedStoreMachine.TestCase)
