"""Durable files when syncs fail, files are cut off, removed or put back, and processes are killed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.files_disk import (
    PAGE,
    PowerKernel,
    blank,
    buffer,
    failing,
    finish,
    no_file_grows,
    open_durable,
    open_files,
    outcome,
)
from tierstore.errors import BackendError, CapacityError, IntegrityError, UsageError
from tierstore.spi import PartialError, Record
from tierstore.units import KIB
from tierstore_backends.files import DurableFiles
from tierstore_backends.files import ground as ground_module
from tierstore_backends.files import manifest as manifest_module
from tierstore_backends.files.owner import Keeping, segment_name
from tierstore_backends.files.probe import IoMode
from tierstore_backends.files.rows import Place, decode_place, encode

SEGMENT = 64 * KIB
FIRST = segment_name(0, Keeping.DURABLE)
DB = "tierstore.db"


def write(files: DurableFiles, sizes: Mapping[str, int], seed: int = 0) -> list[Record]:
    """Write a buffer for each name."""
    records = []
    for name, nbytes in sizes.items():
        slot = files.reserve(nbytes)
        finish(files.write(slot, buffer(nbytes, seed)))
        records.append(Record(name, str(seed), slot))
    return records


def kept(path: Path, sizes: Mapping[str, int], **options: object) -> Path:
    """Make a directory that keeps ``sizes``, in files of 64 KiB; close it."""
    files = open_durable(path, segment_bytes=SEGMENT, options=options)
    finish(files.commit(write(files, sizes)))
    files.close()
    return path


def read(files: DurableFiles, record: Record) -> BaseException | None:
    """Read a record; return its error, or check its bytes."""
    into = blank(record.slot.nbytes)
    error = outcome(files.read(record.slot, into))
    assert error is not None or into.equal(buffer(record.slot.nbytes, int(record.note)))
    return error


def found(files: DurableFiles) -> dict[str, Record]:
    return {record.name: record for record in files.recovered()}


def look(path: Path, **options: object) -> dict[str, str]:
    """Open a directory; return what each name reads as: its seed, or its error's type; close it."""
    files = open_durable(path, segment_bytes=SEGMENT, options=options)
    told = {}
    for name, record in found(files).items():
        error = read(files, record)
        told[name] = record.note if error is None else type(error).__name__
    files.close()
    return told


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


# ---------------------------------------------------------------------------------------- the manifest


def test_a_manifest_that_cannot_be_written_at_any_point_leaves_one_commit_or_the_other(
    tmp_path: Path,
) -> None:
    """The kernel refuses to write a file beyond a limit that grows until the commit fits."""
    limit, failures = 0, 0
    while True:
        path = tmp_path / str(limit)
        files = open_durable(path)
        old = write(files, {f"old {n}": 100 for n in range(40)})
        finish(files.commit(old))
        new = write(files, {f"new {n}": 200 for n in range(120)}, seed=1)
        with no_file_grows(limit):
            error = outcome(files.commit(new))
        shutil.copytree(path, path.with_name(f"{limit} after"))
        assert look(path.with_name(f"{limit} after")).keys() in (
            {record.name for record in old},
            {record.name for record in new},
        )
        finish(files.commit([*old, *new]))
        files.close()
        assert len(look(path)) == 160
        if error is None:
            break
        assert isinstance(error, BackendError)
        assert str(path / DB) in str(error)
        failures += 1
        limit += 7000
    assert failures > 3


class Hesitating(sqlite3.Connection):
    """A database that fails at a commit: before it, or after it was made."""

    fails: tuple[str, bool] | None = None

    def execute(self, sql: str, *parameters: object) -> sqlite3.Cursor:
        if Hesitating.fails is not None and sql == Hesitating.fails[0]:
            was_done, Hesitating.fails = Hesitating.fails[1], None
            if was_done:
                super().execute(sql, *parameters)  # type: ignore[arg-type]
            raise sqlite3.OperationalError("disk I/O error")
        return super().execute(sql, *parameters)  # type: ignore[arg-type]


