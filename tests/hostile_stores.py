"""Durable directories that nobody honest left: each a change of one that is whole, its checksums made right.

A checksum says that nothing was damaged, not who wrote it.  So what is forged here passes every one of them,
and only what a manifest may say at all can tell it from the truth.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from tests.files_disk import PAGE
from tests.files_kept import DB, SEGMENT, kept

SIZES = {"a": 5000, "b": 3 * PAGE, "c": 700}
FIELDS = "id, version, name, note, nbytes, place"


@dataclass(frozen=True, slots=True)
class Forged:
    """One row, before its checks are made."""

    id: int
    version: int
    name: bytes
    note: bytes
    nbytes: int
    block: int
    kind: int
    zero: int
    count: int
    numbers: tuple[int, ...]  # extents and sums
    tail: bytes = b""

    @property
    def sealed(self) -> tuple[int, int, bytes, bytes, int, bytes]:
        """The row with checks that are right."""
        head = struct.pack("<4q", self.id, self.version, self.nbytes, len(self.name)) + self.name + self.note
        numbers = struct.pack(f"<{len(self.numbers)}Q", *self.numbers)
        told = struct.pack("<IHHI", self.block, self.kind, self.zero, self.count)
        rest = struct.pack("<Q", xxhash.xxh3_64_intdigest(head)) + told + numbers + self.tail
        place = struct.pack("<Q", xxhash.xxh3_64_intdigest(head + rest)) + rest
        return self.id, self.version, self.name, self.note, self.nbytes, place


def parsed(row: tuple[int, int, bytes, bytes, int, bytes]) -> Forged:
    """Take a row of a whole manifest apart."""
    block, kind, zero, count = struct.unpack_from("<IHHI", row[5], 16)
    numbers = struct.unpack_from(f"<{(len(row[5]) - 28) // 8}Q", row[5], 28)
    return Forged(*row[:5], block, kind, zero, count, numbers)


@contextlib.contextmanager
def database(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a closed directory's database, and close it as `DurableFiles.close` does."""
    with contextlib.closing(sqlite3.connect(path / DB, isolation_level=None)) as opened:
        opened.text_factory = bytes
        yield opened


def rows_of(opened: sqlite3.Connection) -> list[Forged]:
    return [parsed(row) for row in opened.execute(f"SELECT {FIELDS} FROM records ORDER BY id")]


def write_meta(opened: sqlite3.Connection, body: bytes) -> None:
    total = xxhash.xxh3_64_digest(body)
    opened.execute("UPDATE meta SET body = CAST(? AS TEXT), sum = ?", (body, total))


def forge_rows(path: Path, change: Callable[[list[Forged]], list[Forged]], **meta: object) -> None:
    """Let a manifest have other rows, and say of itself that these are all."""
    with database(path) as opened:
        rows = [row.sealed for row in change(rows_of(opened))]
        opened.execute("BEGIN")
        opened.execute("DELETE FROM records")
        put = "INSERT INTO records VALUES (?, ?, CAST(? AS TEXT), CAST(? AS TEXT), ?, ?)"
        opened.executemany(put, rows)
        (body,) = opened.execute("SELECT body FROM meta").fetchone()
        digest = sum(int.from_bytes(row[5][:8], "little") for row in rows) % 2**64
        told = {**json.loads(body), "records": len(rows), "digest": digest}
        told["next_id"] = max([told["next_id"], *(row[0] + 1 for row in rows)])
        write_meta(opened, json.dumps({**told, **meta}).encode())
        opened.execute("COMMIT")


def forge_b(**fields: object) -> Callable[[Path], None]:
    """Say something else of ``b``, the second row."""

    def forge(path: Path) -> None:
        forge_rows(path, lambda rows: [rows[0], replace(rows[1], **fields), *rows[2:]])  # type: ignore[arg-type]

    return forge


def forge_meta(**fields: object) -> Callable[[Path], None]:
    """Let a manifest say something else of itself."""
    return lambda path: forge_rows(path, list, **fields)


