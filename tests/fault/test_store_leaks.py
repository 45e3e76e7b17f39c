"""A thousand cycles leave no descriptor, no thread, no block of disk and no record behind."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

import tierstore as ts
from tests.files_disk import ScriptedKernel
from tierstore.units import KIB
from tierstore_backends.files.durable import DurableFiles
from tierstore_backends.files.options import parse_options

_NBYTES = 20_000
_DISK_BYTES = 1024 * KIB


@contextmanager
def durable_store(folder: Path, kernel: ScriptedKernel) -> Iterator[ts.Store]:
    options = parse_options({"path": str(folder), "durable": True, "threads": 1})
    disk = DurableFiles(_DISK_BYTES, options, syscalls=kernel, segment_bytes=512 * KIB, stride_bytes=64 * KIB)
    host = ts.TierConfig("host", "pinned", "256KiB", options={"host_mem_block_size": "256KiB"})
    with ts.Store(ts.StoreConfig([host, ts.TierConfig("disk", disk, _DISK_BYTES)])) as store:
        yield store


def held() -> tuple[int, int]:
    """Return how many descriptors and threads this process has."""
    return psutil.Process().num_fds(), threading.active_count()


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


def numbered(number: int) -> torch.Tensor:
    return torch.full((_NBYTES,), number % 251, dtype=torch.uint8)


def cycle(store: ts.Store, number: int) -> None:
    store.put("k", numbered(number), replace=True)
    store.put("other", numbered(number + 1), replace=True)
    store.evict("k", to="disk").result()
    store.flush()
    with store.lease("k", tier="host", write=True) as lease:
        lease.tensor.add_(1)
    store.drop("other")


@pytest.mark.parametrize("cycles", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_cycles_of_one_store_leave_nothing(tmp_path: Path, cycles: int) -> None:
    with durable_store(tmp_path, ScriptedKernel()) as store:
        cycle(store, 0)
        first = held()
        for number in range(1, cycles):
            cycle(store, number)
        assert held() == first
        store.flush()
        tier = store.stats().tiers["disk"]
        assert tier.charged_bytes == tier.ready_bytes == 20 * KIB
        assert torch.equal(store.get("k"), numbered(cycles))
        store.check()
    assert disk_bytes(tmp_path) < _DISK_BYTES + 256 * KIB


@pytest.mark.parametrize("cycles", [50, pytest.param(1000, marks=pytest.mark.long)])
def test_opening_and_closing_leaves_nothing(tmp_path: Path, cycles: int) -> None:
    with durable_store(tmp_path, ScriptedKernel()) as store:
        cycle(store, 0)
    first, taken = held(), disk_bytes(tmp_path)
    for number in range(1, cycles):
        with durable_store(tmp_path, ScriptedKernel()) as store:
            assert list(store) == ["k"]
            cycle(store, number)
    assert held() == first
    assert disk_bytes(tmp_path) <= taken + 128 * KIB


# A disk that is full for one call only has room at the second try, in most places.
@pytest.mark.parametrize(("code", "least"), [(errno.EIO, 50), (errno.ENOSPC, 5)])
def test_cycles_with_a_fault_in_each_leave_nothing(tmp_path: Path, code: int, least: int) -> None:
    kernel = ScriptedKernel()
    with durable_store(tmp_path, kernel) as store:
        cycle(store, 0)
        first = held()
        failures = 0
        for number in range(1, 100):
            calls = iter(range(10_000))

            def fail_one(kind: str, offset: int, nbytes: int, at: int = number % 7) -> int | None:
                if kind in ("read", "write", "sync") and next(calls) == at:  # noqa: B023 - this cycle's
                    raise OSError(code, "as the test says")
                return None

            kernel.twist = fail_one
            try:
                cycle(store, number)
            except ts.BackendError as error:
                failures += errno.errorcode[code] in str(error)
            kernel.twist = None
            store.check()
        assert failures >= least
        assert held() == first
        if "other" in store:
            store.drop("other")
        store.flush()
        tier = store.stats().tiers["disk"]
        assert tier.charged_bytes == tier.ready_bytes == 20 * KIB
