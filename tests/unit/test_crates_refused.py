"""Crates that are used wrongly, closed, or not what they should be: refused by name."""

from __future__ import annotations

import gc
import json
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import xxhash

import tierstore as ts
from tests.crate_stores import CRATE_BYTES, CrateDisk, make_crates, small
from tests.stores import make_store
from tierstore.crates import Crates
from tierstore.spi import Backend
from tierstore.tensors import describe, to_text
from tierstore.testing.faults import Faulty, Gate, Operation

KIB = 1024
READS: tuple[Operation] = ("read",)


def test_wrong_calls_are_refused_by_name() -> None:
    crates = make_crates()
    crates.put("a", small(1))
    wrong: list[tuple[Callable[[], object], type[ts.TierStoreError], str]] = [
        (lambda: crates.put("a", small(2)), ts.KeyExists, "'a'"),
        (lambda: crates.put(3, small(2)), ts.UsageError, "a key is text"),  # type: ignore[arg-type]
        (lambda: crates.put("b", "text"), ts.UsageError, "not a tensor"),  # type: ignore[arg-type]
        (lambda: crates.put("b", torch.empty(2, device="meta")), ts.UsageError, "meta"),
        (lambda: crates.put("b", small(2), tier="attic"), ts.UsageError, "no tier 'attic'"),
        (lambda: crates.get("b"), ts.KeyNotFound, "'b'"),
        (lambda: crates.drop("a", "b"), ts.KeyNotFound, "'b'"),
        (lambda: crates.spec("b"), ts.KeyNotFound, "'b'"),
        (lambda: crates.where("b"), ts.KeyNotFound, "'b'"),
        (lambda: crates.fetch("b"), ts.KeyNotFound, "'b'"),
        (crates.lease, ts.UsageError, "at least one key"),
        (lambda: crates.lease("b"), ts.KeyNotFound, "'b'"),
        (lambda: crates.lease("a", tier="disk"), ts.UsageError, "cannot be used in place"),
        (lambda: crates.lease("a", tier="disk", write=True), ts.UsageError, "cannot be used in place"),
        (crates.flush, ts.UsageError, "no tier of their store is durable"),
        (lambda: Crates(crates.store), ts.UsageError, "are open"),
        (lambda: Crates(crates.store, "x", crate_bytes="much"), ts.ConfigError, "much"),
        (lambda: Crates(crates.store, "x", crate_bytes=63), ts.UsageError, "at least 64"),
        (lambda: Crates(crates.store, 3), ts.UsageError, "a key is text"),  # type: ignore[arg-type]
    ]
    for call, error, text in wrong:
        with pytest.raises(error, match=text):
            call()
    assert list(crates) == ["a"]
    assert torch.equal(crates.get("a"), small(1))
    assert all(crate.is_idle for crate in crates._sharing.index.crates.values())


def test_no_room_leaves_all_as_it_was() -> None:
    crates = make_crates(2 * KIB)
    crates.put("a", small(1, 700))
    with pytest.raises(ts.CapacityError):
        crates.put_all({"b": small(2, 900), "c": small(3, 900)})
    crates.store.check()
    assert list(crates) == ["a"]
    assert len(crates.store) == 1
    assert torch.equal(crates.get("a"), small(1, 700))


def test_a_closed_store_is_said_to_be() -> None:
    crates = make_crates()
    crates.put("a", small(1))
    crates.store.close()
    late: list[Callable[[], object]] = [
        lambda: crates.put("b", small(2)),
        lambda: crates.get("a"),
        lambda: crates.lease("a"),
        lambda: crates.lease("a", write=True),
        lambda: crates.drop("a"),
        lambda: crates.fetch("a"),
    ]
    for call in late:
        with pytest.raises(ts.StoreClosed):
            call()


def test_a_callback_that_would_wait_for_itself_is_refused() -> None:
    crates = make_crates()
    with crates._stock.alone(), pytest.raises(ts.UsageError, match="not from a callback"):
        crates.put("a", small(1))
    crates.put("a", small(1))


def test_crates_can_be_opened_again_when_nobody_has_them() -> None:
    store = make_store(8 * KIB)
    crates = Crates(store, crate_bytes=CRATE_BYTES)
    crates.put("a", small(1))
    del crates
    gc.collect()
    assert torch.equal(Crates(store, crate_bytes=2 * CRATE_BYTES).get("a"), small(1))


def test_closed_crates_are_refused_and_their_name_is_free() -> None:
    store = make_store(8 * KIB, 100 * KIB)
    crates = Crates(store, crate_bytes=CRATE_BYTES)
    crates.put_all({"a": small(1), "b": small(2)})
    for write in (False, True):
        with (
            crates.lease("a", write=write),
            pytest.raises(ts.LeaseError, match="'crates/0' is used") as caught,
        ):
            crates.close()
        assert caught.value.holders == ("MainThread",)
    crates.close()
    crates.close()
    late: list[Callable[[], object]] = [
        lambda: crates.put("c", small(3)),
        lambda: crates.get("a"),
        lambda: crates.lease("a"),
        lambda: crates.lease("a", write=True),
        lambda: crates.drop("a"),
        lambda: crates.evict("a"),
        crates.flush,
    ]
    for call in late:
        with pytest.raises(ts.StoreClosed, match="crates 'crates' are closed"):
            call()
    again = Crates(store, crate_bytes=CRATE_BYTES)
    crates.close()
    assert torch.equal(again.get("b"), small(2))
    with pytest.raises(ts.UsageError, match="are open"):
        Crates(store)