def forge_body(body: bytes) -> Callable[[Path], None]:
    """Let a manifest say of itself any bytes."""

    def forge(path: Path) -> None:
        with database(path) as opened:
            write_meta(opened, body)

    return forge


def run(*statements: str) -> Callable[[Path], None]:
    """Change a database by SQL."""

    def forge(path: Path) -> None:
        with database(path) as opened:
            for statement in statements:
                opened.execute(statement)

    return forge


def rebuilt(columns: str, select: str = FIELDS, options: str = "") -> Callable[[Path], None]:
    """Let ``records`` be a table with other columns and the same contents."""
    names = ", ".join(each.strip().split()[0] for each in select.split(","))
    return run(
        "ALTER TABLE records RENAME TO old",
        f"CREATE TABLE records ({columns}) {options}",
        f"INSERT INTO records ({names}) SELECT {names} FROM old",
        "DROP TABLE old",
        "VACUUM",
    )


def honest(path: Path) -> Path:
    """Make a directory that keeps three records."""
    return kept(path, SIZES)


COLUMNS = (
    "id INTEGER PRIMARY KEY, version INTEGER NOT NULL, name TEXT NOT NULL, note TEXT NOT NULL, "
    "nbytes INTEGER NOT NULL, place BLOB NOT NULL"
)
ENDLESS = f"""CREATE VIEW records AS WITH RECURSIVE more(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM more)
    SELECT {FIELDS} FROM more JOIN kept_aside USING (id)"""

SCHEMAS: dict[str, Callable[[Path], None]] = {
    "records is a view that never ends": run("ALTER TABLE records RENAME TO kept_aside", ENDLESS),
    "meta is a view": run(
        "ALTER TABLE meta RENAME TO told", "CREATE VIEW meta AS SELECT id, body, sum FROM told"
    ),
    "a trigger": run("CREATE TRIGGER t AFTER UPDATE ON meta BEGIN DELETE FROM records; END"),
    "a trigger before a row": run(
        "CREATE TRIGGER t BEFORE INSERT ON records BEGIN SELECT RAISE(IGNORE); END"
    ),
    "a view beside": run("CREATE VIEW v AS SELECT * FROM records"),
    "a table beside": run("CREATE TABLE other (x)"),
    "an index on an expression": run("CREATE INDEX i ON records (length(zeroblob(nbytes)))"),
    "a generated column": run(
        "ALTER TABLE records ADD COLUMN more BLOB GENERATED ALWAYS AS (zeroblob(100000000)) VIRTUAL"
    ),
    "a column more": run("ALTER TABLE records ADD COLUMN more TEXT"),
    "a column in the place of another": rebuilt(COLUMNS.replace("version", "x").replace("name", "version")
        .replace("x INTEGER", "name INTEGER")),
    "a column computed from others": rebuilt(
        COLUMNS.replace("nbytes INTEGER NOT NULL", "nbytes INTEGER AS (length(note) * 100000)"),
        "id, version, name, note, place",
    ),
    "a check that runs a function": rebuilt(f"{COLUMNS}, CHECK (length(randomblob(nbytes + 1)) > 0)"),
    "a default": rebuilt(COLUMNS.replace("version INTEGER NOT NULL", "version INTEGER NOT NULL DEFAULT 7")),
    "columns of other types": rebuilt(COLUMNS.replace("place BLOB", "place REAL")),
    "no rows by number": rebuilt(COLUMNS, options="WITHOUT ROWID"),
    "names without case": rebuilt(COLUMNS.replace("name TEXT", "name TEXT COLLATE NOCASE UNIQUE")),
    "a virtual table": run(
        "DROP TABLE records", "CREATE VIRTUAL TABLE records USING fts5(version, name, note, nbytes, place)"
    ),
    "no records": run("DROP TABLE records"),
    "two rows of meta": run("INSERT INTO meta SELECT 2, body, sum FROM meta"),
    "no row of meta": run("DELETE FROM meta"),
}  # fmt: skip

