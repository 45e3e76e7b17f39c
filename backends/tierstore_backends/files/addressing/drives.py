"""Several directories as one address space, each on a drive of its own.

Address ``a`` is address ``a % SPAN_BYTES`` of drive ``a // SPAN_BYTES``.  So an extent, a fragment and a
row of a manifest look the same whether there is one drive or many.  Knows nothing of room: see `stripes`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

from tierstore_backends.files.addressing.direct_io_probe import IoMode
from tierstore_backends.files.addressing.segments import Doubts, Segments
from tierstore_backends.files.addressing.space import Space
from tierstore_backends.files.extents import Extent

SPAN_BYTES: Final = 1 << 48
"""How many addresses a drive has: 256 TiB."""


@dataclass(frozen=True, slots=True)
class Drive:
    """One directory of several.

    Attributes:
        folder: the directory.
        mode: how I/O is done there; all drives have the same alignment of extents.
        bandwidth_bytes_per_s: what its share of the bytes follows.
        segments: its files, at addresses of its own, which begin at 0.
        space: the room in them.
    """

    folder: Path
    mode: IoMode
    bandwidth_bytes_per_s: int
    segments: Segments
    space: Space

    def most_bytes(self) -> int:
        """Return what its files could take: what they do, and what the file system has left."""
        return disk_bytes(self.folder, self.segments)


def disk_bytes(folder: Path, segments: Segments) -> int:
    """Return what ``segments`` take on disk and what the file system of ``folder`` has left."""
    disk = os.statvfs(folder)
    return segments.physical_bytes + disk.f_bavail * disk.f_frsize


def split_by_drive(extents: Iterable[Extent], count: int) -> list[list[Extent]]:
    """Return the extents on each of ``count`` drives, at addresses of its own."""
    parts: list[list[Extent]] = [[] for _ in range(count)]
    for start, end in extents:
        base = start - start % SPAN_BYTES
        parts[start // SPAN_BYTES].append((start - base, end - base))
    return parts


def reach(extents: Sequence[Extent]) -> list[Extent]:
    """Return for each drive that ``extents``, which are sorted, lie on: everything up to the last."""
    last = [max(group) for _, group in groupby(extents, key=lambda extent: extent[0] // SPAN_BYTES)]
    return [(start - start % SPAN_BYTES, end) for start, end in last]


class DriveFiles:
    """The files of all drives.  See `tierstore_backends.files.addressing.segments.Files`.

    Args:
        segments: those of each drive, of one length, a power of two.
    """

    def __init__(self, segments: Sequence[Segments]) -> None:
        self.segment_bytes = segments[0].segment_bytes
        assert SPAN_BYTES % self.segment_bytes == 0  # no file has addresses of two drives
        self._segments = segments
        self._files_per_drive = SPAN_BYTES // self.segment_bytes
        self._doubts = Doubts()

    def locate(self, start: int, end: int) -> tuple[int, int]:
        """See `Files`."""
        base = start - start % SPAN_BYTES
        return self._segments[start // SPAN_BYTES].locate(start - base, end - base)

    def path(self, address: int) -> Path:
        """See `Files`."""
        return self._segments[address // SPAN_BYTES].path(address % SPAN_BYTES)

    def where(self, address: int) -> str:
        """See `Files`.  Names the drive too."""
        drive = address // SPAN_BYTES
        where = self._segments[drive].where(address % SPAN_BYTES)
        return f"{where} (drive {drive + 1} of {len(self._segments)})"

    def length(self, address: int) -> int:
        """See `Files`."""
        return self._segments[address // SPAN_BYTES].length(address % SPAN_BYTES)

    def first_missing(self, start: int, end: int) -> int | None:
        """See `Files`.  Both addresses are of one drive."""
        base = start - start % SPAN_BYTES
        missing = self._segments[start // SPAN_BYTES].first_missing(start - base, end - base)
        return None if missing is None else base + missing

    def indices(self, extents: Sequence[Extent]) -> set[int]:
        """See `Files`."""
        return {index for extent in extents for index in self._segments[0].indices((extent,))}

    def sync(self, index: int) -> None:
        """See `Files`."""
        drive, own_index = divmod(index, self._files_per_drive)
        try:
            self._segments[drive].sync(own_index)
        except OSError:
            self._doubts.note(index)
            raise

    @property
    def failed_syncs(self) -> int:
        """See `Files`.  Of all drives."""
        return self._doubts.failed_syncs

    def is_in_doubt(self, extents: Sequence[Extent], failed_syncs: int) -> bool:
        """See `Files`."""
        return self._doubts.are_about(self.indices(extents), failed_syncs)

    def check(self) -> None:
        """See `Files`."""
        for segments in self._segments:
            segments.check()

    def sync_names(self) -> None:
        """See `Files`."""
        for segments in self._segments:
            segments.sync_names()

    def punch(self, start: int, end: int) -> None:
        """See `Files`.  Both addresses are of one drive."""
        base = start - start % SPAN_BYTES
        self._segments[start // SPAN_BYTES].punch(start - base, end - base)

    @property
    def physical_bytes(self) -> int:
        """See `Files`."""
        return sum(segments.physical_bytes for segments in self._segments)

    def close(self) -> None:
        """See `Files`."""
        for segments in self._segments:
            segments.close()

    def disown(self) -> None:
        """See `Files`."""
        for segments in self._segments:
            segments.disown()
