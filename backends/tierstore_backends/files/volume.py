"""What a backend of files stands on before any byte moves: a directory that is owned, its files and its room.

Promises: who gets volume has to give it up (``segments.close``, then ``owner.release``); who gets an
error instead has nothing to give up.
"""

from __future__ import annotations

import errno
import importlib.metadata
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tierstore.errors import BackendError, IntegrityError, UsageError
from tierstore_backends.files.addressing.direct_io_probe import IoMode, probe
from tierstore_backends.files.addressing.directory_locks import (
    DirectoryLocks,
    Right,
    bandwidths,
    claim,
    given_bandwidths,
    in_common,
    share_out,
    with_common_alignment,
)
from tierstore_backends.files.addressing.drives import Drive, DriveFiles, split_by_drive
from tierstore_backends.files.addressing.segments import Files, Segments
from tierstore_backends.files.addressing.space import Space
from tierstore_backends.files.addressing.stripes import Stripes
from tierstore_backends.files.directory.identity import store_of, written
from tierstore_backends.files.directory.ownership import (
    DRIVE_NAME,
    MANIFEST_NAME,
    DirectoryOwner,
    Keeping,
    segment_index,
)
from tierstore_backends.files.directory.premises import check_premises
from tierstore_backends.files.durability.manifest import Manifest
from tierstore_backends.files.durability.meta import FORMAT, Meta
from tierstore_backends.files.durability.record_codec import Sums, decode_place, encode
from tierstore_backends.files.durability.recovery import RecoveredRecords, find_missing, recover
from tierstore_backends.files.durability.scan import digest
from tierstore_backends.files.engines.choice import direct_for
from tierstore_backends.files.io.syscalls import Syscalls
from tierstore_backends.files.options import Direct, FilesOptions
from tierstore_backends.paths import explain

_log = logging.getLogger("tierstore.files")

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True)
class Volume:
    """A directory made ready, or several.

    Attributes:
        owner: the right to it.
        mode: how I/O is done there; of several directories, what holds in all.
        segments: its files.
        space: the room in them.
        block_bytes: the most bytes of a fragment of any slot that is there already.
        drives: the directories, if there are several.
    """

    owner: Right
    mode: IoMode
    segments: Files
    space: Space | Stripes
    block_bytes: int = 0
    drives: Sequence[Drive] = ()


def scratch_volume(
    capacity_bytes: int,
    options: FilesOptions,
    syscalls: Syscalls,
    *,
    segment_bytes: int,
    stride_bytes: int,
) -> Volume:
    """Own a directory as scratch space, or several.

    Raises:
        UsageError: another live backend owns the directory, or it holds a durable store.
        BackendError: the directory cannot be made or used.
    """
    if options.drives:
        return _scratch_drives(capacity_bytes, options, syscalls, segment_bytes, stride_bytes)
    owner = DirectoryOwner.claim(options.path)
    try:
        mode = probe(options.path, direct_for(options), syscalls)
        segments = Segments(
            options.path, mode.flags, syscalls, segment_bytes=segment_bytes, stride_bytes=stride_bytes
        )
        return Volume(owner, mode, segments, Space(capacity_bytes, mode.alignment_bytes, segments))
    except BaseException:
        owner.release()
        raise


def _scratch_drives(
    capacity_bytes: int, options: FilesOptions, syscalls: Syscalls, segment_bytes: int, stride_bytes: int
) -> Volume:
    owner = DirectoryLocks.claim(options.folders, Keeping.SCRATCH)
    try:
        modes = [probe(folder, direct_for(options), syscalls) for folder in options.folders]
        modes = with_common_alignment(modes)
        rates = bandwidths(options, modes, syscalls)
        segments = [
            Segments(folder, mode.flags, syscalls, segment_bytes=segment_bytes, stride_bytes=stride_bytes)
            for folder, mode in zip(options.folders, modes, strict=True)
        ]
        drives, stripes = share_out(capacity_bytes, options, modes, rates, segments)
        return Volume(owner, in_common(modes), DriveFiles(segments), stripes, drives=drives)
    except BaseException:
        owner.release()
        raise


