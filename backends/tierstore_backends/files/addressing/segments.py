"""The address space as a few large files.

Address ``a`` is byte ``a % segment_bytes`` of file ``a // segment_bytes``.  Files are opened and
grow when something is first written beyond their end: a stride at a time and with their blocks
allocated, because a disk writes into allocated blocks up to three times as fast as it allocates
them fragment by fragment (64 KiB fragments on ext4: 0.9 against 0.35 GB/s).

Rule 1: a file never grows beyond the limit, and blocks are allocated ahead only while every address
below the limit is part of the capacity; so allocating ahead cannot break the quota.
Rule 2: files that outlive their owner are found again by `reopen`, as long as they are.
Rule 3: `sync` and `sync_names` make what was written survive a power loss.
Rule 4: allocating ahead is a favour: where it fails, or the disk is nearly full, the file grows without
blocks, and if that matters the write itself meets the error.

Thread-safe.  Knows nothing of slots.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

from tierstore.units import align_up, format_bytes
from tierstore_backends.files.directory.ownership import Keeping, segment_index, segment_name
from tierstore_backends.files.extents import Extent
from tierstore_backends.files.io.syscalls import Syscalls

_log = logging.getLogger("tierstore.files")

_CANNOT_PUNCH = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})


class Files(Protocol):
    """The files of an address space, wherever they are.  See `Segments`, of one directory, for the rest."""

    segment_bytes: int
    """The length of a full file; no file holds addresses on both sides of a multiple of it."""

    def locate(self, start: int, end: int) -> tuple[int, int]:
        """Return the open file that holds ``[start, end)``, long enough, and where it begins in it."""
        ...

    def path(self, address: int) -> Path:
        """Name the file that holds ``address``."""
        ...

    def where(self, address: int) -> str:
        """Say where ``address`` is, for messages."""
        ...

    def length(self, address: int) -> int:
        """Return how long the file is that holds ``address``; 0 if there is none."""
        ...

    def first_missing(self, start: int, end: int) -> int | None:
        """Return the lowest address in ``[start, end)`` that lies beyond the end of its file."""
        ...

    def indices(self, extents: Sequence[Extent]) -> set[int]:
        """Return the numbers of the files that ``extents`` lie in."""
        ...

    def sync(self, index: int) -> None:
        """Return when what was written to a file would survive a power loss."""
        ...

    @property
    def failed_syncs(self) -> int:
        """How many syncs have failed."""
        ...

    def is_in_doubt(self, extents: Sequence[Extent], failed_syncs: int) -> bool:
        """Whether a sync failed of what was written at ``extents`` after so many failed syncs."""
        ...

    def check(self) -> None:
        """Look whether every file is still under a name, and as long as it was made."""
        ...

    def sync_names(self) -> None:
        """Return when the files themselves would survive a power loss."""
        ...

    def punch(self, start: int, end: int) -> None:
        """Give the blocks of ``[start, end)`` back to the file system."""
        ...

    @property
    def physical_bytes(self) -> int:
        """What the files take on disk."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...

    def disown(self) -> None:
        """Close the files in the child of a fork."""
        ...


class Doubts:
    """What failed syncs leave in doubt, by the number of the file.

    The kernel drops what it could not write, and tells so only once: syncing again proves nothing.
    """

    def __init__(self) -> None:
        self.failed_syncs = 0
        self._last: dict[int, int] = {}  # how many had failed when that of the file did

    def note(self, index: int) -> None:
        """Note that a file could not be synced."""
        self.failed_syncs += 1
        self._last[index] = self.failed_syncs

    def are_about(self, indices: Collection[int], failed_syncs: int) -> bool:
        """Whether a sync of one of the files failed after so many failed syncs."""
        return any(self._last.get(index, 0) > failed_syncs for index in indices)


