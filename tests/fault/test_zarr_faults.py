"""A zarr store that fails at any operation: typed errors that say where, and nothing lost or left."""

from __future__ import annotations

import contextlib
import itertools
import threading

import pytest
import torch

import tierstore as ts
from tests.stores import numbered
from tests.zarr_stores import (
    TIMEOUT_S,
    FaultyStore,
    chunk_bytes,
    contents,
    finish,
    memory,
    objects,
    open_zarr,
    pattern,
    stored,
    succeed,
    zeros,
)
from tierstore.config import StoreConfig, TierConfig
from tierstore.errors import BackendError, CapacityError, IntegrityError
from tierstore.testing.faults import from_nth_on
from tierstore_backends.memory import open_backend as open_memory
from tierstore_backends.zarr import ZarrBackend

CAPACITY = 100_000


def outcomes(backend: ZarrBackend) -> list[BaseException | None]:
    """Write, read and free the backend's second slot; return what each came to."""
    slot = backend.reserve(7000)
    ended = [finish(backend.write(slot, pattern(7000, seed=2) // 32))]
    if ended == [None]:
        ended.append(finish(backend.read(slot, zeros(7000))))
    ended.append(finish(backend.free(slot)))
    return ended


FAULTS = [
    ("set", OSError(5, "Input/output error")),
    ("set", TimeoutError()),
    ("get", OSError(5, "Input/output error")),
    ("get", None),
    ("delete", PermissionError(13, "no")),
    ("delete", ConnectionResetError(104, "gone")),
]


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize(("kind", "error"), FAULTS, ids=str)
def test_a_failure_at_any_operation_is_typed_and_harms_no_other_slot(
    codec: str, kind: str, error: BaseException | None
) -> None:
    for fail_at in itertools.count(1):
        store = FaultyStore(memory())
        backend = open_zarr(store, CAPACITY, chunk_bytes=1000, codec=codec, concurrency=4)
        kept = pattern(5000, seed=1) // 32
        other = stored(backend, kept)
        store.arm(fail_at, error=error, on=(kind,))
        failed = [each for each in outcomes(backend) if each is not None]
        assert len(failed) == store.failures
        store.heal()
        for each in failed:
            assert isinstance(each, BackendError)
            assert f"{backend.group}/1" in str(each), "the array is named"
            assert isinstance(each, IntegrityError) is (error is None)
            assert each.transient is isinstance(error, TimeoutError | ConnectionError)
        assert chunk_bytes(store) <= backend.held_bytes <= CAPACITY
        assert contents(backend, other).equal(kept)
        backend.close()
        assert objects(store) == {}
        if not failed:
            break
    assert fail_at > 7, "the scenario reaches too little"


def test_a_free_that_failed_stays_counted_and_can_be_tried_again() -> None:
    store = FaultyStore(memory())
    backend = open_zarr(store, 10_000)
    slot = stored(backend, pattern(10_000, seed=1))
    store.arm(1, error=OSError(5, "Input/output error"), on=("delete",))
    assert isinstance(finish(backend.free(slot)), BackendError)
    with pytest.raises(CapacityError):
        backend.reserve(1)
    succeed(backend.free(slot))
    assert chunk_bytes(store) == 0
    backend.reserve(10_000)
    backend.close()


def test_a_free_is_tried_again_while_the_store_may_come_back() -> None:
    store = FaultyStore(memory())
    backend = open_zarr(store, 10_000, free_patience_s=TIMEOUT_S)
    slot = stored(backend, pattern(10_000, seed=1))
    store.arm((1, 2, 3), error=ConnectionRefusedError(111, "not there"), on=("delete",))
    succeed(backend.free(slot))
    assert store.failures == 3
    assert chunk_bytes(store) == 0
    backend.close()


def test_a_free_that_cannot_succeed_is_not_tried_again() -> None:
    store = FaultyStore(memory())
    backend = open_zarr(store, 10_000, free_patience_s=TIMEOUT_S)
    slot = stored(backend, pattern(10_000, seed=1))
    store.arm(from_nth_on(1), error=PermissionError(13, "no"), on=("delete",))
    assert isinstance(finish(backend.free(slot)), BackendError)
    store.heal()
    backend.close()


def test_close_does_not_wait_for_better_times() -> None:
    store = FaultyStore(memory())
    backend = open_zarr(store, 10_000, free_patience_s=1e6)
    slot = stored(backend, pattern(10_000, seed=1))
    store.arm(from_nth_on(1), error=ConnectionRefusedError(111, "not there"), on=("delete",))
    free = backend.free(slot)
    closed: list[BaseException] = []

    def close() -> None:
        try:
            backend.close()
        except BackendError as error:
            closed.append(error)

    closer = threading.Thread(target=close)
    closer.start()
    closer.join(TIMEOUT_S)
    assert isinstance(free.error, BackendError)
    assert "not there" in str(closed[0])
    assert closed[0].transient  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------- below a store


def store_over(faulty: FaultyStore) -> ts.Store:
    """Return a store whose third tier is an array store that fails."""
    backend = open_zarr(faulty, 5000, chunk_bytes=40, concurrency=2, codec="zstd")
    return ts.Store(
        StoreConfig(
            [
                TierConfig("device", open_memory(capacity_bytes=300, options={}), 300),
                TierConfig("host", open_memory(capacity_bytes=400, options={}), 400),
                TierConfig("remote", backend, 5000),
            ]
        )
    )


def use(store: ts.Store, expected: dict[str, torch.Tensor]) -> None:
    """Use every verb that moves bytes; note in ``expected`` what has been promised so far."""
    for number in range(10):
        store.put(f"k{number}", numbered(number))
        expected[f"k{number}"] = numbered(number)
    with store.lease("k3", write=True) as lease:
        lease.tensor.add_(100)
        expected["k3"] = numbered(3).add_(100)
    store.evict(*expected, to="remote").result(TIMEOUT_S)
    store.fetch("k1", "k2", tier="device").result(TIMEOUT_S)
    store.put("k1", numbered(77), replace=True)
    expected["k1"] = numbered(77)
    store.drop("k2")
    del expected["k2"]


@pytest.mark.parametrize("dead", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("kind", ["get", "set", "delete"])
def test_a_store_over_failing_arrays_loses_no_bytes(kind: str, dead: bool) -> None:
    for fail_at in itertools.count(1, 3):
        faulty = FaultyStore(memory())
        store = store_over(faulty)
        expected: dict[str, torch.Tensor] = {}
        faulty.arm(from_nth_on(fail_at) if dead else fail_at, error=OSError(5, "no"), on=(kind,))
        with contextlib.suppress(BackendError, CapacityError):
            use(store, expected)
        store.check()
        is_over = faulty.failures == 0
        faulty.heal()
        assert set(store) == set(expected)
        for key, tensor in expected.items():
            assert torch.equal(store.get(key), tensor), (fail_at, key)
        store.close()
        assert objects(faulty) == {}
        if is_over:
            break
    assert fail_at > 5, "the scenario reaches too little"
