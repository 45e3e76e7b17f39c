"""Manifests that are not those of the files beside them, and lock files that say nothing true."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.files_disk import PAGE, finish, open_durable, open_files
from tests.files_kept import DB, FIRST, LOCK, SEGMENT, WITNESS, flip, kept, look, write
from tierstore.errors import BackendError, IntegrityError, UsageError

SIZES = {"a": 5000, "b": 3 * PAGE}


def rewritten(path: Path, seed: int, options: Mapping[str, object]) -> None:
    """Replace everything that a directory keeps, so that old addresses have other bytes."""
    files = open_durable(path, segment_bytes=SEGMENT, options=options)
    old = list(files.recovered())
    finish(files.commit(new := write(files, SIZES, seed)))
    finish(*[files.free(record.slot) for record in old])
    finish(files.commit(newest := write(files, SIZES, seed)))
    finish(*[files.free(record.slot) for record in new])
    assert newest
    files.close()


@pytest.fixture(params=[True, False], ids=["with checksums", "without"])
def stale(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory that was closed, whose manifest is of an earlier time at which it was closed."""
    path = kept(tmp_path / "store", SIZES, checksum=request.param)
    older = (path / DB).read_bytes()
    rewritten(path, 1, {"checksum": request.param})
    (path / DB).write_bytes(older)
    return path


@pytest.mark.parametrize("options", [{}, {"checksum": False}, {"read_only": True}], ids=str)
def test_a_closed_stores_older_manifest_is_refused_by_the_files_beside_it(
    stale: Path, options: dict[str, object]
) -> None:
    for _ in range(2):
        with pytest.raises(
            IntegrityError, match=rf"is at commit 1, and commit 3 had come to its end.*{WITNESS} says so"
        ):
            open_durable(stale, segment_bytes=SEGMENT, options=options)


def test_going_on_with_an_older_manifest_believes_no_bytes_that_nothing_can_tell(stale: Path) -> None:
    seen = look(stale, salvage=True, read_only=True)
    assert seen == dict.fromkeys(SIZES, "IntegrityError")
    assert look(stale, salvage=True) == seen
    assert look(stale) == seen  # for good


@pytest.mark.parametrize("checksum", [True, False])
def test_a_manifest_of_another_store_is_refused_by_the_files_beside_it(
    tmp_path: Path, checksum: bool
) -> None:
    one = kept(tmp_path / "one", SIZES, checksum=checksum)
    other = kept(tmp_path / "other", SIZES, checksum=checksum)
    shutil.copy(one / DB, other / DB)
    with pytest.raises(IntegrityError, match=f"{WITNESS} says that the files are another's"):
        open_durable(other, segment_bytes=SEGMENT)


def test_what_is_copied_as_documented_opens_also_in_the_place_of_something_newer(tmp_path: Path) -> None:
    path = kept(tmp_path / "store", SIZES, checksum=False)
    copy = tmp_path / "copy"
    copy.mkdir()
    for each in (path / DB, *path.glob("*.bin")):
        shutil.copy(each, copy)
    rewritten(path, 1, {"checksum": False})
    assert look(copy) == dict.fromkeys(SIZES, "0")
    for each in (copy / DB, *copy.glob("*.bin")):
        shutil.copy(each, path)
    assert look(path) == dict.fromkeys(SIZES, "0")


def test_a_directory_without_a_witness_opens_and_has_one_from_then_on(tmp_path: Path) -> None:
    path = kept(tmp_path / "store", SIZES)
    (path / WITNESS).unlink()  # as versions before it left it
    assert look(path, read_only=True) == dict.fromkeys(SIZES, "0")
    assert not (path / WITNESS).exists()
    assert look(path) == dict.fromkeys(SIZES, "0")
    assert (path / WITNESS).exists()


