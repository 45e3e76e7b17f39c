"""Durable files whose manifest cannot be written, is lost, older, or says what cannot be."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.files_disk import (
    PAGE,
    blank,
    finish,
    no_file_grows,
    open_durable,
    outcome,
)
from tests.files_kept import DB, FIRST, SEGMENT, WITNESS, found, kept, look, read, write
from tierstore.errors import BackendError, IntegrityError, UsageError
from tierstore_backends.files.durability.meta import meta_sum
from tierstore_backends.files.durability.record_codec import RecordLocation, decode_place, encode
from tierstore_backends.files.durability.scan import digest

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
    assert {entry.name for entry in path.iterdir()} == {FIRST, WITNESS}
    assert (path / FIRST).read_bytes() == before
    (path / DB).write_bytes(manifest)
    assert look(path) == {"a": "0"}


NAMES = {f"name {n}": 100 for n in range(200)}


def inside(path: Path) -> dict[str, bytes]:
    """Everything but who was there last."""
    return {entry.name: entry.read_bytes() for entry in path.iterdir() if entry.name != "tierstore.lock"}


def cut(path: Path, nbytes: int | None = None) -> bytes:
    """Let a manifest be shorter than it was: by a third of its pages, if nothing is said; return it."""
    whole = (path / DB).read_bytes()
    (path / DB).write_bytes(whole[: len(whole) * 2 // 3 // 4096 * 4096 if nbytes is None else nbytes])
    return (path / DB).read_bytes()


def test_a_manifest_that_is_cut_off_says_what_can_be_salvaged_and_salvage_does_it(tmp_path: Path) -> None:
    path = kept(tmp_path / "store", NAMES)
    left = cut(path)
    before = inside(path)
    with pytest.raises(
        IntegrityError, match=r"of 200 records \d+ can be read\. Nothing was changed\. salvage=True goes on"
    ) as refusal:
        open_durable(path, segment_bytes=SEGMENT)
    assert inside(path) == before
    found_again = look(path, salvage=True)
    assert 0 < len(found_again) < 200
    assert f"200 records {len(found_again)} can be read" in str(refusal.value)
    assert set(found_again.values()) == {"0"}
    assert (path / f"{DB}.damaged").read_bytes() == left
    assert look(path) == found_again  # for good


def test_what_can_be_salvaged_can_be_looked_at_before(tmp_path: Path) -> None:
    path = kept(tmp_path / "store", NAMES)
    cut(path)
    before = inside(path)
    seen = look(path, salvage=True, read_only=True)
    assert inside(path) == before
    assert seen == look(path, salvage=True)


def test_a_cut_off_manifest_with_a_log_is_salvaged_with_what_the_log_has(tmp_path: Path) -> None:
    files = open_durable(tmp_path / "owned", segment_bytes=SEGMENT)
    first = write(files, NAMES)
    finish(files.commit(first))
    files.close()
    files = open_durable(tmp_path / "owned", segment_bytes=SEGMENT)
    finish(files.commit([*files.recovered(), *write(files, {"late": 100})]))
    path = tmp_path / "killed"
    shutil.copytree(tmp_path / "owned", path)
    files.close()
    cut(path)
    found_again = look(path, salvage=True)
    assert found_again["late"] == "0"
    assert look(path) == found_again


@pytest.mark.parametrize("nbytes", [600, 4096, 8192])
def test_salvage_that_would_keep_nothing_is_refused(tmp_path: Path, nbytes: int) -> None:
    path = kept(tmp_path / "store", NAMES)
    cut(path, nbytes)
    before = inside(path)
    with pytest.raises(IntegrityError, match=r"nothing can be salvaged.*put a copy of it back"):
        open_durable(path, segment_bytes=SEGMENT, options={"salvage": True})
    assert inside(path) == before


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
        total = meta_sum(later.encode())
        database.execute("UPDATE meta SET body = ?, sum = ?", (later, total))
    database.close()
    with pytest.raises(UsageError, match=r"has format 2, and .* up to 1: upgrade"):
        open_durable(path)
    with sqlite3.connect(path / DB) as database:
        total = meta_sum(body.encode())
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


def place_of(path: Path, name: str) -> RecordLocation:
    database = sqlite3.connect(path / DB)
    (place,) = database.execute("SELECT place FROM records WHERE name = ?", (name,)).fetchone()
    database.close()
    return decode_place(place)


def change_row(
    path: Path, name: str, *, version: int, place: Callable[[RecordLocation], RecordLocation]
) -> None:
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
    body = json.dumps({**json.loads(body), "digest": digest(rows)})
    database.execute("UPDATE meta SET body = ?, sum = ?", (body, meta_sum(body.encode())))
    database.commit()
    database.close()
