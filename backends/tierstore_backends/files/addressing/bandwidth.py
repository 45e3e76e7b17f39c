"""How fast a directory's disk is: measured in the directory, in a moment.

The figure is for sharing bytes out among drives, nothing else: a byte is written and read about as
often, so it is what one thread reaches that writes a byte and then reads it.  The faster of two passes
counts, and drives that differ by less than such a short measurement does are taken for equal.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tierstore.errors import BackendError
from tierstore.units import MIB
from tierstore_backends.files.addressing.direct_io_probe import IoMode
from tierstore_backends.files.directory.ownership import PROBE_NAME
from tierstore_backends.files.io.syscalls import Syscalls

_log = logging.getLogger("tierstore.files")

_BLOCK_BYTES = MIB
_MOST_BLOCKS = 32
_SECONDS = 0.01  # for each direction and pass; at least two blocks are moved, however long that takes
_PASSES = 2  # over all of them: whoever else uses the machine meanwhile slows down one drive, or one pass
_SLOW_SECONDS = 0.04  # a pass that took longer is the only one
_ALIKE = 1.3  # the same disk, measured again, differs by as much
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def measure_all(
    places: Sequence[tuple[Path, IoMode]], syscalls: Syscalls, clock: Callable[[], float] = time.perf_counter
) -> list[int]:
    """Return the bytes per second of each directory; one that is full counts as the slowest other.

    Raises:
        BackendError: a directory cannot be written or read.
    """
    best = [0] * len(places)
    is_done = [False] * len(places)
    for _ in range(_PASSES):
        for i, (folder, mode) in enumerate(places):
            if is_done[i]:
                continue
            begin_s = clock()
            try:
                best[i] = max(best[i], _measure(folder / PROBE_NAME, mode, syscalls, clock))
            except OSError as error:
                if error.errno not in _FULL:
                    raise BackendError(f"files cannot be written in {folder}: {error}") from error
                _log.warning("%s is full: how fast it is could not be measured", folder)
                is_done[i] = True
            is_done[i] |= clock() - begin_s > _SLOW_SECONDS
    slowest = min((rate for rate in best if rate), default=1)
    return alike([rate or slowest for rate in best])


def alike(rates: Sequence[int]) -> list[int]:
    """Return the rates, each that is hardly above another replaced by what those have on average."""
    groups: list[list[int]] = []
    for rate in sorted(rates):
        if groups and rate <= groups[-1][0] * _ALIKE:
            groups[-1].append(rate)
        else:
            groups.append([rate])
    mean = {rate: round(statistics.fmean(group)) for group in groups for rate in group}
    return [mean[rate] for rate in rates]


def _measure(path: Path, mode: IoMode, syscalls: Syscalls, clock: Callable[[], float]) -> int:
    fd = os.open(path, mode.flags, 0o600)
    try:
        with mmap.mmap(-1, _BLOCK_BYTES) as memory, memoryview(memory) as block:
            write_s, blocks = _times(lambda offset: syscalls.write(fd, [block], offset), _MOST_BLOCKS, clock)
            if not mode.is_direct:
                begin_s = clock()
                syscalls.sync(fd)  # writing was only copying; reading would be, too
                return _rate(2 * (sum(write_s) + clock() - begin_s) / blocks)
            read_s, _ = _times(lambda offset: syscalls.read(fd, [block], offset), blocks, clock)
            # The middle: one block that waited for somebody else's says nothing of the disk.
            return _rate(statistics.median(write_s) + statistics.median(read_s))
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


def _times(
    move: Callable[[int], int], most_blocks: int, clock: Callable[[], float]
) -> tuple[list[float], int]:
    """Move blocks for a moment; return how long each took, and how many there were."""
    times: list[float] = []
    end_s = clock() + _SECONDS
    while len(times) < most_blocks and (len(times) < 2 or clock() < end_s):
        begin_s = clock()
        if move(len(times) * _BLOCK_BYTES) != _BLOCK_BYTES:
            raise OSError(errno.ENOSPC, "only a part of a block was moved")
        times.append(clock() - begin_s)
    return times, len(times)


def _rate(seconds: float) -> int:
    """Return the bytes per second of a block that takes so long there and back."""
    return max(1, round(2 * _BLOCK_BYTES / seconds)) if seconds > 0 else _BLOCK_BYTES << 20