def test_each_of_several_drives_tells_that_its_files_are_newer(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    drives = [{"path": str(folder), "bandwidth": "1GB/s"} for folder in folders]
    options = {"path": drives, "checksum": False}
    files = open_durable(folders[0], segment_bytes=SEGMENT, options=options)
    finish(files.commit(write(files, SIZES)))
    files.close()
    shutil.copytree(folders[0], tmp_path / "older")
    rewritten(folders[0], 1, options)
    shutil.rmtree(folders[0])
    (tmp_path / "older").rename(folders[0])
    with pytest.raises(IntegrityError, match=f"{folders[1] / WITNESS} says so"):
        open_durable(folders[0], segment_bytes=SEGMENT, options=options)


# ---------------------------------------------------------------------------------------- notes


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """What a process left that died after its second commit, of which the log has the last."""
    path = tmp_path / "store"
    files = open_durable(path, segment_bytes=SEGMENT)
    records = write(files, {"a": 5000})
    finish(files.commit(records))
    files.close()
    files = open_durable(path, segment_bytes=SEGMENT)
    finish(files.commit([*files.recovered(), *write(files, {"b": 100}, seed=1)]))
    shutil.copytree(path, tmp_path / "killed")
    files.close()
    return tmp_path / "killed"


def harmed(how: str) -> Callable[[Path], None]:
    def harm(path: Path) -> None:
        data = bytearray(path.read_bytes())
        match how:
            case "is gone":
                path.unlink()
                return
            case "is garbage":
                data[:] = b"\xff" * len(data)
            case "is empty":
                data.clear()
            case "is cut":
                del data[len(data) // 2 :]
            case _:
                bit = int(how.rpartition(" ")[2])
                data[bit // 8 % len(data)] ^= 1 << bit % 8
        path.write_bytes(data)

    return harm


HARMS = ["is gone", "is garbage", "is empty", "is cut", *(f"has another bit {n}" for n in range(0, 400, 23))]


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("victim", [LOCK, WITNESS])
def test_one_note_and_a_bit_of_the_log_that_are_damaged_together_are_noticed(
    killed: Path, victim: str, harm: str
) -> None:
    harmed(harm)(killed / victim)
    flip(killed / f"{DB}-wal", 24 + 32 + 100)  # in the first page that the commit wrote
    with pytest.raises(IntegrityError, match="is at commit 1, and commit 2 had come to its end"):
        open_durable(killed, segment_bytes=SEGMENT)


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("victim", [LOCK, WITNESS])
def test_a_note_that_is_damaged_keeps_nobody_out(killed: Path, victim: str, harm: str) -> None:
    harmed(harm)(killed / victim)
    assert look(killed) == {"a": "0", "b": "1"}


def test_a_lock_note_of_another_store_says_nothing_here(tmp_path: Path) -> None:
    path = kept(tmp_path / "store", SIZES)
    files = open_durable(tmp_path / "other", segment_bytes=SEGMENT)
    for seed in range(5):
        finish(files.commit(write(files, SIZES, seed)))
    shutil.copy(tmp_path / "other" / LOCK, path / LOCK)
    files.close()
    assert look(path) == dict.fromkeys(SIZES, "0")


def test_a_note_from_elsewhere_removes_no_directories_here(tmp_path: Path) -> None:
    owned = open_files(tmp_path / "made" / "for" / "it")
    note = (tmp_path / "made" / "for" / "it" / LOCK).read_bytes()
    owned.close()
    mine = tmp_path / "mine" / "and" / "empty"
    for text in (note, b"1\n3\n", b"1\n3\n0\n"):
        mine.mkdir(parents=True, exist_ok=True)
        (mine / LOCK).write_bytes(text)
        open_files(mine).close()
        assert mine.is_dir()


# ---------------------------------------------------------------------------------------- the directory

NAMES = [DB, f"{DB}-wal", LOCK, WITNESS, FIRST, "tierstore-drive.json", f"{DB}.new"]


def put(path: Path, what: str) -> None:
    """Put something that is no regular file under a name."""
    path.unlink(missing_ok=True)
    match what:
        case "a pipe":
            os.mkfifo(path)
        case "a directory":
            path.mkdir()
        case "a socket":
            os.mknod(path, stat.S_IFSOCK | 0o600)
        case _:
            path.symlink_to("/dev/zero")


@pytest.mark.parametrize("what", ["a pipe", "a directory", "a socket", "a symbolic link"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_file_is_refused_by_its_name_and_nobody_waits_for_it(
    tmp_path: Path, name: str, what: str
) -> None:
    path = kept(tmp_path / "store", SIZES)
    put(path / name, what)
    for options in ({}, {"read_only": True}):
        with pytest.raises(BackendError, match=f"{name} is {what}: .*Nothing was touched"):
            open_durable(path, segment_bytes=SEGMENT, options=options)
    if name == LOCK and what != "a symbolic link":
        with pytest.raises((BackendError, UsageError)):
            open_files(path)


@pytest.mark.parametrize("name", [DB, LOCK, WITNESS, FIRST])
def test_a_file_that_has_another_name_is_not_written_to(tmp_path: Path, name: str) -> None:
    path = kept(tmp_path / "store", SIZES)
    if name == LOCK:
        (path / name).write_bytes(b"mine, and longer than a note\n" * 9)
    os.link(path / name, tmp_path / "mine")
    before = (tmp_path / "mine").read_bytes()
    with pytest.raises(BackendError, match=rf"{name} has 2 names"):
        open_durable(path, segment_bytes=SEGMENT)
    assert (tmp_path / "mine").read_bytes() == before
    assert look(path, read_only=True) == dict.fromkeys(SIZES, "0")


def test_a_lock_that_has_another_name_is_refused_to_scratch_files_too(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "scratch").mkdir()
    os.link(tmp_path / "mine", tmp_path / "scratch" / LOCK)
    with pytest.raises(BackendError, match="it is no file of tierstore's alone"):
        open_files(tmp_path / "scratch")
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_manifest_that_was_put_aside_and_not_yet_replaced_opens(tmp_path: Path) -> None:
    path = kept(tmp_path / "store", SIZES)
    os.link(path / DB, path / f"{DB}.damaged")  # as a process leaves it that dies in between
    assert look(path) == dict.fromkeys(SIZES, "0")


def test_a_journal_that_sqlite_would_undo_is_refused(tmp_path: Path) -> None:
    path = kept(tmp_path / "store", SIZES)
    (path / f"{DB}-journal").write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(1000))
    with pytest.raises(BackendError, match=f"{DB}-journal is none of tierstore's"):
        open_durable(path, segment_bytes=SEGMENT)
