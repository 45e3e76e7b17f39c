"""Who may use a directory: one live owner, held by a lock that dies with its process.

Rule 1: the owner is whoever holds ``flock`` on the lock file; the process inside is for messages.
Rule 2: only files whose names are ours are ever touched.
Rule 3: what a dead owner left is swept by the next one; what a live one holds is refused.
Rule 4: on release nothing of ours is left: neither files, nor the lock, nor a directory that was
made for them, by this owner or by a dead one before it, unless something foreign is in it.
Rule 5: an owner of kept files notes each commit that came to its end in the lock file, and in a witness that
stays when it leaves: see `notes`.
Rule 6: what is kept is no scratch: who wants scratch space is refused where a manifest or kept files
are, and an owner of kept files leaves them where they are.

Knows nothing of what the files contain.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import re
import stat
import weakref
from dataclasses import replace
from pathlib import Path

from tierstore.callers import opener
from tierstore.errors import BackendError, UsageError
from tierstore_backends.files.directory.commit_notes import (
    LockNote,
    NotedCommit,
    Witness,
    encode_lock,
    read_lock,
    read_witness,
    sum_of,
)
from tierstore_backends.paths import explain, matter_with, takes_nothing

LOCK_NAME = "tierstore.lock"  # one for both, so that they keep each other out
_CLAIM_ATTEMPTS = 100
_LOCK_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

PROBE_NAME = "tierstore-scratch-probe.bin"
MANIFEST_NAME = "tierstore.db"
DRIVE_NAME = "tierstore-drive.json"


class Keeping(enum.Enum):
    """What becomes of an owner's files when it leaves, or dies."""

    SCRATCH = "tierstore-scratch-"  # they go
    DURABLE = "tierstore-"  # they stay


def segment_name(index: int, keeping: Keeping = Keeping.SCRATCH) -> str:
    """Name the ``index``-th file."""
    return f"{keeping.value}{index:04d}.bin"


def segment_index(name: str, keeping: Keeping) -> int | None:
    """Return which file is named ``name``; ``None`` if it is none of them."""
    found = _SEGMENT[keeping].fullmatch(name)
    index = int(found[1]) if found else None
    return index if index is not None and segment_name(index, keeping) == name else None


_SEGMENT = {keeping: re.compile(keeping.value + r"([0-9]{4,9})\.bin", re.ASCII) for keeping in Keeping}


