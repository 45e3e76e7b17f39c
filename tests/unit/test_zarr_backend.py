"""Scratch arrays: what is stored, what it takes, what is left, and what is noticed."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numcodecs  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
import zarr
from zarr.storage import LocalStore, MemoryStore

from tests.zarr_stores import (
    CAPACITY,
    TIMEOUT_S,
    FaultyStore,
    GatedStore,
    MeteredStore,
    change,
    chunk_bytes,
    chunk_keys,
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
from tierstore.errors import BackendError, CapacityError, IntegrityError, StoreClosed, UsageError
from tierstore.spi import Completion, Medium, held_bytes
from tierstore.units import KIB, MIB
from tierstore_backends.zarr import ZarrBackend
from tierstore_backends.zarr.slots import ZarrSlot

CODECS = ["none", "zstd", "lz4", "blosc", "gzip", {"name": "zstd", "configuration": {"level": 1}}]


# ---------------------------------------------------------------------------------------- what is stored


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("nbytes", [1, 1000, 100_003])
def test_any_zarr_reads_what_is_stored(codec: object, nbytes: int) -> None:
    store = memory()
    backend = open_zarr(store, codec=codec, chunk_bytes=10_000)
    source = pattern(nbytes, seed=1) // 64
    slot = backend.reserve(nbytes)
    succeed(backend.write(slot, source))
    array = zarr.open_array(store, path=slot.array, mode="r")
    assert str(array.dtype) == "uint8"
    assert array.shape == (nbytes,)
    assert np.array_equal(np.asarray(array[...]), source.numpy())
    backend.close()


def test_arrays_are_numbers_in_one_group() -> None:
    store = memory()
    backend = open_zarr(store)
    for seed in range(3):
        stored(backend, pattern(100, seed))
    (group,) = {key.split("/")[0] for key in objects(store) if "/" in key}
    assert sorted(zarr.open_group(store, path=group, mode="r").array_keys()) == ["0", "1", "2"]
    backend.close()


def test_zeros_are_stored_like_anything_else() -> None:
    store = memory()
    backend = open_zarr(store, chunk_bytes=1000)
    slot = stored(backend, zeros(5000))
    assert len(chunk_keys(store)) == 5
    assert contents(backend, slot).count_nonzero() == 0
    backend.close()


def test_it_is_scratch_behind_io() -> None:
    backend = open_zarr(memory(), concurrency=3)
    capabilities = backend.capabilities
    assert (capabilities.medium, capabilities.is_durable) == (Medium.STORAGE, False)
    assert (capabilities.alignment_bytes, capabilities.depth) == (1, 3)
    backend.close()


# ---------------------------------------------------------------------------------------- what it takes


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_slot_holds_what_the_codec_makes_of_it(codec: str) -> None:
    store = memory()
    backend = open_zarr(store, codec=codec, chunk_bytes=64 * KIB)
    slot = backend.reserve(MIB)
    assert held_bytes(slot, backend.capabilities) == MIB
    succeed(backend.write(slot, zeros(MIB)))
    assert held_bytes(slot, backend.capabilities) == chunk_bytes(store) == backend.held_bytes < MIB // 10
    backend.close()


def test_what_a_codec_gains_can_be_reserved() -> None:
    backend = open_zarr(memory(), 2 * MIB, codec="zstd")
    slots = [stored(backend, zeros(MIB)) for _ in range(20)]
    assert backend.held_bytes < MIB
    backend.reserve(2 * MIB - backend.held_bytes)
    assert contents(backend, slots[0]).equal(zeros(MIB))
    backend.close()


@pytest.mark.parametrize("codec", ["zstd", "lz4", "gzip", "crc32c"])
def test_what_no_codec_can_shrink_is_stored_raw_and_counted(codec: str) -> None:
    store = memory()
    backend = open_zarr(store, MIB, codec=codec, chunk_bytes=100_000)
    source = pattern(MIB, seed=1)
    slot = stored(backend, source)
    assert chunk_bytes(store) == MIB
    assert held_bytes(slot, backend.capabilities) == MIB
    counts = backend.codec_counts
    assert (counts.encoded_slots, counts.raw_slots, counts.given_bytes) == (0, 1, MIB)
    assert contents(backend, slot).equal(source)
    backend.close()


def test_a_codec_that_stops_paying_is_given_up_for_the_whole_slot() -> None:
    store = MeteredStore()
    source = pattern(64 * 100, seed=1)
    # The first chunks shrink; of the others each grows by the codec's header, and the last few by too much.
    gain = 64 - len(numcodecs.Zstd().encode(bytes(64)))
    loss = len(numcodecs.Zstd().encode(source[:64].numpy())) - 64
    source[: 64 * (100 * loss // (gain + loss))] = 0
    backend = open_zarr(store, source.numel(), codec="zstd", chunk_bytes=64)
    slot = backend.reserve(source.numel())
    succeed(backend.write(slot, source))
    assert chunk_bytes(store) == store.peak_bytes == source.numel()
    assert (backend.codec_counts.encoded_slots, backend.codec_counts.raw_slots) == (0, 1)
    assert contents(backend, slot).equal(source)
    assert np.array_equal(np.asarray(zarr.open_array(store, path=slot.array, mode="r")[...]), source.numpy())
    backend.close()


@pytest.mark.parametrize(("zero_bytes", "is_encoded"), [(300, False), (1500, True)])
def test_a_codec_pays_from_a_sixteenth_of_the_first_chunk_on(zero_bytes: int, is_encoded: bool) -> None:
    backend = open_zarr(memory(), codec="zstd", chunk_bytes=10_000)
    source = pattern(20_000, seed=1)
    source[:zero_bytes] = 0
    slot = stored(backend, source)
    assert backend.codec_counts.encoded_slots == is_encoded
    assert (held_bytes(slot, backend.capabilities) < 20_000) is is_encoded
    assert contents(backend, slot).equal(source)
    backend.close()


def test_padding_counts_against_the_capacity() -> None:
    store = memory()
    prime = 1_000_003
    backend = open_zarr(store, prime, chunk_bytes=100_000)
    with pytest.raises(CapacityError):
        backend.reserve(prime)
    backend.resize(prime + 20)
    slot = stored(backend, pattern(prime, seed=1))
    assert prime < chunk_bytes(store) == backend.held_bytes <= prime + 20
    assert held_bytes(slot, backend.capabilities) == prime
    backend.close()


def test_a_slot_that_grows_again_finds_its_bytes_or_says_so() -> None:
    store = memory()
    backend = open_zarr(store, MIB, codec="zstd")
    slot = stored(backend, zeros(MIB))
    other = backend.reserve(MIB // 2)
    error = finish(backend.write(slot, pattern(MIB, seed=1)))
    assert isinstance(error, CapacityError)
    assert contents(backend, slot).equal(zeros(MIB)), "nothing was touched"
    succeed(backend.free(other))
    source = pattern(MIB, seed=1)
    succeed(backend.write(slot, source))
    assert chunk_bytes(store) == held_bytes(slot, backend.capabilities) == MIB
    assert contents(backend, slot).equal(source)
    backend.close()


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_full_place_is_written_again_without_a_moment_above_the_capacity(
    codec: str, concurrency: int
) -> None:
    store = MeteredStore()
    backend = open_zarr(store, 64_000, codec=codec, chunk_bytes=1000, concurrency=concurrency)
    slot = backend.reserve(64_000)
    for seed in range(3):
        succeed(backend.write(slot, pattern(64_000, seed)))
    assert store.peak_bytes == 64_000
    assert contents(backend, slot).equal(pattern(64_000, seed=2))
    backend.close()


def test_the_capacity_cannot_become_less_than_what_is_held() -> None:
    backend = open_zarr(memory(), MIB)
    slot = backend.reserve(MIB // 2)
    with pytest.raises(CapacityError, match=r"holds 512.0 KiB"):
        backend.resize(MIB // 2 - 1)
    succeed(backend.free(slot))
    backend.resize(1)
    backend.close()


def test_no_more_chunks_are_on_their_way_than_concurrency_allows() -> None:
    store = GatedStore(memory())
    backend = open_zarr(store, chunk_bytes=1000, concurrency=3)
    slots = [backend.reserve(10_000) for _ in range(2)]
    writes = [backend.write(slot, pattern(10_000, seed=1)) for slot in slots]
    for _ in range(3):
        assert store.arrived.acquire(timeout=TIMEOUT_S)
    assert not any(write.is_done for write in writes), "the caller was not held up"
    store.is_open.set()
    for write in writes:
        succeed(write)
    assert store.most_under_way == 3
    backend.close()


# ---------------------------------------------------------------------------------------- what is noticed


def written(
    store: MemoryStore, *, codec: str = "none", checksum: bool = True
) -> tuple[ZarrBackend, ZarrSlot, list[str]]:
    backend = open_zarr(store, chunk_bytes=1000, codec=codec, checksum=checksum)
    slot = backend.reserve(4000)
    succeed(backend.write(slot, pattern(4000, seed=1) // 64))
    return backend, slot, chunk_keys(store)


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("checksum", [True, False])
def test_a_missing_chunk_is_an_error_and_never_zeros(codec: str, checksum: bool) -> None:
    store = memory()
    backend, slot, keys = written(store, codec=codec, checksum=checksum)
    change(store, keys[2], None)
    error = finish(backend.read(slot, zeros(4000)))
    assert isinstance(error, IntegrityError)
    assert str(error).startswith(f"chunk 2 of array {slot.array} in memory://")
    assert "is missing" in str(error)
    change(store, keys[2], b"")
    backend.close()


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("change_of", ["cut", "longer", "empty"])
def test_a_chunk_of_another_length_is_an_error(codec: str, checksum: bool, change_of: str) -> None:
    store = memory()
    backend, slot, keys = written(store, codec=codec, checksum=checksum)
    old = objects(store)[keys[1]]
    change(store, keys[1], {"cut": old[:-1], "longer": old + b"\0", "empty": b""}[change_of])
    error = finish(backend.read(slot, zeros(4000)))
    assert isinstance(error, IntegrityError)
    assert f"of the {len(old)} B that were stored" in str(error)
    backend.close()


@pytest.mark.parametrize("codec", ["none", "zstd", "lz4"])
def test_a_flipped_bit_is_an_error(codec: str) -> None:
    store = memory()
    backend, slot, keys = written(store, codec=codec)
    old = bytearray(objects(store)[keys[3]])
    old[len(old) // 2] ^= 4
    change(store, keys[3], bytes(old))
    error = finish(backend.read(slot, zeros(4000)))
    assert isinstance(error, IntegrityError)
    assert "has the checksum" in str(error)
    backend.close()


def test_without_checksums_a_chunk_that_cannot_be_decoded_is_an_error() -> None:
    store = memory()
    backend, slot, keys = written(store, codec="zstd", checksum=False)
    change(store, keys[0], bytes(len(objects(store)[keys[0]])))
    error = finish(backend.read(slot, zeros(4000)))
    assert isinstance(error, IntegrityError)
    assert "cannot be decoded" in str(error)
    backend.close()


def test_without_checksums_a_chunk_that_decodes_to_another_length_is_an_error() -> None:
    store = memory()
    backend, slot, keys = written(store, codec="zstd", checksum=False)
    length = len(objects(store)[keys[0]])
    encode = numcodecs.Zstd().encode
    noise = pattern(900, seed=3).numpy()
    like = next(c for n in range(900) if len(c := encode(np.append(noise[:n], noise[n:] * 0))) == length)
    change(store, keys[0], like)
    error = finish(backend.read(slot, zeros(4000)))
    assert isinstance(error, IntegrityError)
    assert "decodes to" in str(error)
    backend.close()


def test_one_lost_chunk_leaves_the_other_slots_readable() -> None:
    store = memory()
    backend, slot, keys = written(store)
    other = stored(backend, pattern(4000, seed=2))
    change(store, keys[0], None)
    assert finish(backend.read(slot, zeros(4000))) is not None
    assert contents(backend, other).equal(pattern(4000, seed=2))
    backend.close()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_buffer_is_let_go_of_before_the_completion_is_told(fails: bool, codec: str) -> None:
    store = FaultyStore(memory())
    backend = open_zarr(store, codec=codec, chunk_bytes=1000)
    slot = stored(backend, zeros(3000))
    told: list[tuple[bool, object]] = []

    def tell(reference: weakref.ref[torch.Tensor], error: BaseException | None) -> None:
        told.append((error is not None, reference()))

    gc.collect()
    gc.disable()
    try:
        for kind, begin in (("get", backend.read), ("set", backend.write)):
            store.arm((2,) if fails else (), error=OSError(5, "no"), on=(kind,))
            go = threading.Event()

            async def hold(go: threading.Event = go) -> None:
                go.wait(TIMEOUT_S)

            backend._loop.begin(hold)  # nothing ends before the test has let go of the buffer
            buffer = zeros(3000)
            completion = begin(slot, buffer)
            completion.add_done_callback(functools.partial(tell, weakref.ref(buffer)))
            del buffer
            go.set()
            finish(completion)
    finally:
        gc.enable()
    assert told == [(fails, None)] * 2
    backend.close()


# ---------------------------------------------------------------------------------------- wrong calls


def test_what_is_not_a_slot_of_this_backend_is_refused() -> None:
    backend, other = open_zarr(memory()), open_zarr(memory())
    with pytest.raises(UsageError, match="is not a slot of the arrays in"):
        backend.write(other.reserve(10), zeros(10))
    with pytest.raises(UsageError, match="is not a slot"):
        backend.free(object())  # type: ignore[arg-type]
    slot = stored(backend, zeros(10))
    succeed(backend.free(slot))
    with pytest.raises(UsageError, match="was freed before"):
        backend.free(slot)
    with pytest.raises(UsageError, match="holds no bytes"):
        backend.read(backend.reserve(5), zeros(5))
    with pytest.raises(UsageError, match="cannot have -1 bytes"):
        backend.reserve(-1)
    backend.close()
    other.close()


def test_a_slot_whose_write_failed_holds_no_bytes() -> None:
    store = FaultyStore(memory())
    backend = open_zarr(store)
    slot = stored(backend, zeros(10))
    store.arm(1, error=OSError("no"), on=("set",))
    assert isinstance(finish(backend.write(slot, zeros(10))), BackendError)
    with pytest.raises(UsageError, match="holds no bytes"):
        backend.read(slot, zeros(10))
    backend.close()


# ---------------------------------------------------------------------------------------- what is left


def test_a_freed_slot_leaves_nothing() -> None:
    store = memory()
    backend = open_zarr(store, chunk_bytes=1000)
    before = set(objects(store))
    slot = stored(backend, pattern(5000, seed=1))
    assert len(objects(store)) == len(before) + 6
    succeed(backend.free(slot))
    assert set(objects(store)) == before
    assert backend.held_bytes == 0
    backend.close()


def test_close_leaves_nothing_of_ours_and_everything_else() -> None:
    store = memory()
    zarr.create_array(store, name="theirs/0", data=np.arange(9))
    foreign = objects(store)
    backend = open_zarr(store, chunk_bytes=1000)
    stored(backend, pattern(5000, seed=1))
    backend.close()
    assert objects(store) == foreign


def test_directories_that_were_made_go_and_others_stay(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    backend = open_zarr(tmp_path / "there" / "made" / "too")
    stored(backend, pattern(5000, seed=1))
    backend.close()
    assert list(tmp_path.iterdir()) == [tmp_path / "there"]
    assert list((tmp_path / "there").iterdir()) == []
    backend = open_zarr(str(tmp_path / "there" / "made"))
    (tmp_path / "there" / "made" / "foreign").touch()
    backend.close()
    assert [path.name for path in (tmp_path / "there" / "made").iterdir()] == ["foreign"]


def test_a_freed_slot_leaves_no_directory(tmp_path: Path) -> None:
    backend = open_zarr(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    succeed(backend.free(stored(backend, pattern(5000, seed=1))))
    assert sorted(tmp_path.rglob("*")) == before
    backend.close()


def test_a_forgotten_backend_removes_what_it_made(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    backend = open_zarr(tmp_path / "scratch")
    stored(backend, pattern(5000, seed=1))
    del backend
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert set(threading.enumerate()) <= threads


PROGRAM = """
import sys, torch
from tierstore_backends.zarr import open_backend
options = {"store": sys.argv[1], "codec": "zstd", "chunk_bytes": 1000}
backend = open_backend(capacity_bytes=10**6, options=options)
slot = backend.reserve(5000)
backend.write(slot, torch.ones(5000, dtype=torch.uint8))
"""


def test_a_program_that_ends_without_closing_leaves_nothing(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, str(tmp_path / "scratch")],
        check=True, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert ended.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_a_backend_that_is_forgotten_in_its_own_loop_is_closed_all_the_same(tmp_path: Path) -> None:
    store = GatedStore(LocalStore(tmp_path))
    backends = [open_zarr(store)]
    (loop,) = [each for each in threading.enumerate() if each.name == "tierstore-zarr-loop"]
    write = backends[0].write(backends[0].reserve(10), zeros(10))
    write.add_done_callback(lambda _error: backends.clear())
    store.is_open.set()
    loop.join(TIMEOUT_S)
    assert not loop.is_alive()
    assert objects(LocalStore(tmp_path)) == {}


def test_closing_from_a_callback_is_refused(tmp_path: Path) -> None:
    store = GatedStore(LocalStore(tmp_path))
    backend = open_zarr(store)
    told = Completion()

    def close(_error: BaseException | None) -> None:
        try:
            backend.close()
        except UsageError as error:
            told.complete(error)

    write = backend.write(backend.reserve(10), zeros(10))
    write.add_done_callback(close)
    store.is_open.set()
    assert isinstance(finish(told), UsageError)
    backend.close()


def test_a_closed_backend_says_so() -> None:
    backend = open_zarr(memory())
    slot = stored(backend, zeros(10))
    backend.close()
    for call in (
        lambda: backend.reserve(1),
        lambda: backend.write(slot, zeros(10)),
        lambda: backend.read(slot, zeros(10)),
        lambda: backend.free(slot),
        lambda: backend.resize(1),
    ):
        with pytest.raises(StoreClosed, match="were closed"):
            call()


def test_close_waits_for_what_is_under_way(tmp_path: Path) -> None:
    store = GatedStore(LocalStore(tmp_path))
    backend = open_zarr(store)
    write = backend.write(backend.reserve(100), pattern(100, seed=1))
    assert store.arrived.acquire(timeout=TIMEOUT_S)
    closer = threading.Thread(target=backend.close)
    closer.start()
    store.is_open.set()
    closer.join(TIMEOUT_S)
    assert write.is_done
    assert write.error is None
    assert objects(LocalStore(tmp_path)) == {}


def test_the_whole_capacity_can_be_held_in_equal_parts() -> None:
    store = memory()
    backend = open_zarr(store, chunk_bytes=300 * KIB)
    for seed in range(8):
        stored(backend, pattern(CAPACITY // 8, seed))
    assert chunk_bytes(store) == CAPACITY
    backend.close()
