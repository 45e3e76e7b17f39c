"""The manifest: one SQLite file that names what a directory keeps.

Promises: after `commit` returned, a power loss leaves what it wrote; if it raises or never returns,
that or what was there before, whole.  What is read is what was written, or is said to be damaged.

Rule 1: the file appears under its name only when it is whole; so an empty or shorter one is damage.
Rule 2: after an error nobody knows what the database holds: it is opened and read again before it is
written again.
Rule 3: a manifest with damage is never written: it is put aside, and a sound one takes its place.

The directory has one owner, who holds its lock: nobody else has the file open.  Not thread-safe.
Knows nothing of slots, and of files no more than the bytes that `rows` makes of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tierstore.errors import BackendError, IntegrityError
from tierstore_backends.files.directory.commit_notes import NotedCommit
from tierstore_backends.files.directory.ownership import MANIFEST_NAME
from tierstore_backends.files.durability.claims import SCHEMA
from tierstore_backends.files.durability.meta import Meta, encode_meta
from tierstore_backends.files.durability.record_codec import Row
from tierstore_backends.files.durability.scan import UNREADABLE, Scan, digest
from tierstore_backends.paths import explain

_log = logging.getLogger("tierstore.files")

_MAGIC = b"SQLite format 3\0"
_WAL_KEPT_BYTES = 1 << 22  # the write-ahead log shrinks to this once its pages are in the database
_PUT = "INSERT OR REPLACE INTO records VALUES (?, ?, CAST(? AS TEXT), CAST(? AS TEXT), ?, ?)"
# Or SQLite opens no database that is shorter than it says.  Only for what is read, never written.
_TOLERANT = "PRAGMA writable_schema = ON"
_ERRNO = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_CANTOPEN: errno.ENOENT,
    sqlite3.SQLITE_BUSY: errno.EBUSY,
}


class Manifest:
    """One open manifest.  Made by `create`, `open` and `look`."""

    def __init__(self, path: Path, connection: sqlite3.Connection | None, meta: Meta) -> None:
        self.path = path
        self.meta = meta
        self.is_older = False  # whether the files were written since, and somebody said to go on with it
        self._connection = connection
        self._inode = path.stat().st_ino

    @classmethod
    def create(cls, folder: Path, meta: Meta, rows: Iterable[Row] = ()) -> Manifest:
        """Make a manifest in ``folder``, in place of one that may be there.

        Raises:
            BackendError: it cannot be written; what was there is there still.
        """
        path, draft = folder / MANIFEST_NAME, folder / f"{MANIFEST_NAME}.new"
        with _explained(draft, "made"):
            _remove(draft)
            draft.touch(mode=0o600, exist_ok=False)  # SQLite gives its log the same mode
            connection = _connect(draft)
            try:
                for statement in SCHEMA:
                    connection.execute(statement)
                connection.execute("BEGIN")
                connection.executemany(_PUT, rows)
                connection.execute("INSERT INTO meta VALUES (1, ?, ?)", encode_meta(meta))
                connection.execute("COMMIT")
            finally:
                connection.close()  # which moves everything into the database, and syncs it
            if _wal(draft).exists():
                raise BackendError(f"{draft} could not be completed: its log could not be emptied")
            draft.rename(path)
            _sync_folder(folder)
        with _explained(path, "opened"):
            return cls(path, _connect(path), meta)

    @classmethod
    def open(
        cls, folder: Path, *, salvage: bool, noted: Sequence[NotedCommit] = ()
    ) -> tuple[Manifest, Sequence[Row]]:
        """Open the manifest of ``folder`` and read its rows, which are whole.

        One in which something is damaged is put aside as ``tierstore.db.damaged`` and replaced, if all
        names are still known or ``salvage`` says to go on with those that are.

        Args:
            folder: where it is.
            salvage: whether to go on although something is lost.
            noted: commits that are known to have come to their end.

        Raises:
            IntegrityError: it is damaged, or older than those commits; nothing was changed.
            UsageError: a later version of tierstore wrote it.
            BackendError: it cannot be read.
        """
        path = folder / MANIFEST_NAME
        _check_magic(path)
        try:
            with _explained(path, "opened"):
                connection = _connect(path)
        except IntegrityError:  # SQLite does not even begin: it is shorter than it says
            manifest, rows, _ = cls._look(folder, salvage=salvage, noted=noted)
            return manifest._replace(rows), rows
        try:
            with _explained(path, "read"):
                reading = Scan(path, connection, _size_bytes(path))
                reading.run()
            reading.judge(salvage=salvage, noted=noted)
            with _explained(path, "opened"):
                _remove(path.with_name(f"{MANIFEST_NAME}.new"))
        except BaseException:
            connection.close()
            raise
        manifest = cls(path, connection, reading.meta)
        manifest.is_older = reading.is_older
        if reading.is_damaged:
            manifest = manifest._replace(reading.rows)
        return manifest, reading.rows

    @classmethod
    def look(
        cls, folder: Path, *, salvage: bool, noted: Sequence[NotedCommit] = ()
    ) -> tuple[Manifest, Sequence[Row]]:
        """Read the manifest of ``folder`` and change nothing there: its rows, as `open` returns them.

        SQLite cannot read a database in WAL mode without files of its own beside it.  So one without a log
        is opened as immutable, which needs none; and of one with a log, which a process left that was
        killed, a copy in the system's temporary directory is opened.  Damage is put right in what is
        returned, not in the file.

        Returns:
            The manifest, which is not open, and its rows.

        Raises:
            IntegrityError, UsageError, BackendError: as from `open`.
        """
        manifest, rows, is_damaged = cls._look(folder, salvage=salvage, noted=noted)
        if is_damaged:
            _log.warning("%s is damaged: what is wrong is put right here, not in the file", manifest.path)
        return manifest, rows

    @classmethod
    def _look(
        cls, folder: Path, *, salvage: bool, noted: Sequence[NotedCommit]
    ) -> tuple[Manifest, Sequence[Row], bool]:
        """Read a manifest; return whether it is damaged, too."""
        path = folder / MANIFEST_NAME
        _check_magic(path)
        with contextlib.ExitStack() as room:
            with _explained(path, "opened"):
                connection = room.enter_context(contextlib.closing(_connect_to_read(path, room)))
            with _explained(path, "read"):
                reading = Scan(path, connection, _size_bytes(path))
                reading.run()
            reading.judge(salvage=salvage, noted=noted)
        manifest = cls(path, None, reading.meta)
        manifest.is_older = reading.is_older
        return manifest, reading.rows, reading.is_damaged

    def reopen(self) -> tuple[Manifest, Sequence[Row]]:
        """Open and read it again after an error.

        Raises:
            BackendError: it cannot be read, or is not what it was.
        """
        manifest, rows = Manifest.open(self.path.parent, salvage=False, noted=[NotedCommit(self.meta.commit)])
        if manifest.meta.directory != self.meta.directory:
            manifest.close()
            raise BackendError(f"{self.path} was replaced by another while it was in use")
        return manifest, rows

    @property
    def is_open(self) -> bool:
        """Whether it may be written: ``False`` after an error, until it is opened again."""
        return self._connection is not None

    def check(self) -> None:
        """Look whether the file is still under its name.

        Raises:
            BackendError: it was removed or replaced: what is written goes nowhere.
        """
        with _explained(self.path, "found"):
            if self.path.stat().st_ino != self._inode:
                raise BackendError(f"the manifest {self.path} was replaced while it was in use")

    def commit(self, dropped: Iterable[int], rows: Iterable[Row], meta: Callable[[], Meta]) -> None:
        """Remove the rows with the ids ``dropped``, write ``rows``, then ``meta()``: all, or nothing.

        Blocks until a power loss would leave it.

        Raises:
            BackendError: it failed, or perhaps it did not; the manifest is to be opened again.
        """
        connection = self._connection
        assert connection is not None  # who commits looks at ``is_open``
        try:
            with _explained(self.path, "written"):
                connection.execute("BEGIN IMMEDIATE")
                connection.executemany("DELETE FROM records WHERE id = ?", ((id_,) for id_ in dropped))
                connection.executemany(_PUT, rows)
                new = meta()
                connection.execute("UPDATE meta SET body = ?, sum = ? WHERE id = 1", encode_meta(new))
                connection.execute("COMMIT")
        except BaseException:
            self.close()
            raise
        self.meta = new

    def close(self) -> None:
        """Close the file.  What was committed stays, in the database or in its log.  Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.rollback()
            with contextlib.suppress(sqlite3.Error):
                connection.close()  # empties and removes the log, if the disk lets it

    def disown(self) -> None:
        """Forget the file in the child of a fork.

        It is not closed, nor when the interpreter ends: closing would tidy up what is the parent's.
        """
        connection, self._connection = self._connection, None
        if connection is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))

    def _replace(self, rows: Sequence[Row]) -> Manifest:
        """Put the file aside and write one that holds ``rows`` alone."""
        meta = replace(
            self.meta,
            records=len(rows),
            digest=digest(rows),
            next_id=max((row[0] for row in rows), default=0) + 1,
        )
        self.close()
        aside = self.path.with_name(f"{MANIFEST_NAME}.damaged")
        with _explained(self.path, "put aside"):
            if _wal(self.path).exists():
                raise BackendError(f"{self.path} is damaged, and its log could not be emptied to replace it")
            aside.unlink(missing_ok=True)
            os.link(self.path, aside)
        _log.error("%s was damaged: a sound one replaces it, and it is kept as %s", self.path, aside.name)
        manifest = Manifest.create(self.path.parent, meta, rows)
        manifest.is_older = self.is_older
        return manifest