@pytest.mark.parametrize("was_done", [False, True])
@pytest.mark.parametrize("statement", ["BEGIN IMMEDIATE", "COMMIT"])
def test_after_a_commit_of_which_nobody_knows_the_next_one_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str, was_done: bool
) -> None:
    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3,
        "connect",
        lambda *arguments, **options: connect(*arguments, factory=Hesitating, **options),
    )
    path = tmp_path / "store"
    files = open_durable(path)
    first = write(files, {"a": 100, "b": 200})
    finish(files.commit(first))
    second = [first[0], *write(files, {"b": 300, "c": 400}, seed=1)]
    Hesitating.fails = (statement, was_done)
    error = outcome(files.commit(second))
    assert isinstance(error, BackendError)
    assert str(path / DB) in str(error)
    shutil.copytree(path, tmp_path / "after")
    is_second = was_done and statement == "COMMIT"
    assert look(tmp_path / "after") == ({"a": "0", "b": "1", "c": "1"} if is_second else {"a": "0", "b": "0"})
    finish(files.commit([*second[:2], *write(files, {"d": 1}, seed=2)]))
    files.close()
    assert look(path) == {"a": "0", "b": "1", "d": "2"}


def test_a_lost_manifest_is_refused_and_the_files_stay(tmp_path: Path) -> None:
    path = kept(tmp_path / "store", {"a": 5000})
    manifest = (path / DB).read_bytes()
    (path / DB).unlink()
    before = (path / FIRST).read_bytes()
    with pytest.raises(IntegrityError, match=f"holds {FIRST} but not {DB}"):
        open_durable(path)
    assert {entry.name for entry in path.iterdir()} == {FIRST}
    assert (path / FIRST).read_bytes() == before
    (path / DB).write_bytes(manifest)
    assert look(path) == {"a": "0"}


@pytest.mark.parametrize("content", [b"", b"SQLite format 3\0", b"garbage" * 1000])
def test_what_is_no_manifest_is_refused_and_nothing_is_touched(tmp_path: Path, content: bytes) -> None:
    path = kept(tmp_path / "store", {"a": 5000})
    (path / DB).write_bytes(content)
    (path / f"{DB}-wal").write_bytes(b"the log")
    before = {entry.name: entry.read_bytes() for entry in path.iterdir()}
    with pytest.raises(IntegrityError, match=f"{DB} is not a manifest: it is {len(content)} bytes long"):
        open_durable(path)
    after = {entry.name: entry.read_bytes() for entry in path.iterdir()}
    after.pop("tierstore.lock")
    assert after == before


def test_a_later_format_is_refused_with_both_versions(tmp_path: Path) -> None:
    path = kept(tmp_path / "store", {"a": 5000})
    with sqlite3.connect(path / DB) as database:
        (body,) = database.execute("SELECT body FROM meta").fetchone()
        later = json.dumps({**json.loads(body), "format": 2, "what we do not know": 1})
        total = manifest_module.meta_sum(later.encode())
        database.execute("UPDATE meta SET body = ?, sum = ?", (later, total))
    database.close()
    with pytest.raises(UsageError, match=r"has format 2, and .* up to 1: upgrade"):
        open_durable(path)
    with sqlite3.connect(path / DB) as database:
        total = manifest_module.meta_sum(body.encode())
        database.execute("UPDATE meta SET body = ?, sum = ?", (body, total))
    database.close()
    assert look(path) == {"a": "0"}


@pytest.mark.parametrize("harm", ["removed", "emptied", "cut"])
def test_a_log_that_is_gone_after_a_crash_is_noticed(tmp_path: Path, harm: str) -> None:
    path = tmp_path / "store"
    files = open_durable(path)
    records = write(files, {"a": 5000})
    finish(files.commit(records))
    finish(files.commit([*records, *write(files, {"b": 100}, seed=1)]))
    shutil.copytree(path, tmp_path / "crashed")
    files.close()
    log = tmp_path / "crashed" / f"{DB}-wal"
    match harm:
        case "removed":
            log.unlink()
        case "emptied":
            log.write_bytes(b"")
        case _:
            log.write_bytes(log.read_bytes()[:-1])
    for _ in range(2):  # refusing changes nothing
        with pytest.raises(
            IntegrityError, match=rf"is at commit [01], and commit 2 had come to its end: {DB}-wal"
        ):
            open_durable(tmp_path / "crashed")
    told = look(tmp_path / "crashed", salvage=True)
    assert told == ({"a": "0"} if harm == "cut" else {})
    assert look(tmp_path / "crashed") == told


def test_a_page_of_an_older_manifest_is_noticed(tmp_path: Path) -> None:
    """A write that the disk never did: every row has its checksum, and some are not of this commit."""
    names = {f"{n:0200}": 1 for n in range(60)}
    path = kept(tmp_path / "store", names)
    old = (path / DB).read_bytes()
    files = open_durable(path, segment_bytes=SEGMENT)
    finish(files.commit(write(files, names, seed=1)))
    files.close()
    new = (path / DB).read_bytes()
    assert len(old) == len(new)
    differing = [at for at in range(PAGE, len(new), PAGE) if old[at : at + PAGE] != new[at : at + PAGE]]
    at = differing[-1]
    (path / DB).write_bytes(new[:at] + old[at : at + PAGE] + new[at + PAGE :])
    with pytest.raises(IntegrityError, match="rows are missing, or are not its own"):
        open_durable(path)
    (path / DB).write_bytes(new)
    assert set(look(path).values()) == {"1"}