METAS: dict[str, Callable[[Path], None]] = {
    "no object": forge_body(b"[1]"),
    "no JSON": forge_body(b"{"),
    "no text": forge_body(b"\xff\xfe"),
    "nothing": forge_body(b"{}"),
    "JSON that is deeper than the stack": forge_body(b"[" * 50_000),
    "a number of more digits than one can be read": forge_body(b'{"format": ' + b"9" * 50_000 + b"}"),
    "a megabyte": forge_body(b'{"format": 1, "directory": "' + b"x" * (1 << 20) + b'"}'),
    "a field that nobody knows": forge_meta(what=1),
    **{
        f"{name} is {value!r}": forge_meta(**{name: value})
        for name, values in {
            "format": (0, -1, "1", None, 1.0, True),
            "directory": (1, None, "x" * 10_000),
            "created_by": (1, "x" * 10_000),
            "segment_bytes": (0, -SEGMENT, 1, PAGE + 1, 2**63, 2**200, "65536", 65536.0),
            "alignment_bytes": (0, 1, -PAGE, 3 * PAGE, 2**40, "4096", None),
            "bandwidths": ([0, 1], [-1, 1], ["1", "2"], "12", {"0": 1}, [1] * 10_000, [2**70, 1]),
            "commit": (-1, 2**63, 2**200, "1", True, None),
            "records": (-1, 2**63, 2**200, "3", None),
            "digest": (-1, 2**64, "0", 1.5),
            "next_id": (0, -1, 1, 3, 2**63, 2**200, "4"),
        }.items()
        for value in values
    },
}  # fmt: skip


def twice(rows: list[Forged]) -> list[Forged]:
    return [*rows, replace(rows[1], id=77)]


HEADS: dict[str, Callable[[Path], None]] = {
    "a name that is no text": forge_b(name=b"b\xff\xfe"),
    "a name that is cut in a character": forge_b(name="ä".encode()[:1]),
    "an endless name": forge_b(name=b"b" * 2_000_000),
    "a number below 1": forge_b(id=0),
    "a negative number": forge_b(id=-(2**60)),
    "a version below 0": forge_b(version=-5),
    "two rows of one name": lambda path: forge_rows(path, twice),
    "a number that the next row gets": lambda path: forge_rows(
        path, lambda rows: [*rows[:2], replace(rows[2], id=50)], next_id=50
    ),
}

_B = (2 * PAGE, 5 * PAGE)  # where b is

PLACES: dict[str, Callable[[Path], None]] = {
    "fewer bytes than none": forge_b(nbytes=-1),
    "the fewest bytes": forge_b(nbytes=-(2**63)),
    "more bytes than there are addresses": forge_b(nbytes=2**62),
    "sums that are not there": forge_b(numbers=_B),
    "more sums than pieces": forge_b(numbers=(*_B, 1, 2)),
    "sums where none were kept": forge_b(kind=0, numbers=(*_B, 1)),
    "a kind of sums that is none": forge_b(kind=9),
    "something in the place of nothing": forge_b(zero=1),
    "half an extent": forge_b(count=2),
    "more extents than it has room for": forge_b(count=2**32 - 1),
    "no extent": forge_b(count=0),
    "bytes after the sums": forge_b(tail=b"abc"),
    "blocks of nothing": forge_b(block=0),
    "blocks of a byte": forge_b(block=1, kind=0, numbers=_B),
    "blocks that are cut elsewhere": forge_b(block=PAGE),
    "blocks of 4 GiB": forge_b(block=2**32 - 1),
    "bytes for which there is no room": forge_b(nbytes=2**46),
    "bytes beyond every file": forge_b(numbers=(2**47, 2**47 + 3 * PAGE, 1)),
    "bytes beyond every file that are not compared": forge_b(
        kind=0, numbers=(2**47, 2**47 + 3 * PAGE)
    ),
    "as many bytes as there are addresses": forge_b(
        kind=0, nbytes=2**47, block=2**30, numbers=(PAGE * 64, PAGE * 64 + 2**47)
    ),
    "bytes beyond every drive": forge_b(numbers=(2**63, 2**63 + 3 * PAGE, 1)),
    "bytes at no multiple": forge_b(numbers=(_B[0] + 1, _B[1] + 1, 1)),
    "bytes that end before they begin": forge_b(numbers=(_B[1], _B[0], 1)),
    "the same bytes twice": forge_b(nbytes=6 * PAGE, count=2, kind=0, numbers=(*_B, *_B)),
    "bytes in a file of an enormous number": lambda path: (
        forge_b(kind=0, numbers=(999_999_999 * SEGMENT, 999_999_999 * SEGMENT + 3 * PAGE))(path),
        (path / "tierstore-999999999.bin").write_bytes(b"x"),
    )[0],
}  # fmt: skip
"""What is said of ``b`` and cannot be: it costs that key, and no other."""

