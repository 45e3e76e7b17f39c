"""Manifests that nobody honest wrote: each is refused by name, or costs the one key that it speaks of."""

from __future__ import annotations

import contextlib
import gc
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.files_disk import blank, finish, open_durable, outcome
from tests.files_kept import DB, SEGMENT, found, look, read, write
from tests.hostile_stores import (
    HEADS,
    METAS,
    MUCH,
    PLACES,
    SCHEMAS,
    SIZES,
    forge_b,
    honest,
)
from tierstore import Store, StoreConfig
from tierstore.errors import IntegrityError, UsageError
from tierstore.spi import Record

Forge = Callable[[Path], None]


def each(*groups: dict[str, Forge]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "forge", [pytest.param(forge, id=name) for group in groups for name, forge in group.items()]
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return honest(tmp_path_factory.mktemp("whole") / "store")


@pytest.fixture
def path(whole: Path, tmp_path: Path) -> Path:
    """A directory that keeps three records: a copy of one that is whole."""
    return shutil.copytree(whole, tmp_path / "store")


def inside(path: Path) -> dict[str, bytes]:
    """Everything but who was there last, and SQLite's log, which may have moved into its database."""
    left_out = ("tierstore.lock", f"{DB}-wal")
    return {entry.name: entry.read_bytes() for entry in path.iterdir() if entry.name not in left_out}


@each(SCHEMAS, METAS)
def test_a_database_that_tierstore_does_not_make_is_refused_by_name_and_left_alone(
    path: Path, forge: Forge
) -> None:
    forge(path)
    before = inside(path)
    for options in ({}, {"salvage": True}, {"read_only": True}):
        with pytest.raises(IntegrityError, match=f"{DB} (is|says)") as refusal:
            open_durable(path, segment_bytes=SEGMENT, options=options)
        assert "Nothing was changed" in str(refusal.value)
        assert len(str(refusal.value)) < 1000 + 2 * len(str(path))
        assert inside(path) == before


@each(HEADS)
def test_a_row_that_names_nothing_is_told_and_salvage_goes_on_without_it(path: Path, forge: Forge) -> None:
    forge(path)
    before = inside(path)
    with pytest.raises(IntegrityError, match="salvage=True goes on with what is there") as refusal:
        open_durable(path, segment_bytes=SEGMENT)
    assert "what cannot be" in str(refusal.value) or "rows have the name" in str(refusal.value)
    assert len(str(refusal.value)) < 1000 + 2 * len(str(path))
    assert inside(path) == before
    told = look(path, salvage=True)
    assert set(told.values()) == {"0"}
    assert len(told) >= 2
    assert look(path) == told  # for good


@each(PLACES)
@pytest.mark.parametrize("options", [{}, {"read_only": True}], ids=str)
def test_what_cannot_be_of_one_record_costs_that_one_and_no_other(
    path: Path, forge: Forge, options: dict[str, object]
) -> None:
    forge(path)
    files_before = len(list(path.iterdir()))
    files = open_durable(path, segment_bytes=SEGMENT, options=options)
    records = found(files)
    assert records.keys() == SIZES.keys()
    assert read(files, records["a"]) is None
    assert read(files, records["c"]) is None
    slot = records["b"].slot
    assert 0 <= slot.nbytes <= 8 << 20  # or who reads it makes room for it
    error = outcome(files.read(slot, blank(slot.nbytes)))
    assert isinstance(error, IntegrityError)
    files.close()
    assert len(list(path.iterdir())) <= files_before  # no file is made for what is not there


@each(PLACES)
def test_a_store_goes_on_beside_what_cannot_be(path: Path, forge: Forge) -> None:
    forge(path)
    files = open_durable(path, segment_bytes=SEGMENT)
    more = write(files, {"d": 3 * SEGMENT}, seed=1)
    finish(files.commit([*files.recovered(), *more]))
    files.close()
    told = look(path)
    assert {name: told[name] for name in "acd"} == {"a": "0", "c": "0", "d": "1"}
    assert told["b"] == "IntegrityError"
    files = open_durable(path, segment_bytes=SEGMENT)
    bad = found(files)["b"]
    finish(files.commit([], gone=["b"]))
    finish(files.free(bad.slot))
    files.close()
    assert look(path) == {"a": "0", "c": "0", "d": "1"}


@each(MUCH)
def test_what_there_is_much_of_takes_a_time_and_a_memory_that_go_with_it(path: Path, forge: Forge) -> None:
    forge(path)
    gc.collect()
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    with contextlib.suppress(IntegrityError):
        files = open_durable(path, segment_bytes=SEGMENT)
        assert {read(files, record) for name, record in found(files).items() if name in "ac"} == {None}
        files.close()
    size_bytes = sum(entry.stat().st_size for entry in path.iterdir())
    grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before) * 1024
    assert time.process_time() - began < 10  # hours, or for ever, when nothing bounds it
    assert grown_bytes < 20 * size_bytes + (64 << 20)


