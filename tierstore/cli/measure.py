"""Short measurements of what this machine's copies and disks can do.

Each takes well under a second or two and reports bytes per second.  They say what to expect, not
what is best: nothing else is stopped meanwhile, and nothing is warmed up for long.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from tierstore.cli.room import own_name
from tierstore.errors import BackendError
from tierstore.units import MIB

_COPY_BYTES = 64 * MIB  # larger than the last-level caches of most machines
_COPY_SECONDS = 0.3
_PIECE_BYTES = 4 * MIB
_FILE_BYTES = 256 * MIB
_DISK_SECONDS = 0.8
_THREADS = 4
_SMALL_READ_BYTES = 4096
_SMALL_READS = 33
_ALIGNMENTS = (512, 4096)  # in the order of how much they allow


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """What copies between pinned host memory and a device reach."""

    to_device_bytes_per_s: int
    from_device_bytes_per_s: int


@dataclass(frozen=True, slots=True)
class Disk:
    """What a directory's file system can do.

    Attributes:
        is_direct: whether files can be read and written without the page cache.
        alignment_bytes: what direct I/O has to be a multiple of; ``None`` without it.
        write_bytes_per_s: through to the device if direct, else to the end of an ``fsync``.
        read_bytes_per_s: from the device if direct, else likely out of the page cache.
    """

    is_direct: bool
    alignment_bytes: int | None
    write_bytes_per_s: int
    read_bytes_per_s: int


@dataclass(frozen=True, slots=True)
class DiskAtOnce:
    """What a directory's file system can do at once.

    Attributes:
        together_bytes_per_s: reading and writing, added up.
        latency_s: of one read of 4 KiB; without direct I/O it is the page cache's.
    """

    together_bytes_per_s: int
    latency_s: float


def host_copy_bytes_per_s() -> int:
    """Measure one ``torch.Tensor.copy_`` from host memory to host memory."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    destination = torch.empty_like(source)
    return _best_bytes_per_s(lambda: destination.copy_(source))


def link(device: str) -> LinkSpeed:
    """Measure copies from and to pinned memory of the accelerator ``device``.

    Raises:
        RuntimeError: host memory cannot be pinned there, or the device has no room.
    """
    host = torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)

    def up() -> None:
        there.copy_(host, non_blocking=True)
        torch.accelerator.synchronize(device)

    def down() -> None:
        host.copy_(there, non_blocking=True)
        torch.accelerator.synchronize(device)

    return LinkSpeed(_best_bytes_per_s(up), _best_bytes_per_s(down))


def _best_bytes_per_s(copy: Callable[[], object]) -> int:
    copy()  # the first touches pages and wakes what sleeps
    best_s = float("inf")
    end = time.perf_counter() + _COPY_SECONDS
    while True:  # at least once, however busy the machine is
        begin = time.perf_counter()
        copy()
        now = time.perf_counter()
        best_s = min(best_s, now - begin)
        if now >= end:
            return int(_COPY_BYTES / best_s)


def disk(directory: Path, *, room_bytes: int) -> Disk:
    """Measure writing and reading one file in ``directory`` that is gone afterwards.

    Args:
        directory: has to exist.
        room_bytes: the file gets no larger than this.

    Raises:
        BackendError: a file cannot be made or written there; cause attached.
    """
    pieces = min(_FILE_BYTES, room_bytes) // _PIECE_BYTES
    if pieces == 0:
        raise BackendError(f"{directory}: less than {_PIECE_BYTES} bytes to measure with; make room there")
    try:
        with _unnamed_file(directory) as (descriptor, alignment_bytes):
            is_direct = alignment_bytes is not None
            written, write_bytes_per_s = _timed(descriptor, pieces, _write, sync=not is_direct)
            _, read_bytes_per_s = _timed(descriptor, written, _read, sync=False)
    except OSError as cause:
        raise BackendError(f"{directory}: cannot be written or read: {cause.strerror}") from cause
    return Disk(is_direct, alignment_bytes, write_bytes_per_s, read_bytes_per_s)