# ---------------------------------------------------------------------------------------- much of it


def many_rows(count: int, **fields: object) -> Callable[[Path], None]:
    """Say the same of many records, at the place of ``b``."""

    def more(rows: list[Forged]) -> list[Forged]:
        made = (
            replace(rows[1], id=10 + n, name=f"more {n}".encode(), version=1 + n % 7) for n in range(count)
        )
        return [rows[0], rows[2], *(replace(row, **fields) for row in made)]  # type: ignore[arg-type]

    return lambda path: forge_rows(path, more)


def broken_rows(count: int, note_bytes: int) -> Callable[[Path], None]:
    """Let many rows have checks that no flipped bit explains."""

    def forge(path: Path) -> None:
        many_rows(count, note=b"n" * note_bytes)(path)
        run("UPDATE records SET place = zeroblob(60) WHERE id >= 10")(path)

    return forge


def circles(depth: int, width: int) -> Callable[[Path], None]:
    """Let pages name the same page below them ``width`` times each: few pages, and no end of rows."""

    def forge(path: Path) -> None:
        with database(path) as opened:
            (root,) = opened.execute("SELECT rootpage FROM sqlite_master WHERE name = 'records'").fetchone()
        pages = (path / DB).read_bytes()
        leaf = pages[(root - 1) * PAGE : root * PAGE]
        first = len(pages) // PAGE + 1  # the leaf goes there, and the others behind it
        more = [leaf, *(_interior([first + level] * width) for level in range(depth))]
        whole = bytearray(pages + b"".join(more))
        whole[(root - 1) * PAGE : root * PAGE] = _interior([first + depth] * width)
        whole[28:32] = struct.pack(">I", len(whole) // PAGE)
        (path / DB).write_bytes(whole)

    return forge


def _interior(children: list[int]) -> bytes:
    """Return a page of a table that names others."""
    *left, right = children
    cells = [struct.pack(">I", child) + bytes([1 + n % 100]) for n, child in enumerate(left)]
    starts = [PAGE - 5 * (n + 1) for n in range(len(cells))]
    head = struct.pack(">BHHHBI", 5, 0, len(cells), starts[-1] if starts else 0, 0, right)
    head += b"".join(struct.pack(">H", start) for start in starts)
    return head + bytes(PAGE - len(head) - 5 * len(cells)) + b"".join(reversed(cells))


def long_and_broken_meta(path: Path) -> None:
    """Let a manifest say much of itself, with a checksum that no flipped bit explains."""
    with database(path) as opened:
        opened.execute("UPDATE meta SET body = CAST(? AS TEXT)", (b"x" * 600_000,))


MUCH: dict[str, Callable[[Path], None]] = {
    "rows that are all at one place": many_rows(12_000, kind=0, numbers=_B),
    "rows that no flipped bit explains": broken_rows(600, 3_000),
    "pages that name each other": circles(4, 300),
    "a text about itself that no flipped bit explains": long_and_broken_meta,
}
"""What takes a while: to be refused or opened in a time that goes with its size."""
