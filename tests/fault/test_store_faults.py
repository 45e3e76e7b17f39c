"""What the store does when the hardware does not do its part."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tierstore as ts
from tests.stores import make_store, memory_backends, numbered
from tierstore.config import StoreConfig, TierConfig
from tierstore.errors import BackendError, CapacityError, KeyNotFound, StoreClosed, TierStoreError
from tierstore.spi import Backend
from tierstore.testing.faults import Faulty, Gate, from_nth_on

CAPACITIES = (300, 400, 5000)


def faulty_store(tier: int, fail_at: int, *, dead: bool) -> tuple[ts.Store, Faulty]:
    backends: list[Backend] = memory_backends(CAPACITIES)
    faulty = Faulty(backends[tier], fail_at=from_nth_on(fail_at) if dead else fail_at)
    backends[tier] = faulty
    tiers = [
        TierConfig(name, backend, capacity)
        for name, backend, capacity in zip(("device", "host", "disk"), backends, CAPACITIES, strict=True)
    ]
    return ts.Store(StoreConfig(tiers)), faulty


def scenario(store: ts.Store, expected: dict[str, torch.Tensor]) -> None:
    """Use every verb; note in ``expected`` what has been promised so far."""
    for number in range(12):
        key = f"k{number}"
        store.put(key, numbered(number))
        expected[key] = numbered(number)
    for key in list(expected):
        with store.lease(key) as lease:
            assert torch.equal(lease.tensor, expected[key])
    with store.lease("k3", write=True) as lease:
        lease.tensor.add_(100)
        expected["k3"] = numbered(3).add_(100)
    store.evict(*expected, to="disk").result(10)
    store.fetch("k1", "k2", tier="device").result(10)
    store.put("k1", numbered(77), replace=True)
    expected["k1"] = numbered(77)
    store.resize("host", 150)
    store.resize("host", 400)
    store.drop("k2")
    del expected["k2"]


@pytest.mark.parametrize("dead", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("tier", [0, 1, 2], ids=["device", "host", "disk"])
def test_an_io_error_at_any_operation_loses_no_bytes(tier: int, dead: bool) -> None:
    for fail_at in itertools.count(1):
        store, faulty = faulty_store(tier, fail_at, dead=dead)
        expected: dict[str, torch.Tensor] = {}
        with contextlib.suppress(BackendError, CapacityError):
            scenario(store, expected)
        store.check()
        is_over = faulty.failures == 0
        faulty.heal()
        assert set(store) == set(expected)
        for key, tensor in expected.items():
            assert torch.equal(store.get(key), tensor), (fail_at, key)
        store.close()
        if is_over:
            break
    assert fail_at > 10, "the scenario reaches too little"


def test_a_failed_copy_names_key_tiers_and_cause() -> None:
    store, faulty = faulty_store(2, 1, dead=True)
    store.put("k", numbered(1))
    with pytest.raises(BackendError, match=r"copying 'k' \(100 B\) from 'device' to 'disk'") as caught:
        store.evict("k", to="disk").result(10)
    assert caught.value.key == "k"
    assert caught.value.tier == "disk"
    assert caught.value.__cause__ is not None
    assert store.where("k") == ("device",)
    assert faulty.failures == 1


def test_after_a_failure_the_same_call_works() -> None:
    store, faulty = faulty_store(1, 1, dead=False)
    store.put("k", numbered(1))
    with pytest.raises(BackendError):
        store.evict("k").result(10)
    faulty.heal()
    store.evict("k").result(10)
    assert store.where("k") == ("host",)


@pytest.fixture
def gated() -> Iterator[tuple[ts.Store, Gate]]:
    gates: list[Gate] = []

    def wrap(backend: Backend) -> Backend:
        gates.append(Gate(backend))
        gates[-1].open()
        return gates[-1]

    store = make_store(300, 300, 3000, wrap=wrap)
    yield store, gates[2]
    for gate in gates:
        gate.open()
    store.close()


def test_a_copy_that_never_ends_holds_up_nobody_else(gated: tuple[ts.Store, Gate]) -> None:
    store, disk = gated
    store.put("stuck", numbered(1), tier="host")
    store.put("free", numbered(2))
    disk.shut()
    transfer = store.evict("stuck", to="disk")
    with pytest.raises(TimeoutError):
        transfer.result(0.01)
    with store.lease("free") as lease:
        assert torch.equal(lease.tensor, numbered(2))
    assert torch.equal(store.get("stuck"), numbered(1)), "the source of a copy can be read"
    disk.open()
    transfer.result(10)
    assert store.where("stuck") == ("disk",)


def test_a_key_can_be_dropped_while_it_moves(gated: tuple[ts.Store, Gate]) -> None:
    store, disk = gated
    store.put("k", numbered(1), tier="host")
    disk.shut()
    transfer = store.evict("k", to="disk")
    store.drop("k")
    with pytest.raises(KeyNotFound, match="dropped"):
        transfer.result(10)
    store.put("k", numbered(2), tier="host")
    disk.open()
    store.check()
    assert torch.equal(store.get("k"), numbered(2))
    assert store.stats().tiers["disk"].charged_bytes == 0


def test_a_want_joins_the_copy_already_in_flight(gated: tuple[ts.Store, Gate]) -> None:
    store, disk = gated
    store.put("k", numbered(1), tier="disk")
    disk.shut()
    reads = disk.reads
    first, second = store.fetch("k", tier="host"), store.fetch("k", tier="host")
    disk.open()
    first.result(10)
    second.result(10)
    assert disk.reads == reads + 1


def test_close_fails_what_waits(gated: tuple[ts.Store, Gate]) -> None:
    store, disk = gated
    store.put("k", numbered(1), tier="disk")
    disk.shut()
    transfer = store.fetch("k", tier="host")
    closer = threading.Thread(target=store.close)
    closer.start()
    with pytest.raises(StoreClosed):
        transfer.result(10)
    assert closer.is_alive(), "the copy that is under way has not ended"
    disk.open()
    closer.join(10)
    assert not closer.is_alive()
    with pytest.raises(StoreClosed):
        store.get("k")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MiB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_disk_that_fills_in_the_middle_of_an_eviction_loses_nothing(small_disk: Path) -> None:
    pytest.importorskip("tierstore_backends.files")
    mib = 1024**2
    config = StoreConfig(
        [
            TierConfig("host", "pinned", 8 * mib, options={"enable_pinned_mem": False}),
            TierConfig("disk", "files", 16 * mib, options={"path": str(small_disk / "swap")}),
        ]
    )
    with ts.Store(config) as store:
        expected = {f"k{n}": torch.full((mib,), n, dtype=torch.uint8) for n in range(8)}
        for key, tensor in expected.items():
            store.put(key, tensor, tier="host")
        with pytest.raises(TierStoreError):
            store.evict(*expected, to="disk").result(30)
        store.check()
        for key, tensor in expected.items():
            assert torch.equal(store.get(key), tensor), key
        for key in expected:  # until nothing of it is under way any more
            with contextlib.suppress(TierStoreError):
                store.evict(key, to="disk").result(30)
        store.drop("k0", "k1", "k2", "k3", "k4", "k5")
        store.evict("k6", "k7", to="disk").result(30)
        assert torch.equal(store.get("k7"), expected["k7"])
