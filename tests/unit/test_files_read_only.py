"""A durable directory opened with ``read_only``: everything is found, and nothing in it is changed."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
from pathlib import Path

import pytest
import torch

import tierstore as ts

TENSORS = {f"k{i}": torch.arange(1000 * (i + 1), dtype=torch.int32) for i in range(5)}


def open_store(*paths: Path, **options: object) -> ts.Store:
    path = str(paths[0]) if len(paths) == 1 else [{"path": str(each), "bandwidth": "1GB"} for each in paths]
    files = ts.TierConfig("disk", "files", "64MiB", options={"path": path, "durable": True, **options})
    return ts.Store(ts.StoreConfig([files]))


def look(*paths: Path, **options: object) -> ts.Store:
    return open_store(*paths, read_only=True, **options)


def fill(store: ts.Store) -> None:
    for key, tensor in TENSORS.items():
        store.put(key, tensor)
    store.flush()


def is_whole(store: ts.Store) -> bool:
    return set(store) == set(TENSORS) and all(torch.equal(store.get(key), TENSORS[key]) for key in store)


def snapshot(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything that can be told of a directory but when it was read."""
    inside = {path.name: path for path in folder.iterdir()} | {".": folder}
    return {
        name: (path.stat().st_mtime_ns, path.stat().st_blocks, b"" if path.is_dir() else path.read_bytes())
        for name, path in inside.items()
    }


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A store that was closed."""
    with open_store(tmp_path / "closed") as store:
        fill(store)
        store.put("dropped", torch.zeros(300_000))
        store.flush()
        store.drop("dropped")  # leaves room at the end of the files, which an owner would cut off
    return tmp_path / "closed"


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """What a process left that was killed: a log, a lock file, and bytes that no commit named."""
    with open_store(tmp_path / "owned") as store:
        fill(store)
        store.put("not flushed", torch.ones(10))
        shutil.copytree(tmp_path / "owned", tmp_path / "killed")
    (tmp_path / "killed" / "tierstore-0007.bin").write_bytes(b"of a commit that never was")
    return tmp_path / "killed"


@pytest.mark.parametrize("which", ["closed", "killed"])
def test_looking_finds_everything_and_changes_nothing(which: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(which)
    before = snapshot(folder)
    with look(folder) as store:
        assert is_whole(store)
    assert snapshot(folder) == before


def test_a_log_that_a_killed_process_left_is_read_too(killed: Path) -> None:
    assert (killed / "tierstore.db-wal").stat().st_size
    (killed / "tierstore.db-wal").unlink()
    with pytest.raises(ts.IntegrityError, match=r"tierstore\.db-wal is damaged or was not copied"):
        look(killed)


def test_bytes_are_compared_with_what_the_disk_holds(closed: Path) -> None:
    with open_store(closed) as store:
        wanted = _is_direct(store)
    with look(closed) as store:
        assert _is_direct(store) == wanted
    with look(closed, direct=False) as store:
        assert not _is_direct(store)


def _is_direct(store: ts.Store) -> bool:
    io = store.stats().tiers["disk"].io
    assert io is not None
    return bool(io["is_direct"])


def test_files_that_are_longer_than_the_capacity_stay_as_long(closed: Path) -> None:
    before = snapshot(closed)
    options = {"path": str(closed), "durable": True, "read_only": True}
    with ts.Store(ts.StoreConfig([ts.TierConfig("disk", "files", "4MiB", options=options)])) as store:
        assert is_whole(store)
    assert snapshot(closed) == before


def test_a_damaged_row_is_put_right_in_memory_alone(closed: Path, caplog: pytest.LogCaptureFixture) -> None:
    connection = sqlite3.connect(closed / "tierstore.db")
    connection.execute("UPDATE records SET nbytes = nbytes + 1 WHERE name = 'k3'")
    connection.commit()
    connection.close()
    before = snapshot(closed)
    with caplog.at_level(logging.WARNING, "tierstore.files"), look(closed) as store:
        assert is_whole(store)
    assert "is put right here, not in the file" in caplog.text
    assert snapshot(closed) == before


def test_a_file_that_is_missing_is_named_and_not_made(closed: Path) -> None:
    (closed / "tierstore-0000.bin").unlink()
    with look(closed) as store:
        with pytest.raises(
            ts.IntegrityError, match=r"tierstore-0000\.bin are not there: the file is 0 bytes"
        ):
            store.get("k1")
        assert len(store) == len(TENSORS)
    assert sorted(path.name for path in closed.iterdir()) == ["tierstore-witness.bin", "tierstore.db"]


def test_several_drives_can_be_looked_into(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    with open_store(*paths) as store:
        fill(store)
    before = [snapshot(path) for path in paths]
    with look(*paths) as store:
        assert is_whole(store)
    assert [snapshot(path) for path in paths] == before
    with pytest.raises(ts.UsageError, match="give all directories of the store, in their order"):
        look(*reversed(paths))


# ---------------------------------------------------------------------- beside others


@pytest.mark.parametrize("which", ["closed", "killed"])
def test_several_may_look_at_a_time(which: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(which)
    with look(folder) as one, look(folder) as other:
        assert is_whole(one)
        assert is_whole(other)


def test_a_store_that_is_in_use_cannot_be_looked_into(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        fill(store)
        with pytest.raises(ts.UsageError, match="in use by a live backend of this process"):
            look(tmp_path / "store")


def test_an_owner_is_kept_out_where_there_is_a_lock_file(killed: Path) -> None:
    with look(killed), pytest.raises(ts.UsageError, match="in use by"):
        open_store(killed)
    open_store(killed).close()


def test_an_owner_is_told_that_somebody_reads(killed: Path) -> None:
    gone = os.fork()
    if not gone:
        os._exit(0)
    os.waitpid(gone, 0)
    (killed / "tierstore.lock").write_text(f"{gone}\n0\n")
    with look(killed), pytest.raises(ts.UsageError, match=f"only reads it.*last owner was pid {gone}"):
        open_store(killed)


def test_what_changed_while_it_was_read_is_no_result(closed: Path) -> None:
    store = look(closed)
    with open_store(closed) as owner:
        owner.put("new", torch.zeros(1))
    with pytest.raises(ts.BackendError, match="was changed by another process while it was read"):
        store.close()


def test_an_owner_who_commits_nothing_disturbs_nobody(closed: Path) -> None:
    store = look(closed)
    with open_store(closed) as owner:
        assert is_whole(owner)
    assert is_whole(store)
    store.close()


# ---------------------------------------------------------------------- what it refuses


def test_nothing_can_be_put_or_kept(closed: Path) -> None:
    before = snapshot(closed)
    store = look(closed)
    with pytest.raises(ts.BackendError, match="read_only=True: nothing can be put there"):
        store.put("new", torch.zeros(1))
    with pytest.raises(ts.BackendError, match="read_only=True: nothing can be put there"):
        store.put("k0", torch.zeros(1), replace=True)
    store.drop("k1")
    with pytest.raises(ts.BackendError, match="replaced or dropped since cannot be kept there"):
        store.flush()
    store.close(flush=False)
    assert snapshot(closed) == before


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"durable": False}, "read_only=True is for what was kept: say durable=True"),
        ({"engine": "io_uring"}, "engine='io_uring' needs files that it can write"),
        ({"engine": "aiofiles"}, "engine='aiofiles' needs files that it can write"),
        ({"read_only": 1}, "read_only=1: accepted: True or False"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    options: dict[str, object], fault: str, tmp_path: Path
) -> None:
    with pytest.raises(ts.ConfigError, match=fault):
        open_store(tmp_path, **{"read_only": True, **options})


def test_what_is_no_store_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ts.UsageError, match="is not a durable store"):
        look(tmp_path)
    with pytest.raises(ts.UsageError, match="is not a durable store"):
        look(tmp_path / "nowhere")
    (tmp_path / "tierstore-0000.bin").write_bytes(b"x")
    with pytest.raises(ts.IntegrityError, match="put that back, or remove the files"):
        look(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tierstore-0000.bin"]
