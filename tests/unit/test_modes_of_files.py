"""Whatever tierstore keeps in a directory is its owner's alone to read."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tierstore as ts
from tests.files_disk import finish, open_durable, open_files
from tests.files_kept import DB, SEGMENT, WITNESS, flip, look, write


@pytest.fixture(autouse=True, params=[0o000, 0o022], ids=["any mode", "the usual modes"])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    """What the process takes from the modes of files that it makes."""
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode)
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_every_file_of_a_durable_directory_is_its_owners_alone(tmp_path: Path) -> None:
    folders = [tmp_path / "store", tmp_path / "second"]
    options = {"path": [{"path": str(folder), "bandwidth": "1GB/s"} for folder in folders]}
    files = open_durable(folders[0], segment_bytes=SEGMENT, options=options)
    finish(files.commit(write(files, {"a": 3 * SEGMENT})))
    while_open = modes(tmp_path)
    files.close()
    assert {f"store/{DB}", f"store/{DB}-wal", f"store/{WITNESS}", "second/tierstore-drive.json"} <= set(
        while_open
    )
    assert set(while_open.values()) == set(modes(tmp_path).values()) == {0o600}


def test_a_manifest_that_replaces_a_damaged_one_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "store"
    files = open_durable(path, segment_bytes=SEGMENT)
    finish(files.commit(write(files, {"a": 100})))
    files.close()
    flip(path / DB, (path / DB).read_bytes().index(b'"created_by": "') + 20)
    assert look(path) == {"a": "0"}
    assert f"{DB}.damaged" in modes(path)
    assert set(modes(path).values()) == {0o600}


def test_scratch_files_are_their_owners_alone(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    write(files, {"a": 100})  # type: ignore[arg-type]  # what is called of both is the same
    assert set(modes(tmp_path).values()) == {0o600}
    files.close()


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_chunks_and_documents_of_a_zarr_store_in_a_directory_are_its_owners_alone(
    tmp_path: Path, codec: str
) -> None:
    options = {"store": str(tmp_path / "zarr"), "codec": codec, "chunk_bytes": "4KiB"}
    tiers = [ts.TierConfig("disk", "zarr", "1MiB", options=options)]
    with ts.Store(ts.StoreConfig(tiers)) as store:
        store.put("a", torch.zeros(10_000))
        shutil.copytree(tmp_path / "zarr", tmp_path / "seen")
        assert store.get("a").equal(torch.zeros(10_000))
    assert len(modes(tmp_path / "seen")) > 4
    assert set(modes(tmp_path / "seen").values()) == {0o600}
