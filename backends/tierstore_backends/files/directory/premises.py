"""What a durable directory may consist of, looked at before any of it is opened.

Promises: nothing is opened that would wait for somebody, as a pipe does; and nothing is written to through a
name that is another file's as well.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from tierstore.errors import BackendError
from tierstore_backends.files.directory.commit_notes import WITNESS_NAME
from tierstore_backends.files.directory.ownership import (
    DRIVE_NAME,
    LOCK_NAME,
    MANIFEST_NAME,
    Keeping,
    segment_index,
)
from tierstore_backends.paths import explain

_OURS = frozenset(
    {MANIFEST_NAME, DRIVE_NAME, LOCK_NAME, WITNESS_NAME}
    | {f"{MANIFEST_NAME}{end}" for end in ("-wal", "-shm", ".new", ".new-wal", ".damaged")}
)
_NEVER = f"{MANIFEST_NAME}-journal"
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_premises(folders: Sequence[Path], *, is_read_only: bool) -> None:
    """Refuse directories in which something under a name of ours is no file of ours.  Touches nothing.

    Raises:
        BackendError: there is such a thing; the message names it and says what it is.
    """
    for folder in folders:
        try:
            found = {
                entry.name: entry.lstat()
                for entry in (folder.iterdir() if folder.is_dir() else ())
                if entry.name in _OURS or entry.name == _NEVER or _is_segment(entry.name)
            }
        except OSError as error:
            raise BackendError(f"{folder} cannot be read: {explain(error)}") from error
        for name, status in found.items():
            fault = _fault(name, status, found, is_read_only=is_read_only)
            if fault is not None:
                raise BackendError(f"{folder / name} {fault}. Nothing was touched")


def _is_segment(name: str) -> bool:
    return segment_index(name, Keeping.DURABLE) is not None


def _fault(
    name: str, status: os.stat_result, found: Mapping[str, os.stat_result], *, is_read_only: bool
) -> str | None:
    if name == _NEVER:
        return "is none of tierstore's, and SQLite would undo in the manifest what it says: move it away"
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        return f"is {_KINDS.get(kind, 'something else')}: a durable store has regular files only"
    ours = sum(
        1 for other in found.values() if (other.st_dev, other.st_ino) == (status.st_dev, status.st_ino)
    )
    if status.st_nlink > ours and not is_read_only:
        return (
            f"has {status.st_nlink} names (hard links), and what is written here would be written under the "
            f"others as well: put a copy in its place, or open it with read_only=True"
        )
    return None