def test_two_records_that_share_addresses_are_not_both_believed(tmp_path: Path) -> None:
    path = tmp_path / "store"
    files = open_durable(path, segment_bytes=SEGMENT)
    finish(
        files.commit(
            [*write(files, {"a": 5000}, 1), *write(files, {"b": 5000}, 2), *write(files, {"c": 5000}, 3)]
        )
    )
    files.close()
    change_row(path, "b", version=9, place=lambda own: own._replace(extents=place_of(path, "a").extents))
    files = open_durable(path, segment_bytes=SEGMENT)
    records = found(files)
    error = read(files, records["a"])
    assert isinstance(error, IntegrityError)
    assert "'b' is where 'a' was" in str(error)
    assert read(files, records["c"]) is None
    into = blank(5000)
    assert isinstance(outcome(files.read(records["b"].slot, into)), IntegrityError)  # by its checksum
    files.close()


@pytest.mark.parametrize(
    "extents",
    [
        (),
        ((0, PAGE),),
        ((PAGE, 0),),
        ((100, 100 + 2 * PAGE),),
        ((0, PAGE), (0, PAGE)),
        ((2**63, 2**63 + 2 * PAGE),),
    ],
)
def test_an_impossible_place_is_lost_and_nothing_else(
    tmp_path: Path, extents: tuple[tuple[int, int], ...]
) -> None:
    path = kept(tmp_path / "store", {"a": 5000, "b": 5000})
    change_row(path, "b", version=1, place=lambda own: own._replace(extents=extents))
    assert look(path) == {"a": "0", "b": "IntegrityError"}


def place_of(path: Path, name: str) -> Place:
    database = sqlite3.connect(path / DB)
    (place,) = database.execute("SELECT place FROM records WHERE name = ?", (name,)).fetchone()
    database.close()
    return decode_place(place)


def change_row(path: Path, name: str, *, version: int, place: Callable[[Place], Place]) -> None:
    """Write another row for ``name``, with checksums that are right."""
    changed = place(place_of(path, name))
    database = sqlite3.connect(path / DB)
    id_, note, nbytes = database.execute(
        "SELECT id, note, nbytes FROM records WHERE name = ?", (name,)
    ).fetchone()
    row = encode(id_, version, name.encode(), note.encode(), nbytes, changed)
    database.execute("UPDATE records SET version = ?, place = ? WHERE id = ?", (version, row[5], id_))
    rows = database.execute("SELECT id, version, name, note, nbytes, place FROM records").fetchall()
    (body,) = database.execute("SELECT body FROM meta").fetchone()
    body = json.dumps({**json.loads(body), "digest": manifest_module.digest(rows)})
    database.execute("UPDATE meta SET body = ?, sum = ?", (body, manifest_module.meta_sum(body.encode())))
    database.commit()
    database.close()


# ---------------------------------------------------------------------------------------- files


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


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
    assert {entry.name for entry in path.iterdir()} == {FIRST, DB, "notes.txt"}


def test_a_directory_is_made_anew_over_a_draft_that_was_never_completed(tmp_path: Path) -> None:
    (tmp_path / f"{DB}.new").write_bytes(b"half of it")
    (tmp_path / f"{DB}.new-wal").write_bytes(b"and its log")
    files = open_durable(tmp_path)
    assert list(files.recovered()) == []
    files.close()
    assert {entry.name for entry in tmp_path.iterdir()} == {DB}


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
    monkeypatch.setattr(ground_module, "probe", lambda *_: coarse)
    assert look(path) == {"a": "0", "b": "0"}
    assert "direct I/O needs 65536 there now" in caplog.text
    with pytest.raises(BackendError, match="direct I/O needs 65536"):
        open_durable(path, options={"direct": True})
    fine = IoMode(is_direct=False, alignment_bytes=512, memory_alignment_bytes=1)
    monkeypatch.setattr(ground_module, "probe", lambda *_: fine)
    files = open_durable(path)
    assert files.capabilities.alignment_bytes == PAGE
    files.close()


def test_a_refused_opening_leaves_the_directory_to_the_next(tmp_path: Path) -> None:
    path = kept(tmp_path / "store", {"a": 5000})
    with pytest.raises(CapacityError):
        open_durable(path, PAGE)
    assert look(path) == {"a": "0"}


