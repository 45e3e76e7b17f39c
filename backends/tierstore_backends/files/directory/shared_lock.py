"""Who looks into a directory without owning it: nothing there is written, not even a lock file.

Rule 1: where a lock file is, it is locked, shared with other readers: an owner is kept out as long as one
looks, and where one is in already, the reader is refused.
Rule 2: where there is none nobody is in, and nobody can be kept out, for a file would have to be made.
So the reader looks at the end whether the manifest is still what it was: what one commit named stays where
it is until the next, which changes the manifest.

Stands where a `DirectoryOwner` or `DirectoryLocks` would, and does nothing of what changes a directory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from tierstore.errors import BackendError
from tierstore_backends.files.directory.commit_notes import NotedCommit, read_lock, read_witness
from tierstore_backends.files.directory.ownership import MANIFEST_NAME, lock_shared, unlock
from tierstore_backends.paths import explain

_Signs = tuple[object, ...]


class SharedLock:
    """The right to look at one directory, or at several of one store.

    Args:
        folders: the first has the manifest.

    Raises:
        UsageError: a live backend owns one; the message names its process.
        BackendError: one cannot be read.

    Attributes:
        noted: commits that are known to have come to their end.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folder = folders[0]
        self.noted: tuple[NotedCommit, ...] = ()
        self._locks: list[int] = []
        try:
            for folder in folders:
                self.noted += (read_witness(folder),)
                lock_fd = lock_shared(folder)
                if lock_fd is not None:
                    self._locks.append(lock_fd)
                    self.noted += (read_lock(lock_fd, folder).noted,)
            self._signs = self._look()
        except OSError as error:
            self.release()
            raise BackendError(f"{self.folder} cannot be read: {explain(error)}") from error
        except BaseException:
            self.release()
            raise

    def check(self) -> None:
        """Look whether everything is still as it was found.

        Raises:
            BackendError: somebody else has changed it meanwhile.
        """
        try:
            signs = self._look()
        except OSError as error:
            raise BackendError(f"{self.folder} was taken away while it was read: {error}") from error
        if signs != self._signs:
            raise BackendError(
                f"{self.folder} was changed by another process while it was read here: what was read may be "
                f"partly old and partly new. Read it again when nobody else has it open",
                transient=True,
            )

    def note_commit(self, commit: int, directory: str) -> None:
        """Note nothing: a reader commits nothing."""
        del commit, directory

    def sweep(self) -> None:
        """Remove nothing: what a dead owner left is the next owner's affair."""

    def leave(self) -> None:
        """Let owners in again.  Idempotent."""
        locks, self._locks = self._locks, []
        for lock_fd in locks:
            unlock(lock_fd)

    def release(self) -> None:
        """Let owners in again.  Idempotent."""
        self.leave()

    def disown(self) -> None:
        """Forget the directory in the child of a fork."""
        locks, self._locks = self._locks, []
        for lock_fd in locks:
            os.close(lock_fd)

    def _look(self) -> _Signs:
        """Return what changes when somebody commits."""
        found = (self.folder / MANIFEST_NAME).stat()
        log_bytes = log_time = 0
        with contextlib.suppress(FileNotFoundError):
            log = (self.folder / f"{MANIFEST_NAME}-wal").stat()
            log_bytes, log_time = log.st_size, log.st_mtime_ns if log.st_size else 0  # empty: as if none
        return found.st_ino, found.st_size, found.st_mtime_ns, log_bytes, log_time