def test_a_write_lease_waits_for_copies_that_are_being_made() -> None:
    """And is not refused for their sake: they are no leases."""
    disk = CrateDisk()
    with disk.open() as store:
        Crates(store, crate_bytes=CRATE_BYTES).put("a", small(1))
    gates: list[Gate] = []

    def wrap(backend: Backend) -> Backend:
        gates.append(Gate(backend, holds=READS))
        gates[0].open()
        return gates[0]

    store = disk.open(wrap)
    crates = Crates(store, crate_bytes=CRATE_BYTES)
    gates[0].shut()
    with ThreadPoolExecutor(2) as threads:
        copy = threads.submit(crates.get, "a")
        gates[0].wait_until_held()
        lease = threads.submit(crates.lease, "a", tier="host", write=True)
        while not next(iter(crates._sharing.index.crates.values())).is_moving:
            pass  # until it waits
        gates[0].open()
        assert torch.equal(copy.result(30), small(1))
        with lease.result(30) as held:
            held.tensor.fill_(2)
    assert torch.equal(crates.get("a"), small(2))
    assert len(store) == 1
    store.close(flush=False)


def test_crates_of_which_nothing_counts_make_room_to_write_others_anew() -> None:
    crates = make_crates(3 * KIB)
    crates.put_all({key: small(1, 150) for key in "abcd"})
    crates.put("e", small(2, 1000))
    crates.store.put("in the way", small(3, 650))
    crates.drop("a", "b", "c", "e")
    assert "crates/0" not in crates.store
    assert "crates/1" not in crates.store
    assert torch.equal(crates.get("d"), small(1, 150))


def test_the_child_of_a_fork_is_refused() -> None:
    crates = make_crates()
    crates.put("a", small(1))
    lease = crates.lease("a")
    pid = os.fork()
    if pid == 0:
        calls: list[Callable[[], object]] = [
            lambda: crates.put("b", small(2)),
            lambda: crates.get("a"),
            lambda: "a" in crates,
            lambda: lease["a"],
            lambda: Crates(crates.store, "more"),
        ]
        lease.release()
        crates.close()
        refused = 0
        for call in calls:
            try:
                call()
            except ts.StoreForked:
                refused += 1
        os._exit(0 if refused == len(calls) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert torch.equal(lease["a"], small(1))


def _crate(fields: object, more_bytes: int = 0, check: int | None = None) -> torch.Tensor:
    directory = json.dumps(fields).encode()
    check = xxhash.xxh3_64_intdigest(directory) if check is None else check
    whole = struct.pack("<8sQQ", b"tscrate1", len(directory), check) + directory + bytes(more_bytes)
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("found", "error"),
    [
        (torch.zeros(3), ts.UsageError),
        (torch.zeros(100, dtype=torch.uint8), ts.UsageError),
        (torch.tensor(1, dtype=torch.uint8), ts.UsageError),
        (_crate({"keys": [], "specs": [], "spec_of": []}, check=1), ts.IntegrityError),
        (_crate({"keys": [], "specs": [], "spec_of": []}, more_bytes=1), ts.IntegrityError),
        (_crate({"keys": ["a"], "specs": [], "spec_of": [0]}), ts.IntegrityError),
        (_crate({"keys": ["a"], "specs": ["{}"], "spec_of": [0]}), ts.IntegrityError),
        (_crate({"keys": ["a"], "specs": [], "spec_of": []}), ts.IntegrityError),
        (_crate({"keys": [3], "specs": [], "spec_of": [-1]}), ts.IntegrityError),
        (
            _crate({"keys": ["a"], "specs": [to_text(describe(small(1)))] * 3, "spec_of": [-2]}),
            ts.IntegrityError,
        ),
        (_crate({"keys": [], "specs": [], "spec_of": []}).reshape(1, -1), ts.UsageError),
        (_crate({"keys": ["a", "a"], "specs": [], "spec_of": [-1, -1]}), ts.IntegrityError),
        (_crate([]), ts.IntegrityError),
        (
            torch.frombuffer(bytearray(struct.pack("<8sQQ", b"tscrate1", 2**63, 0)), dtype=torch.uint8),
            ts.IntegrityError,
        ),
    ],
)
def test_what_is_no_crate_is_named(found: torch.Tensor, error: type[ts.TierStoreError]) -> None:
    store = make_store(8 * KIB)
    store.put("crates/5", found)
    with pytest.raises(error, match="'crates/5'") as caught:
        Crates(store)
    assert type(caught.value) is error
    store.drop("crates/5")
    assert len(Crates(store)) == 0


def test_other_keys_that_begin_alike_are_no_crates() -> None:
    store = make_store(8 * KIB)
    for key in ("crates/", "crates/07", "crates/x", "crates/-1", "crates/²"):
        store.put(key, small(1))
    assert len(Crates(store)) == 0


def test_a_crate_that_somebody_dropped_is_said_to_be_gone() -> None:
    crates = make_crates()
    crates.put("a", small(1))
    crates.store.drop("crates/0")
    for call in (lambda: crates.get("a"), lambda: crates.lease("a"), lambda: crates.evict("a")):
        with pytest.raises(ts.KeyNotFound, match="'crates/0'"):
            call()


def test_a_lease_that_fails_leaves_nobody_waiting() -> None:
    disk = CrateDisk()
    with disk.open() as store:
        Crates(store, crate_bytes=CRATE_BYTES).put("a", small(1))
    faulty: list[Faulty] = []

    def wrap(backend: Backend) -> Backend:
        faulty.append(Faulty(backend, fail_at=(2, 3), on=READS))
        return faulty[0]

    store = disk.open(wrap)
    crates = Crates(store, crate_bytes=CRATE_BYTES)
    for write in (False, True):
        with pytest.raises(ts.BackendError):
            crates.lease("a", tier="host", write=write)
    with crates.lease("a", tier="host", write=True) as lease:
        assert torch.equal(lease.tensor, small(1))
    store.close(flush=False)
