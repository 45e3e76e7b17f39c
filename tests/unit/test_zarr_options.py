"""What a user may say about scratch arrays: every fault at once, and no password in any message."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from zarr.abc.codec import BytesBytesCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer
from zarr.core.common import JSON
from zarr.registry import register_codec
from zarr.storage import FsspecStore, MemoryStore

from tests.zarr_stores import FaultyStore, objects, open_zarr
from tierstore.errors import BackendError, ConfigError, UsageError
from tierstore.units import MIB
from tierstore_backends.zarr import open_backend
from tierstore_backends.zarr.options import parse_options
from tierstore_backends.zarr.owner import MARKER
from tierstore_backends.zarr.places import OpenStore, open_place


def fault(**options: object) -> str:
    """Return what opening with these options says, which must leave nothing behind."""
    with pytest.raises(ConfigError) as caught:
        open_zarr(**{"store": MemoryStore(), **options})  # type: ignore[arg-type]
    return str(caught.value)


def test_the_defaults_are_those_of_the_documentation() -> None:
    options = parse_options({"store": "memory://"})
    assert (options.chunk_bytes, options.concurrency, options.checksum) == (4 * MIB, 16, True)
    assert (options.storage_options, options.free_patience_s) == (None, 30.0)
    assert not options.codec


def test_every_fault_is_in_one_message() -> None:
    text = fault(
        chunk_byte=5, codec="lz77", concurrency=0, checksum=1, chunk_bytes="none", free_patience_s=-1
    )
    assert "unknown option 'chunk_byte' (did you mean 'chunk_bytes'?)" in text
    assert "codec='lz77': zarr knows no codec 'lz77'; accepted: 'none', 'lz4'" in text
    assert "concurrency=0: accepted: an int from 1 to 1024" in text
    assert "checksum=1: accepted: True or False" in text
    assert "chunk_bytes='none': not a size" in text
    assert "free_patience_s=-1: accepted: seconds" in text


@pytest.mark.parametrize("patience_s", [-1, float("inf"), float("nan"), True, "5"])
def test_patience_is_a_time_that_ends(patience_s: object) -> None:
    assert f"free_patience_s={patience_s!r}: accepted: seconds, 0 or more" in fault(
        free_patience_s=patience_s
    )


def test_a_store_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'path'.*; store is missing: the path"):
        open_backend(capacity_bytes=1, options={"path": "x"})


@pytest.mark.parametrize("store", [None, 7, "", "a\0b", b"bytes"])
def test_what_is_no_store_is_refused(store: object) -> None:
    assert "accepted: a directory's path, a URL such as 's3://bucket/prefix', or a zarr store" in fault(
        store=store
    )


def test_a_store_that_cannot_be_written_is_refused() -> None:
    assert "cannot be written" in fault(store=MemoryStore(read_only=True))


@pytest.mark.parametrize("chunk_bytes", [0, -1, True, 1.5, "2GiB"])
def test_chunks_have_a_size(chunk_bytes: object) -> None:
    assert f"chunk_bytes={chunk_bytes!r}: " in fault(chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("storage_options", ["secret", {1: "secret"}, {"key": "secret"}])
def test_options_of_a_remote_store_are_never_printed(storage_options: object) -> None:
    text = fault(storage_options=storage_options, chunk_bytes=0)
    assert "storage_options" in text
    assert "secret" not in text


def test_a_password_in_a_url_is_never_printed() -> None:
    text = fault(store="nowhere://me:secret@host/path")
    assert "secret" not in text
    assert "nowhere://***@host/path" in text


def test_an_unknown_protocol_is_refused_with_what_it_takes() -> None:
    assert "Remote stores need fsspec and the package of their protocol" in fault(store="nowhere://bucket")


def test_a_server_that_is_not_there_is_an_error_that_may_pass() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(BackendError, match=rf"opening ftp://\*\*\*@127.0.0.1:{port}/x failed") as caught:
        open_zarr(f"ftp://me:secret@127.0.0.1:{port}/x")
    assert caught.value.transient


@pytest.mark.parametrize(
    ("codec", "said"),
    [
        (5, "accepted: 'none', 'lz4', 'blosc', 'zstd'"),
        ({"configuration": {}}, "accepted: 'none'"),
        ({"name": "zstd", "level": 3}, "accepted: 'none'"),
        (
            {"name": "zstd", "configuration": {"level": 99}},
            "does not take this configuration: ValueError",
        ),
        ({"name": "blosc", "configuration": {"cname": "zip"}}, "does not take this configuration"),
        ("transpose", "'transpose' does not turn bytes into bytes"),
        ("bytes", "'bytes' does not turn bytes into bytes"),
        (["zstd", "nothing"], "zarr knows no codec 'nothing'"),
        ({"name": "gzip", "configuration": {"level": 11}}, "does not take this configuration"),
    ],
    ids=str,
)
def test_a_codec_that_zarr_cannot_use_is_refused(codec: object, said: str) -> None:
    assert said in fault(codec=codec)


def test_codecs_may_follow_each_other() -> None:
    chain = parse_options({"store": "memory://", "codec": ["zstd", {"name": "crc32c"}]}).codec
    assert [document["name"] for document in chain.documents] == ["zstd", "crc32c"]


def test_lz4_shuffles_the_bytes_of_four_byte_elements() -> None:
    (document,) = parse_options({"store": "memory://", "codec": "lz4"}).codec.documents
    configuration: Any = document["configuration"]
    assert document["name"] == "blosc"
    assert (configuration["cname"], configuration["shuffle"], configuration["typesize"]) == (
        "lz4",
        "shuffle",
        4,
    )


def test_a_place_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BackendError, match=r"cannot be kept in .*/file/below: .*/file is a"):
        open_zarr(tmp_path / "file" / "below")


def test_every_backend_has_a_file_system_of_its_own() -> None:
    async def both() -> list[OpenStore]:
        return [await open_place("s3://bucket/x", {"key": "k", "secret": "s"}) for _ in range(2)]

    first, second = (place.store for place in asyncio.run(both()))
    assert isinstance(first, FsspecStore)
    assert isinstance(second, FsspecStore)
    assert first.fs is not second.fs, "what one has connected would be another event loop's"
    assert not first.fs.dircache.use_listings_cache


def test_a_path_may_be_a_url_or_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    home, url = open_zarr("~/one"), open_zarr(f"file://{tmp_path}/two")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    with pytest.raises(UsageError, match="is in use"):
        open_zarr(tmp_path / "one")
    home.close()
    url.close()
    assert list(tmp_path.iterdir()) == []


class Rounding(BytesBytesCodec):
    """A codec that loses bits."""

    is_fixed_size = True

    @classmethod
    def from_dict(cls, data: dict[str, JSON]) -> Rounding:
        return cls()

    def to_dict(self) -> dict[str, JSON]:
        return {"name": "test-rounding"}

    def compute_encoded_size(self, _input_byte_length: int, _chunk_spec: ArraySpec) -> int:
        return _input_byte_length

    async def _encode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer | None:
        return chunk_spec.prototype.buffer.from_array_like(chunk_bytes.as_numpy_array() & 0xF0)

    async def _decode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        return chunk_bytes


class Broken(Rounding):
    """A codec that fails."""

    async def _encode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer | None:
        raise RuntimeError("its library is missing")


class Nothing(Rounding):
    """A codec that makes nothing of bytes."""

    async def _encode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer | None:
        return None


@pytest.mark.parametrize(
    ("codec", "said"),
    [
        (Rounding, "gives other bytes back than it was given"),
        (Broken, "does not work: RuntimeError: its library is missing"),
        (Nothing, "does not work: ValueError: a codec made nothing of a chunk"),
    ],
)
def test_a_codec_is_tried_before_anything_is_stored(codec: type[Rounding], said: str) -> None:
    register_codec(f"test-{codec.__name__}", codec)
    store = MemoryStore()
    assert said in fault(store=store, codec=f"test-{codec.__name__}")
    assert objects(store) == {}


@pytest.mark.parametrize("kind", ["get", "set"])
def test_a_backend_that_does_not_open_leaves_nothing_of_its_arrays(kind: str) -> None:
    threads = set(threading.enumerate())
    store = FaultyStore(MemoryStore())
    store.arm(1, error=OSError(5, "Input/output error"), on=(kind,))
    with pytest.raises(BackendError, match="Input/output error"):
        open_zarr(store)
    store.heal()
    assert set(objects(store)) <= {MARKER}
    assert set(threading.enumerate()) <= threads
    open_zarr(store).close()
