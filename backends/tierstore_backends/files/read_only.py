"""A durable directory to look into: as it is found, and as it is left.

Promises: nothing in it is made, changed or removed, so that it may be on read-only media or another user's.
What opening to write would repair is put right in memory only, and is as damaged for the next one.

Bytes are read past the page cache where the kernel can do that without a trial write: so what is compared
with checksums is what the disk holds.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path

from tierstore.errors import BackendError, IntegrityError
from tierstore_backends.files.addressing.direct_io_probe import IoMode, probe_reading
from tierstore_backends.files.addressing.drives import DriveFiles, split_by_drive
from tierstore_backends.files.addressing.segments import Segments
from tierstore_backends.files.directory.identity import store_of
from tierstore_backends.files.directory.ownership import MANIFEST_NAME, Keeping, segment_name
from tierstore_backends.files.directory.premises import check_premises
from tierstore_backends.files.directory.shared_lock import SharedLock
from tierstore_backends.files.durability.manifest import Manifest
from tierstore_backends.files.durability.record_codec import Row
from tierstore_backends.files.durability.recovery import RecoveredRecords, find_missing, recover
from tierstore_backends.files.io.syscalls import FileStreams, Ring, Syscalls
from tierstore_backends.files.options import FilesOptions
from tierstore_backends.files.volume import Volume, check_drives, check_nothing_is_kept, require_kept, settled
from tierstore_backends.paths import explain

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class ReadOnly:
    """A way to the kernel on which nothing is changed: what would give blocks back does nothing."""

    def __init__(self, syscalls: Syscalls) -> None:
        self._syscalls = syscalls

    def read(self, fd: int, vector: Sequence[memoryview], offset: int) -> int:
        """See `Syscalls`."""
        return self._syscalls.read(fd, vector, offset)

    def write(self, fd: int, vector: Sequence[memoryview], offset: int) -> int:
        """Refuse."""
        del fd, vector, offset
        raise _refusal()

    def open_streams(self, path_of: Callable[[int], Path], executor: Executor) -> FileStreams:
        """Refuse: streams are opened to be written."""
        del path_of, executor
        raise _refusal()

    def open_ring(self, entries: int, *, is_direct: bool) -> Ring:
        """Refuse: what is put into a ring nobody looks at."""
        del entries, is_direct
        raise _refusal()

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Refuse."""
        del fd, offset, nbytes
        raise _refusal()

    def punch(self, fd: int, offset: int, nbytes: int) -> None:
        """Leave the file as it is."""
        del fd, offset, nbytes

    def truncate(self, fd: int, nbytes: int) -> None:
        """Leave the file as it is."""
        del fd, nbytes

    def sync(self, fd: int) -> None:
        """There is nothing to sync."""
        del fd

    def sync_folder(self, fd: int) -> None:
        """There is nothing to sync."""
        del fd


def _refusal() -> OSError:
    return OSError(errno.EROFS, "it was opened with read_only=True")


def reading_volume(
    capacity_bytes: int, options: FilesOptions, syscalls: Syscalls, *, stride_bytes: int
) -> tuple[Volume, Manifest, RecoveredRecords]:
    """Look into a directory, or several of one store; find what is kept there.

    Args:
        capacity_bytes: at least what is kept there.
        options: see `FilesOptions`.
        syscalls: the way to the kernel; what changes anything is not asked of it.
        stride_bytes: as of `FilesBackend`.

    Raises:
        UsageError: it is no durable store, a live backend owns it, a later version of tierstore wrote it,
            or directories are not the ones that the store has, or not in their order.
        CapacityError: what is kept there is more than the capacity.
        IntegrityError: the manifest is damaged so that names are lost.
        BackendError: the directory cannot be read.
    """
    check_premises(options.folders, is_read_only=True)
    require_kept(options.folders[0])
    store = store_of(options.folders)
    if not (options.path / MANIFEST_NAME).exists():
        check_nothing_is_kept(options.folders, store)
    reader = SharedLock(options.folders)
    try:
        manifest, rows = _manifest(options, reader)
        check_drives(options.folders, store, manifest)
        recovered = recover(rows, manifest.meta, str(manifest.path), is_older=manifest.is_older)
        volume = _stand(
            capacity_bytes, options, reader, manifest, recovered, ReadOnly(syscalls), stride_bytes
        )
    except BaseException:
        reader.release()
        raise
    return volume, manifest, recovered


def _manifest(options: FilesOptions, reader: SharedLock) -> tuple[Manifest, Sequence[Row]]:
    try:
        return Manifest.look(options.path, salvage=options.salvage, noted=reader.noted)
    except IntegrityError:
        reader.check()  # what looks like damage may be somebody who writes
        raise


def _stand(
    capacity_bytes: int,
    options: FilesOptions,
    reader: SharedLock,
    manifest: Manifest,
    recovered: RecoveredRecords,
    syscalls: Syscalls,
    stride_bytes: int,
) -> Volume:
    meta = manifest.meta
    modes = [
        probe_reading(
            folder / segment_name(0, Keeping.DURABLE), meta.alignment_bytes, options.direct, syscalls
        )
        for folder in options.folders
    ]
    segments = [
        Segments(
            folder,
            _flags(mode),
            syscalls,
            segment_bytes=meta.segment_bytes,
            stride_bytes=stride_bytes,
            keeping=Keeping.DURABLE,
        )
        for folder, mode in zip(options.folders, modes, strict=True)
    ]
    try:
        for files, live in zip(segments, split_by_drive(recovered.live, len(segments)), strict=True):
            files.look(live[-1][1] if live else 0)
        find_missing(recovered, DriveFiles(segments) if options.drives else segments[0])
        return settled(capacity_bytes, options, reader, modes, segments, meta, recovered)
    except BaseException as error:
        for files in segments:
            files.close()
        if isinstance(error, OSError):
            raise BackendError(f"the files in {reader.folder} cannot be read: {explain(error)}") from error
        raise


def _flags(mode: IoMode) -> int:
    return _FLAGS | os.O_DIRECT if mode.is_direct else _FLAGS