def durable_volume(
    capacity_bytes: int,
    options: FilesOptions,
    syscalls: Syscalls,
    *,
    segment_bytes: int,
    stride_bytes: int,
) -> tuple[Volume, Manifest, RecoveredRecords]:
    """Own a directory to keep files in, or several, and find what is kept there.

    Raises:
        UsageError: another live backend owns the directory, or a later version of tierstore wrote it.  Or
            directories are not the ones that the store has, or not in their order; nothing was changed.
        CapacityError: what is kept there is more than the capacity.
        IntegrityError: the manifest is damaged; nothing was changed.
        BackendError: the directory cannot be made or used.
    """
    home = options.folders[0]
    check_premises(options.folders, is_read_only=False)
    if not options.create:
        require_kept(home)
    store_of(options.folders)
    owner = claim(options.folders, Keeping.DURABLE)
    try:
        manifest, recovered = _open_manifest(owner, options, syscalls, segment_bytes)
        try:
            owner.note_commit(manifest.meta.commit, manifest.meta.directory)
            owner.sweep()
            modes = _modes(options, manifest.meta, syscalls)
            volume = _stand(
                capacity_bytes, options, owner, modes, manifest, recovered, syscalls, stride_bytes
            )
        except BaseException:
            manifest.close()
            raise
    except BaseException:
        if (options.path / MANIFEST_NAME).exists():
            owner.leave()
        else:
            owner.release()
        raise
    return volume, manifest, recovered


def _open_manifest(
    owner: DirectoryOwner | DirectoryLocks, options: FilesOptions, syscalls: Syscalls, segment_bytes: int
) -> tuple[Manifest, RecoveredRecords]:
    path = options.path / MANIFEST_NAME
    store = store_of(options.folders)  # again, now that nobody else changes it
    if path.exists() or path.is_symlink():
        manifest, rows = Manifest.open(options.path, salvage=options.salvage, noted=owner.noted)
        try:
            check_drives(options.folders, store, manifest)
            recovered = recover(rows, manifest.meta, str(path), is_older=manifest.is_older)
        except BaseException:
            manifest.close()
            raise
        return manifest, recovered
    check_nothing_is_kept(options.folders, store)
    modes = [probe(folder, direct_for(options), syscalls) for folder in options.folders]
    meta = Meta(
        format=FORMAT,
        directory=str(uuid.uuid4()),
        created_by=f"tierstore {importlib.metadata.version('tierstore')}",
        segment_bytes=segment_bytes,
        alignment_bytes=in_common(modes).alignment_bytes,
        bandwidths=bandwidths(options, modes, syscalls),
    )
    if not options.drives:
        return Manifest.create(options.path, meta), RecoveredRecords(())
    with written(options.folders, meta.directory):
        return Manifest.create(options.path, meta), RecoveredRecords(())


def check_drives(folders: Sequence[Path], store: str | None, manifest: Manifest) -> None:
    """Refuse directories that are not those of the manifest.

    Raises:
        UsageError: they are not.
    """
    meta = manifest.meta
    count = meta.drives
    if count != len(folders) or (store is None) != (count == 1) or store not in (None, meta.directory):
        raise UsageError(
            f"{manifest.path} is that of the store {meta.directory} with {count} directories, and given are "
            f"{len(folders)}, which say that they belong to {store or 'none that has several'}: "
            f"{', '.join(map(str, folders))}. Give those of one store, in their order. Nothing was touched"
        )


def require_kept(folder: Path) -> None:
    """Refuse a directory in which no store was ever kept; one that is damaged passes.

    Raises:
        UsageError: there is none.
        BackendError: the directory cannot be read.
    """
    try:
        has_kept = folder.is_dir() and any(
            entry.name == MANIFEST_NAME or segment_index(entry.name, Keeping.DURABLE) is not None
            for entry in folder.iterdir()
        )
    except OSError as error:
        raise BackendError(f"{folder} cannot be read: {explain(error)}") from error
    if not has_kept:
        raise UsageError(f"{folder} is not a durable store: it has no {MANIFEST_NAME}")


def check_nothing_is_kept(folders: Sequence[Path], store: str | None) -> None:
    """Refuse files whose manifest is gone: what they hold would be written over.

    Raises:
        IntegrityError, UsageError: there are such files.
    """
    if store is not None:
        raise IntegrityError(
            f"{folders[0]} is the first drive of the store {store}, and has no {MANIFEST_NAME}, which says "
            f"what is in it: put that back. If the store was never completed, remove the {DRIVE_NAME} of "
            f"each of its directories. Nothing was changed"
        )
    for folder in folders:
        for entry in folder.iterdir():
            if entry.name == MANIFEST_NAME:
                raise UsageError(f"{folder} holds a store of its own ({entry.name}): give another directory")
            if segment_index(entry.name, Keeping.DURABLE) is not None:
                raise IntegrityError(
                    f"{folder} holds {entry.name} but not {MANIFEST_NAME}, which says what is in it: "
                    f"put that back, or remove the files. Nothing was changed"
                )