def _connect(path: Path, *first: str) -> sqlite3.Connection:
    """Open a database, after the statements ``first``."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        _distrust(connection)
        for statement in first:
            connection.execute(statement)
        # Before the first access: so that the log's index is in memory, not in a file that is mapped.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA journal_size_limit = {_WAL_KEPT_BYTES}")
    except BaseException:
        connection.close()
        raise
    return connection


def _distrust(connection: sqlite3.Connection) -> None:
    """Let a database be anybody's: its text need be none, and what is in it runs nothing."""
    connection.text_factory = bytes
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")


def _connect_to_read(path: Path, room: contextlib.ExitStack) -> sqlite3.Connection:
    """Open a database, or a copy that ``room`` removes: see `Manifest.look`."""
    log = _wal(path)
    if not (log.exists() and log.stat().st_size):
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)
        _distrust(connection)
        connection.execute(_TOLERANT)
        return connection
    folder = Path(room.enter_context(tempfile.TemporaryDirectory(prefix="tierstore-")))
    for each in (path, log):
        shutil.copyfile(each, folder / each.name)
    return _connect(folder / path.name, _TOLERANT)


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            begin = file.read(512)
    except OSError as error:
        raise BackendError(f"the manifest {path} cannot be read: {explain(error)}") from error
    if len(begin) < 512 or not begin.startswith(_MAGIC):
        # Never let SQLite have it: it takes an empty file for a new one, and deletes the log beside it.
        raise IntegrityError(
            f"{path} is not a manifest: it is {path.stat().st_size} bytes long and begins with "
            f"{begin[:16]!r}: nothing can be salvaged from it, put a copy of it back. Nothing was changed"
        )