class DirectoryOwner:
    """The right to a directory, from ``claim`` to ``release``."""

    def __init__(self, folder: Path, lock_fd: int, made: int, keeping: Keeping) -> None:
        self.folder = folder
        self._keeping = keeping
        self.noted: tuple[NotedCommit, ...] = ()  # commits that are known to have come to their end
        self._note = LockNote()
        self._witness = Witness(folder)
        self._lock_fd: int | None = lock_fd
        self.opened_by = opener()
        _owners.add(self)
        self._made = made  # this many directories, from ``folder`` upwards, exist only for us

    @classmethod
    def claim(cls, folder: Path, keeping: Keeping = Keeping.SCRATCH) -> DirectoryOwner:
        """Make ``folder`` if it is missing and lock it; sweep scratch files that a dead owner left.

        Who keeps files looks at them first and sweeps then, by `sweep`.

        Raises:
            UsageError: a live backend owns it, in this process or another; the message names it.  Or
                it is wanted as scratch space, and there are files that are kept.
            BackendError: it cannot be made, locked or swept.
        """
        made = 0
        try:
            for _ in range(_CLAIM_ATTEMPTS):
                made = max(made, _make(folder))  # what an attempt made may be gone again: never a sum
                lock_fd = _lock(folder)
                if lock_fd is not None:
                    return cls._move_in(folder, lock_fd, made, keeping)
        except OSError as error:
            _unmake(folder, made)
            raise BackendError(f"files cannot be kept in {folder}: {explain(error)}") from error
        never = matter_with(folder) or takes_nothing(folder)
        if never is not None:
            raise BackendError(f"files cannot be kept in {folder}: {never}")
        raise BackendError(f"{folder} is taken and given up again and again by others", transient=True)

    @classmethod
    def _move_in(cls, folder: Path, lock_fd: int, made: int, keeping: Keeping) -> DirectoryOwner:
        try:
            if keeping is Keeping.SCRATCH:
                _refuse_what_is_kept(folder)
            owner = cls(folder, lock_fd, made, keeping)
            owner._take_over()
            if keeping is Keeping.SCRATCH:
                _sweep(folder)
        except BaseException:
            if keeping is Keeping.SCRATCH:
                with contextlib.suppress(OSError):  # the error under way says more
                    (folder / LOCK_NAME).unlink(missing_ok=True)
            os.close(lock_fd)
            raise
        return owner

    @classmethod
    def opener_of(cls, folder: Path) -> str:
        """Return which call of this process opened a directory that it owns; empty if nobody knows."""
        for owner in list(_owners):
            with contextlib.suppress(OSError):
                if owner.has_locked(folder):
                    return owner.opened_by
        return ""

    def has_locked(self, folder: Path) -> bool:
        """Whether a directory is the one that it owns, whatever its path; ``OSError`` if it is not there."""
        lock_fd = self._lock_fd
        return lock_fd is not None and os.path.samestat(os.fstat(lock_fd), (folder / LOCK_NAME).stat())

    def note_commit(self, commit: int, directory: str) -> None:
        """Note that a commit of the store ``directory`` came to its end."""
        self._note = replace(self._note, noted=NotedCommit(commit, sum_of(directory)))
        for write in (self._write_note, lambda: self._witness.note(commit, directory)):
            with contextlib.suppress(OSError):  # they are witnesses, no promises
                write()

    def check(self) -> None:
        """Look whether the directory is still the one that was claimed.

        Raises:
            BackendError: it, or its lock, was removed or replaced.
        """
        assert self._lock_fd is not None  # nobody commits after release
        path = self.folder / LOCK_NAME
        try:
            is_ours = path.stat().st_ino == os.fstat(self._lock_fd).st_ino
        except OSError as error:
            raise BackendError(f"{self.folder} was removed while it was in use: {error}") from error
        if not is_ours:
            raise BackendError(
                f"{path} was replaced while it was in use: somebody else may own {self.folder}"
            )

    def sweep(self) -> None:
        """Remove scratch files that a dead owner left.

        Raises:
            BackendError: one cannot be removed.
        """
        try:
            _sweep(self.folder)
        except OSError as error:
            raise BackendError(f"scratch files cannot be removed from {self.folder}: {error}") from error

    def leave(self) -> None:
        """Let the next one in and change nothing, as a dead owner would.  Idempotent."""
        self._witness.close(sync=False)
        lock_fd, self._lock_fd = self._lock_fd, None
        if lock_fd is not None:
            unlock(lock_fd)

    def release(self) -> None:
        """Remove what is ours, but for files that are kept, and let the next one in.  Idempotent.

        Where a directory of scratch files is gone itself, nothing is left to do.

        Raises:
            BackendError: a file cannot be removed.  The directory is given up all the same.
        """
        lock_fd, self._lock_fd = self._lock_fd, None
        if lock_fd is None:
            return
        self._witness.close(sync=True)
        try:
            if self._keeping is Keeping.SCRATCH:
                _sweep(self.folder)
            (self.folder / LOCK_NAME).unlink(missing_ok=True)
            _unmake(self.folder, self._made)
        except OSError as error:
            # Somebody may have removed a directory of scratch files, with all that was ours.
            if self._keeping is not Keeping.SCRATCH or not isinstance(error, FileNotFoundError):
                raise BackendError(f"scratch files cannot be removed from {self.folder}: {error}") from error
        finally:
            unlock(lock_fd)  # last: whoever waits for the lock finds everything gone

    def disown(self) -> None:
        """Forget the directory without touching it: for the child of a fork, which owns nothing.

        The lock stays with the parent, because it belongs to the open file that both share.
        """
        lock_fd, self._lock_fd = self._lock_fd, None
        if lock_fd is not None:
            os.close(lock_fd)

    def _take_over(self) -> None:
        """Keep what a dead owner noted, and say who owns the directory now."""
        assert self._lock_fd is not None
        former = read_lock(self._lock_fd, self.folder)
        self._made = max(self._made, former.made)
        self._note = LockNote(os.getpid(), self._made)
        if self._keeping is Keeping.DURABLE:
            self._note = replace(self._note, noted=former.noted)
            self.noted = (former.noted, read_witness(self.folder))
        try:
            self._write_note()
        except OSError as error:
            # Scratch space on a full disk is of no use; what is kept there has to be read all the same.
            if self._keeping is Keeping.SCRATCH or error.errno not in _FULL:
                raise

    def _write_note(self) -> None:
        assert self._lock_fd is not None
        note = encode_lock(self.folder, self._note)
        os.pwrite(self._lock_fd, note, 0)  # in place: the old note may not be lost if there is no room
        os.ftruncate(self._lock_fd, len(note))


_owners: weakref.WeakSet[DirectoryOwner] = weakref.WeakSet()


