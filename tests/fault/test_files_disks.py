"""Scratch files on real small disks: ones that fill up, and ones that cannot be written."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tierstore as ts
from tests.files_disk import PAGE, blank, buffer, finish, open_durable, open_files, outcome
from tierstore.cli import main
from tierstore.errors import BackendError
from tierstore.spi import Record
from tierstore.units import KIB, MIB

DISK = 8 * MIB


def mount(*arguments: str) -> None:
    """Mount, or skip the test where that is not allowed."""
    try:
        subprocess.run(["mount", *arguments], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting is not possible here: {error}")


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of its own, of 8 MiB.

    Not below ``tmp_path``: another pytest may rename that to sweep it, and then nobody can unmount.
    """
    with tempfile.TemporaryDirectory(prefix="files-disk-", ignore_cleanup_errors=True) as folder:
        point = Path(folder) / "disk"
        point.mkdir()
        _make(point, request.param)
        yield point
        # Lazily: a test that failed may still have files open there.
        subprocess.run(["umount", "--lazy", str(point)], check=True)


def _make(point: Path, kind: str) -> None:
    if kind == "ramfs":
        mount("-t", "ramfs", "none", str(point))
        return
    if kind == "tmpfs":
        mount("-t", "tmpfs", "-o", f"size={DISK}", "none", str(point))
        return
    mkfs = shutil.which("mkfs.ext4")
    if mkfs is None:
        pytest.skip("there is no mkfs.ext4 here")
    image = point.with_name("image")
    with image.open("wb") as file:
        file.truncate(DISK)
    subprocess.run([mkfs, "-q", "-O", "^has_journal", str(image)], check=True, capture_output=True)
    mount("-o", "loop", str(image), str(point))