@contextlib.contextmanager
def _explained(path: Path, done: str) -> Iterator[None]:
    """Turn what SQLite and the file system raise into errors that name the file."""
    try:
        yield
    except sqlite3.Error as error:
        primary = _primary(error)
        code = errno.errorcode.get(_ERRNO.get(primary, 0), "")
        name = getattr(error, "sqlite_errorname", None) or type(error).__name__
        kind = IntegrityError if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) else BackendError
        why = f"{code}, {name}" if code else name
        raise kind(f"the manifest {path} could not be {done}: {error} ({why})") from error
    except OSError as error:
        raise BackendError(f"the manifest {path} could not be {done}: {explain(error)}") from error
    except UNREADABLE as error:
        raise IntegrityError(f"the manifest {path} could not be {done}: {error!r}") from error


def _primary(error: sqlite3.Error) -> int:
    """Return SQLite's code for a kind of error; 0: it is Python's own."""
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF


def _size_bytes(path: Path) -> int:
    """Return how long a database and its log are: no more than that can be in them."""
    log = _wal(path)
    return path.stat().st_size + (log.stat().st_size if log.exists() else 0)


def _wal(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def _remove(draft: Path) -> None:
    """Remove a manifest that was never completed."""
    draft.unlink(missing_ok=True)
    _wal(draft).unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
