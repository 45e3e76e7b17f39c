"""What crates do when the hardware does not do its part."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import tierstore as ts
from tests.crate_stores import CRATE_BYTES, CrateDisk, check_index, small
from tests.stores import memory_backends
from tierstore.crates import Crates
from tierstore.spi import Backend
from tierstore.testing.faults import Faulty, Gate, Operation, from_nth_on

CAPACITIES = (3 * CRATE_BYTES, 4 * CRATE_BYTES, 60 * CRATE_BYTES)
WRITES: tuple[Operation] = ("write",)
COMMITS: tuple[Operation] = ("commit",)


def faulty_crates(tier: int, fail_at: int, *, dead: bool) -> tuple[Crates, Faulty]:
    backends: list[Backend] = memory_backends(CAPACITIES)
    faulty = Faulty(backends[tier], fail_at=from_nth_on(fail_at) if dead else fail_at)
    backends[tier] = faulty
    tiers = [
        ts.TierConfig(name, backend, capacity)
        for name, backend, capacity in zip(("device", "host", "disk"), backends, CAPACITIES, strict=True)
    ]
    return Crates(ts.Store(ts.StoreConfig(tiers)), crate_bytes=CRATE_BYTES), faulty


def scenario(crates: Crates, expected: dict[str, torch.Tensor]) -> None:
    """Use every verb; note in ``expected`` what has been promised so far."""
    for first in range(0, 40, 10):
        tensors = {f"k{number}": small(number) for number in range(first, first + 10)}
        crates.put_all(tensors)
        expected |= tensors
    for number in range(20):
        crates.put(f"s{number}", small(number))
        expected[f"s{number}"] = small(number)
    for key in list(expected):
        with crates.lease(key) as lease:
            assert torch.equal(lease.tensor, expected[key])
    with crates.lease("k3", write=True) as lease, crates.lease("k4") as other:  # copied to another crate
        assert torch.equal(other.tensor, expected["k4"])
        lease.tensor.fill_(100)
        expected["k3"] = small(100)
    crates.evict(*expected, to="disk").result(10)
    crates.fetch("k1", "k2").result(10)
    for number in range(8):
        crates.put(f"k{number}", small(77), replace=True)
        expected[f"k{number}"] = small(77)
    dropped = [f"k{number}" for number in range(20, 36)]
    crates.drop(*dropped)
    for key in dropped:
        del expected[key]
    assert all(torch.equal(crates.get(key), tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("dead", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("tier", [0, 1, 2], ids=["device", "host", "disk"])
def test_an_io_error_at_any_operation_loses_no_small_tensor(tier: int, dead: bool) -> None:
    for fail_at in itertools.count(1):
        crates, faulty = faulty_crates(tier, fail_at, dead=dead)
        expected: dict[str, torch.Tensor] = {}
        with contextlib.suppress(ts.BackendError, ts.CapacityError):
            scenario(crates, expected)
        crates.store.check()
        check_index(crates)
        is_over = faulty.failures == 0
        faulty.heal()
        assert set(crates) == set(expected)
        for key, tensor in expected.items():
            assert torch.equal(crates.get(key), tensor), (fail_at, key)
        crates.put("afterwards", small(1))
        assert all(crate.is_idle for crate in crates._sharing.index.crates.values())
        crates.store.close()
        if is_over:
            break
    assert fail_at > 10, "the scenario reaches too little"


def test_a_third_write_that_fails_leaves_none_of_three_crates() -> None:
    disk = CrateDisk(host_bytes=CRATE_BYTES)
    faulty: list[Faulty] = []

    def wrap(backend: Backend) -> Backend:
        faulty.append(Faulty(backend, fail_at=3, on=WRITES))
        return faulty[0]

    store = disk.open(wrap)
    crates = Crates(store, crate_bytes=CRATE_BYTES)
    tensors = {f"k{number}": small(number, 400) for number in range(6)}
    with pytest.raises(ts.BackendError):
        crates.put_all(tensors, tier="disk")
    assert len(crates) == 0
    assert all(store.spec(name).nbytes == 0 for name in store)
    crates.put_all(tensors, tier="disk")
    crates.flush()
    assert sum(store.spec(name).nbytes > 0 for name in store) == len(store) == 3
    store.close(flush=False)
    found = Crates(disk.open(), crate_bytes=CRATE_BYTES)
    assert all(torch.equal(found.get(key), tensor) for key, tensor in tensors.items())


def test_a_flush_that_fails_leaves_one_flush_or_the_other() -> None:
    disk = CrateDisk()
    with disk.open() as store:
        crates = Crates(store, crate_bytes=CRATE_BYTES)
        crates.put_all({f"k{number}": small(1) for number in range(20)})
    store = disk.open(lambda backend: Faulty(backend, fail_at=1, on=COMMITS))
    crates = Crates(store, crate_bytes=CRATE_BYTES)
    crates.put_all({f"k{number}": small(2) for number in range(20)}, replace=True)
    crates.drop("k0")
    with pytest.raises(ts.BackendError):
        crates.flush()
    store.close(flush=False)
    found = Crates(disk.open(), crate_bytes=CRATE_BYTES)
    assert {key: int(found.get(key)[0]) for key in found} in (
        {f"k{number}": 1 for number in range(20)},
        {f"k{number}": 2 for number in range(1, 20)},
    )
    found.put("k0", small(3), replace=True)
    found.flush()


class GatedCrates:
    """Crates over a disk whose writes can stand still.

    Args:
        host_bytes: of the tier above it.
    """

    def __init__(self, host_bytes: int) -> None:
        gates: list[Gate] = []

        def wrap(backend: Backend) -> Backend:
            gates.append(Gate(backend, holds=WRITES))
            gates[0].open()
            return gates[0]

        self.store = CrateDisk(host_bytes=host_bytes).open(wrap)
        self.crates = Crates(self.store, crate_bytes=CRATE_BYTES)
        self.gate = gates[0]


@pytest.fixture
def gated() -> Iterator[GatedCrates]:
    made = GatedCrates(CRATE_BYTES)
    yield made
    made.gate.open()
    made.store.close(flush=False)


def test_readers_go_on_while_a_put_waits_for_a_disk_that_stands_still(gated: GatedCrates) -> None:
    crates, gate = gated.crates, gated.gate
    crates.put_all({"a": small(1), "b": small(2)})
    gate.shut()
    with ThreadPoolExecutor(1) as thread:
        put = thread.submit(crates.put, "c", small(3), tier="disk")
        gate.wait_until_held()
        assert torch.equal(crates.get("a"), small(1))
        with crates.lease("b", tier="host") as lease:
            assert torch.equal(lease.tensor, small(2))
        gate.open()
        put.result(30)
    assert torch.equal(crates.get("c"), small(3))


def test_crates_are_not_written_anew_while_a_transfer_moves_them(gated: GatedCrates) -> None:
    crates, gate = gated.crates, gated.gate
    crates.put_all({key: small(1) for key in "abcde"})
    gate.shut()
    transfer = crates.evict("a", to="disk")
    gate.wait_until_held()
    with ThreadPoolExecutor(1) as thread:
        drop = thread.submit(crates.drop, "b", "c", "d")  # what is left is less than half
        gate.open()
        drop.result(30)
    transfer.result(30)
    assert torch.equal(crates.get("a"), small(1))
    crates.put("f", small(2))
    assert not gated.store.spec("crates/0").nbytes


def test_a_writer_gives_nothing_back_while_a_neighbour_is_copied_from_it(gated: GatedCrates) -> None:
    crates, gate = gated.crates, gated.gate
    crates.put_all({"a": small(1, 300), "b": small(2, 300)})
    lease = crates.lease("a", tier="host", write=True)
    gate.shut()
    with ThreadPoolExecutor(2) as threads:
        reader = threads.submit(crates.lease, "b", tier="host")  # which is copied to disk: the host is full
        gate.wait_until_held()
        lease["a"].fill_(3)
        end = threads.submit(lease.release)
        with pytest.raises(TimeoutError):
            end.result(0.05)
        gate.open()
        end.result(30)
        with contextlib.suppress(ts.CapacityError):  # if it came before the writer's end
            reader.result(30).release()
    with crates.lease("b", tier="host") as held:
        assert torch.equal(held.tensor, small(2, 300))
    assert torch.equal(crates.get("a"), small(3, 300))
    check_index(crates)
