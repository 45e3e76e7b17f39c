"""A directory that anybody changed at will opens right, or is refused, or tells the keys that it cost.

Never are there bytes that differ from a checksum, an error that is none of ours, a wait without end, or more
memory than goes with what there is.
"""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import sqlite3
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.files_disk import PAGE, blank, finish, open_durable, outcome
from tests.files_kept import DB, FIRST, LOCK, SEGMENT, WITNESS, write
from tests.hostile_stores import FIELDS, SIZES, Forged, database, parsed, rows_of, write_meta
from tests.unit.test_files_manifest import read_fragments
from tierstore.errors import IntegrityError, TierStoreError
from tierstore_backends.files import DurableFiles

# ---------------------------------------------------------------------------------------- what is changed

EDGES = [0, 1, -1, PAGE, -PAGE, 3 * PAGE, SEGMENT, 2**31, 2**32, 2**47, 2**48, 2**62, 2**63 - 1, -(2**63)]
NUMBERS = st.sampled_from(EDGES) | st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 10)
UNSIGNED = st.builds(lambda number: number % 2**64, NUMBERS)
ADDRESSES = st.sampled_from([n * PAGE for n in range(8)]) | UNSIGNED
TEXTS = st.binary(max_size=30) | st.sampled_from(
    [b"a", b"b", b"\xed\xa0\x80", b"\xff", b"n" * 70_000, b"[" * 9000]
)
SIXTEEN = st.sampled_from([0, 1, 2, 3, 9, 65535])
THIRTY_TWO = st.sampled_from([0, 1, 512, PAGE, PAGE + 1, 4 << 20, 2**31, 2**32 - 1])
FIELD = st.one_of(
    st.tuples(st.sampled_from(["id", "version", "nbytes"]), NUMBERS),
    st.tuples(st.sampled_from(["name", "note", "tail"]), TEXTS),
    st.tuples(st.sampled_from(["kind", "zero"]), SIXTEEN),
    st.tuples(st.sampled_from(["block", "count"]), THIRTY_TWO),
    st.tuples(st.just("numbers"), st.lists(ADDRESSES, max_size=6).map(tuple)),
)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=9) | st.just(2**200),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
META = st.sampled_from(
    [
        "format",
        "directory",
        "segment_bytes",
        "alignment_bytes",
        "bandwidths",
        "commit",
        "records",
        "next_id",
        "x",
    ]
)
STATEMENTS = st.sampled_from(
    [
        "DELETE FROM records WHERE id = 2",
        "DELETE FROM meta",
        "UPDATE records SET name = x'00ff' WHERE id = 1",
        "UPDATE records SET nbytes = 'many'",
        "UPDATE records SET place = zeroblob(1000000) WHERE id = 2",
        "UPDATE meta SET sum = 7",
        "CREATE TRIGGER t AFTER UPDATE ON meta BEGIN DELETE FROM records; END",
        "CREATE INDEX i ON records (name)",
        "PRAGMA user_version = 9",
        "PRAGMA journal_mode = DELETE",
        "VACUUM",
    ]
)
CHANGES = st.one_of(
    st.tuples(st.just("row"), st.integers(0, 2), FIELD),
    st.tuples(st.just("again"), st.integers(0, 2), FIELD),
    st.tuples(st.just("meta"), META, JSON),
    st.tuples(st.just("sql"), STATEMENTS, st.none()),
    st.tuples(
        st.just("bytes"),
        st.tuples(st.sampled_from([DB, DB, DB, FIRST, WITNESS, LOCK]), st.floats(0, 1, exclude_max=True)),
        st.binary(max_size=200) | st.none(),
    ),
)
Change = tuple[str, object, object]


def apply(path: Path, changes: list[Change]) -> None:
    """Change a directory; what makes no database any more is left as it is."""
    for what, where, how in changes:
        with contextlib.suppress(
            sqlite3.Error, struct.error, ArithmeticError, ValueError, TypeError, LookupError
        ):
            match what:
                case "bytes":
                    change_bytes(path / where[0], where[1], how)  # type: ignore[index,arg-type]
                case "sql":
                    with database(path) as opened:
                        opened.execute(str(where))
                case "meta":
                    change_meta(path, str(where), how)
                case _:
                    change_row(path, where, *how, is_more=what == "again")  # type: ignore[misc,arg-type]


def change_bytes(file: Path, where: float, how: bytes | None) -> None:
    data = bytearray(file.read_bytes() if file.exists() else bytes(60))
    at = int(where * len(data))
    data[at : None if how is None else at + len(how)] = how or b""
    file.write_bytes(data)


def change_meta(path: Path, key: str, value: object) -> None:
    with database(path) as opened:
        (body,) = opened.execute("SELECT body FROM meta").fetchone()
        write_meta(opened, json.dumps({**json.loads(body), key: value}).encode())


