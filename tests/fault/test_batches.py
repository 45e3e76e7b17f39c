"""Small tensors travel together, and fail one by one."""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import tierstore as ts
from tests.files_disk import PAGE, ScriptedKernel, open_files
from tests.stores import numbered
from tierstore.config import StoreConfig, TierConfig
from tierstore.errors import BackendError, CapacityError, IntegrityError, StoreClosed
from tierstore.spi import Backend, Buffer, Completion, Slot
from tierstore.testing.batching import Batching
from tierstore.testing.faults import Faulty, Gate, Slow, from_nth_on
from tierstore_backends.memory import open_backend
from tierstore_backends.pinned import open_backend as open_pinned

KEYS = [f"k{number}" for number in range(12)]
CAPACITY = 12 * 100
PATIENCE_S = 10


def memory_disk(capacity_bytes: int = CAPACITY) -> Backend:
    return open_backend(capacity_bytes=capacity_bytes, options={"storage": True})


def store_over(disk: Backend, *lower: Backend, capacity_bytes: int = CAPACITY) -> ts.Store:
    """Return a store of host memory over a disk, and others below it."""
    host = open_backend(capacity_bytes=capacity_bytes, options={})
    names = ["host", "disk", *(f"disk{number}" for number in range(2, 2 + len(lower)))]
    backends = [host, disk, *lower]
    return ts.Store(
        StoreConfig([TierConfig(n, b, capacity_bytes) for n, b in zip(names, backends, strict=True)])
    )


def put_all(store: ts.Store, tier: str = "host") -> None:
    for number, key in enumerate(KEYS):
        store.put(key, numbered(number), tier=tier)


def is_whole(store: ts.Store) -> bool:
    """Whether every key has the bytes that were put."""
    store.check()
    return all(torch.equal(store.get(key), numbered(number)) for number, key in enumerate(KEYS))


def round_trip(store: ts.Store) -> None:
    store.evict(*KEYS, to="disk").result(PATIENCE_S)
    store.fetch(*KEYS, tier="host").result(PATIENCE_S)


def test_small_tensors_of_one_request_travel_together() -> None:
    disk = Batching(memory_disk())
    with store_over(disk) as store:
        put_all(store)
        round_trip(store)
        assert disk.batches == [12, 12]
        assert is_whole(store)


def test_what_cannot_travel_together_travels_alone() -> None:
    with store_over(memory_disk()) as store:
        put_all(store)
        round_trip(store)
        assert is_whole(store)


def test_tensors_of_different_directions_travel_in_batches_of_their_own() -> None:
    upper, lower = Batching(memory_disk()), Batching(memory_disk())
    with store_over(upper, lower) as store:
        put_all(store)
        store.evict(*KEYS[:6], to="disk").result(PATIENCE_S)
        store.evict(*KEYS[6:], to="disk2").result(PATIENCE_S)
        upper.batches.clear()
        lower.batches.clear()
        store.fetch(*KEYS, tier="host").result(PATIENCE_S)
        assert (upper.batches, lower.batches) == ([6], [6])
        assert is_whole(store)


@pytest.mark.parametrize("dead", [False, True], ids=["once", "from then on"])
def test_an_error_at_any_slot_of_a_batch_loses_no_bytes(dead: bool) -> None:
    for fail_at in itertools.count(1):
        faulty = Faulty(memory_disk(), fail_at=from_nth_on(fail_at) if dead else fail_at)
        with store_over(Batching(faulty)) as store:
            put_all(store)
            with contextlib.suppress(BackendError, CapacityError):
                round_trip(store)
            is_over = faulty.failures == 0
            faulty.heal()
            round_trip(store)
            assert is_whole(store)
        if is_over:
            break
    assert fail_at == 3 * 12 + 1  # reserve, write, read


