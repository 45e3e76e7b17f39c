"""What a backend of files stands on before any byte moves: a directory that is owned, its files and its room.

Promises: who gets ground has to give it up (``segments.close``, then ``owner.release``); who gets an
error instead has nothing to give up.
"""

from __future__ import annotations

import errno
import importlib.metadata
import logging
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

from tierstore.errors import BackendError, IntegrityError
from tierstore_backends.files.collecting import paused_collector
from tierstore_backends.files.engines.choice import direct_for
from tierstore_backends.files.manifest import FORMAT, Manifest, Meta, digest
from tierstore_backends.files.options import Direct, FilesOptions
from tierstore_backends.files.owner import MANIFEST_NAME, DirectoryOwner, Keeping, segment_index
from tierstore_backends.files.probe import IoMode, probe
from tierstore_backends.files.recovery import Recovered, find_missing, recover
from tierstore_backends.files.rows import Sums, decode_place, encode
from tierstore_backends.files.segments import Segments
from tierstore_backends.files.space import Space
from tierstore_backends.files.syscalls import Syscalls

_log = logging.getLogger("tierstore.files")

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True)
class Ground:
    """A directory made ready.

    Attributes:
        owner: the right to it.
        mode: how I/O is done there.
        segments: its files.
        space: the room in them.
        block_bytes: the most bytes of a piece of any slot that is there already.
    """

    owner: DirectoryOwner
    mode: IoMode
    segments: Segments
    space: Space
    block_bytes: int = 0


def scratch_ground(
    capacity_bytes: int,
    options: FilesOptions,
    syscalls: Syscalls,
    *,
    segment_bytes: int,
    stride_bytes: int,
) -> Ground:
    """Own a directory as scratch space.

    Raises:
        UsageError: another live backend owns the directory, or it holds a durable store.
        BackendError: the directory cannot be made or used.
    """
    owner = DirectoryOwner.claim(options.path)
    try:
        mode = probe(options.path, direct_for(options), syscalls)
        segments = Segments(
            options.path, mode.flags, syscalls, segment_bytes=segment_bytes, stride_bytes=stride_bytes
        )
        return Ground(owner, mode, segments, Space(capacity_bytes, mode.alignment_bytes, segments))
    except BaseException:
        owner.release()
        raise


def durable_ground(
    capacity_bytes: int,
    options: FilesOptions,
    syscalls: Syscalls,
    *,
    segment_bytes: int,
    stride_bytes: int,
) -> tuple[Ground, Manifest, Recovered]:
    """Own a directory to keep files in, and find what is kept there.

    Raises:
        UsageError: another live backend owns the directory, or a later version of tierstore wrote it.
        CapacityError: what is kept there is more than the capacity.
        IntegrityError: the manifest is damaged; nothing was changed.
        BackendError: the directory cannot be made or used.
    """
    owner = DirectoryOwner.claim(options.path, Keeping.DURABLE)
    try:
        with paused_collector():
            manifest, recovered = _open_manifest(owner, options, syscalls, segment_bytes)
            try:
                owner.note_commit(manifest.meta.commit)
                owner.sweep()
                mode = _mode(manifest.meta, options, syscalls)
                ground = _stand(capacity_bytes, owner, mode, manifest, recovered, syscalls, stride_bytes)
            except BaseException:
                manifest.close()
                raise
    except BaseException:
        if (options.path / MANIFEST_NAME).exists():
            owner.leave()
        else:
            owner.release()
        raise
    return ground, manifest, recovered


def _open_manifest(
    owner: DirectoryOwner, options: FilesOptions, syscalls: Syscalls, segment_bytes: int
) -> tuple[Manifest, Recovered]:
    folder = options.path
    path = folder / MANIFEST_NAME
    if path.exists() or path.is_symlink():
        manifest, rows = Manifest.open(folder, salvage=options.salvage, at_least=owner.noted_commit)
        return manifest, recover(rows, manifest.meta.alignment_bytes, str(path))
    _check_nothing_is_kept(folder)
    meta = Meta(
        format=FORMAT,
        directory=str(uuid.uuid4()),
        created_by=f"tierstore {importlib.metadata.version('tierstore')}",
        segment_bytes=segment_bytes,
        alignment_bytes=probe(folder, direct_for(options), syscalls).alignment_bytes,
    )
    return Manifest.create(folder, meta), Recovered(())


def _check_nothing_is_kept(folder: Path) -> None:
    """Refuse files whose manifest is gone: what they hold would be written over."""
    for entry in folder.iterdir():
        if segment_index(entry.name, Keeping.DURABLE) is not None:
            raise IntegrityError(
                f"{folder} holds {entry.name} but not {MANIFEST_NAME}, which says what is in it: "
                f"put that back, or remove the files. Nothing was changed"
            )


def _mode(meta: Meta, options: FilesOptions, syscalls: Syscalls) -> IoMode:
    """Return how to do I/O in a directory whose extents have the alignment that they were made with."""
    buffered = IoMode(is_direct=False, alignment_bytes=meta.alignment_bytes, memory_alignment_bytes=1)
    try:
        mode = probe(options.path, direct_for(options), syscalls)
    except BackendError as error:
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in _FULL:
            raise
        _log.warning("%s is too full to find out whether direct I/O works: I/O is buffered", options.path)
        return buffered
    if not mode.is_direct or meta.alignment_bytes % mode.alignment_bytes == 0:
        return replace(mode, alignment_bytes=meta.alignment_bytes)
    if options.direct is Direct.ALWAYS:
        raise BackendError(
            f"{options.path} was made with an alignment of {meta.alignment_bytes} bytes and direct I/O needs "
            f"{mode.alignment_bytes} there now: use direct='auto', or export to a new directory"
        )
    _log.warning(
        "%s was made with an alignment of %d bytes and direct I/O needs %d there now: I/O is buffered",
        options.path,
        meta.alignment_bytes,
        mode.alignment_bytes,
    )
    return buffered


def _stand(
    capacity_bytes: int,
    owner: DirectoryOwner,
    mode: IoMode,
    manifest: Manifest,
    recovered: Recovered,
    syscalls: Syscalls,
    stride_bytes: int,
) -> Ground:
    segments = Segments(
        owner.folder,
        mode.flags,
        syscalls,
        segment_bytes=manifest.meta.segment_bytes,
        stride_bytes=stride_bytes,
        keeping=Keeping.DURABLE,
    )
    try:
        segments.reopen(recovered.end)
        silent = find_missing(recovered, segments)
        space = Space(capacity_bytes, mode.alignment_bytes, segments, recovered.live)
        space.trim()
        _note_losses(manifest, recovered, silent)
    except OSError as error:
        segments.close()
        raise BackendError(f"the files in {owner.folder} cannot be opened again: {error}") from error
    except BaseException:
        segments.close()
        raise
    return Ground(owner, mode, segments, space, recovered.block_bytes)


def _note_losses(manifest: Manifest, recovered: Recovered, positions: list[int]) -> None:
    """Write down which bytes are lost, where nothing would show it later."""
    if not positions:
        return
    rows = list(recovered.rows)
    for position in positions:
        id_, version, name, note, nbytes, encoded = rows[position]
        place = decode_place(encoded)._replace(kind=Sums.LOST)
        rows[position] = encode(id_, version, name, note, nbytes, place)
    manifest.commit(
        replace(manifest.meta, digest=digest(rows)), (), [rows[position] for position in positions]
    )
    recovered.rows = rows
