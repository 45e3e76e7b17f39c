"""Memory that the program allocated as bytes of the store: `Store.adopt`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tierstore as ts
from tests.stores import make_store
from tierstore.testing.faults import Faulty, Gate, from_nth_on
from tierstore.testing.memory import DeviceBudget
from tierstore.units import KIB
from tierstore_backends.device import EmulatedDevice
from tierstore_backends.memory import open_backend

_TENSOR = 64 * KIB


def _tensor(value: int, nbytes: int = _TENSOR) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def _store(device: EmulatedDevice, host_bytes: int = 4 * _TENSOR, disk_bytes: int = 16 * _TENSOR) -> ts.Store:
    host = open_backend(capacity_bytes=host_bytes, options={})
    disk = open_backend(capacity_bytes=disk_bytes, options={"storage": True})
    tiers = [
        ts.TierConfig("device", device, 2 * _TENSOR),
        ts.TierConfig("host", host, host_bytes),
        ts.TierConfig("disk", disk, disk_bytes),
    ]
    return ts.Store(ts.StoreConfig(tiers, eviction="lru"))


@pytest.fixture
def device() -> EmulatedDevice:
    return EmulatedDevice(2 * _TENSOR, is_overwriting=True)


@pytest.fixture
def store(device: EmulatedDevice) -> Iterator[ts.Store]:
    with _store(device) as store:
        yield store


def test_the_memory_itself_is_the_replica(store: ts.Store) -> None:
    tensor = _tensor(3).view(4, -1).t()
    store.adopt("k", tensor)
    with store.lease("k") as lease:
        assert lease.tensor.data_ptr() == tensor.data_ptr()
        assert (lease.tensor.shape, lease.tensor.stride()) == (tensor.shape, tensor.stride())
    assert store.where("k") == ("device",)
    assert store.stats().tiers["device"].charged_bytes == _TENSOR


def test_the_store_lets_go_of_what_it_evicts(store: ts.Store) -> None:
    tensor = _tensor(3)
    storage = weakref.ref(tensor.untyped_storage())
    store.adopt("k", tensor)
    del tensor
    assert storage() is not None
    store.evict("k", to="host").result(10)
    assert storage() is None
    assert torch.equal(store.get("k"), _tensor(3))


def test_whoever_refers_to_it_keeps_the_bytes_unharmed(store: ts.Store) -> None:
    tensor = _tensor(3)
    store.adopt("k", tensor)
    store.evict("k", to="disk").result(10)
    assert torch.equal(tensor, _tensor(3))  # although freed memory is overwritten here


def test_a_copy_below_leaves_the_replica_where_it_is(store: ts.Store) -> None:
    tensor = _tensor(3)
    store.adopt("k", tensor)
    store.fetch("k", tier="host").result(10)
    assert store.where("k") == ("device", "host")
    with store.lease("k") as lease:
        assert lease.tensor.data_ptr() == tensor.data_ptr()


def test_it_comes_back_into_memory_of_the_tier(store: ts.Store) -> None:
    tensor = _tensor(3)
    store.adopt("k", tensor)
    store.evict("k").result(10)
    with store.lease("k") as lease:
        assert lease.tensor.data_ptr() != tensor.data_ptr()
        assert torch.equal(lease.tensor, tensor)


def test_room_is_made_for_it(store: ts.Store) -> None:
    for number in range(5):
        store.adopt(f"k{number}", _tensor(number))
    assert store.stats().tiers["device"].peak_charged_bytes == 2 * _TENSOR
    assert all(torch.equal(store.get(f"k{n}"), _tensor(n)) for n in range(5))


def test_leases_may_leave_no_room(store: ts.Store, device: EmulatedDevice) -> None:
    store.put("a", _tensor(1))
    store.put("b", _tensor(2))
    tensor = _tensor(3)
    with store.lease("a", "b"), pytest.raises(ts.CapacityError) as caught:
        store.adopt("k", tensor)
    assert len(caught.value.holders) == 1
    assert "k" not in store
    assert torch.equal(tensor, _tensor(3))
    assert device.used_bytes == 2 * _TENSOR


def test_a_failed_eviction_leaves_the_tensor_to_the_caller() -> None:
    device = EmulatedDevice(2 * _TENSOR)
    host = Faulty(open_backend(capacity_bytes=_TENSOR, options={}), fail_at=from_nth_on(1))
    tiers = [ts.TierConfig("device", device, 2 * _TENSOR), ts.TierConfig("host", host, _TENSOR)]
    with ts.Store(ts.StoreConfig(tiers)) as store:
        store.adopt("a", _tensor(1))
        store.adopt("b", _tensor(2))
        with pytest.raises(ts.TierStoreError):
            store.adopt("k", _tensor(3))
        assert torch.equal(store.get("a"), _tensor(1))
        assert torch.equal(store.get("b"), _tensor(2))
        assert device.used_bytes == 2 * _TENSOR


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(10)[1:],
        torch.zeros(10)[:9],
        torch.zeros(4, 4).expand(2, 4, 4),
        torch.zeros(4, 4)[:, :2],
        torch.zeros(2, dtype=torch.complex64).conj(),
    ],
    ids=["begins-later", "ends-earlier", "overlaps", "has-gaps", "conjugate"],
)
def test_a_part_of_a_storage_is_refused(store: ts.Store, tensor: torch.Tensor) -> None:
    with pytest.raises(ts.UsageError, match="fill its storage"):
        store.adopt("k", tensor)
    assert "k" not in store


def test_a_key_that_is_there_is_refused(store: ts.Store) -> None:
    store.put("k", _tensor(1))
    with pytest.raises(ts.KeyExists):
        store.adopt("k", _tensor(2))
    assert torch.equal(store.get("k"), _tensor(1))


def test_a_tier_with_memory_of_its_own_adopts_nothing() -> None:
    with make_store(4 * _TENSOR, 4 * _TENSOR) as store:
        assert not store.can_adopt
        with pytest.raises(ts.UsageError, match="put the tensor instead"):
            store.adopt("k", _tensor(1))


def test_every_thread_may_adopt(device: EmulatedDevice) -> None:
    with _store(device, disk_bytes=64 * _TENSOR) as store:

        def work(first: int) -> None:
            for number in range(first, first + 8):
                store.adopt(f"k{number}", _tensor(number))

        threads = [threading.Thread(target=work, args=(8 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert all(torch.equal(store.get(f"k{n}"), _tensor(n)) for n in range(32))
        store.drop(*store)
        assert device.used_bytes == 0


def test_metered_memory_is_not_counted_twice() -> None:
    with DeviceBudget(10 * _TENSOR) as budget, _store(EmulatedDevice(2 * _TENSOR)) as store:
        tensor = _tensor(1)
        before = budget.live_bytes
        store.adopt("k", tensor)
        assert budget.live_bytes == before
        del tensor
        assert budget.live_bytes == before
        store.evict("k").result(10)
        assert budget.live_bytes == before - _TENSOR


def test_what_is_on_its_way_down_stays_in_use_until_it_is_there() -> None:
    gate = Gate(open_backend(capacity_bytes=4 * _TENSOR, options={"storage": True}))
    device = EmulatedDevice(2 * _TENSOR)
    tiers = [ts.TierConfig("device", device, 2 * _TENSOR), ts.TierConfig("disk", gate, 4 * _TENSOR)]
    with ts.Store(ts.StoreConfig(tiers)) as store:
        tensor = _tensor(7)
        storage = weakref.ref(tensor.untyped_storage())
        store.adopt("k", tensor)
        del tensor
        leaving = store.evict("k")
        gate.wait_until_held()
        assert storage() is not None
        gate.open()
        leaving.result(10)
        assert storage() is None


@given(shape=st.lists(st.integers(1, 5), min_size=0, max_size=4), seed=st.integers(0, 5))
def test_every_dense_layout_comes_back_as_it_was(shape: list[int], seed: int) -> None:
    order = torch.randperm(len(shape), generator=torch.Generator().manual_seed(seed)).tolist()
    tensor = torch.rand(shape).permute(order)
    with _store(EmulatedDevice(2 * _TENSOR)) as store:
        store.adopt("k", tensor)
        store.evict("k", to="disk").result(10)
        with store.lease("k") as lease:
            assert torch.equal(lease.tensor, tensor)
            assert lease.tensor.shape == tensor.shape


def test_stats_tell_what_leases_hold(device: EmulatedDevice) -> None:
    with _store(device) as store:
        store.put("k", _tensor(1), tier="device")
        assert store.stats().tiers["device"].leased_bytes == 0
        with store.lease("k"), store.lease("k"):
            assert store.stats().tiers["device"].leased_bytes == _TENSOR
            assert [store.leased_bytes(tier) for tier in store.tier_names] == [_TENSOR, 0, 0]
            assert store.rooms() == {
                name: (tier.capacity_bytes, tier.charged_bytes, tier.leased_bytes)
                for name, tier in store.stats().tiers.items()
            }
            with pytest.raises(ts.UsageError, match="no tier 'attic'"):
                store.leased_bytes("attic")
        assert store.stats().tiers["device"].leased_bytes == 0


def test_who_watches_the_device_is_told_what_it_allocates_and_adopts_until_it_leaves(
    device: EmulatedDevice,
) -> None:
    seen: list[int] = []
    with _store(device) as store:
        leave = store.watch_device(lambda storage: seen.append(storage.nbytes()))
        store.put("k", _tensor(1, 1000), tier="device")
        store.adopt("a", _tensor(2, 2000))
        leave()
        leave()
        store.put("later", _tensor(1, 1000), tier="device")
    assert seen == [1000, 2000]


# ---------------------------------------------------------------------- puts that may adopt


def test_a_put_may_take_the_memory_itself(store: ts.Store) -> None:
    tensor = _tensor(3)
    store.put("k", tensor, adopt=True)
    with store.lease("k") as lease:
        assert lease.tensor.data_ptr() == tensor.data_ptr()
    store.put("j", tensor)
    with store.lease("j") as lease:
        assert lease.tensor.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_put_to_a_lower_tier_copies(store: ts.Store, tier: str) -> None:
    tensor = _tensor(3)
    store.put("k", tensor, tier=tier, adopt=True)
    assert store.where("k") == (tier,)
    tensor.fill_(4)
    assert torch.equal(store.get("k"), _tensor(3))


def test_a_put_for_which_the_fastest_tier_has_no_room_is_a_copy_below(store: ts.Store) -> None:
    store.put("a", _tensor(1))
    store.put("b", _tensor(2))
    tensor = _tensor(3)
    with store.lease("a", "b"):
        store.put("k", tensor, adopt=True)
        assert store.where("k") == ("host",)
    tensor.fill_(4)
    assert torch.equal(store.get("k"), _tensor(3))


def test_what_replaces_a_key_s_bytes_may_be_adopted(store: ts.Store, device: EmulatedDevice) -> None:
    store.put("k", _tensor(1))
    with store.lease("k") as former:
        tensor = _tensor(2)
        with pytest.raises(ts.KeyExists):
            store.put("k", tensor, adopt=True)
        store.put("k", tensor, replace=True, adopt=True)
        assert torch.equal(former.tensor, _tensor(1))
    with store.lease("k") as lease:
        assert lease.tensor.data_ptr() == tensor.data_ptr()
    assert device.used_bytes == _TENSOR


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(10.0)[1:],
        torch.arange(10.0)[:9],
        torch.arange(16.0).view(4, 4)[:, :2],
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.zeros(0),
    ],
    ids=["begins-later", "ends-earlier", "has-gaps", "conjugate", "empty"],
)
def test_a_put_copies_what_is_not_a_whole_storage(store: ts.Store, tensor: torch.Tensor) -> None:
    expected = tensor.clone()
    store.put("k", tensor, adopt=True)
    assert torch.equal(store.get("k"), expected)


def test_a_put_copies_into_a_tier_with_memory_of_its_own() -> None:
    with make_store(4 * _TENSOR, 4 * _TENSOR) as store:
        tensor = _tensor(1)
        store.put("k", tensor, adopt=True)
        tensor.fill_(2)
        assert torch.equal(store.get("k"), _tensor(1))


def test_a_put_that_finds_no_room_anywhere_leaves_the_tensor_to_the_caller() -> None:
    device = EmulatedDevice(2 * _TENSOR)
    host = Faulty(open_backend(capacity_bytes=_TENSOR, options={}), fail_at=from_nth_on(1))
    tiers = [ts.TierConfig("device", device, 2 * _TENSOR), ts.TierConfig("host", host, _TENSOR)]
    with ts.Store(ts.StoreConfig(tiers)) as store:
        store.put("a", _tensor(1), adopt=True)
        store.put("b", _tensor(2), adopt=True)
        tensor = _tensor(3)
        for _ in range(2):
            with pytest.raises(ts.TierStoreError):
                store.put("k", tensor, adopt=True)
        assert "k" not in store
        assert torch.equal(tensor, _tensor(3))
        assert torch.equal(store.get("a"), _tensor(1))
        assert device.used_bytes == 2 * _TENSOR