def test_a_fault_in_the_middle_of_a_batch_fails_that_tensor_only() -> None:
    faulty = Faulty(memory_disk(), on=["read"])
    with store_over(Batching(faulty)) as store:
        put_all(store)
        store.evict(*KEYS, to="disk").result(PATIENCE_S)
        faulty.fail_next(6)
        with pytest.raises(BackendError) as caught:
            store.fetch(*KEYS, tier="host").result(PATIENCE_S)
        assert caught.value.key == "k5"
        assert [key for key in KEYS if "host" not in store.where(key)] == ["k5"]
        assert is_whole(store)


def test_room_that_one_of_a_batch_does_not_get_is_no_matter_of_the_others() -> None:
    faulty = Faulty(memory_disk(), fail_at=6, on=["reserve"])
    disk = Batching(faulty)
    with store_over(disk) as store:
        put_all(store)
        with pytest.raises(BackendError) as caught:
            store.evict(*KEYS, to="disk").result(PATIENCE_S)
        assert caught.value.key == "k5"
        assert disk.batches == [11]
        assert is_whole(store)


class Failing(Batching):
    """Batches fail as a whole: they raise, or complete with one error for all."""

    def __init__(self, backend: Backend, *, raises: bool) -> None:
        super().__init__(backend)
        self.raises = raises

    def write_many(self, slots: Sequence[Slot], sources: Sequence[Buffer]) -> Completion:
        error = OSError(errno.EIO, "this batch goes nowhere")
        if self.raises:
            raise error
        return Completion.done(error)


@pytest.mark.parametrize("raises", [True, False])
def test_a_batch_that_fails_as_a_whole_fails_each_of_its_tensors(raises: bool) -> None:
    with store_over(Failing(memory_disk(), raises=raises)) as store:
        put_all(store)
        evictions = store.evict(*KEYS, to="disk"), store.evict("k11", to="disk")
        for eviction in evictions:
            with pytest.raises(BackendError, match="goes nowhere"):
                eviction.result(PATIENCE_S)
        assert not any("disk" in store.where(key) for key in KEYS)
        assert is_whole(store)


class PeculiarError(BackendError):
    """An error of somebody's own, with a signature of its own."""

    def __init__(self) -> None:
        super().__init__("a sector of a kind")


def test_an_error_of_the_backend_s_own_kind_reaches_whoever_waits() -> None:
    faulty = Faulty(memory_disk(), fail_at=6, error=PeculiarError(), on=["write"])
    with store_over(Batching(faulty)) as store:
        put_all(store)
        with pytest.raises(BackendError, match="a sector of a kind") as caught:
            store.evict(*KEYS, to="disk").result(PATIENCE_S)
        assert caught.value.key == "k5"
        assert isinstance(caught.value.__cause__, PeculiarError)


def test_a_key_of_a_batch_under_way_can_be_dropped() -> None:
    gate = Gate(memory_disk())
    with store_over(Batching(gate)) as store:
        put_all(store)
        eviction = store.evict(*KEYS, to="disk")
        gate.wait_until_held(12)
        store.drop("k5")
        gate.open()
        with pytest.raises(ts.KeyNotFound):
            eviction.result(PATIENCE_S)
        rest = [key for key in KEYS if key != "k5"]
        store.evict(*rest, to="disk").result(PATIENCE_S)
        assert all(torch.equal(store.get(f"k{n}"), numbered(n)) for n in range(12) if n != 5)
        assert store.stats().tiers["disk"].charged_bytes == 11 * 100


def test_a_batch_ends_with_its_last_tensor_in_whatever_order_they_end() -> None:
    slow = Slow(memory_disk(), delays=[7, 1, 4, 0, 9], on=["read", "write"])
    with store_over(Batching(slow)) as store:
        put_all(store)
        eviction = store.evict(*KEYS, to="disk")
        slow.drain()
        eviction.result(PATIENCE_S)
        fetch = store.fetch(*KEYS, tier="host")
        slow.drain()
        fetch.result(PATIENCE_S)
        assert is_whole(store)


