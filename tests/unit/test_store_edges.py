"""What the store does at its edges: other devices, tensors without bytes, sums over tiers, lazy rooms."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tierstore as ts
from tests.stores import make_store, numbered
from tierstore.config import StoreConfig, TierConfig
from tierstore.stats import Traffic
from tierstore.units import MIB


@pytest.fixture
def store() -> Iterator[ts.Store]:
    with make_store(300, 400, 5000) as store:
        yield store


@pytest.mark.parametrize("tier", ["device", "disk"])
def test_get_makes_the_copy_on_the_device_that_is_asked_for(store: ts.Store, tier: str) -> None:
    store.put("k", torch.arange(6, dtype=torch.float32).view(2, 3).T, tier=tier)
    elsewhere = store.get("k", device="meta")
    assert elsewhere.device.type == "meta", "the one other device that every machine has"
    assert (elsewhere.shape, elsewhere.dtype, elsewhere.stride()) == ((3, 2), torch.float32, (1, 3))
    assert store.stats().traffic[tier, "caller"].copies == 1


def test_a_victim_that_finds_no_room_below_is_no_eviction() -> None:
    with make_store(100, 100) as store:
        store.put("a", numbered(1), tier="disk")
        store.put("b", numbered(2), tier="host")
        for _ in range(3):
            with pytest.raises(ts.CapacityError):
                store.put("c", numbered(3))
        assert store.stats().evictions == 0
        store.drop("a")
        store.put("c", numbered(3), tier="host")
        assert store.stats().evictions == 1


def test_what_callers_get_is_counted_by_the_tier_that_it_came_from(store: ts.Store) -> None:
    store.put("small", numbered(1, 10), tier="disk")
    store.put("large", numbered(2, 200), tier="disk")
    for key in ("small", "large", "large"):
        store.get(key)
    assert store.stats().traffic["disk", "caller"] == Traffic(3, 410)
    assert ("device", "caller") not in store.stats().traffic


def test_a_closed_store_keeps_no_memory_of_copies_that_it_handed_out() -> None:
    with make_store(4 * MIB) as store:
        store.put("k", numbered(1, 2 * MIB))
        store.get("k")
        outputs = store._tensor_io._outputs
        assert outputs._idle_bytes == 2 * MIB
    assert outputs._idle_bytes == 0


def test_a_tensor_whose_storage_was_freed_is_refused(store: ts.Store) -> None:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ts.UsageError, match="storage was freed"):
        store.put("k", tensor)
    assert "k" not in store


def test_a_wrapper_that_does_not_say_that_it_is_one_is_refused(store: ts.Store) -> None:
    class Silent(torch.Tensor):
        """A subclass without storage and without PyTorch's protocol for such."""

        @classmethod
        def __torch_dispatch__(cls, func: object, *_: object) -> torch.Tensor:
            raise TypeError(f"{func} is not for this test")

    with pytest.raises(ts.UsageError, match=r"without memory of its own \(Silent\)"):
        store.put("k", torch.Tensor._make_wrapper_subclass(Silent, (3,)))
    assert "k" not in store


def test_a_tensor_inside_vmap_is_refused(store: ts.Store) -> None:
    def put(row: torch.Tensor) -> torch.Tensor:
        with pytest.raises(ts.UsageError, match="vmap"):
            store.put("k", row)
        return row

    torch.vmap(put)(torch.ones(2, 3))
    assert "k" not in store


def test_what_happened_is_summed_over_tiers(store: ts.Store) -> None:
    store.put("k", numbered(1), tier="device")
    with store.lease("k"):
        pass
    store.evict("k").result(10)
    store.fetch("k").result(10)
    with store.lease("k"), pytest.raises(ts.CapacityError):
        store.put("large", numbered(2, 300), tier="device")
    stats = store.stats()
    assert (stats.hits, stats.faults, stats.evictions, stats.refusals) == (2, 1, 1, 1)
    assert stats.copies == len(["put", "down", "up"])
    assert stats.copied_bytes == 300


def test_a_backend_that_does_not_open_closes_those_that_did(tmp_path: Path) -> None:
    tiers = [
        TierConfig("disk", "files", 1000, options={"path": str(tmp_path / "files")}),
        TierConfig("slow", "memory", 1000, options={"no_such_option": 1}),
    ]
    with pytest.raises(ts.ConfigError, match="no_such_option"):
        ts.Store(StoreConfig(tiers))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("room", ["testing", "training"])
def test_a_room_that_is_seldom_entered_is_imported_at_its_first_use(room: str) -> None:
    program = (
        f"import sys, tierstore as ts; assert 'tierstore.{room}' not in sys.modules; "
        f"print(ts.{room}.__name__); assert 'tierstore.{room}' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"tierstore.{room}"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    assert ts.__getattr__("testing").__name__ == "tierstore.testing"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = ts.nonsense


def test_a_tier_on_disk_shows_what_became_of_block_size_and_depth(tmp_path: Path) -> None:
    def io_with(**options: object) -> dict[str, object]:
        tiers = [
            ts.TierConfig("host", "memory", "1MB"),
            ts.TierConfig("disk", "files", "1MB", options={"path": str(tmp_path), "threads": 4, **options}),
        ]
        with ts.Store(ts.StoreConfig(tiers)) as store:
            store.put("k", torch.zeros(256 * 1024, dtype=torch.uint8))
            store.evict("k").result(10)
            assert store.stats().tiers["host"].io == {}
            return dict(store.stats().tiers["disk"].io)

    large, small = io_with(), io_with(aio_block_size="64KB", aio_queue_depth=1, engine="plain")
    assert (large["engine"], large["write_calls"], large["mean_transfer_bytes"]) == ("threads", 1, 256 * 1024)
    assert (small["engine"], small["write_calls"], small["mean_transfer_bytes"]) == ("plain", 4, 64 * 1024)
    assert small["most_in_flight"] == 1


def test_a_tier_over_two_drives_shows_what_each_has_done(tmp_path: Path) -> None:
    paths = [{"path": str(tmp_path / name), "bandwidth": 1} for name in "ab"]
    options = {"path": paths, "aio_block_size": "64KB"}
    tiers = [ts.TierConfig("host", "memory", "1MB"), ts.TierConfig("disk", "files", "1MB", options=options)]
    with ts.Store(ts.StoreConfig(tiers)) as store:
        store.put("k", torch.zeros(256 * 1024, dtype=torch.uint8))
        store.evict("k").result(10)
        drives = store.stats().tiers["disk"].io["drives"]
    assert isinstance(drives, tuple)
    assert [(drive["path"], drive["written_bytes"]) for drive in drives] == [
        (str(tmp_path / "a"), 128 * 1024),
        (str(tmp_path / "b"), 128 * 1024),
    ]