def disk_at_once(directory: Path, *, room_bytes: int) -> DiskAtOnce:
    """Measure one file in ``directory`` as `disk` does: read and written at the same time, and bit by bit.

    Raises:
        BackendError: as `disk`.
    """
    pieces = min(_FILE_BYTES, room_bytes) // _PIECE_BYTES
    if pieces == 0:
        raise BackendError(f"{directory}: less than {_PIECE_BYTES} bytes to measure with; make room there")
    try:
        with _unnamed_file(directory) as (descriptor, alignment_bytes):
            sync = alignment_bytes is None
            written, _ = _timed(descriptor, pieces, _write, sync=sync)
            with ThreadPoolExecutor(2) as both:
                reading = both.submit(_timed, descriptor, written, _read, sync=False)
                writing = both.submit(_timed, descriptor, written, _write, sync=sync)
                together = reading.result()[1] + writing.result()[1]
            latency_s = _small_read_s(descriptor, written * _PIECE_BYTES)
    except OSError as cause:
        raise BackendError(f"{directory}: cannot be written or read: {cause.strerror}") from cause
    return DiskAtOnce(together, latency_s)


def _small_read_s(descriptor: int, nbytes: int) -> float:
    """Return how long one small read takes, of several the one in the middle."""
    step = max(nbytes // _SMALL_READS // _SMALL_READ_BYTES, 1) * _SMALL_READ_BYTES
    seconds: list[float] = []
    memory = mmap.mmap(-1, _SMALL_READ_BYTES)
    for number in range(_SMALL_READS):
        begin = time.perf_counter()
        if _read(descriptor, memory, number * step % nbytes) != _SMALL_READ_BYTES:
            raise OSError(errno.EIO, "moved only a part of the bytes")
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[_SMALL_READS // 2]


@contextmanager
def _unnamed_file(directory: Path) -> Iterator[tuple[int, int | None]]:
    """Open a file that has no name any more: its descriptor, and the alignment of direct I/O.

    Without direct I/O the alignment is ``None`` and the file goes through the page cache.
    """
    path = directory / own_name()
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        descriptor = _open_direct(str(path))
        alignment_bytes = None if descriptor is None else _alignment_bytes(descriptor)
        if descriptor is None or alignment_bytes is None:
            descriptor = os.open(path, os.O_RDWR)
    finally:
        path.unlink(missing_ok=True)  # `tierstore.cli.room.remove_ours` does, if that is interrupted
    try:
        yield descriptor, alignment_bytes
    finally:
        os.close(descriptor)


def _open_direct(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError as refusal:
        if refusal.errno != errno.EINVAL:  # which is how file systems say that they cannot
            raise
        return None


def _alignment_bytes(descriptor: int) -> int | None:
    """Return the smallest alignment that direct I/O accepts for memory, offset and length.

    Closes the descriptor if there is none.
    """
    view = memoryview(
        mmap.mmap(-1, 2 * _ALIGNMENTS[-1])
    )  # never closed by name: an interrupt may hold a part
    for alignment_bytes in _ALIGNMENTS:
        try:
            os.pwritev(descriptor, [view[alignment_bytes : 2 * alignment_bytes]], alignment_bytes)
        except OSError as refusal:
            if refusal.errno != errno.EINVAL:
                raise
        else:
            return alignment_bytes
    os.close(descriptor)
    return None


def _timed(
    descriptor: int, pieces: int, move: Callable[[int, mmap.mmap, int], int], *, sync: bool
) -> tuple[int, int]:
    """Move at most ``pieces`` pieces in the time there is; return how many, and bytes per second."""
    begin = time.perf_counter()
    end = begin + _DISK_SECONDS
    numbers = itertools.count()
    done: list[int] = []

    def lane() -> None:
        with mmap.mmap(-1, _PIECE_BYTES) as memory:
            while (piece := next(numbers)) < pieces:
                if move(descriptor, memory, piece * _PIECE_BYTES) != _PIECE_BYTES:
                    raise OSError(errno.EIO, "moved only a part of the bytes")
                done.append(piece)
                if time.perf_counter() > end:
                    return

    with ThreadPoolExecutor(_THREADS) as lanes:
        for future in [lanes.submit(lane) for _ in range(_THREADS)]:
            future.result()
    if sync:
        os.fsync(descriptor)
    return len(done), int(len(done) * _PIECE_BYTES / (time.perf_counter() - begin))


def _write(descriptor: int, memory: mmap.mmap, offset: int) -> int:
    return os.pwritev(descriptor, [memory], offset)


def _read(descriptor: int, memory: mmap.mmap, offset: int) -> int:
    return os.preadv(descriptor, [memory], offset)