def test_closing_waits_for_the_batches_under_way() -> None:
    gate = Gate(memory_disk())
    store = store_over(Batching(gate))
    put_all(store)
    eviction = store.evict(*KEYS, to="disk")
    gate.wait_until_held(12)
    gate.open()
    store.close()
    with contextlib.suppress(StoreClosed):
        eviction.result(PATIENCE_S)
    with pytest.raises(StoreClosed):
        store.get("k0")


def test_more_than_a_batch_takes_goes_in_several() -> None:
    disk = Batching(memory_disk(64 * PAGE * 16))
    host = open_backend(capacity_bytes=64 * PAGE * 16, options={})
    tiers = [TierConfig("host", host, 64 * PAGE * 16), TierConfig("disk", disk, 64 * PAGE * 16)]
    with ts.Store(StoreConfig(tiers)) as store:
        keys = [f"t{number}" for number in range(60)]
        for number, key in enumerate(keys):
            store.put(key, numbered(number, 64 * 1024), tier="host")
        store.evict(*keys, to="disk").result(PATIENCE_S)
        assert disk.batches == [16, 16, 16, 12]  # a MiB each, and the rest
        assert all(torch.equal(store.get(f"t{n}"), numbered(n, 64 * 1024)) for n in range(60))


# ------------------------------------------------------------------------------------ real files


def files_store(path: Path, kernel: ScriptedKernel) -> ts.Store:
    disk = open_files(path, 12 * PAGE, syscalls=kernel)
    host = open_pinned(capacity_bytes=12 * PAGE, options={"enable_pinned_mem": False})
    return ts.Store(StoreConfig([TierConfig("host", host, 12 * PAGE), TierConfig("disk", disk, 12 * PAGE)]))


def put_pages(store: ts.Store) -> None:
    for number, key in enumerate(KEYS):
        store.put(key, numbered(number, PAGE), tier="host")


def pages_are_whole(store: ts.Store) -> bool:
    store.check()
    return all(torch.equal(store.get(key), numbered(number, PAGE)) for number, key in enumerate(KEYS))


def failing_page(page: int, kind: str) -> Callable[[str, int, int], int | None]:
    """Return a disk that fails at every call of ``kind`` that touches ``page``."""

    def twist(called: str, offset: int, nbytes: int) -> int | None:
        if called == kind and offset <= page * PAGE < offset + nbytes:
            raise OSError(errno.EIO, "a scripted bad block")
        return None

    return twist


def test_neighbours_in_a_file_are_written_and_read_in_one_call(tmp_path: Path) -> None:
    kernel = ScriptedKernel()
    with files_store(tmp_path, kernel) as store:
        kernel.forget()  # what opening tried out
        put_pages(store)
        round_trip(store)
        assert kernel.of_kind("write") == [(0, 12 * PAGE)]
        assert kernel.of_kind("read") == [(0, 12 * PAGE)]
        assert pages_are_whole(store)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_bad_block_fails_the_tensor_that_lies_there(tmp_path: Path, kind: str) -> None:
    kernel = ScriptedKernel(failing_page(5, kind))
    with files_store(tmp_path, kernel) as store:
        put_pages(store)
        with pytest.raises(BackendError, match="EIO") as caught:
            round_trip(store)
        assert caught.value.key == "k5"
        kernel.twist = None
        assert pages_are_whole(store)


def test_corrupt_bytes_in_the_middle_of_a_batch_are_found_and_named(tmp_path: Path) -> None:
    with files_store(tmp_path, ScriptedKernel()) as store:
        put_pages(store)
        store.evict(*KEYS, to="disk").result(PATIENCE_S)
        (file,) = tmp_path.glob("*.bin")
        with file.open("r+b") as opened:
            opened.seek(5 * PAGE + 17)
            opened.write(b"\x55")
        with pytest.raises(IntegrityError) as caught:
            store.fetch(*KEYS, tier="host").result(PATIENCE_S)
        assert caught.value.key == "k5"
        assert [key for key in KEYS if "host" not in store.where(key)] == ["k5"]
        for number, key in enumerate(KEYS):
            if key != "k5":
                assert torch.equal(store.get(key), numbered(number, PAGE))
