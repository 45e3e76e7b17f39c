"""One reading of a manifest that may be damaged, or forged: what can be believed of it, and what is wrong.

Rule 1: nothing is told of which `claims` and the checksums do not both say that it can be.
Rule 2: what is wrong with a row costs that row, and that is a record less than the manifest says: it is
refused, unless somebody says to go on with the others.
Rule 3: reading ends, and takes memory, in proportion to the size of the files, whatever they say: pages that
refer to each other in circles name rows for which there is no room.

Changes nothing.  Knows nothing of files but their sizes.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy

from tierstore.errors import IntegrityError, UsageError
from tierstore_backends.files.bit_flips import flips
from tierstore_backends.files.directory.commit_notes import NotedCommit
from tierstore_backends.files.durability.claims import ClaimError, check_meta_table, check_schema, head_fault
from tierstore_backends.files.durability.meta import (
    FORMAT,
    LaterFormatError,
    Meta,
    MetaError,
    decode_meta,
    meta_sum,
)
from tierstore_backends.files.durability.record_codec import (
    MENDED_BYTES,
    Row,
    RowDamage,
    as_row,
    is_whole,
    mend,
)

_log = logging.getLogger("tierstore.files")

UNREADABLE = (MemoryError, OverflowError, UnicodeError)
"""What else damage makes of lengths, and of SQLite's messages."""

_FAILURES = (sqlite3.Error, *UNREADABLE)
_NO_SUCH = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR})  # page, or table
_LEAST_ROW_BYTES = 8  # of a page, beside its contents
_MOST_VALUE_BYTES = 1 << 28  # the place of 10**14 bytes in blocks of 4 MiB
_MOST_META_BYTES = 1 << 16
# Of all rows: a second or two for a thousand short ones; so many flipped bits are something else.
_MOST_HASHED_BYTES = 1 << 30
_HASH_BYTES = 500  # that a hash of nothing takes the time of
_TOLD_FAULTS = 3


