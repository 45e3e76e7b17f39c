"""Crates: small tensors that are one key of the store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tierstore as ts
from tests.crate_stores import (
    CRATE_BYTES,
    CrateDisk,
    check_index,
    check_waste,
    make_crates,
    of_all_kinds,
    small,
)
from tests.stores import make_store
from tierstore.crates import Crates
from tierstore.testing.faults import Operation

KIB = 1024
READS: tuple[Operation] = ("read",)


def files_store(path: Path) -> ts.Store:
    disk = ts.TierConfig("disk", "files", "64MiB", options={"path": str(path), "durable": True})
    return ts.Store(ts.StoreConfig([ts.TierConfig("host", "pinned", "1MiB"), disk]))


# --- bytes ------------------------------------------------------------------------------------


def test_every_kind_of_tensor_comes_back_as_it_was() -> None:
    crates, kinds = make_crates(), of_all_kinds()
    crates.put_all(kinds)
    assert len(crates.store) < len(kinds)
    for key, tensor in kinds.items():
        found = crates.get(key)
        assert torch.equal(found, tensor.detach())
        assert (found.dtype, found.shape, found.requires_grad) == (tensor.dtype, tensor.shape, False)
        assert found.stride() == crates.spec(key).stride
        with crates.lease(key) as lease:
            assert torch.equal(lease.tensor, tensor.detach())
    crates.store.check()


def test_every_kind_of_tensor_is_found_after_reopening() -> None:
    disk, kinds = CrateDisk(), of_all_kinds()
    with disk.open() as store:
        Crates(store, crate_bytes=CRATE_BYTES).put_all(kinds)
    with disk.open() as store:
        crates = Crates(store, crate_bytes=CRATE_BYTES)
        assert set(crates) == set(kinds)
        for key, tensor in kinds.items():
            assert torch.equal(crates.get(key), tensor.detach())
            assert crates.get(key).stride() == crates.spec(key).stride


def test_any_text_is_a_key() -> None:
    disk = CrateDisk()
    keys = ["", "crates/0", "Straße", "\ud800", "a" * 3000, '"\\\n']
    with disk.open() as store:
        Crates(store, crate_bytes=CRATE_BYTES).put_all({key: small(n) for n, key in enumerate(keys)})
    with disk.open() as store:
        crates = Crates(store, crate_bytes=CRATE_BYTES)
        assert [torch.equal(crates.get(key), small(n)) for n, key in enumerate(keys)] == [True] * len(keys)


def test_a_tensor_as_large_as_a_crate_fits_and_a_larger_one_is_refused_by_name() -> None:
    crates = make_crates()
    crates.put("just", small(1, CRATE_BYTES))
    with pytest.raises(ts.UsageError, match=r"'more' has 1\.0 KiB.*put it in the store itself") as caught:
        crates.put_all({"fits": small(2), "more": small(3, CRATE_BYTES + 1)})
    assert caught.value.key == "more"
    assert caught.value.needed_bytes == CRATE_BYTES + 1
    assert list(crates) == ["just"]


def test_a_put_beside_readers_leaves_them_the_former_bytes() -> None:
    crates = make_crates()
    crates.put("a", small(1))
    with crates.lease("a") as lease:
        crates.put("a", small(2), replace=True)
        assert torch.equal(lease.tensor, small(1))
        assert torch.equal(crates.get("a"), small(2))
        with crates.lease("a", write=True) as other:  # of the new value
            other.tensor.fill_(3)
        assert torch.equal(lease.tensor, small(1))
    assert torch.equal(crates.get("a"), small(3))


# --- leases -----------------------------------------------------------------------------------


def test_leased_tensors_are_views_of_one_replica() -> None:
    crates = make_crates()
    crates.put_all({"a": small(1), "b": small(2)})
    (name,) = crates.store.keys()
    with crates.lease("a", "b") as lease, crates.store.lease(name) as whole:
        assert lease["a"].untyped_storage().data_ptr() == whole.tensor.untyped_storage().data_ptr()
        assert lease["b"].data_ptr() - lease["a"].data_ptr() == 128  # both begin at multiples of 64
    assert crates.store.stats().traffic.keys() == {("caller", "device")}


def test_what_is_written_under_a_lease_is_there_afterwards() -> None:
    crates = make_crates()
    crates.put_all({"a": small(1), "b": small(2)})
    with crates.lease("a", write=True) as lease:
        lease.tensor.fill_(9)
    assert torch.equal(crates.get("a"), small(9))
    assert torch.equal(crates.get("b"), small(2))
    assert len(crates.store) == 1


def test_a_write_lease_that_wrote_nothing_leaves_the_lower_replicas() -> None:
    crates = make_crates()
    crates.put("a", small(1))
    crates.evict("a", to="disk").result(10)
    crates.lease("a", write=True).release(written=False)
    assert crates.where("a") == ("device", "disk")
    crates.lease("a", write=True).release()
    assert crates.where("a") == ("device",)


@pytest.mark.parametrize("first", [False, True], ids=["read", "write"])
@pytest.mark.parametrize("second", [False, True], ids=["then read", "then write"])
def test_a_lease_on_a_key_is_in_nobodys_way_who_wants_its_neighbours(first: bool, second: bool) -> None:
    crates = make_crates()
    crates.put_all({key: small(n) for n, key in enumerate("abc")})
    with crates.lease("a", write=first) as mine, crates.lease("b", "c", write=second) as others:
        assert torch.equal(mine["a"], small(0))
        assert torch.equal(others["b"], small(1))
        assert len(crates.store) == (2 if first or second else 1)
        if first:
            mine["a"].fill_(7)
        if second:
            others["b"].fill_(8)
        assert torch.equal(others["c"], small(2))
    assert torch.equal(crates.get("a"), small(7 if first else 0))
    assert torch.equal(crates.get("b"), small(8 if second else 1))
    check_index(crates)


def test_neighbours_of_what_is_written_can_be_got_put_and_dropped() -> None:
    crates = make_crates()
    crates.put_all({key: small(n) for n, key in enumerate("abc")})
    with crates.lease("a", write=True) as lease:
        assert torch.equal(crates.get("b"), small(1))
        crates.put("b", small(5), replace=True)
        crates.drop("c")
        lease.tensor.fill_(6)
    assert {key: int(crates.get(key)[0]) for key in crates} == {"a": 6, "b": 5}


@pytest.mark.parametrize("write", [False, True])
def test_a_key_that_is_leased_is_refused_by_name(write: bool) -> None:
    crates = make_crates()
    crates.put_all({"a": small(1), "b": small(2)})
    refused: list[Callable[[], object]] = [
        lambda: crates.lease("b", "a", write=True),
        lambda: crates.drop("b", "a"),
    ]
    refused += [lambda: crates.evict("a").result(10)]
    if write:
        refused += [
            lambda: crates.lease("a"),
            lambda: crates.put_all({"b": small(3), "a": small(3)}, replace=True),
        ]
        refused += [lambda: crates.get("a")]
    with crates.lease("a", write=write):
        for call in refused:
            with pytest.raises(ts.LeaseError, match="'a'") as caught:
                call()
            assert caught.value.key == "a"
            assert caught.value.holders
    assert {key: int(crates.get(key)[0]) for key in crates} == {"a": 1, "b": 2}


def test_evicting_the_neighbour_of_a_leased_key_says_which_crate_they_share() -> None:
    crates = make_crates()
    crates.put_all({"a": small(1), "b": small(2)})
    with crates.lease("a"), pytest.raises(ts.LeaseError, match=r"'b' is in the crate 'crates/0'") as caught:
        crates.evict("b").result(10)
    assert caught.value.key == "b"


def test_a_lease_says_what_it_is_not_for() -> None:
    crates = make_crates()
    crates.put_all({"a": small(1), "b": small(2)})
    lease = crates.lease("a", "b")
    lease.use()
    with pytest.raises(ts.KeyNotFound, match="'c' is not one of the 2 keys"):
        lease["c"]
    with pytest.raises(ts.UsageError, match="needs a lease on one key, not on 2"):
        _ = lease.tensor
    lease.release()
    lease.release()
    with pytest.raises(ts.NotResident):
        lease["a"]
    with pytest.raises(ts.NotResident):
        lease.use()


# --- what the store does ------------------------------------------------------------------------


def test_crates_move_as_one_value() -> None:
    crates = make_crates()
    keys = [f"k{n}" for n in range(8)]
    crates.put_all({key: small(n, 64) for n, key in enumerate(keys)})
    crates.evict(*keys, to="disk").result(10)
    assert crates.where("k0") == ("disk",)
    crates.fetch("k0", tier="host").result(10)
    assert {crates.where(key) for key in keys} == {("host", "disk")}
    crates.prefetch("k7").result(10)
    assert crates.where("k1")[0] == "device"
    traffic = crates.store.stats().traffic
    assert all(moved.copies == 1 for moved in traffic.values())


def test_get_brings_a_crate_up_once_for_all_its_keys_if_there_is_room() -> None:
    crates = make_crates(2 * KIB, 100 * KIB)
    crates.put_all({"a": small(1), "b": small(2)}, tier="disk")
    assert torch.equal(crates.get("a"), small(1))
    assert crates.where("b") == ("host", "disk")
    crates.evict("a", to="disk").result(10)
    crates.store.put("in the way", small(0, 2 * KIB))
    with crates.store.lease("in the way", tier="host"):
        assert torch.equal(crates.get("b"), small(2))
    assert crates.where("b") == ("disk",)


def test_crates_of_a_store_without_usable_tiers_are_read() -> None:
    crates = Crates(CrateDisk().open(), crate_bytes=CRATE_BYTES)
    crates.put("a", small(1), tier="disk")
    crates.store.resize("host", 0)
    assert torch.equal(crates.get("a"), small(1))


def test_who_shares_the_store_has_keys_of_their_own() -> None:
    store = make_store(8 * KIB, 100 * KIB)
    crates, others = Crates(store, crate_bytes=CRATE_BYTES), Crates(store, "others", crate_bytes=CRATE_BYTES)
    crates.put("a", small(1))
    others.put("a", small(2))
    store.put("a", small(3))
    assert [int(each.get("a")[0]) for each in (crates, others, store)] == [1, 2, 3]
    assert store.keys() == ("crates/0", "others/0", "a")
    assert (others.name, others.store, others.crate_bytes) == ("others", store, CRATE_BYTES)


# --- what is superseded -------------------------------------------------------------------------


def test_single_puts_are_joined_and_what_is_superseded_is_given_back() -> None:
    crates = make_crates(400 * KIB)
    for round_ in range(4):
        for number in range(200):
            crates.put(f"k{number}", small(number + round_), replace=True)
            check_waste(crates)
    check_index(crates)
    assert len(crates.store) < 80
    live = 200 * (128 + 20)
    assert crates.store.stats().tiers["disk"].charged_bytes < 2.5 * live
    assert all(torch.equal(crates.get(f"k{number}"), small(number + 3)) for number in range(200))


def test_nothing_is_left_when_all_is_dropped_one_by_one() -> None:
    crates = make_crates(400 * KIB)
    crates.put_all({f"k{number}": small(number) for number in range(100)})
    for number in range(100):
        crates.drop(f"k{number}")
        check_waste(crates)
    assert crates.store.keys() == ()
    assert crates._sharing.index._superseded == {}
    assert crates.store.stats().tiers["disk"].charged_bytes == 0


def test_what_becomes_of_crates_on_disk_stays_there() -> None:
    crates = make_crates(8 * KIB, 100 * KIB)
    for number in range(40):
        crates.put(f"k{number}", small(number, 20), tier="disk")
    assert len(crates.store) < 40
    assert {crates.where(key) for key in crates} == {("disk",)}


def test_crates_that_are_leased_stay_until_the_release() -> None:
    crates = make_crates()
    crates.put_all({"a": small(1), "b": small(2)})
    lease = crates.lease("a", "b")
    crates.put_all({"a": small(3), "b": small(4)}, replace=True)
    assert len(crates.store) == 2
    assert torch.equal(lease["b"], small(2))
    lease.release()
    crates.put("c", small(5))
    assert "crates/0" not in crates.store
    check_index(crates)


def test_what_cannot_be_given_back_now_is_given_back_later(caplog: pytest.LogCaptureFixture) -> None:
    crates = make_crates()
    crates.put("a", small(1))
    lease = crates.store.lease("crates/0")
    crates.put("a", small(2), replace=True)
    assert "keep what could be given back" in caplog.text
    assert "crates/0" in crates.store
    lease.release()
    for number in range(20):
        crates.put("a", small(number), replace=True)
    assert "crates/0" not in crates.store
    check_index(crates)


# --- what survives ------------------------------------------------------------------------------


def test_a_flush_leaves_puts_writes_and_drops_and_nothing_since() -> None:
    disk = CrateDisk()
    store = disk.open()
    crates = Crates(store, crate_bytes=CRATE_BYTES)
    crates.put_all({key: small(n) for n, key in enumerate("abcd")})
    crates.drop("c")
    with crates.lease("b", write=True, tier="host") as lease:
        lease.tensor.fill_(8)
    crates.flush()
    crates.put("a", small(9), replace=True)
    crates.drop("d")
    crates.put("e", small(9))
    store.close(flush=False)
    found = Crates(disk.open(), crate_bytes=CRATE_BYTES)
    assert {key: int(found.get(key)[0]) for key in found} == {"a": 0, "b": 8, "d": 3}
    check_index(found)


def test_a_flush_of_other_keys_forgets_nothing_of_the_last_flush_of_crates() -> None:
    """Crates were written anew meanwhile, and the former ones given back."""
    disk = CrateDisk()
    store = disk.open()
    crates = Crates(store, crate_bytes=CRATE_BYTES)
    crates.put_all({f"k{n}": small(n) for n in range(6)})
    crates.flush()
    crates.drop(*(f"k{n}" for n in range(5)))
    assert not store.spec("crates/0").nbytes  # a stub
    store.put("other", small(0))
    store.flush("other")
    store.close(flush=False)
    store = disk.open()
    found = Crates(store, crate_bytes=CRATE_BYTES)
    assert {key: int(found.get(key)[0]) for key in found} == {f"k{n}": n for n in range(6)}
    found.drop(*(f"k{n}" for n in range(6)))
    found.flush()
    assert store.keys() == ("other",)


def test_stubs_that_a_reopened_store_has_are_forgotten_with_the_next_flush() -> None:
    disk = CrateDisk()
    with disk.open() as store:
        crates = Crates(store, crate_bytes=CRATE_BYTES)
        crates.put("a", small(1))
        crates.put("a", small(2), replace=True)
        assert set(store) == {"crates/0", "crates/1"}
    with disk.open() as store:
        crates = Crates(store, crate_bytes=CRATE_BYTES)
        crates.put("b", small(3))
        crates.flush()
        assert set(store) == {"crates/1", "crates/2"}
        assert {key: int(crates.get(key)[0]) for key in crates} == {"a": 2, "b": 3}


def test_opening_reads_the_beginnings_of_crates_on_disk(tmp_path: Path) -> None:
    keys = [f"k{number}" for number in range(96)]
    with files_store(tmp_path) as store:
        Crates(store).put_all({key: small(n, 32 * KIB) for n, key in enumerate(keys)})
    with files_store(tmp_path) as store:
        crates = Crates(store)
        read = store.stats().tiers["disk"].io["read_bytes"]
        assert isinstance(read, int)
        assert 0 < read <= 4 * 16 * KIB
        assert set(crates) == set(keys)
        assert torch.equal(crates.get("k95"), small(95, 32 * KIB))


def test_a_long_directory_is_read_whole(tmp_path: Path) -> None:
    tensors = {f"{'long ' * 40}{number}": small(number, 8) for number in range(200)}
    with files_store(tmp_path) as store:
        Crates(store).put_all(tensors)
    with files_store(tmp_path) as store:
        crates = Crates(store)
        assert all(torch.equal(crates.get(key), tensor) for key, tensor in tensors.items())