def _make(folder: Path) -> int:
    """Make ``folder``; return how many directories had to be made."""
    missing = 0
    for ancestor in (folder, *folder.parents):
        if ancestor.exists():
            break
        missing += 1
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError:
        pass  # an owner that leaves removed a parent: there is nothing to lock, so we try again
    except FileExistsError:
        if folder.exists() and not folder.is_dir():
            raise  # else the directory was there and is gone: the same
    return missing


def _unmake(folder: Path, made: int) -> None:
    """Remove the ``made`` lowest directories of ``folder`` as far as they are empty."""
    for ancestor in (folder, *folder.parents)[:made]:
        try:
            ancestor.rmdir()
        except OSError:
            return  # something else is in there, or it is gone: not ours either way


def unlock(lock_fd: int) -> None:
    """Give a lock up, also where a child that Python did not make has a copy of the descriptor."""
    with contextlib.suppress(OSError):
        fcntl.flock(lock_fd, fcntl.LOCK_UN)
    os.close(lock_fd)


def _lock(folder: Path) -> int | None:
    """Lock the directory; ``None`` if it or its lock file vanished meanwhile: try again."""
    path = folder / LOCK_NAME
    try:
        lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | _LOCK_FLAGS, 0o600)
    except FileNotFoundError:
        return None
    try:
        _check_lock(path, lock_fd)
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # An owner that leaves removes the file while it holds the lock: then this one is nobody's.
        if path.stat().st_ino == os.fstat(lock_fd).st_ino:
            return lock_fd
    except BlockingIOError:
        refusal = _in_use(folder, read_lock(lock_fd, folder).pid)
        os.close(lock_fd)
        raise refusal from None
    except FileNotFoundError:
        pass
    except BaseException:
        os.close(lock_fd)
        raise
    os.close(lock_fd)
    return None


def _check_lock(path: Path, lock_fd: int) -> None:
    """Refuse to write into what is no file, or is one of somebody else's as well.

    Raises:
        OSError: it is.
    """
    status = os.fstat(lock_fd)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "a lock has to be a plain file, and this is none: remove it", str(path))
    if status.st_nlink > 1:
        raise OSError(
            errno.EMLINK,
            f"it is no file of tierstore's alone ({status.st_nlink} names): move it away",
            str(path),
        )


def lock_shared(folder: Path) -> int | None:
    """Keep owners out of a directory, but not others who do the same; ``None``: there is no lock file.

    Changes nothing.

    Raises:
        UsageError: a live backend owns it; the message names its process.
        OSError: the lock file cannot be opened or locked.
    """
    try:
        lock_fd = os.open(folder / LOCK_NAME, os.O_RDONLY | _LOCK_FLAGS)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        refusal = _in_use(folder, read_lock(lock_fd, folder).pid)
        os.close(lock_fd)
        raise refusal from None
    except BaseException:
        os.close(lock_fd)
        raise
    return lock_fd


def _in_use(folder: Path, pid: int) -> UsageError:
    """Return the refusal of a directory whose lock somebody holds; its last owner was ``pid``."""
    if pid and not _is_alive(pid):
        # A reader holds the lock and notes nothing; or the owner is in another container.
        return UsageError(
            f"{folder} is in use by a process that only reads it, or that cannot be seen from here (its last "
            f"owner was pid {pid}): wait for it, or give this one a directory of its own"
        )
    if not pid:  # it has the lock and has not yet noted who it is
        return UsageError(
            f"{folder} is in use by another process (pid unknown): "
            f"wait for it, or give this one a directory of its own"
        )
    opened_by = DirectoryOwner.opener_of(folder) if pid == os.getpid() else ""
    if opened_by:
        return UsageError(
            f"{folder} is in use by a live backend of this process (pid {pid}): {opened_by}, opened it and "
            f"it was not closed. Call close() on what that returned, or give this one a directory of its own"
        )
    whose = "this process" if pid == os.getpid() else f"process {pid}"
    return UsageError(
        f"{folder} is in use by a live backend of {whose} (pid {pid}): "
        f"close that one, or give this one a directory of its own"
    )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True  # it is somebody else's
    except (OSError, OverflowError):
        return False
    return True


def _refuse_what_is_kept(folder: Path) -> None:
    for entry in folder.iterdir():
        if (
            entry.name in (MANIFEST_NAME, DRIVE_NAME)
            or segment_index(entry.name, Keeping.DURABLE) is not None
        ):
            raise UsageError(
                f"{folder} holds a durable store ({entry.name}): open it with durable=True, "
                f"or give scratch files a directory of their own"
            )


def _sweep(folder: Path) -> None:
    for entry in folder.iterdir():
        is_ours = entry.name == PROBE_NAME or segment_index(entry.name, Keeping.SCRATCH) is not None
        if is_ours and entry.is_file() and not entry.is_symlink():
            entry.unlink(missing_ok=True)