@pytest.mark.parametrize("bit", [pytest.param(bit, id=f"bit {bit}") for bit in range(0, 8 * 60, 17)])
def test_a_flipped_bit_of_the_schema_is_put_right_or_refused(path: Path, bit: int) -> None:
    data = bytearray((path / DB).read_bytes())
    at = data.index(b"CREATE TABLE records") + bit // 8
    data[at] ^= 1 << bit % 8
    (path / DB).write_bytes(data)
    with contextlib.suppress(IntegrityError):  # SQLite cannot read it any more
        told = look(path)
        assert set(told.values()) == {"0"}
        assert (path / f"{DB}.damaged").exists()
        assert b"CREATE TABLE records (\n    id INTEGER PRIMARY KEY,\n" in (path / DB).read_bytes()


def test_a_name_that_could_not_be_read_again_is_not_kept(tmp_path: Path) -> None:
    files = open_durable(tmp_path)
    (record,) = write(files, {"a": 100})
    longest = "n" * (1 << 20)
    assert isinstance(outcome(files.commit([Record(longest + "n", "", record.slot)])), UsageError)
    finish(files.commit([Record(longest, "0", record.slot)]))
    files.close()
    assert look(tmp_path) == {longest: "0"}


def test_two_drives_are_refused_an_address_beyond_them(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    drives = [{"path": str(folder), "bandwidth": "1GB/s"} for folder in folders]
    files = open_durable(folders[0], segment_bytes=SEGMENT, options={"path": drives})
    finish(files.commit(write(files, SIZES)))
    files.close()
    forge_b(kind=0, numbers=(5 << 48, (5 << 48) + 3 * 4096))(folders[0])
    files = open_durable(folders[0], segment_bytes=SEGMENT, options={"path": drives})
    records = found(files)
    assert [type(read(files, records[name])).__name__ for name in "abc"] == [
        "NoneType",
        "IntegrityError",
        "NoneType",
    ]
    files.close()


# ---------------------------------------------------------------------------------------- the store


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "tensors"
    with Store(config(path)) as store:
        for value, (key, nbytes) in enumerate(SIZES.items()):
            store.put(key, torch.full((nbytes,), value, dtype=torch.uint8))
    return path


def config(path: Path) -> StoreConfig:
    return StoreConfig.default(
        device="cpu", offload_cpu_size="1MB", offload_disk_size="8MB", offload_path=str(path), durable=True
    )


@each(PLACES)
def test_a_store_tells_the_key_of_which_its_manifest_says_what_cannot_be(
    tensors: Path, tmp_path: Path, forge: Forge
) -> None:
    path = tmp_path / "store"
    shutil.copytree(tensors, path)
    forge(path)
    with Store(config(path)) as store:
        assert set(store) == SIZES.keys()
        with pytest.raises(IntegrityError, match="'b'"):
            store.get("b")
        with pytest.raises(IntegrityError, match="'b'"), store.lease("b", tier="host"):
            pass
        assert store.get("a").equal(torch.full((5000,), 0, dtype=torch.uint8))
        assert store.get("c").equal(torch.full((700,), 2, dtype=torch.uint8))
        store.put("d", torch.ones(10))
        store.flush()
