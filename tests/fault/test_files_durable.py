"""Durable files when syncs fail, and files and directories are cut off, removed or put back."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.files_disk import (
    PAGE,
    PowerKernel,
    blank,
    buffer,
    failing,
    finish,
    open_durable,
    open_files,
    outcome,
)
from tests.files_kept import DB, FIRST, SEGMENT, WITNESS, flip, found, kept, look, read, write
from tierstore import Store, StoreConfig
from tierstore.errors import BackendError, CapacityError, IntegrityError, UsageError
from tierstore.spi import PartialError, Record
from tierstore_backends.files import DurableFiles
from tierstore_backends.files import volume as volume_module
from tierstore_backends.files.addressing.direct_io_probe import IoMode
from tierstore_backends.files.directory.ownership import Keeping, segment_name


@pytest.fixture
def kernel(tmp_path: Path) -> PowerKernel:
    return PowerKernel(tmp_path / "store")


@pytest.fixture
def files(kernel: PowerKernel) -> Iterator[DurableFiles]:
    files = open_durable(kernel.folder, syscalls=kernel, segment_bytes=SEGMENT)
    yield files
    files.close()


def fail_syncs(kernel: PowerKernel, kind: str = "sync", code: int = errno.EIO) -> None:
    fail = failing(code)
    kernel.twist = lambda what, offset, nbytes: fail(nbytes) if what == kind else None


# ---------------------------------------------------------------------------------------- syncs


def test_a_failed_sync_names_file_and_errno_and_harms_no_other_key(
    files: DurableFiles, kernel: PowerKernel
) -> None:
    old = write(files, {"a": 5000})
    finish(files.commit(old))
    new = write(files, {"b": 6000}, seed=1)
    fail_syncs(kernel)
    error = outcome(files.commit([*old, *new]))
    assert isinstance(error, BackendError)
    assert f"{kernel.folder / FIRST} could not be made durable: EIO" in str(error)
    assert isinstance(error.__cause__, OSError)
    assert error.__cause__.errno == errno.EIO
    for record in (*old, *new):
        assert read(files, record) is None


def test_what_a_failed_sync_put_in_doubt_is_written_again_before_it_is_named(
    files: DurableFiles, kernel: PowerKernel, tmp_path: Path
) -> None:
    later = write(files, {"c": 100}, seed=2)  # written before the failure, and not named by that commit
    records = write(files, {"a": 5000, "b": 3 * SEGMENT + 5})
    fail_syncs(kernel)
    assert outcome(files.commit(records)) is not None
    kernel.twist = None
    kernel.forget()
    finish(files.commit(records))
    assert sum(nbytes for _, nbytes in kernel.of_kind("write")) >= 3 * SEGMENT + 5000
    kernel.forget()
    finish(files.commit(records + later))
    assert len(kernel.of_kind("write")) == 1
    kernel.forget()
    finish(files.commit(records))
    assert kernel.of_kind("write") == []
    kernel.lose_power(tmp_path / "after")
    assert look(tmp_path / "after") == {"a": "0", "b": "0"}


def test_what_is_written_after_a_failed_sync_is_in_no_doubt(files: DurableFiles, kernel: PowerKernel) -> None:
    fail_syncs(kernel)
    assert outcome(files.commit(write(files, {"a": 5000}))) is not None
    kernel.twist = None
    records = write(files, {"b": 5000}, seed=1)
    kernel.forget()
    finish(files.commit(records))
    assert kernel.of_kind("write") == []


def test_bytes_that_a_failed_sync_lost_are_never_named(
    files: DurableFiles, kernel: PowerKernel, tmp_path: Path
) -> None:
    records = write(files, {"a": 5000, "b": 6000})
    fail_syncs(kernel)
    assert outcome(files.commit(records)) is not None
    kernel.twist = None
    flip(kernel.folder / FIRST, 100)  # the kernel dropped the page, and the disk has what was there before
    error = outcome(files.commit(records))
    assert isinstance(error, BackendError)
    assert error.key == "a"
    assert "'a'" in str(error)
    assert str(kernel.folder / FIRST) in str(error)
    finish(files.commit(records[1:]))
    kernel.lose_power(tmp_path / "after")
    assert look(tmp_path / "after") == {"b": "0"}


def test_without_checksums_what_is_in_doubt_has_to_be_put_again(tmp_path: Path) -> None:
    kernel = PowerKernel(tmp_path / "store")
    files = open_durable(kernel.folder, syscalls=kernel, options={"checksum": False})
    records = write(files, {"a": 5000})
    fail_syncs(kernel)
    assert outcome(files.commit(records)) is not None
    kernel.twist = None
    for _ in range(2):
        error = outcome(files.commit(records))
        assert isinstance(error, BackendError)
        assert error.key == "a"
        assert "put it again" in str(error)
    finish(files.write(records[0].slot, buffer(5000, 0)))
    finish(files.commit(records))
    files.close()
    assert look(kernel.folder) == {"a": "0"}


def test_a_directory_that_cannot_be_synced_fails_the_commit_that_made_a_file(
    files: DurableFiles, kernel: PowerKernel, tmp_path: Path
) -> None:
    records = write(files, {"a": 5000})
    fail_syncs(kernel, "sync folder")
    error = outcome(files.commit(records))
    assert isinstance(error, BackendError)
    assert f"{kernel.folder} could not be made durable: EIO" in str(error)
    kernel.twist = None
    finish(files.commit(records))
    kernel.lose_power(tmp_path / "after")
    assert look(tmp_path / "after") == {"a": "0"}


def test_only_files_with_something_new_are_synced(files: DurableFiles, kernel: PowerKernel) -> None:
    records = write(files, {"a": SEGMENT, "b": SEGMENT, "c": SEGMENT})
    finish(files.commit(records))
    kernel.forget()
    finish(files.commit([*records, *write(files, {"d": 100})]))
    assert len(kernel.of_kind("sync")) == 1
    assert kernel.of_kind("sync folder") != []  # the fourth file is new
    kernel.forget()
    finish(files.commit(records))
    assert kernel.of_kind("sync") == kernel.of_kind("sync folder") == []


# ---------------------------------------------------------------------------------------- files


def test_a_flipped_bit_is_told_with_file_and_offset_after_opening_again(tmp_path: Path) -> None:
    path = kept(tmp_path / "store", {"a": 5000, "b": 5000})
    flip(path / FIRST, 2 * PAGE + 77)
    files = open_durable(path, segment_bytes=SEGMENT)
    records = found(files)
    error = read(files, records["b"])
    assert isinstance(error, IntegrityError)
    assert f"offset {2 * PAGE} of {path / FIRST}" in str(error)
    assert read(files, records["a"]) is None
    files.close()


@pytest.mark.parametrize("direct", ["auto", False])
def test_blocks_are_those_of_the_write_however_large_they_are_later(tmp_path: Path, direct: object) -> None:
    for written, later in ((1, 64), (64, 1)):
        path = tmp_path / str(written)
        files = open_durable(path, options={"aio_block_size": written * PAGE, "direct": direct})
        finish(files.commit(write(files, {"a": 100 * PAGE + 5, "b": 3})))
        files.close()
        files = open_durable(path, options={"aio_block_size": later * PAGE, "direct": direct, "threads": 1})
        records = found(files)
        into = blank(
            100 * PAGE + 5, misalignment=1
        )  # which direct I/O cannot use: it goes through our memory
        finish(files.read(records["a"].slot, into))
        assert into.equal(buffer(100 * PAGE + 5))
        finish(files.commit([*records.values(), *write(files, {"c": 70 * PAGE}, seed=1)]))
        files.close()
        assert look(path) == {"a": "0", "b": "0", "c": "1"}


def test_what_was_written_without_checksums_is_not_compared(tmp_path: Path) -> None:
    path = kept(tmp_path / "store", {"a": 5000}, checksum=False)
    assert look(path, checksum=True) == {"a": "0"}
    files = open_durable(path, segment_bytes=SEGMENT)
    finish(files.commit([*files.recovered(), *write(files, {"b": 5000}, seed=1)]))
    files.close()
    flip(path / FIRST, 2 * PAGE + 77)
    assert look(path)["b"] == "IntegrityError"
    flip(path / FIRST, 2 * PAGE + 77)
    assert look(path, checksum=False) == {"a": "0", "b": "1"}


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("length", [None, 0, 1, PAGE, 3 * PAGE + 1])
def test_a_file_that_is_cut_off_or_missing_loses_what_was_there_and_nothing_else(
    tmp_path: Path, length: int | None, checksum: bool
) -> None:
    sizes = {"a": PAGE, "b": SEGMENT - PAGE, "c": PAGE + 1, "d": PAGE, "e": 2 * SEGMENT}
    path = kept(tmp_path / "store", sizes, checksum=checksum)
    second = path / segment_name(1, Keeping.DURABLE)
    if length is None:
        second.unlink()
    else:
        os.truncate(second, length)
    survivors = {name for name, end in {"c": 2 * PAGE, "d": 3 * PAGE}.items() if end <= (length or 0)}
    told = look(path, checksum=checksum)
    assert {name for name, seed in told.items() if seed == "0"} == {"a", "b", *survivors}
    assert {told[name] for name in {"c", "d", "e"} - survivors} == {"IntegrityError"}


@pytest.mark.parametrize("checksum", [True, False])
def test_what_was_cut_off_stays_lost_when_the_file_has_grown_again(tmp_path: Path, checksum: bool) -> None:
    path = kept(tmp_path / "store", {"a": PAGE, "b": PAGE}, checksum=checksum)
    os.truncate(path / FIRST, PAGE)
    for _ in range(3):
        files = open_durable(path, segment_bytes=SEGMENT, options={"checksum": checksum})
        records = found(files)
        assert read(files, records["a"]) is None
        assert isinstance(read(files, records["b"]), IntegrityError)
        write(files, {"beyond": 5 * PAGE}, seed=1)
        shutil.copytree(path, tmp_path / "crashed")
        files.close()
        shutil.rmtree(path)
        (tmp_path / "crashed").rename(path)
        assert (path / FIRST).stat().st_size >= 7 * PAGE


def test_a_file_that_is_cut_off_is_named_with_offset_and_key(tmp_path: Path) -> None:
    path = kept(tmp_path / "store", {"a": 5000, "b": 5000})
    os.truncate(path / FIRST, 2 * PAGE + 10)
    files = open_durable(path, segment_bytes=SEGMENT)
    error = read(files, found(files)["b"])
    assert (
        f"the bytes of 'b' at offset {2 * PAGE + 10} of {path / FIRST} are not there: "
        f"the file is {2 * PAGE + 10} bytes long"
    ) in str(error)
    files.close()


def test_a_file_that_is_put_back_brings_its_bytes_back(tmp_path: Path) -> None:
    path = kept(tmp_path / "store", {"a": 5000, "b": 5000})
    whole = (path / FIRST).read_bytes()
    os.truncate(path / FIRST, PAGE)
    assert look(path) == {"a": "IntegrityError", "b": "IntegrityError"}
    (path / FIRST).write_bytes(whole)
    assert look(path) == {"a": "0", "b": "0"}


def test_in_a_batch_only_what_is_lost_fails(tmp_path: Path) -> None:
    path = kept(tmp_path / "store", {"a": 5000, "b": 5000, "c": 5000})
    os.truncate(path / FIRST, 3 * PAGE)
    flip(path / FIRST, 10)
    files = open_durable(path, segment_bytes=SEGMENT)
    slots = [record.slot for record in files.recovered()]
    others = write(files, {"d": 700}, seed=3)
    slots.append(others[0].slot)
    into = [blank(slot.nbytes) for slot in slots]
    error = outcome(files.read_many(slots, into))
    assert isinstance(error, PartialError)
    assert error.errors.keys() == {0, 1, 2}
    assert into[3].equal(buffer(700, 3))
    error = outcome(files.read_many(slots[1:3], into[1:3]))
    assert isinstance(error, PartialError)
    assert error.errors.keys() == {0, 1}
    with pytest.raises(UsageError, match="was lost"):
        files.write(slots[1], buffer(5000))
    files.close()


def test_what_is_lost_can_be_committed_renamed_dropped_and_freed(tmp_path: Path) -> None:
    path = kept(tmp_path / "store", {"a": 5000, "b": 5000})
    os.truncate(path / FIRST, 2 * PAGE)
    files = open_durable(path, segment_bytes=SEGMENT)
    a, b = files.recovered()
    finish(files.commit([a, Record("renamed", b.note, b.slot)]))
    files.close()
    assert look(path) == {"a": "0", "renamed": "IntegrityError"}
    files = open_durable(path, segment_bytes=SEGMENT)
    a, b = files.recovered()
    finish(files.commit([a]))
    finish(files.free(b.slot))
    files.close()
    assert look(path) == {"a": "0"}


# ---------------------------------------------------------------------------------------- the directory


def test_scratch_files_never_take_a_durable_directory(tmp_path: Path) -> None:
    path = kept(tmp_path / "store", {"a": 5000})
    with pytest.raises(UsageError, match="holds a durable store"):
        open_files(path)
    (path / DB).rename(path / "elsewhere")
    with pytest.raises(UsageError, match=f"holds a durable store .{FIRST}."):
        open_files(path)
    (path / "elsewhere").rename(path / DB)
    assert look(path) == {"a": "0"}


def test_scratch_files_that_a_dead_owner_left_are_swept(tmp_path: Path) -> None:
    path = kept(tmp_path / "store", {"a": 5000})
    (path / segment_name(0)).write_bytes(b"scratch")
    (path / f"{DB}.new").write_bytes(b"a draft")
    stray = path / segment_name(5, Keeping.DURABLE)
    stray.write_bytes(b"written, and never committed")
    (path / "notes.txt").write_text("mine")
    assert look(path) == {"a": "0"}
    assert {entry.name for entry in path.iterdir()} == {FIRST, DB, WITNESS, "notes.txt"}


def test_a_directory_is_made_anew_over_a_draft_that_was_never_completed(tmp_path: Path) -> None:
    (tmp_path / f"{DB}.new").write_bytes(b"half of it")
    (tmp_path / f"{DB}.new-wal").write_bytes(b"and its log")
    files = open_durable(tmp_path)
    assert list(files.recovered()) == []
    files.close()
    assert {entry.name for entry in tmp_path.iterdir()} == {DB, WITNESS}


def test_a_directory_that_is_removed_while_in_use_fails_commits_and_nothing_else(
    files: DurableFiles, kernel: PowerKernel
) -> None:
    records = write(files, {"a": 5000})
    finish(files.commit(records))
    shutil.rmtree(kernel.folder)
    error = outcome(files.commit([*records, *write(files, {"b": 100})]))
    assert isinstance(error, BackendError)
    assert f"{kernel.folder} was removed while it was in use" in str(error)
    assert read(files, records[0]) is None


@pytest.mark.parametrize("victim", ["tierstore.lock", DB, FIRST])
def test_a_file_that_is_removed_or_replaced_while_in_use_fails_commits(
    files: DurableFiles, kernel: PowerKernel, victim: str
) -> None:
    records = write(files, {"a": 5000})
    finish(files.commit(records))
    shutil.copy(kernel.folder / victim, kernel.folder / "other")
    (kernel.folder / "other").replace(kernel.folder / victim)
    error = outcome(files.commit([]))
    assert isinstance(error, BackendError)
    assert victim in str(error)
    assert read(files, records[0]) is None


@pytest.mark.parametrize("taken", [1, PAGE, None], ids=["a byte", "a page", "all of it"])
@pytest.mark.parametrize("file", [0, 1, 2])
@pytest.mark.parametrize("is_committed", [True, False])
def test_a_file_that_is_cut_off_while_in_use_fails_commits_by_its_name_and_length(
    files: DurableFiles, kernel: PowerKernel, file: int, taken: int | None, is_committed: bool
) -> None:
    records = write(files, {"a": SEGMENT, "b": SEGMENT, "c": SEGMENT})
    if is_committed:
        finish(files.commit(records))
    victim = kernel.folder / segment_name(file, Keeping.DURABLE)
    os.truncate(victim, 0 if taken is None else SEGMENT - taken)
    for change in ([*records, *write(files, {"d": 100}, seed=1)], records, []):
        error = outcome(files.commit(change))
        assert isinstance(error, BackendError)
        assert f"it is {0 if taken is None else SEGMENT - taken} bytes long, of {SEGMENT}" in str(error)
        assert str(victim) in str(error)
    others = [record for n, record in enumerate(records) if n != file]
    assert [read(files, record) for record in others] == [None, None]


def test_keys_in_memory_are_not_lost_to_a_file_that_is_cut_off_under_a_flush(tmp_path: Path) -> None:
    path = tmp_path / "store"
    values = {f"{n}": torch.full((PAGE,), n, dtype=torch.uint8) for n in range(12)}
    store = Store(
        StoreConfig.default(
            device="cpu",
            offload_cpu_size="20KB",
            offload_disk_size="8MB",
            offload_path=str(path),
            durable=True,
        )
    )
    for key, value in values.items():
        store.put(key, value)
    store.flush()
    os.truncate(path / FIRST, 0)
    for _ in range(2):
        with pytest.raises(BackendError, match=f"it is 0 bytes long.*{FIRST}"):
            store.flush()
    in_memory = [key for key in values if "host" in store.where(key)]
    assert len(in_memory) >= 4
    assert all(store.get(key).equal(values[key]) for key in in_memory)
    with pytest.raises(BackendError, match="cut off while it was in use"):
        store.close()


def test_times_of_files_mean_nothing(tmp_path: Path) -> None:
    path = kept(tmp_path / "store", {"a": 5000})
    for clock in (0, 2**33):
        for entry in path.iterdir():
            os.utime(entry, (clock, clock))
        assert look(path) == {"a": "0"}


def test_a_coarser_disk_is_used_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = kept(tmp_path / "store", {"a": 5000, "b": 100})
    coarse = IoMode(is_direct=True, alignment_bytes=16 * PAGE, memory_alignment_bytes=4)
    monkeypatch.setattr(volume_module, "probe", lambda *_: coarse)
    assert look(path) == {"a": "0", "b": "0"}
    assert "direct I/O needs 65536 there now" in caplog.text
    with pytest.raises(BackendError, match="direct I/O needs 65536"):
        open_durable(path, options={"direct": True})
    fine = IoMode(is_direct=False, alignment_bytes=512, memory_alignment_bytes=1)
    monkeypatch.setattr(volume_module, "probe", lambda *_: fine)
    files = open_durable(path)
    assert files.capabilities.alignment_bytes == PAGE
    files.close()


def test_a_refused_opening_leaves_the_directory_to_the_next(tmp_path: Path) -> None:
    path = kept(tmp_path / "store", {"a": 5000})
    with pytest.raises(CapacityError):
        open_durable(path, PAGE)
    assert look(path) == {"a": "0"}


# ---------------------------------------------------------------------------------------- calls


def test_a_commit_is_refused_what_it_cannot_name(files: DurableFiles, tmp_path: Path) -> None:
    (record,) = write(files, {"a": 100})
    other = open_durable(tmp_path / "other")
    (foreign,) = write(other, {"a": 100})
    for records in (
        [record, record],
        [record, Record("b", "", files.reserve(10))],
        [Record("b", "", foreign.slot)],
    ):
        assert isinstance(outcome(files.commit(records)), UsageError)
    finish(files.commit([record]))
    for records in ([record, record], [record, Record("a", "other", record.slot)]):
        assert isinstance(outcome(files.commit(records)), UsageError)
    other.close()