# ---------------------------------------------------------------------------------------- many times


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.slow
def test_a_thousand_commits_leak_nothing(tmp_path: Path) -> None:
    files = open_durable(tmp_path, 64 * PAGE)
    records: list[Record] = []
    before = 0
    for turn in range(1000):
        old = records
        records = write(files, {str(n): PAGE for n in range(8)}, seed=turn)
        finish(files.commit(records))
        for record in old:
            finish(files.free(record.slot))
        if turn == 10:
            before = descriptors()
    assert descriptors() == before
    assert files.physical_bytes <= 64 * PAGE
    assert sum(entry.stat().st_size for entry in tmp_path.glob(f"{DB}*")) < 6_000_000
    files.close()


@pytest.mark.slow
def test_opening_and_closing_leaks_nothing(tmp_path: Path) -> None:
    kept(tmp_path, {"a": 5000})
    before = 0
    for turn in range(100):
        assert look(tmp_path) == {"a": "0"}
        if turn % 3 == 0:
            with pytest.raises(CapacityError):
                open_durable(tmp_path, PAGE)
        if turn == 3:
            before = descriptors()
    assert descriptors() == before


# ---------------------------------------------------------------------------------------- processes


def run_python(code: str, path: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


COMMIT_FOR_EVER = """
import sys
from pathlib import Path
from tests.files_disk import buffer, finish, open_durable
from tierstore.spi import Record
files = open_durable(Path(sys.argv[1]), 1 << 20)
records = {record.name: record for record in files.recovered()}
turn = max((int(record.note) for record in records.values()), default=0)
while True:
    turn += 1
    name, nbytes = str(turn % 7), turn * 997 % 20_000
    slot = files.reserve(nbytes)
    finish(files.write(slot, buffer(nbytes, turn)))
    old, records[name] = records.get(name), Record(name, str(turn), slot)
    finish(files.commit(list(records.values())))
    print(turn, flush=True)
    if old is not None:
        finish(files.free(old.slot))
"""


@pytest.mark.parametrize("kills", [4, pytest.param(200, marks=pytest.mark.long)])
def test_a_killed_process_leaves_its_last_commit_or_the_one_under_way(tmp_path: Path, kills: int) -> None:
    last = 0
    for kill in range(kills):
        with run_python(COMMIT_FOR_EVER, tmp_path) as child:
            assert child.stdout is not None
            for _ in range(3 + kill % 40):
                last = int(child.stdout.readline())
            child.send_signal(signal.SIGKILL)
            told = child.stdout.read().split()
        last = int(told[-1]) if told and told[-1].isdigit() else last
        files = open_durable(tmp_path, 1 << 20)
        records = found(files)
        newest = max(int(record.note) for record in records.values())
        assert newest in (last, last + 1)
        for name, record in records.items():
            expected = max(turn for turn in range(1, newest + 1) if str(turn % 7) == name)
            assert int(record.note) == expected
            assert record.slot.nbytes == expected * 997 % 20_000
            assert read(files, record) is None
        files.close()
        last = newest


FORK = """
import os, sys
from pathlib import Path
from tests.files_disk import buffer, finish, open_durable
from tierstore.errors import StoreClosed
from tierstore.spi import Record
path = Path(sys.argv[1])
files = open_durable(path)
slot = files.reserve(5000)
finish(files.write(slot, buffer(5000)))
finish(files.commit([Record("a", "0", slot)]))
child = os.fork()
if child == 0:
    for call in (lambda: files.reserve(1), lambda: files.commit([]), files.recovered):
        try:
            call()
        except StoreClosed:
            continue
        os._exit(1)
    files.close()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert (path / "tierstore.db-wal").stat().st_size > 0
finish(files.commit([Record("a", "0", slot), Record("c", "0", files.reserve(0))]))
files.close()
print("fine")
"""


def test_the_child_of_a_fork_leaves_the_parents_manifest_alone(tmp_path: Path) -> None:
    with run_python(FORK, tmp_path / "store") as child:
        assert child.communicate()[0].endswith("fine\n")
    assert look(tmp_path / "store") == {"a": "0", "c": "0"}


def test_a_program_that_forgets_to_close_keeps_its_commits(tmp_path: Path) -> None:
    code = FORK.split("child = os.fork()", maxsplit=1)[0]
    with run_python(code, tmp_path / "store") as child:
        child.communicate()
    assert look(tmp_path / "store") == {"a": "0"}
    assert {entry.name for entry in (tmp_path / "store").iterdir()} == {FIRST, DB}


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
