"""Retries through a real store: what fails for a while works, and what fails for good loses no bytes."""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tierstore as ts
from tests.files_disk import ScriptedKernel, open_durable, open_files
from tests.stores import numbered
from tests.zarr_stores import FaultyStore, memory, open_zarr
from tierstore.spi import Backend
from tierstore.testing.batching import Batching
from tierstore.testing.faults import Faulty
from tierstore.units import MIB
from tierstore_backends.memory import MemoryBackend

PATIENCE_S = 20
SIZE = 4096
CAPACITY = 64 * SIZE
OPTIONS = {"retries": 3, "retry_wait_s": 0.001}
AWAY = ts.BackendError("the server is away", transient=True)

Arm = Callable[[str, list[OSError]], None]


def store_over(disk: object, options: dict[str, object] | None = None) -> ts.Store:
    tiers = [
        ts.TierConfig("host", MemoryBackend(CAPACITY), CAPACITY),
        ts.TierConfig("disk", disk, CAPACITY, options=OPTIONS if options is None else options),
    ]
    return ts.Store(ts.StoreConfig(tiers))


def files_that_fail(path: Path) -> tuple[Backend, Arm]:
    """Return files, and what lets their next calls of a kind fail with these errors."""
    kernel = ScriptedKernel()
    backend = open_files(path, CAPACITY, syscalls=kernel)

    def arm(kind: str, errors: list[OSError]) -> None:
        left = list(errors)

        def twist(called: str, offset: int, nbytes: int) -> int | None:
            if called == kind and left:
                raise left.pop(0)
            return None

        kernel.twist = twist

    return backend, arm


class ScriptedStore(FaultyStore):
    """A store whose next operations of a kind fail with these errors."""

    left: list[OSError]

    def _fails(self, kind: str, key: str) -> bool:
        if kind in self.on and self.left:
            raise self.left.pop(0)
        return False


def zarr_that_fails(path: Path) -> tuple[Backend, Arm]:
    """Return arrays in a store, and what lets its next calls of a kind fail with these errors."""
    del path
    store = ScriptedStore(memory())
    store.left = []

    def arm(kind: str, errors: list[OSError]) -> None:
        store.on, store.left = ({"write": "set", "read": "get"}[kind],), list(errors)

    return open_zarr(store, CAPACITY), arm


MEDIA = pytest.mark.parametrize("medium", [files_that_fail, zarr_that_fails], ids=["files", "zarr"])
KINDS = pytest.mark.parametrize("kind", ["write", "read"])


def timed_out() -> OSError:
    return OSError(errno.ETIMEDOUT, "the server does not answer")


def dead() -> OSError:
    return OSError(errno.EIO, "the disk is dead")


def down_and_up(store: ts.Store, kind: str, arm: Arm, errors: list[OSError]) -> None:
    """Bring a key down and up, with failures on one of the ways."""
    store.put("k", numbered(1, SIZE), tier="host")
    if kind == "write":
        arm("write", errors)
    store.evict("k", to="disk").result(PATIENCE_S)
    if kind == "read":
        arm("read", errors)
    store.fetch("k", tier="host").result(PATIENCE_S)


@MEDIA
@KINDS
def test_what_fails_twice_and_then_works_has_worked(
    medium: Callable[[Path], tuple[Backend, Arm]], kind: str, tmp_path: Path
) -> None:
    backend, arm = medium(tmp_path)
    with store_over(backend) as store:
        down_and_up(store, kind, arm, [timed_out(), timed_out()])
        assert store.get("k").equal(numbered(1, SIZE))
        counted = store.stats().tiers["disk"].wrappers["retries"]
        assert (counted["recovered"], counted["given_up"]) == (1, 0)
        store.check()


@MEDIA
@KINDS
def test_what_fails_for_good_in_its_third_try_fails_and_loses_no_bytes(
    medium: Callable[[Path], tuple[Backend, Arm]], kind: str, tmp_path: Path
) -> None:
    backend, arm = medium(tmp_path)
    with store_over(backend) as store:
        with pytest.raises(ts.BackendError, match="the disk is dead") as caught:
            down_and_up(store, kind, arm, [timed_out(), timed_out(), dead()])
        assert not caught.value.transient
        assert caught.value.key == "k"
        assert store.where("k") == (("host",) if kind == "write" else ("disk",))
        assert store.get("k").equal(numbered(1, SIZE))
        assert store.stats().tiers["disk"].wrappers["retries"] == {
            "retries": 2,
            "recovered": 0,
            "given_up": 1,
        }
        store.check()


@MEDIA
@KINDS
def test_what_fails_too_often_fails_with_the_number_of_tries(
    medium: Callable[[Path], tuple[Backend, Arm]], kind: str, tmp_path: Path
) -> None:
    backend, arm = medium(tmp_path)
    with store_over(backend, {"retries": 2, "retry_wait_s": 0.001}) as store:
        with pytest.raises(ts.BackendError, match="tried 3 times") as caught:
            down_and_up(store, kind, arm, [timed_out(), timed_out(), timed_out()])
        assert caught.value.transient
        assert store.get("k").equal(numbered(1, SIZE))
        store.evict("k", to="disk").result(PATIENCE_S)


def test_corrupt_bytes_are_not_read_again(tmp_path: Path) -> None:
    kernel = ScriptedKernel()
    with store_over(open_files(tmp_path, CAPACITY, syscalls=kernel)) as store:
        store.put("k", numbered(1, SIZE), tier="disk")
        (file,) = tmp_path.glob("*.bin")
        with file.open("r+b") as opened:
            opened.seek(17)
            opened.write(b"\x55")
        kernel.forget()
        with pytest.raises(ts.IntegrityError):
            store.get("k")
        assert len(kernel.of_kind("read")) == 1
        assert store.stats().tiers["disk"].wrappers["retries"]["retries"] == 0


