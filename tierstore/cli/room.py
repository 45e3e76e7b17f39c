"""The directory of its own in which ``doctor`` tries things at a path: nothing of it stays.

Rule 1: it is removed on the way out, whatever ends the verb; its name says whose it is before it is made, so
that there is no moment in which it could be forgotten.
Rule 2: who is killed leaves it; the next doctor at the same path removes what nobody holds any more.
Rule 3: nothing else is touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tierstore.cli.ending import held
from tierstore.errors import BackendError

_PREFIX: Final = "tierstore-doctor-"
_NAME: Final = re.compile(_PREFIX + r"[0-9]+-[0-9a-f]{8}", re.ASCII)
_ATTEMPTS: Final = 8  # another doctor may take a new one for a dead one's, once each


@contextlib.contextmanager
def room(folder: Path) -> Iterator[Path]:
    """Make a directory in ``folder`` for as long as the block lasts.

    Raises:
        BackendError: it cannot be made.
    """
    path = folder / own_name()
    try:
        _sweep(folder)
        try:
            lock_fd = _made(path)
        except OSError as error:
            raise BackendError(f"{folder}: cannot be written or read: {error.strerror}") from error
        try:
            yield path
        finally:
            os.close(lock_fd)
    finally:
        _remove(path)


def own_name() -> str:
    """Return a new name that says whose it is."""
    return f"{_PREFIX}{os.getpid()}-{os.urandom(4).hex()}"


def remove_ours(folder: Path) -> None:
    """Remove whatever of this process is in ``folder``: what an interrupt of a removal left."""
    for path in folder.glob(f"{_PREFIX}{os.getpid()}-*"):
        _remove(path)


def _remove(path: Path) -> None:
    with held():
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _made(path: Path) -> int:
    """Make the directory and hold it.

    Raises:
        OSError: it cannot be made.
    """
    for _ in range(_ATTEMPTS):
        path.mkdir(mode=0o700, exist_ok=True)
        lock_fd = _held(path)
        if lock_fd is not None:
            return lock_fd
    raise FileExistsError(f"{path} is taken away again and again")


def _held(path: Path) -> int | None:
    """Hold a directory; ``None``: somebody else does, or it is gone."""
    try:
        lock_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.stat().st_ino == os.fstat(lock_fd).st_ino:
            return lock_fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(lock_fd)
        raise
    os.close(lock_fd)
    return None


def _sweep(folder: Path) -> None:
    """Remove what dead doctors left."""
    with contextlib.suppress(OSError):  # who cannot read here is told when making
        for path in folder.iterdir():
            if _NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                _sweep_one(path)


def _sweep_one(path: Path) -> None:
    with contextlib.suppress(OSError):  # it is somebody else's
        lock_fd = _held(path)
        if lock_fd is not None:
            _remove(path)
            os.close(lock_fd)