@pytest.mark.parametrize("nbytes", [512 * KIB, 20 * KIB + 1])
def test_a_disk_that_fills_up_fails_what_does_not_fit_and_nothing_else(disk: Path, nbytes: int) -> None:
    files = open_files(disk / "scratch", 4 * DISK, stride_bytes=MIB)
    slots = [files.reserve(nbytes) for _ in range(2 * DISK // nbytes)]
    writing = [files.write(slot, buffer(nbytes, i)) for i, slot in enumerate(slots)]
    errors = [outcome(completion) for completion in writing]

    failures = [error for error in errors if error is not None]
    assert failures
    for error in failures:
        assert isinstance(error, BackendError)
        assert not error.transient
        assert "failed: ENOSPC" in str(error)
    kept = [i for i, error in enumerate(errors) if error is None]
    assert len(kept) * nbytes > DISK // 2
    into = blank(nbytes)
    for i in kept:
        finish(files.read(slots[i], into))
        assert into.equal(buffer(nbytes, i))

    # What is freed can really be used again: its blocks are there.
    half = kept[::2]
    for i in half:
        finish(files.free(slots[i]))
    for i in half:
        slot = files.reserve(nbytes)
        finish(files.write(slot, buffer(nbytes, 1000 + i)))
        finish(files.read(slot, into))
        assert into.equal(buffer(nbytes, 1000 + i))
    files.close()
    assert not (disk / "scratch").exists()


def test_a_full_disk_gets_back_the_blocks_of_free_addresses_before_a_write_fails(disk: Path) -> None:
    nbytes = 256 * KIB
    with contextlib.closing(open_files(disk / "scratch", 4 * DISK, stride_bytes=MIB)) as files:
        slots = [files.reserve(nbytes) for _ in range(2 * DISK // nbytes)]
        writing = [files.write(slot, buffer(nbytes, i)) for i, slot in enumerate(slots)]
        kept = [i for i, completion in enumerate(writing) if outcome(completion) is None]
        for i in kept[::2]:
            finish(files.free(slots[i]))
        larger = files.reserve(4 * nbytes)  # in none of the holes, so at addresses that have no blocks
        finish(files.write(larger, buffer(4 * nbytes, 7)))
        into = blank(4 * nbytes)
        finish(files.read(larger, into))
        assert into.equal(buffer(4 * nbytes, 7))
        into = blank(nbytes)
        for i in kept[1::2]:
            finish(files.read(slots[i], into))
            assert into.equal(buffer(nbytes, i))


def test_a_disk_that_is_full_at_opening_is_refused_and_left_as_it_was(disk: Path) -> None:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(PAGE))
    with pytest.raises(BackendError, match="No space left"):
        open_files(disk / "scratch", MIB)
    assert not (disk / "scratch").exists()
    filler.unlink()
    open_files(disk / "scratch", MIB).close()


def test_a_disk_that_cannot_be_written_is_refused_with_its_name(disk: Path) -> None:
    mount("-o", "remount,ro", str(disk))
    with pytest.raises(BackendError, match=r"cannot be kept in .*scratch.*Read-only file system"):
        open_files(disk / "scratch")
    with pytest.raises(BackendError, match=r"cannot be kept in .*disk.*Read-only file system"):
        open_files(disk)


@pytest.mark.parametrize("disk", ["ramfs"], indirect=True)
def test_a_file_system_without_direct_io_is_used_through_the_cache(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(BackendError, match="refuses direct I/O, and direct=True demands it"):
        open_files(disk, direct=True)
    assert list(disk.iterdir()) == []
    files = open_files(disk)
    assert f"{disk} refuses direct I/O" in caplog.text
    slot = files.reserve(100 * KIB + 1)
    finish(files.write(slot, buffer(100 * KIB + 1)))
    into = blank(100 * KIB + 1)
    finish(files.read(slot, into))
    assert into.equal(buffer(100 * KIB + 1))
    files.close()


def test_shrinking_gives_room_to_others(disk: Path) -> None:
    files = open_files(disk / "scratch", 5 * MIB, stride_bytes=MIB)
    slots = [files.reserve(MIB) for _ in range(5)]
    finish(*(files.write(slot, buffer(MIB, i)) for i, slot in enumerate(slots)))
    for slot in slots[:4]:
        finish(files.free(slot))
    files.resize(MIB)
    (disk / "others").write_bytes(bytes(5 * MIB))
    into = blank(MIB)
    finish(files.read(slots[4], into))
    assert into.equal(buffer(MIB, 4))
    files.close()


def fill(disk: Path) -> Path:
    """Leave no byte of the disk; return the file that took them."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(PAGE))
    return filler


def test_a_manifest_on_a_full_disk_fails_the_commit_and_the_next_one_works(disk: Path) -> None:
    files = open_durable(disk / "store", 4 * MIB)
    old, new = files.reserve(100 * KIB), files.reserve(200 * KIB)
    finish(files.write(old, buffer(100 * KIB, 1)), files.write(new, buffer(200 * KIB, 2)))
    finish(files.commit([Record("old", "", old)]))
    filler = fill(disk)
    many = [Record("new", "", new), *(Record(f"{n:0100}", "", files.reserve(0)) for n in range(2000))]
    for _ in range(2):
        error = outcome(files.commit(many))
        assert isinstance(error, BackendError)
        assert str(disk / "store" / "tierstore.db") in str(error)
        assert "ENOSPC" in str(error) or "EIO" in str(error)
    into = blank(100 * KIB)
    finish(files.read(old, into))
    assert into.equal(buffer(100 * KIB, 1))
    filler.unlink()
    finish(files.commit(many))
    files.close()
    files = open_durable(disk / "store", 4 * MIB)
    assert {record.name for record in files.recovered()} == {record.name for record in many}
    files.close()


def test_a_durable_directory_on_a_full_disk_opens_and_reads(disk: Path) -> None:
    """Also after a crash: what is in the log is read there."""
    files = open_durable(disk / "store", 4 * MIB)
    slot = files.reserve(100 * KIB)
    finish(files.write(slot, buffer(100 * KIB, 1)))
    finish(files.commit([Record("a", "", slot)]))
    shutil.copytree(disk / "store", disk / "crashed")
    files.close()
    for name in ("store", "crashed"):
        filler = fill(disk)
        files = open_durable(disk / name, 4 * MIB)
        (record,) = files.recovered()
        into = blank(100 * KIB)
        finish(files.read(record.slot, into))
        assert into.equal(buffer(100 * KIB, 1))
        files.close()
        filler.unlink()


def test_a_durable_directory_that_cannot_be_written_is_refused_with_its_name(disk: Path) -> None:
    files = open_durable(disk / "store", MIB)
    finish(files.commit([Record("a", "", files.reserve(0))]))
    files.close()
    before = {entry.name: entry.read_bytes() for entry in (disk / "store").iterdir()}
    mount("-o", "remount,ro", str(disk))
    with pytest.raises(BackendError, match=r"cannot be kept in .*store.*Read-only file system"):
        open_durable(disk / "store", MIB)
    mount("-o", "remount,rw", str(disk))
    assert before == {entry.name: entry.read_bytes() for entry in (disk / "store").iterdir()}
    files = open_durable(disk / "store", MIB)
    assert [record.name for record in files.recovered()] == ["a"]
    files.close()


@pytest.mark.parametrize("verb", ["ls", "du", "verify"])
def test_a_store_on_read_only_media_can_be_looked_into(
    disk: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = disk / "store"
    options = {"path": str(store), "durable": True}
    with ts.Store(ts.StoreConfig([ts.TierConfig("disk", "files", 4 * MIB, options=options)])) as kept:
        kept.put("a.b", torch.ones(1000))
        kept.flush()
        shutil.copytree(store, disk / "killed")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for folder in (store, disk / "killed"):
        assert main([verb, str(folder)]) == 0
        assert ("a.b" in capsys.readouterr().out) or verb != "ls"
    assert main(["import", str(store), "anything.safetensors"]) != 0


def test_who_gets_no_room_above_a_disk_that_is_full_is_told_that_it_is(disk: Path) -> None:
    tiers = [
        ts.TierConfig("host", "pinned", 2 * MIB),
        ts.TierConfig("disk", "files", 8 * DISK, options={"path": str(disk / "scratch")}),
    ]
    with ts.Store(ts.StoreConfig(tiers)) as store, pytest.raises(ts.CapacityError) as failure:
        _put_for_ever(store)
    assert "could not be moved to a lower tier" in str(failure.value)
    assert "ENOSPC (No space left on device)" in str(failure.value)


def _put_for_ever(store: ts.Store) -> None:
    for number in itertools.count():
        store.put(str(number), torch.ones(MIB, dtype=torch.uint8), tier="host")
