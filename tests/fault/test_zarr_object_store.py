"""A fourth tier on a real object store: an S3 server on loopback, through s3fs and through obstore."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr
from zarr.abc.store import Store
from zarr.core.buffer import Buffer
from zarr.storage import FsspecStore, WrapperStore

import tierstore as ts
from tests.zarr_stores import (
    TIMEOUT_S,
    ObjectServer,
    contents,
    finish,
    open_zarr,
    pattern,
    stored,
    succeed,
    zeros,
)
from tierstore.config import StoreConfig, TierConfig
from tierstore.errors import BackendError, IntegrityError, UsageError
from tierstore.units import KIB
from tierstore_backends.zarr import ZarrBackend
from tierstore_backends.zarr.owner import MARKER

pytestmark = pytest.mark.slow

CLIENTS = ["s3fs", "obstore"]
CAPACITIES = {"device": 64 * KIB, "host": 128 * KIB, "disk": 128 * KIB, "remote": 1024 * KIB}
NBYTES = 16 * KIB


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    """Serve objects on loopback."""
    server = ObjectServer()
    yield server
    server.close()


def options_for(client: str, server: ObjectServer, prefix: str) -> dict[str, object]:
    """Return the options by which a client reaches a prefix."""
    return server.fsspec_options(prefix) if client == "s3fs" else server.obstore_options(prefix)


def open_remote(client: str, server: ObjectServer, prefix: str, **more: object) -> ZarrBackend:
    """Open scratch arrays on the server."""
    given = {"chunk_bytes": 4 * KIB, "concurrency": 4, **options_for(client, server, prefix), **more}
    return open_zarr(given.pop("store"), CAPACITIES["remote"], **given)


def tensor(number: int) -> torch.Tensor:
    """Return a tensor that no other number has and no codec shrinks."""
    return pattern(NBYTES, seed=number)


# ---------------------------------------------------------------------------------------- the backend


@pytest.mark.parametrize("client", CLIENTS)
def test_bytes_come_back_and_nothing_is_left(client: str, server: ObjectServer) -> None:
    backend = open_remote(client, server, "round-trip", codec="zstd")
    server.put("round-trip/theirs", b"foreign")
    slots = [stored(backend, pattern(20_000, seed) // 64) for seed in range(6)]
    for seed, slot in enumerate(slots):
        assert contents(backend, slot).equal(pattern(20_000, seed) // 64)
    stored_bytes = sum(size for key, size in server.sizes().items() if "/c/" in key)
    assert stored_bytes == backend.held_bytes < 6 * 20_000 / 2
    succeed(backend.free(slots[0]))
    assert sum(size for key, size in server.sizes().items() if "/c/" in key) == backend.held_bytes
    backend.close()
    assert server.keys() == ["round-trip/theirs"]
    server.delete("round-trip/theirs")


def test_any_zarr_reads_the_arrays_from_the_server(server: ObjectServer) -> None:
    backend = open_remote("obstore", server, "plain", codec="lz4")
    source = pattern(30_000, seed=1) // 64
    stored(backend, source)
    options = server.fsspec_options("plain")
    given: Any = options["storage_options"]
    array = zarr.open_array(f"{options['store']}/{backend.group}/0", storage_options=given, mode="r")
    assert bytes(array[...]) == bytes(source.tolist())  # type: ignore[arg-type]
    backend.close()


@pytest.mark.parametrize("first", CLIENTS)
@pytest.mark.parametrize("second", CLIENTS)
def test_two_backends_on_one_prefix_refuse_each_other(first: str, second: str, server: ObjectServer) -> None:
    backend = open_remote(first, server, "shared")
    slot = stored(backend, tensor(1))
    with pytest.raises(UsageError, match="is in use by a live backend of process"):
        open_remote(second, server, "shared")
    other = open_remote(second, server, "shared/below")
    assert contents(backend, slot).equal(tensor(1))
    other.close()
    assert contents(backend, slot).equal(tensor(1))
    backend.close()
    open_remote(second, server, "shared").close()
    assert server.keys() == []


@pytest.mark.parametrize("client", CLIENTS)
def test_the_same_place_can_be_opened_again_and_again(client: str, server: ObjectServer) -> None:
    for turn in range(3):  # connections of one event loop must not be found by the next
        backend = open_remote(client, server, "again")
        assert contents(backend, stored(backend, tensor(turn))).equal(tensor(turn))
        backend.close()
    assert server.keys() == []


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_damage_on_the_server_is_noticed(client: str, damage: str, server: ObjectServer) -> None:
    backend = open_remote(client, server, "damage")
    slot, other = stored(backend, tensor(1)), stored(backend, tensor(2))
    key = f"damage/{backend.group}/0/c/2"
    if damage == "missing":
        server.delete(key)
    else:
        body = bytearray(tensor(1)[8 * KIB : 12 * KIB].tolist())
        body[77] ^= 1
        server.put(key, bytes(body if damage == "flipped" else body[:-5]))
    error = finish(backend.read(slot, zeros(NBYTES)))
    assert isinstance(error, IntegrityError)
    assert f"chunk 2 of array {backend.group}/0 in " in str(error)
    assert contents(backend, other).equal(tensor(2))
    backend.close()


@pytest.mark.parametrize("client", CLIENTS)
def test_a_bucket_that_is_not_there_is_an_error(client: str, server: ObjectServer) -> None:
    bucket, server.bucket = server.bucket, "nobody-s-bucket"
    try:
        with pytest.raises(BackendError, match="becoming the owner of") as caught:
            open_remote(client, server, "x")
    finally:
        server.bucket = bucket
    assert not caught.value.transient


@pytest.mark.parametrize("client", CLIENTS)
def test_a_server_that_is_away_when_it_opens_is_an_error_that_may_pass(client: str) -> None:
    server = ObjectServer()
    server.stop()
    with pytest.raises(BackendError, match="becoming the owner of") as caught:
        open_remote(client, server, "away")
    assert caught.value.transient
    server.start()
    open_remote(client, server, "away").close()
    server.close()


# ---------------------------------------------------------------------------------------- a fourth tier


class Striking(WrapperStore[Store]):
    """A store whose server is killed when the n-th chunk is about to be written."""

    def __init__(self, store: Store, server: ObjectServer) -> None:
        super().__init__(store)
        self.server = server
        self.chunks_left = -1

    async def set(self, key: str, value: Buffer) -> None:
        if "/c/" in key:
            self.chunks_left -= 1
            if self.chunks_left == 0:
                await asyncio.get_running_loop().run_in_executor(None, self.server.stop)
        await super().set(key, value)


def four_tiers(path: Path, remote: ZarrBackend) -> ts.Store:
    """Return a store: emulated device, host memory, files, arrays on the server."""
    return ts.Store(
        StoreConfig(
            [
                TierConfig("device", "device", CAPACITIES["device"], options={"device": "emulated"}),
                TierConfig("host", "pinned", CAPACITIES["host"], options={"enable_pinned_mem": False}),
                TierConfig("disk", "files", CAPACITIES["disk"], options={"path": str(path / "scratch")}),
                TierConfig("remote", remote, CAPACITIES["remote"]),
            ]
        )
    )


def check_quotas(store: ts.Store, server: ObjectServer) -> None:
    """See that no tier holds more than its capacity, by the books and on the server."""
    store.check()
    for name, tier in store.stats().tiers.items():
        assert tier.peak_charged_bytes <= CAPACITIES[name]
    assert sum(size for key, size in server.sizes().items() if "/c/" in key) <= CAPACITIES["remote"]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_fourth_tier_takes_what_the_others_cannot(
    client: str, server: ObjectServer, tmp_path: Path
) -> None:
    remote = open_remote(client, server, "fourth", chunk_bytes=8 * KIB)
    with four_tiers(tmp_path, remote) as store:
        for number in range(40):  # twice what the first three hold
            store.put(f"k{number}", tensor(number))
        places = [store.where(f"k{number}") for number in range(40)]
        assert places[0] == ("remote",)
        assert places[39][0] == "device"
        assert {place[-1] for place in places} == {"device", "host", "disk", "remote"}
        check_quotas(store, server)
        for number in range(40):
            assert store.get(f"k{number}").equal(tensor(number))
        for number in range(0, 40, 7):
            with store.lease(f"k{number}") as lease:
                assert lease.tensor.equal(tensor(number))
        store.evict(*store.keys(), to="remote").result(TIMEOUT_S)
        assert {store.where(key) for key in store} == {("remote",)}
        check_quotas(store, server)
        store.fetch("k3", "k5").result(TIMEOUT_S)
        assert (store.where("k3")[0], store.where("k3")[-1]) == ("device", "remote")
        store.drop(*store.keys())
        store.resize("remote", NBYTES)  # returns when the rest has left
        assert sum(size for key, size in server.sizes().items() if "/c/" in key) <= NBYTES
    assert server.keys() == []


@pytest.mark.parametrize("client", CLIENTS)
def test_a_server_killed_in_the_middle_of_an_eviction_costs_nothing(client: str, tmp_path: Path) -> None:
    server = ObjectServer()
    given = options_for(client, server, "killed")
    if client == "s3fs":
        inner: object = FsspecStore.from_url(
            str(given["store"]),
            storage_options={**given["storage_options"], "skip_instance_cache": True},  # type: ignore[dict-item]
        )
    else:
        inner = given["store"]
    assert isinstance(inner, Store)
    striking = Striking(inner, server)
    remote = open_zarr(striking, CAPACITIES["remote"], chunk_bytes=4 * KIB, concurrency=4, free_patience_s=20)
    with four_tiers(tmp_path, remote) as store:
        for number in range(18):
            store.put(f"k{number}", tensor(number))
        store.evict("k0", "k1", to="remote").result(TIMEOUT_S)
        striking.chunks_left = 6  # in the second tensor of the eviction
        with pytest.raises(BackendError, match=r"copying 'k\d+' .* to 'remote' failed: writing ") as caught:
            store.evict(*(f"k{number}" for number in range(2, 10)), to="remote").result(TIMEOUT_S)
        assert caught.value.transient
        assert caught.value.tier == "remote"
        with pytest.raises(BackendError, match=r"reading chunk \d of array .*/0 in ") as unread:
            store.get("k0")
        assert unread.value.transient
        for number in range(10, 18):
            assert store.get(f"k{number}").equal(tensor(number)), "what is elsewhere can be read"
        server.start()
        for number in range(18):
            assert store.get(f"k{number}").equal(tensor(number)), "nothing was lost"
        store.evict(*store.keys(), to="remote").result(TIMEOUT_S)
        assert {store.where(key) for key in store} == {("remote",)}
        check_quotas(store, server)
        for number in range(18):
            assert store.get(f"k{number}").equal(tensor(number))
        store.drop(*store.keys())
    assert server.keys() == []
    server.close()


@pytest.mark.parametrize("client", CLIENTS)
def test_a_backend_whose_server_died_leaves_a_marker_that_is_swept(client: str) -> None:
    server = ObjectServer()
    backend = open_remote(client, server, "dead")
    stored(backend, tensor(1))
    server.stop()
    with pytest.raises(BackendError, match="removing tierstore-") as caught:
        backend.close()
    assert caught.value.transient
    server.start()
    assert f"dead/{MARKER}" in server.keys()  # noqa: SIM118 - not a mapping
    open_remote(client, server, "dead").close()
    assert server.keys() == []
    server.close()