def _modes(options: FilesOptions, meta: Meta, syscalls: Syscalls) -> list[IoMode]:
    """Return how to do I/O in each directory, whose extents have the alignment that they were made with."""
    return [_mode(folder, meta, options, syscalls) for folder in options.folders]


def _mode(folder: Path, meta: Meta, options: FilesOptions, syscalls: Syscalls) -> IoMode:
    """Return how to do I/O in a directory whose extents have the alignment that they were made with."""
    buffered = IoMode(is_direct=False, alignment_bytes=meta.alignment_bytes, memory_alignment_bytes=1)
    try:
        mode = probe(folder, direct_for(options), syscalls)
    except BackendError as error:
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in _FULL:
            raise
        _log.warning("%s is too full to find out whether direct I/O works: I/O is buffered", folder)
        return buffered
    if not mode.is_direct or meta.alignment_bytes % mode.alignment_bytes == 0:
        return replace(mode, alignment_bytes=meta.alignment_bytes)
    if options.direct is Direct.ALWAYS:
        raise BackendError(
            f"{folder} was made with an alignment of {meta.alignment_bytes} bytes and direct I/O needs "
            f"{mode.alignment_bytes} there now: use direct='auto', or export to a new directory"
        )
    _log.warning(
        "%s was made with an alignment of %d bytes and direct I/O needs %d there now: I/O is buffered",
        folder,
        meta.alignment_bytes,
        mode.alignment_bytes,
    )
    return buffered


def _stand(
    capacity_bytes: int,
    options: FilesOptions,
    owner: DirectoryOwner | DirectoryLocks,
    modes: Sequence[IoMode],
    manifest: Manifest,
    recovered: RecoveredRecords,
    syscalls: Syscalls,
    stride_bytes: int,
) -> Volume:
    segments = [
        Segments(
            folder,
            mode.flags,
            syscalls,
            segment_bytes=manifest.meta.segment_bytes,
            stride_bytes=stride_bytes,
            keeping=Keeping.DURABLE,
        )
        for folder, mode in zip(options.folders, modes, strict=True)
    ]
    try:
        for files, live in zip(segments, split_by_drive(recovered.live, len(segments)), strict=True):
            files.reopen(live[-1][1] if live else 0)
        silent = recovered.untold + find_missing(
            recovered, DriveFiles(segments) if options.drives else segments[0]
        )
        volume = settled(capacity_bytes, options, owner, modes, segments, manifest.meta, recovered)
        _note_losses(manifest, recovered, silent)
    except BaseException as error:
        for files in segments:
            files.close()
        if isinstance(error, OSError):
            raise BackendError(
                f"the files in {owner.folder} cannot be opened again: {explain(error)}"
            ) from error
        raise
    return volume


def settled(
    capacity_bytes: int,
    options: FilesOptions,
    owner: Right,
    modes: Sequence[IoMode],
    segments: Sequence[Segments],
    meta: Meta,
    recovered: RecoveredRecords,
) -> Volume:
    """Let the files hold what was recovered, and nothing above it."""
    recovered.fit(capacity_bytes)
    if not options.drives:
        space = Space(capacity_bytes, modes[0].alignment_bytes, segments[0], recovered.live)
        space.trim()
        return Volume(owner, modes[0], segments[0], space, recovered.block_bytes)
    rates = given_bandwidths(options) or meta.bandwidths
    drives, stripes = share_out(capacity_bytes, options, modes, rates, segments, recovered.live)
    for drive in drives:
        drive.space.trim()
    return Volume(owner, in_common(modes), DriveFiles(segments), stripes, recovered.block_bytes, drives)


def _note_losses(manifest: Manifest, recovered: RecoveredRecords, positions: list[int]) -> None:
    """Write down which bytes are lost, where nothing would show it later."""
    if not positions:
        return
    rows = list(recovered.rows)
    for position in positions:
        id_, version, name, note, nbytes, encoded = rows[position]
        place = decode_place(encoded)._replace(kind=Sums.LOST)
        rows[position] = encode(id_, version, name, note, nbytes, place)
    meta = replace(manifest.meta, digest=digest(rows))
    manifest.commit((), [rows[position] for position in positions], lambda: meta)
    recovered.rows = rows
