"""An engine for each drive, so that a slow one, or one that hangs, holds nobody else up.

To its drive's engine a *drive part*, the fragments of one transfer on that drive, is as good as a transfer;
the transfer ends when its last drive part does.  What a full drive refuses is written to the others.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tierstore.spi import Buffer
from tierstore_backends.files.addressing.drives import SPAN_BYTES, Drive
from tierstore_backends.files.addressing.segments import Files
from tierstore_backends.files.addressing.stripes import Stripes
from tierstore_backends.files.engines.base import IoEngine
from tierstore_backends.files.engines.choice import Started, start
from tierstore_backends.files.io.io_request import (
    Direction,
    FileSlot,
    FileSlotState,
    Fragment,
    IoRequest,
    cut,
)
from tierstore_backends.files.io.io_stats import DriveStats, IoStats, total
from tierstore_backends.files.io.syscalls import Syscalls
from tierstore_backends.files.options import EngineName, FilesOptions

_log = logging.getLogger("tierstore.files")

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True)
class StartedDrives:
    """Engines that run, one for each drive."""

    engine: DriveEngine
    name: EngineName
    drives: Sequence[Drive]
    parts: Sequence[Started]

    def accepts(self, memory: torch.Tensor) -> bool:
        """Say whether every drive moves ``memory`` of a GPU straight."""
        return all(part.accepts(memory) for part in self.parts)

    def close(self) -> None:
        """Let what is under way come to its end, and stop."""
        self.engine.close()
        for part in self.parts:
            part.close()

    def stats(self) -> IoStats:
        """Return what they have done so far."""
        whole = total(
            [batch_io.counts for part in self.parts for batch_io in part.batch_ios],
            engine=self.name.value,
            is_direct=all(part.is_direct for part in self.parts),
            most_in_flight=self.engine.most_in_flight,
        )
        drives = tuple(
            _drive_stats(drive, part.stats()) for drive, part in zip(self.drives, self.parts, strict=True)
        )
        return replace(whole, drives=drives)


def _drive_stats(drive: Drive, io: IoStats) -> DriveStats:
    return DriveStats(
        path=str(drive.folder),
        bandwidth_bytes_per_s=drive.bandwidth_bytes_per_s,
        live_bytes=drive.space.live_bytes,
        is_direct=io.is_direct,
        read_bytes=io.read_bytes,
        written_bytes=io.written_bytes,
        calls=io.read_calls + io.write_calls,
        call_seconds=io.call_seconds,
        most_in_flight=io.most_in_flight,
    )


def start_all(
    options: FilesOptions,
    drives: Sequence[Drive],
    files: Files,
    stripes: Stripes,
    syscalls: Syscalls,
    block_bytes: int,
    quiet_s: float,
) -> StartedDrives:
    """Start the engine that ``options`` mean, once for each drive.

    Args:
        options: what the user wrote; depth and threads are meant for each drive.
        drives: each with its files and its room.
        files: those of all drives.
        stripes: finds room elsewhere for what a full drive refuses.
        syscalls: the way to the kernel.
        block_bytes: the most bytes of a batch.
        quiet_s: how long nothing has moved on a drive before unused disk is given back.

    Raises:
        BackendError: the engine was asked for by name and cannot run on a drive; the message says why.
    """
    parts: list[Started] = []
    try:
        for drive in drives:
            own = replace(options, path=drive.folder)
            parts.append(start(own, drive.mode, files, drive.space, syscalls, block_bytes, quiet_s))
    except BaseException:
        for part in parts:
            part.engine.close()
        raise
    engine = DriveEngine(
        [part.engine for part in parts],
        stripes,
        folders=[drive.folder for drive in drives],
        segment_bytes=files.segment_bytes,
    )
    return StartedDrives(engine, parts[0].name, drives, parts)


class DriveEngine:
    """One engine of all drives'.  See `tierstore_backends.files.engines.base.IoEngine`.

    Args:
        engines: of each drive.
        stripes: finds room elsewhere.
        folders: what messages call the drives.
        segment_bytes: the length of a full file.
    """

    def __init__(
        self, engines: Sequence[IoEngine], stripes: Stripes, *, folders: Sequence[Path], segment_bytes: int
    ) -> None:
        self._engines = engines
        self._stripes = stripes
        self._folders = folders
        self._segment_bytes = segment_bytes
        self._told: set[int] = set()  # drives of which it was said that they are full

    @property
    def most_in_flight(self) -> int:
        """The most fragments that were in flight at a time on one drive."""
        return max(engine.most_in_flight for engine in self._engines)

    def submit(self, fragments: Sequence[Fragment]) -> None:
        """See `IoEngine`."""
        transfer = fragments[0].transfer
        assert isinstance(transfer, IoRequest)  # nobody has cut it into drive parts yet
        by_drive = _by_drive(fragments)
        if transfer.direction is Direction.READ and len(by_drive) == 1:
            (drive,) = by_drive
            self._engines[drive].submit(fragments)
        else:
            _DrivesRequest(self, transfer).begin(by_drive)

    def submit_drive_part(self, drive_part: _DrivePart) -> None:
        """Move the fragments of one drive part.

        Raises:
            StoreClosed: the engine of its drive was closed.
        """
        self._engines[drive_part.drive].submit(drive_part.fragments)

    def move(self, slot: FileSlot, full: set[int]) -> bool:
        """Give a slot addresses on drives that are not ``full``; return whether it has some now.

        Not one that has bytes, which are only written again: its addresses are no part of this write.
        """
        if slot.state is not FileSlotState.RESERVED:
            return False
        moved = self._stripes.move(slot.extents, full)
        if moved is None:
            return False
        slot.extents = moved
        for drive in full - self._told:
            self._told.add(drive)
            _log.warning("%s is full: other drives take what was meant for it", self._folders[drive])
        return True

    def cut_again(self, transfer: IoRequest, parts: Sequence[int]) -> list[Fragment]:
        """Cut the slots ``parts`` of a transfer into fragments anew, at the addresses that they have now."""
        slots = [transfer.slots[part] for part in parts]
        buffers = [transfer.buffers[part] for part in parts]
        fragments = cut(IoRequest(transfer.direction, slots, buffers), segment_bytes=self._segment_bytes)
        for fragment in fragments:
            fragment.part = parts[fragment.part]
        return fragments

    def tidy_when_quiet(self) -> None:
        """See `IoEngine`."""
        for engine in self._engines:
            engine.tidy_when_quiet()

    def close(self) -> None:
        """See `IoEngine`."""
        with contextlib.ExitStack() as all_of_them:
            for engine in reversed(self._engines):
                all_of_them.callback(engine.close)

    def is_worker(self) -> bool:
        """See `IoEngine`."""
        return any(engine.is_worker() for engine in self._engines)


class _DrivePart:
    """What one drive has of a request: a `FragmentOwner`."""

    __slots__ = (
        "_request",
        "buffers",
        "direction",
        "drive",
        "fragments",
        "is_whole",
        "ready",
        "remaining",
        "slots",
    )

    def __init__(
        self, request: _DrivesRequest, transfer: IoRequest, drive: int, fragments: Sequence[Fragment]
    ) -> None:
        self._request = request
        self.drive = drive
        self.direction = transfer.direction
        self.slots = transfer.slots
        self.buffers: Sequence[Buffer] = transfer.buffers
        self.is_whole = transfer.is_whole
        self.ready = transfer.ready
        self.fragments = fragments
        self.remaining = len(fragments)  # guarded by the drive's engine
        for fragment in fragments:
            fragment.transfer = self

    def note(self) -> bool:
        """See `FragmentOwner`."""
        self.remaining -= 1
        return not self.remaining

    def finish(self) -> None:
        """See `FragmentOwner`."""
        self.buffers = self.fragments = ()
        self._request.note_end()


class _DrivesRequest:
    """One transfer over several drives, under way."""

    def __init__(self, engine: DriveEngine, transfer: IoRequest) -> None:
        self._engine = engine
        self._transfer = transfer
        self._lock = threading.Lock()  # guards the next
        self._drive_parts = 0  # not yet at their end
        self._full: set[int] = set()

    def begin(self, by_drive: Mapping[int, Sequence[Fragment]], *, is_again: bool = False) -> None:
        """Move fragments on each drive.

        Raises:
            StoreClosed: nothing moves, for the first engine was closed; not raised ``is_again``.
        """
        drive_parts = [
            _DrivePart(self, self._transfer, drive, fragments) for drive, fragments in by_drive.items()
        ]
        self._drive_parts = len(drive_parts)
        for i, drive_part in enumerate(drive_parts):
            try:
                self._engine.submit_drive_part(drive_part)
            except Exception as error:
                if i == 0 and not is_again:
                    raise
                for fragment in drive_part.fragments:
                    fragment.error = error.with_traceback(None)  # frames refer to the caller's buffer
                drive_part.finish()

    def note_end(self) -> None:
        """Count a part that has ended; after the last write elsewhere what is to be, or end the request."""
        with self._lock:
            self._drive_parts -= 1
            if self._drive_parts:
                return
        transfer = self._transfer
        if transfer.direction is Direction.WRITE:
            again = self._move_elsewhere()
            if again:
                self.begin(_by_drive(again), is_again=True)
                return
        transfer.finish()

    def _move_elsewhere(self) -> list[Fragment]:
        """Give slots that met a full drive, and nothing worse, other addresses; return new fragments."""
        transfer = self._transfer
        failed = [fragment for fragment in transfer.fragments if fragment.error is not None]
        if not failed:
            return []
        refused = {fragment.part for fragment in failed if _is_full(fragment)}
        refused -= {fragment.part for fragment in failed if not _is_full(fragment)}
        # Each time another drive: what was moved lies on none of those that are known to be full.
        self._full |= {fragment.address // SPAN_BYTES for fragment in failed if fragment.part in refused}
        moved = [part for part in sorted(refused) if self._engine.move(transfer.slots[part], self._full)]
        again = self._engine.cut_again(transfer, moved)
        kept = [fragment for fragment in transfer.fragments if fragment.part not in moved]
        transfer.fragments = sorted([*kept, *again], key=lambda fragment: (fragment.part, fragment.index))
        return again


def _is_full(fragment: Fragment) -> bool:
    cause = fragment.error.__cause__ if fragment.error is not None else None
    return isinstance(cause, OSError) and cause.errno in _FULL


def _by_drive(fragments: Sequence[Fragment]) -> dict[int, list[Fragment]]:
    by_drive: dict[int, list[Fragment]] = {}
    for fragment in fragments:
        by_drive.setdefault(fragment.address // SPAN_BYTES, []).append(fragment)
    return by_drive
