"""Several directories made ready as one: owned together, and the capacity shared out among them.

Promises: who gets an error has nothing to give up, and every error names its directory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tierstore.errors import CapacityError
from tierstore.units import align_up, format_bytes
from tierstore_backends.files.addressing.bandwidth import measure_all
from tierstore_backends.files.addressing.direct_io_probe import IoMode
from tierstore_backends.files.addressing.drives import Drive, disk_bytes, split_by_drive
from tierstore_backends.files.addressing.segments import Segments
from tierstore_backends.files.addressing.space import Space
from tierstore_backends.files.addressing.stripes import Stripes, allot
from tierstore_backends.files.directory.commit_notes import NotedCommit
from tierstore_backends.files.directory.ownership import DirectoryOwner, Keeping
from tierstore_backends.files.directory.shared_lock import SharedLock
from tierstore_backends.files.extents import Extent
from tierstore_backends.files.io.syscalls import Syscalls
from tierstore_backends.files.options import FilesOptions


class DirectoryLocks:
    """The right to several directories, each with its own `DirectoryOwner`."""

    def __init__(self, owners: Sequence[DirectoryOwner]) -> None:
        self.folder = owners[0].folder
        self._owners = owners

    @classmethod
    def claim(cls, folders: Sequence[Path], keeping: Keeping) -> DirectoryLocks:
        """Own all of ``folders``, or none of them.

        Raises:
            UsageError: a live backend owns one; or it holds what is kept, and is wanted as scratch space.
            BackendError: one cannot be made, locked or swept.
        """
        with contextlib.ExitStack() as given_up:
            owners = []
            for folder in folders:
                owners.append(DirectoryOwner.claim(folder, keeping))
                given_up.callback(owners[-1].release)
            given_up.pop_all()
        return cls(owners)

    @property
    def noted(self) -> tuple[NotedCommit, ...]:
        """Commits that are known to have come to their end."""
        return tuple(noted for owner in self._owners for noted in owner.noted)

    def note_commit(self, commit: int, directory: str) -> None:
        """Note that a commit of the store ``directory`` came to its end."""
        for owner in self._owners:
            owner.note_commit(commit, directory)

    def check(self) -> None:
        """Look whether the directories are still the ones that were claimed."""
        for owner in self._owners:
            owner.check()

    def sweep(self) -> None:
        """Remove scratch files that dead owners left."""
        for owner in self._owners:
            owner.sweep()

    def leave(self) -> None:
        """Let the next one in; leave what a dead owner noted."""
        first, *others = self._owners
        first.leave()
        for owner in others:
            owner.release()

    def release(self) -> None:
        """Give all of them up; then raise the first error.  Idempotent."""
        with contextlib.ExitStack() as all_of_them:
            for owner in self._owners:
                all_of_them.callback(owner.release)

    def disown(self) -> None:
        """Forget the directories without touching them, in the child of a fork."""
        for owner in self._owners:
            owner.disown()


Right = DirectoryOwner | DirectoryLocks | SharedLock
"""What a backend has of its directories."""


def claim(folders: Sequence[Path], keeping: Keeping) -> DirectoryOwner | DirectoryLocks:
    """Own one directory or several.  See `DirectoryLocks.claim`."""
    return (
        DirectoryLocks.claim(folders, keeping)
        if len(folders) > 1
        else DirectoryOwner.claim(folders[0], keeping)
    )


def with_common_alignment(modes: Sequence[IoMode]) -> list[IoMode]:
    """Return the modes, each with the coarsest alignment of extents: a fragment may go to any drive."""
    alignment_bytes = max(mode.alignment_bytes for mode in modes)
    return [replace(mode, alignment_bytes=alignment_bytes) for mode in modes]


def in_common(modes: Sequence[IoMode]) -> IoMode:
    """Return what holds on all drives."""
    return IoMode(
        is_direct=all(mode.is_direct for mode in modes),
        alignment_bytes=max(mode.alignment_bytes for mode in modes),
        memory_alignment_bytes=max(mode.memory_alignment_bytes for mode in modes),
    )


def given_bandwidths(options: FilesOptions) -> list[int] | None:
    """Return each drive's bytes per second as the user gave them; ``None`` if they were not given."""
    given = [drive.bandwidth_bytes_per_s for drive in options.drives]
    known = [rate for rate in given if rate is not None]
    return known if len(known) == len(given) else None


def bandwidths(options: FilesOptions, modes: Sequence[IoMode], syscalls: Syscalls) -> list[int]:
    """Return each drive's bytes per second, as given, or else measured; of a single directory nothing.

    Raises:
        BackendError: a directory cannot be written or read.
    """
    given = given_bandwidths(options)
    if given is not None:
        return given
    return measure_all(list(zip(options.folders, modes, strict=True)), syscalls)


def share_out(
    capacity_bytes: int,
    options: FilesOptions,
    modes: Sequence[IoMode],
    rates: Sequence[int],
    segments: Sequence[Segments],
    live: Sequence[Extent] = (),
) -> tuple[list[Drive], Stripes]:
    """Give each drive its share of the capacity.

    Args:
        capacity_bytes: what they hold together.
        options: what the user wrote.
        modes: how I/O is done on each, with one alignment.
        rates: the bandwidth of each.
        segments: the files of each.
        live: what is reserved from the beginning: sorted, aligned, no two overlapping.

    Raises:
        CapacityError: ``live`` is more than the capacity.
        BackendError: files hold more than their share and could not be cut.
    """
    alignment_bytes = modes[0].alignment_bytes
    live_parts = split_by_drive(live, len(segments))
    live_bytes = [sum(end - start for start, end in part) for part in live_parts]
    if sum(live_bytes) > capacity_bytes:
        raise CapacityError(
            f"{format_bytes(sum(live_bytes))} are in use in the files of {len(segments)} drives, and the "
            f"capacity is only {format_bytes(capacity_bytes)}: enlarge it",
            needed_bytes=sum(live_bytes),
            free_bytes=capacity_bytes,
        )
    most = [disk_bytes(folder, files) for folder, files in zip(options.folders, segments, strict=True)]
    shares = allot(capacity_bytes, alignment_bytes, rates, least=live_bytes, most=most)
    drives = [
        Drive(folder, mode, rate, files, Space(share, alignment_bytes, files, own))
        for folder, mode, rate, files, share, own in zip(
            options.folders, modes, rates, segments, shares, live_parts, strict=True
        )
    ]
    return drives, Stripes(drives, align_up(options.aio_block_size, alignment_bytes), alignment_bytes)