@pytest.mark.parametrize("wrap", [lambda backend: backend, Batching], ids=["alone", "together"])
def test_a_failure_that_passes_at_any_operation_is_not_seen(wrap: Callable[[Backend], Backend]) -> None:
    for fail_at in itertools.count(1):
        faulty = Faulty(MemoryBackend(CAPACITY, is_storage=True), error=AWAY, on=["read", "write", "free"])
        faulty._fail_at = (fail_at, fail_at + 1)
        with store_over(wrap(faulty)) as store:
            for number in range(4):
                store.put(str(number), numbered(number), tier="host")
            store.evict(*map(str, range(4)), to="disk").result(PATIENCE_S)
            store.fetch(*map(str, range(4)), tier="host").result(PATIENCE_S)
            store.drop("0")
            assert all(store.get(str(number)).equal(numbered(number)) for number in range(1, 4))
            store.check()
        if not faulty.failures:
            break
    assert fail_at > 8, "the scenario reaches too little"


def test_a_commit_that_fails_for_a_while_is_one_commit() -> None:
    disk = MemoryBackend(CAPACITY, is_storage=True, is_durable=True)
    faulty = Faulty(disk, error=AWAY, on=["commit"], fail_at=(1, 2))
    with store_over(faulty) as store:
        store.put("k", numbered(1), tier="host")
        store.flush()
        assert set(disk.image) == {"k"}
        assert store.stats().tiers["disk"].wrappers["retries"]["recovered"] == 1
        store.drop("k")
        store.flush()
    assert disk.image == {}


@pytest.mark.parametrize("codec", [None, "lz4"])
def test_a_durable_store_is_found_again_whatever_failed_for_a_while(
    tmp_path: Path, codec: str | None
) -> None:
    def opened(fail_at: range) -> ts.Store:
        disk = Faulty(
            open_durable(tmp_path, 8 * MIB),
            error=AWAY,
            on=["read", "write", "free", "commit"],
            fail_at=fail_at,
        )
        tiers = [
            ts.TierConfig("host", MemoryBackend(8 * MIB), 8 * MIB),
            ts.TierConfig("disk", disk, 8 * MIB, options={**OPTIONS, "max_bandwidth": "4GB/s"}, codec=codec),
        ]
        return ts.Store(ts.StoreConfig(tiers))

    values = {str(number): torch.arange(100_000) * number for number in range(3)}
    with opened(range(2, 10**6, 3)) as store:
        for key, value in values.items():
            store.put(key, value, tier="host")
        store.flush()
        store.drop("0")
        assert store.stats().tiers["disk"].wrappers["retries"]["recovered"] != 0
    with opened(range(1, 10**6, 2)) as store:
        assert set(store) == {"1", "2"}
        assert all(store.get(key).equal(values[key]) for key in store)


def test_a_sync_that_failed_is_not_tried_again_but_told(tmp_path: Path) -> None:
    kernel = ScriptedKernel()
    backend = open_durable(tmp_path, CAPACITY, syscalls=kernel)
    with store_over(backend) as store:
        store.put("k", numbered(1, SIZE), tier="host")
        failed: list[str] = []

        def twist(called: str, offset: int, nbytes: int) -> int | None:
            if called == "sync" and not failed:
                failed.append(called)
                raise timed_out()
            return None

        kernel.twist = twist
        with pytest.raises(ts.BackendError, match="durable"):
            store.flush()
        assert store.stats().tiers["disk"].wrappers["retries"]["retries"] == 0
        store.flush()
    again = open_durable(tmp_path, CAPACITY)
    assert [record.name for record in again.recovered()] == ["k"]
    again.close()


def closed_in_time(store: ts.Store) -> bool:
    """Close a store in another thread, and say whether that has ended."""
    closing = threading.Thread(target=store.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    return not closing.is_alive()


def test_a_store_closes_while_an_operation_waits_for_its_next_try() -> None:
    faulty = Faulty(
        MemoryBackend(CAPACITY, is_storage=True), error=AWAY, on=["write"], fail_at=range(1, 10**6)
    )
    store = store_over(faulty, {"retries": 100, "retry_wait_s": 10})
    store.put("k", numbered(1), tier="host")
    eviction = store.evict("k", to="disk")
    assert not eviction.done()
    assert closed_in_time(store)
    with pytest.raises(ts.StoreClosed):
        eviction.result(PATIENCE_S)


@pytest.mark.parametrize("codec", [None, "lz4"])
def test_a_store_closes_while_copies_wait_for_bandwidth(codec: str | None) -> None:
    tiers = [
        ts.TierConfig("host", MemoryBackend(CAPACITY), CAPACITY),
        ts.TierConfig(
            "disk",
            MemoryBackend(CAPACITY, is_storage=True),
            CAPACITY,
            options={"max_bandwidth": 1},
            codec=codec,
        ),
    ]
    store = ts.Store(ts.StoreConfig(tiers))
    for number in range(4):
        store.put(str(number), numbered(number, SIZE), tier="host")
    evictions = [store.evict(str(number), to="disk") for number in range(4)]
    assert not any(eviction.done() for eviction in evictions)
    assert closed_in_time(store)
    for eviction in evictions:
        with pytest.raises(ts.StoreClosed):
            eviction.result(PATIENCE_S)