class Scan:
    """One reading of a database.

    Args:
        path: its file.
        connection: to it, or to a copy.
        size_bytes: how long it and its log are.

    Attributes:
        meta: what the manifest says of itself.
        rows: the rows that are whole, or could be mended, and can be believed.
        is_damaged: whether anything is not as it was written.
        is_older: whether the files were written since, or under another one.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, size_bytes: int) -> None:
        self._path = path
        self._connection = connection
        self._size_bytes = size_bytes
        self._left_bytes = size_bytes  # for rows
        self._left_hashed_bytes = _MOST_HASHED_BYTES
        self._damage: list[str] = []  # all of it, in words
        self._is_incomplete = False  # whether a record is missing
        self.rows: list[Row] = []
        self.is_older = False
        self.meta: Meta

    @property
    def is_damaged(self) -> bool:
        """Whether anything is not as it was written."""
        return bool(self._damage)

    def run(self) -> None:
        """Read it.

        Raises:
            IntegrityError: it is none that tierstore makes, or what it says of itself cannot be read.
            UsageError: a later version of tierstore wrote it.
            sqlite3.Error: it cannot be read.
        """
        before = self._connection.getlimit(sqlite3.SQLITE_LIMIT_LENGTH)
        most_bytes = min(self._size_bytes, _MOST_VALUE_BYTES)
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, most_bytes)
        try:
            self._run()
        finally:
            self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, before)

    def judge(self, *, salvage: bool, noted: Sequence[NotedCommit]) -> None:
        """Raise if a name is lost, or the files are not its own, and nobody said to go on."""
        age = self._age(noted)
        self.is_older = age is not None
        if age is not None:
            message = f"{self._path} {age}"
        elif self._is_incomplete:
            message = (
                f"{self._path} is damaged ({'; '.join(self._damage)}): "
                f"of {self.meta.records} records {len(self.rows)} can be read"
            )
        else:
            return
        if not self.rows and self.meta.records:  # going on would give back every byte
            raise IntegrityError(
                f"{message}: nothing can be salvaged, put a copy of it back. Nothing was changed"
            )
        if not salvage:
            raise IntegrityError(f"{message}. Nothing was changed. salvage=True goes on with what is there")
        _log.error("%s. Going on with what is there", message)

    def _age(self, noted: Sequence[NotedCommit]) -> str | None:
        """Say how the manifest is not that of the files, if so."""
        directory = self.meta.directory
        for each in noted:
            if each.is_witness and not each.is_of(directory):
                return f"is that of the store {directory}, and {each.where} says that the files are another's"
        newest = max(
            (each for each in noted if each.is_of(directory)), key=lambda each: each.commit, default=None
        )
        if newest is None or newest.commit <= self.meta.commit:
            return None
        return (
            f"is at commit {self.meta.commit}, and commit {newest.commit} had come to its end: "
            f"{self._path.name}-wal is damaged or was not copied, or an older copy was put back"
            f"{f' ({newest.where} says so)' if newest.where else ''}"
        )

    def _run(self) -> None:
        self._read_schema_and_meta()
        rows, has_places = self._sorted_out(list(self._raw_rows()))
        rows = self._believed(rows)
        self.rows = self._each_once(rows)
        self._is_incomplete = len(self.rows) != self.meta.records or (
            has_places and digest(self.rows) != self.meta.digest
        )
        if self._is_incomplete:
            self._damage.append("rows are missing, or are not its own")

    # --- what it is ---------------------------------------------------------------------------

    def _read_schema_and_meta(self) -> None:
        try:
            check_meta_table(self._connection)
            self._read_meta()  # first: of a later format everything else may differ
            if check_schema(self._connection):
                self._damage.append("a bit of its schema")
        except ClaimError as claim:
            raise self._refusal(f"is no manifest of tierstore's: {claim}") from claim
        except sqlite3.DatabaseError as error:
            if ((getattr(error, "sqlite_errorcode", None) or 0) & 0xFF) not in _NO_SUCH:
                raise
            raise self._refusal(f"is damaged: what it says of itself cannot be read ({error})") from error

    def _read_meta(self) -> None:
        found = self._connection.execute("SELECT body, sum FROM meta LIMIT 2").fetchall()
        if len(found) > 1:
            raise self._refusal("is no manifest of tierstore's: it says two things of itself")
        for body, total in _candidates(*(found[0] if found else (None, None))):
            if meta_sum(body) == total:
                self.meta = self._decoded(body)
                if (body, total) != found[0]:
                    self._damage.append("a bit of what it says of itself")
                return
        raise self._refusal("is damaged: what it says of itself has a wrong checksum")

    def _decoded(self, body: bytes) -> Meta:
        try:
            return decode_meta(body)
        except LaterFormatError as later:
            what, made_by = later.args
            raise UsageError(
                f"{self._path} has {what}, and this version of tierstore knows formats "
                f"up to {FORMAT}: upgrade tierstore (it was made by {made_by})"
            ) from None
        except MetaError as fault:
            raise self._refusal(f"says of itself what cannot be: {fault}") from fault

    def _refusal(self, what: str) -> IntegrityError:
        return IntegrityError(
            f"{self._path} {what}. Without that nothing can be salvaged: put a copy of it back. "
            f"Nothing was changed"
        )

    # --- its rows -----------------------------------------------------------------------------

    def _raw_rows(self) -> Iterator[Sequence[object]]:
        """Yield every row that can be reached; look whether the pages are as they should be."""
        try:
            yield from self._affordable(self._connection.execute("SELECT * FROM records"))
            # Only now: it goes as deep as pages say, and the reading above is stopped where they lie.
            found = self._connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        except _FAILURES as error:
            self._damage.append(str(error))
            self._left_bytes = self._size_bytes
            yield from self._affordable(self._rows_around_damage())
        else:
            if found != b"ok":
                self._damage.append(found.decode("utf-8", "replace"))

    def _affordable(self, rows: Iterable[Sequence[object]]) -> Iterator[Sequence[object]]:
        """Yield rows as long as the files have room for them."""
        for raw in rows:
            self._left_bytes -= _LEAST_ROW_BYTES + sum(len(each) for each in raw if isinstance(each, bytes))
            if self._left_bytes < 0:
                self._damage.append(f"its pages name more rows than {self._size_bytes} bytes have room for")
                return
            yield raw

    def _rows_around_damage(self) -> Iterator[Sequence[object]]:
        """Yield every row that can be reached, going around pages that cannot be read."""
        after = failures = 0
        most_failures = 64 + self._size_bytes // 8
        while after < self.meta.next_id and failures < most_failures:
            try:
                rows = self._connection.execute("SELECT * FROM records WHERE id > ? ORDER BY id", (after,))
                for raw in rows:
                    after = max(after, raw[0])
                    yield raw
            except _FAILURES:
                failures += 1
                after += 1 + failures // 256  # a page has some forty rows
            else:
                return

    def _sorted_out(self, raw: Sequence[Sequence[object]]) -> tuple[list[Row], bool]:
        """Return the rows that are whole, or could be mended, and whether no place of one is lost."""
        broken = [each for each in raw if not is_whole(*each)]
        rows: list[Row] = [each for each in raw if is_whole(*each)] if broken else list(raw)  # type: ignore[arg-type,misc]  # these have the types
        if not broken:
            return rows, True
        self._damage.append(f"{len(broken)} rows have wrong checksums")
        mended = [mend(each, search=self._can_search(each)) for each in broken]
        rows += [row for row, _ in mended if row is not None]
        return rows, all(damage is RowDamage.REPAIRED for _, damage in mended)

    def _can_search(self, raw: Sequence[object]) -> bool:
        """Whether there is time to look for a flipped bit in a row."""
        row = as_row(raw)
        if row is None:
            return False
        nbytes = len(row[2]) + len(row[3]) + len(row[5])
        self._left_hashed_bytes -= 8 * nbytes * (nbytes + _HASH_BYTES)
        return self._left_hashed_bytes >= 0

    def _believed(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows that say nothing that cannot be."""
        believed: list[Row] = []
        faults: list[str] = []
        for row in rows:
            fault = head_fault(row, self.meta)
            if fault is None:
                believed.append(row)
            else:
                faults.append(f"row {row[0]} says what cannot be: {fault}")
        self._tell(faults)
        return believed

    def _each_once(self, rows: Sequence[Row]) -> list[Row]:
        """Return the newest row of each name and number: pages that are read twice bring them twice."""
        if len({row[2] for row in rows}) == len({row[0] for row in rows}) == len(rows):
            return list(rows)
        newest = sorted(rows, key=lambda row: row[1])
        by_name = {row[2]: row for row in newest}
        by_number = {row[0]: row for row in by_name.values()}
        self._tell([f"{len(rows) - len(by_number)} rows have the name, or the number, of another"])
        return list(by_number.values())

    def _tell(self, faults: Sequence[str]) -> None:
        self._damage += faults[:_TOLD_FAULTS]
        if len(faults) > _TOLD_FAULTS:
            self._damage.append(f"and {len(faults) - _TOLD_FAULTS} more")


def digest(rows: Iterable[Row]) -> int:
    """Return what tells one set of rows from another: the sum of their checks."""
    checks = numpy.frombuffer(b"".join([row[5][:8] for row in rows]), "<u8")
    return int(checks.sum(dtype=numpy.uint64))


def _candidates(body: object, total: object) -> Iterator[tuple[bytes, bytes]]:
    """Yield what was read, and everything that is one flipped bit away from it."""
    if not isinstance(body, bytes) or not isinstance(total, bytes) or len(body) > _MOST_META_BYTES:
        return
    yield body, total
    if len(body) + len(total) <= MENDED_BYTES:
        yield from ((flipped, total) for flipped in flips(body))
        yield from ((body, flipped) for flipped in flips(total))