def change_row(path: Path, index: int, field: str, value: object, *, is_more: bool) -> None:
    """Change a row, or add one like it, and let the manifest agree."""
    with database(path) as opened:
        rows = rows_of(opened)
        forged: Forged = replace(rows[index], **{field: value})  # type: ignore[arg-type]
        if is_more:
            rows.append(replace(forged, id=forged.id if field == "id" else 50))
        else:
            rows[index] = forged
        sealed = [row.sealed for row in rows]
        (body,) = opened.execute("SELECT body FROM meta").fetchone()
        told = json.loads(body)
        opened.execute("BEGIN")
        opened.execute("DELETE FROM records")
        put = "INSERT OR REPLACE INTO records VALUES (?, ?, CAST(? AS TEXT), CAST(? AS TEXT), ?, ?)"
        opened.executemany(put, sealed)
        digest = sum(int.from_bytes(row[5][:8], "little") for row in sealed) % 2**64
        next_id = max(told["next_id"], *(min(row[0], 2**60) + 1 for row in sealed))
        write_meta(
            opened, json.dumps({**told, "records": len(rows), "digest": digest, "next_id": next_id}).encode()
        )
        opened.execute("COMMIT")


# ---------------------------------------------------------------------------------------- the oracle


def made_stores(folder: Path) -> dict[bool, Path]:
    """Make a directory that was closed, and one that a crash left with its last commit in the log."""
    files = open_durable(folder / "closed", segment_bytes=SEGMENT)
    finish(files.commit(write(files, SIZES)))
    files.close()
    files = open_durable(folder / "closed", segment_bytes=SEGMENT)
    finish(files.commit([*files.recovered(), *write(files, {"d": 100}, seed=1)]))
    shutil.copytree(folder / "closed", folder / "crashed")
    files.close()
    return {False: folder / "closed", True: folder / "crashed"}


@pytest.fixture(scope="module")
def stores() -> Iterator[dict[bool, Path]]:
    with tempfile.TemporaryDirectory() as folder:
        yield made_stores(Path(folder))


def told_rows(path: Path) -> dict[bytes, Forged] | None:
    """Return the whole rows of the database, read with no code of ours; nothing where it cannot be read."""
    try:
        with database(path) as opened:
            rows = list(opened.execute(f"SELECT {FIELDS} FROM records"))
            return {row[2]: parsed(row) for row in rows if parsed(row).sealed == row}
    except Exception:  # noqa: BLE001 - whatever it is, it is none of ours
        return None


def check(files: DurableFiles, path: Path, told: dict[bytes, Forged] | None) -> None:
    """See to it that whatever can be read has its checksums, and that a commit can be made beside it."""
    records = files.recovered()
    for record in records:
        assert 0 <= record.slot.nbytes <= 8 << 20
        into = blank(record.slot.nbytes)
        error = outcome(files.read(record.slot, into))
        assert error is None or isinstance(error, IntegrityError)
        row = (told or {}).get(record.name.encode("utf-8", "surrogatepass"))
        if error is None and row is not None and row.kind == 1 and row.nbytes == record.slot.nbytes:
            extents = list(
                zip(row.numbers[: 2 * row.count : 2], row.numbers[1 : 2 * row.count : 2], strict=True)
            )
            sums = list(row.numbers[2 * row.count :])
            meta = {"segment_bytes": SEGMENT, "alignment_bytes": PAGE}
            assert bytes(into.numpy()) == read_fragments(path, meta, extents, sums, row.nbytes, row.block)
    more = write(files, {"more": 200}, seed=3)
    finish(files.commit([*(record for record in records if record.name != "more"), *more]))


def look_into(store: Path, changes: list[Change], options: dict[str, object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        shutil.copytree(store, path)
        apply(path, changes)
        told = told_rows(shutil.copytree(path, Path(folder) / "seen")) if not options else None
        began = time.process_time()
        try:
            files = open_durable(path, segment_bytes=SEGMENT, options=options)
        except TierStoreError as refusal:
            assert len(str(refusal)) < 3000  # noqa: PT017 - one of ours is what is looked for
        else:
            try:
                check(files, path, told)
            finally:
                files.close()
        assert time.process_time() - began < 5


def fuzz(stores: dict[bool, Path], changes: list[Change], is_crashed: bool, is_salvaged: bool) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    look_into(stores[is_crashed], changes, {"salvage": True} if is_salvaged else {})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 128 << 10


@given(st.lists(CHANGES, min_size=1, max_size=3), st.booleans(), st.booleans())
def test_whatever_is_changed_is_refused_or_told_or_right(
    stores: dict[bool, Path], changes: list[Change], is_crashed: bool, is_salvaged: bool
) -> None:
    fuzz(stores, changes, is_crashed, is_salvaged)


@pytest.mark.long
@pytest.mark.timeout(7200)
@settings(max_examples=20_000)
@given(st.lists(CHANGES, min_size=1, max_size=6), st.booleans(), st.booleans())
def test_whatever_is_changed_many_times_is_refused_or_told_or_right(
    stores: dict[bool, Path], changes: list[Change], is_crashed: bool, is_salvaged: bool
) -> None:
    fuzz(stores, changes, is_crashed, is_salvaged)
