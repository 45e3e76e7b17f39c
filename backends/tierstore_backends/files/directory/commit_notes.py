"""What owners note of the last commit that came to its end: in the lock file, and in one that stays.

Both are witnesses, no promises: nothing waits for them to reach the disk while a store is open.  But what
is noted came to its end, so who finds an older manifest knows that it is older.  The *witness* stays when
the lock goes: the bytes beside it were last written under at least that commit, and belong to that store.

Rule 1: a note has a check of all of it; one flipped bit is put right, anything else is no note.
Rule 2: a note says which store it is of, and what it says of directories is of the place where it was
written: one that was copied from elsewhere says nothing here.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from tierstore_backends.files.bit_flips import flips

WITNESS_NAME: Final = "tierstore-witness.bin"
"""It ends like the files whose commit it notes, and goes where they go."""

_MOST_BYTES = 256
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class NotedCommit:
    """A commit that came to its end.

    Attributes:
        commit: its number; 0: none did, or it is not known.
        store: a sum of the store's name; empty: it is not known.
        where: the file that says so, for messages.
        is_witness: whether it is about the bytes beside it.
    """

    commit: int = 0
    store: str = ""
    where: str = ""
    is_witness: bool = False

    def is_of(self, directory: str) -> bool:
        """Whether it may be of the store ``directory``."""
        return self.store in ("", sum_of(directory))


@dataclass(frozen=True, slots=True)
class LockNote:
    """What a lock file says.

    Attributes:
        pid: its owner's process; 0: unknown.
        made: how many directories were made for it.
        noted: the last commit that came to its end there.
    """

    pid: int = 0
    made: int = 0
    noted: NotedCommit = NotedCommit()


def sum_of(text: str) -> str:
    """Return what stands for a name or a path in a note."""
    return xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogateescape"))


def encode_lock(folder: Path, note: LockNote) -> bytes:
    """Return the text of a lock file."""
    told = (note.pid, note.made, note.noted.commit, note.noted.store or "-", sum_of(str(folder)))
    return _sealed("".join(f"{each}\n" for each in told).encode())


def read_lock(lock_fd: int, folder: Path) -> LockNote:
    """Return what a lock file says; of what is no note nothing but the process, as far as it can be told."""
    try:
        text = os.pread(lock_fd, _MOST_BYTES, 0)
    except OSError:  # it is no file
        return LockNote()
    where = f"{folder}'s lock"
    told = _opened(text)
    if told is not None and len(told) == 5:
        made = _number(told[1]) if told[4] == sum_of(str(folder)) else 0
        return LockNote(_number(told[0]), made, NotedCommit(_number(told[2]), told[3].strip("-"), where))
    lines = text.decode("ascii", "replace").split("\n")
    if 3 <= len(lines) <= 4 and not lines[-1] and all(map(_is_number, lines[:-1])):
        # As versions before the check wrote it: the process, directories, and the commit of what is kept.
        return LockNote(_number(lines[0]), 0, NotedCommit(_number(lines[2]), "", where))
    return LockNote(_number(lines[0]))


class Witness:
    """The file that stays: open from the first commit that is noted on.

    Args:
        folder: where it is.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / WITNESS_NAME
        self._fd: int | None = None

    def note(self, commit: int, directory: str) -> None:
        """Note a commit.

        Raises:
            OSError: it cannot be written.
        """
        if self._fd is None:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
        text = _sealed(f"tierstore witness\n{sum_of(directory)}\n{commit:020}\n".encode())
        os.pwrite(self._fd, text, 0)  # of one length always: it is never half of it

    def close(self, *, sync: bool) -> None:
        """Close the file; before, let what was noted survive a power loss, if that can be."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                if sync:
                    os.fdatasync(fd)
            os.close(fd)


def read_witness(folder: Path) -> NotedCommit:
    """Return what the files of a directory were last written under; nothing where nobody says it."""
    path = folder / WITNESS_NAME
    try:
        fd = os.open(path, os.O_RDONLY | _FLAGS)
    except OSError:
        return NotedCommit()
    try:
        told = _opened(os.pread(fd, _MOST_BYTES, 0))
    except OSError:
        return NotedCommit()
    finally:
        os.close(fd)
    if told is None or len(told) != 3 or told[0] != "tierstore witness":
        return NotedCommit()
    return NotedCommit(_number(told[2]), told[1], str(path), is_witness=True)


def _sealed(text: bytes) -> bytes:
    return text + xxhash.xxh3_64_hexdigest(text).encode() + b"\n"


def _opened(sealed: bytes) -> list[str] | None:
    """Return the lines of a note that is whole, but for one bit; ``None``: it is none."""
    for candidate in (sealed, *flips(sealed)):
        text, check = candidate[:-17], candidate[-17:]
        if check == xxhash.xxh3_64_hexdigest(text).encode() + b"\n":
            return text.decode("ascii", "replace").split("\n")[:-1]
    return None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _number(text: str) -> int:
    return int(text) if _is_number(text) else 0