class Segments:
    """The files of one directory, growing and shrinking with what is written.

    Args:
        folder: where the files are; owned.
        flags: how they are opened.
        syscalls: the way to the kernel.
        segment_bytes: the length of a full file; a multiple of the alignment.
        stride_bytes: how far a file grows at a time; a multiple of the alignment.
        keeping: how the files are named.
    """

    def __init__(
        self,
        folder: Path,
        flags: int,
        syscalls: Syscalls,
        *,
        segment_bytes: int,
        stride_bytes: int,
        keeping: Keeping = Keeping.SCRATCH,
    ) -> None:
        self.segment_bytes = segment_bytes
        self._folder = folder
        self._flags = flags
        self._syscalls = syscalls
        self._stride_bytes = stride_bytes
        self._keeping = keeping
        self._lock = threading.Lock()  # guards all below; held while a file is opened or changes length
        # By number; one that is not there has no bytes, and is made when something is written to it.
        self._fds: dict[int, int] = {}
        self._lengths: dict[int, int] = {}
        self._limit = 0
        self._is_dense = True
        self._has_new_names = False
        self._doubts = Doubts()

    def reopen(self, end: int) -> None:
        """Open the files of addresses below ``end`` that are there; remove those above.

        Raises:
            OSError: a file cannot be opened or removed.
        """
        with self._lock:
            for index, path in self._found():
                if index * self.segment_bytes < end:
                    self._open(index, self._flags & ~os.O_CREAT)
                elif path.is_file() and not path.is_symlink():
                    path.unlink()

    def look(self, end: int) -> None:
        """Open the files of addresses below ``end`` that are there.

        Raises:
            OSError: a file cannot be opened.
        """
        with self._lock:
            for index, _ in self._found():
                if index * self.segment_bytes < end:
                    self._open(index, self._flags)

    def _found(self) -> list[tuple[int, Path]]:
        """Return the files that are there, by number: never more than there are, whatever a manifest says."""
        found = ((segment_index(path.name, self._keeping), path) for path in self._folder.iterdir())
        return sorted((index, path) for index, path in found if index is not None)

    def indices(self, extents: Sequence[Extent]) -> set[int]:
        """Return the numbers of the files that ``extents`` lie in."""
        return {
            index
            for start, end in extents
            for index in range(start // self.segment_bytes, (end - 1) // self.segment_bytes + 1)
        }

    def first_missing(self, start: int, end: int) -> int | None:
        """Return the lowest address in ``[start, end)`` that lies beyond the end of its file."""
        while start < end:
            begin = start - start % self.segment_bytes
            if start < begin + self.length(start) < min(end, begin + self.segment_bytes):
                return begin + self.length(start)
            if start >= begin + self.length(start):
                return start
            start = begin + self.segment_bytes
        return None

    def length(self, address: int) -> int:
        """Return how long the file is that holds ``address``; 0 if there is none."""
        return self._lengths.get(address // self.segment_bytes, 0)

    def sync(self, index: int) -> None:
        """Return when what was written to a file would survive a power loss.

        Raises:
            OSError: it might not; and what was written there so far is in doubt from now on.
        """
        try:
            self._syscalls.sync(self._fds[index])
        except OSError:
            self._doubts.note(index)
            raise

    @property
    def failed_syncs(self) -> int:
        """How many syncs have failed."""
        return self._doubts.failed_syncs

    def is_in_doubt(self, extents: Sequence[Extent], failed_syncs: int) -> bool:
        """Whether a sync failed of what was written at ``extents`` after so many failed syncs."""
        return self._doubts.are_about(self.indices(extents), failed_syncs)

    def check(self) -> None:
        """Look whether every file is still under a name, and as long as it was made.

        Raises:
            OSError: one was removed, or cut off.
        """
        with self._lock:  # or one grows meanwhile
            found = [(index, os.fstat(fd), self._lengths[index]) for index, fd in self._fds.items()]
        for index, status, nbytes in found:
            if not status.st_nlink:
                raise FileNotFoundError(
                    errno.ENOENT, "it was removed while it was in use", str(self._name(index))
                )
            if status.st_size < nbytes:
                raise OSError(
                    errno.ENODATA,
                    f"it was cut off while it was in use: it is {status.st_size} bytes long, of {nbytes}",
                    str(self._name(index)),
                )

    def sync_names(self) -> None:
        """Return when the files themselves would survive a power loss.

        Raises:
            OSError: one that was opened since the last time might not.  It names the directory.
        """
        with self._lock:
            has_new_names, self._has_new_names = self._has_new_names, False
        if not has_new_names:
            return
        try:
            self._sync_folder()
        except OSError as error:
            with self._lock:
                self._has_new_names = True
            error.filename = str(self._folder)
            raise

    def path(self, address: int) -> Path:
        """Name the file that holds ``address``."""
        return self._name(address // self.segment_bytes)

    def where(self, address: int) -> str:
        """Say where ``address`` is, for messages."""
        return f"offset {address % self.segment_bytes} of {self.path(address)}"

    def locate(self, start: int, end: int) -> tuple[int, int]:
        """Return the open file that holds ``[start, end)``, long enough, and where it begins in it.

        Raises:
            OSError: the file cannot be opened or lengthened.
        """
        index, offset = divmod(start, self.segment_bytes)
        end -= start - offset
        # Without the lock: entries only appear; a length shrinks only where nothing moves.
        if end > self._lengths.get(index, -1):
            with self._lock:
                self._grow(index, end)
        return self._fds[index], offset

    @property
    def physical_bytes(self) -> int:
        """What the files take on disk."""
        with self._lock:
            return sum(os.fstat(fd).st_blocks * 512 for fd in self._fds.values())

    def limit(self, end: int, *, is_dense: bool) -> None:
        """Let files hold addresses below ``end``, and cut off what they hold above.

        Args:
            end: one past the highest address in use.
            is_dense: whether everything below is part of the capacity (rule 1).

        Raises:
            OSError: a file cannot be cut.
        """
        with self._lock:
            self._limit = end
            self._is_dense = is_dense
            self._cut(end)

    def trim(self, end: int) -> None:
        """Cut the files down to the stride that holds the last byte below ``end``.

        Nothing above may be in use, and nothing may begin to be written there.

        Raises:
            OSError: a file cannot be cut.
        """
        with self._lock:
            self._cut(align_up(end, self._stride_bytes))

    def punch(self, start: int, end: int) -> None:
        """Give the blocks of ``[start, end)`` back to the file system.

        Raises:
            OSError: the file system failed at it.  One that cannot do it at all is only logged.
        """
        first, last = start // self.segment_bytes, (end - 1) // self.segment_bytes
        with self._lock:
            indices = sorted(index for index in self._lengths if first <= index <= last)
        for index in indices:
            begin = index * self.segment_bytes
            with self._lock:
                low, high = max(start - begin, 0), min(end - begin, self._lengths.get(index, 0))
                if low < high:
                    self._punch(index, low, high - low)

    def close(self) -> None:
        """Close the files.  Whoever owns the directory removes them.  Idempotent."""
        with self._lock:
            fds, self._fds, self._lengths = self._fds, {}, {}
        for fd in fds.values():
            os.close(fd)

    def disown(self) -> None:
        """Close the files in the child of a fork, where nobody else can hold the lock for long."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds, self._lengths = {}, {}

    def _grow(self, index: int, end: int) -> None:
        if index not in self._fds:
            self._open(index, self._flags | os.O_EXCL)
        length = self._lengths[index]
        if end <= length:
            return
        room = min(self.segment_bytes, self._limit - index * self.segment_bytes)
        target = min(max(room, end), align_up(end, self._stride_bytes))
        if not self._allocate(self._fds[index], length, target - length):
            self._syscalls.truncate(self._fds[index], target)
        self._lengths[index] = target

    def _open(self, index: int, flags: int) -> None:
        """Open a file."""
        fd = os.open(self._name(index), flags, 0o600)
        self._fds[index] = fd
        self._lengths[index] = os.fstat(fd).st_size
        self._has_new_names = True

    def _name(self, index: int) -> Path:
        return self._folder / segment_name(index, self._keeping)

    def _sync_folder(self) -> None:
        fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._syscalls.sync_folder(fd)
        finally:
            os.close(fd)

    def _allocate(self, fd: int, offset: int, nbytes: int) -> bool:
        disk = os.fstatvfs(fd)
        # On a disk that is nearly full the last blocks are for what is really written.
        if not self._is_dense or disk.f_bavail * disk.f_frsize < 2 * nbytes:
            return False
        try:
            self._syscalls.allocate(fd, offset, nbytes)
        except OSError:
            return False  # whatever it is: the write will meet it if it matters
        return True

    def _cut(self, end: int) -> None:
        for index, length in self._lengths.items():
            wanted = min(length, max(0, end - index * self.segment_bytes))
            if wanted < length:
                self._syscalls.truncate(self._fds[index], wanted)
                self._lengths[index] = wanted

    def _punch(self, index: int, offset: int, nbytes: int) -> None:
        try:
            self._syscalls.punch(self._fds[index], offset, nbytes)
        except OSError as error:
            if error.errno not in _CANNOT_PUNCH:
                raise
            _log.warning(
                "%s: the file system cannot give back %s inside a file; it is given back on close",
                self._name(index),
                format_bytes(nbytes),
            )
