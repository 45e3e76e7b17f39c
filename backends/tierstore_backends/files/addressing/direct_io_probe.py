"""What direct I/O can do in one directory: asked by doing it, never by tables.

File systems refuse ``O_DIRECT`` when a file is opened (NFS servers, some overlays), when it is
used (alignment), or not at all.  So one page is written and read back, with ever coarser
alignments, until bytes come back equal.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierstore.errors import BackendError
from tierstore_backends.files.directory.ownership import PROBE_NAME
from tierstore_backends.files.io.syscalls import Syscalls
from tierstore_backends.files.options import Direct

_log = logging.getLogger("tierstore.files")

OPEN_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_OFFSET_ALIGNMENTS = (512, 4096)
_MEMORY_ALIGNMENTS = (4, 64, 512, 4096)
_PAGE_BYTES = 4096
_LARGEST_BLOCK_BYTES = 65536  # larger "blocks" are transfer sizes of network file systems
_REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})


@dataclass(frozen=True, slots=True)
class IoMode:
    """How files in a directory are opened and what their transfers must be multiples of.

    Attributes:
        is_direct: whether transfers go past the page cache.
        alignment_bytes: extents begin at and have a multiple of this: of what direct I/O needs,
            and of the file system's block, so that bytes reserved are bytes on disk.
        memory_alignment_bytes: buffers at other addresses have to be copied.
    """

    is_direct: bool
    alignment_bytes: int
    memory_alignment_bytes: int

    @property
    def flags(self) -> int:
        """What ``os.open`` is told."""
        return OPEN_FLAGS | os.O_DIRECT if self.is_direct else OPEN_FLAGS


def probe(folder: Path, direct: Direct, syscalls: Syscalls) -> IoMode:
    """Find out how to do I/O in ``folder``.

    Raises:
        BackendError: the directory cannot be written, or direct I/O is demanded and refused.
    """
    try:
        block_bytes = _block_bytes(folder)
        if direct is not Direct.NEVER:
            found = _probe_direct(folder / PROBE_NAME, syscalls)
            if found is not None:
                return IoMode(
                    is_direct=True,
                    alignment_bytes=max(found[0], block_bytes),
                    memory_alignment_bytes=found[1],
                )
    except OSError as error:
        raise BackendError(f"scratch files cannot be written in {folder}: {error}") from error
    if direct is Direct.ALWAYS:
        raise BackendError(
            f"{folder} refuses direct I/O, and direct=True demands it: use direct='auto', or another disk"
        )
    if direct is Direct.AUTO:
        _log.warning("%s refuses direct I/O: scratch files there go through the page cache", folder)
    return IoMode(is_direct=False, alignment_bytes=block_bytes, memory_alignment_bytes=1)


def probe_reading(path: Path, alignment_bytes: int, direct: Direct, syscalls: Syscalls) -> IoMode:
    """Find out how to read ``path``, a file whose extents have a given alignment.  Changes nothing.

    Raises:
        BackendError: direct I/O is demanded and refused.
    """
    found = None if direct is Direct.NEVER else _probe_reads(path, alignment_bytes, syscalls)
    if found is None and direct is Direct.ALWAYS:
        raise BackendError(
            f"{path} cannot be read by direct I/O, and direct=True demands it: use direct='auto'"
        )
    return IoMode(
        is_direct=found is not None, alignment_bytes=alignment_bytes, memory_alignment_bytes=found or 1
    )


def _probe_reads(path: Path, alignment_bytes: int, syscalls: Syscalls) -> int | None:
    """Return the finest alignment in memory with which a page can be read; ``None``: none can."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | getattr(os, "O_DIRECT", 0))
    except OSError:
        return None
    try:
        with mmap.mmap(-1, 2 * _PAGE_BYTES + _LARGEST_BLOCK_BYTES) as pages, memoryview(pages) as memory:
            return _first(
                _MEMORY_ALIGNMENTS,
                lambda n: _can_read(fd, memory, alignment_bytes, n % _PAGE_BYTES, syscalls),
            )
    finally:
        os.close(fd)


def _can_read(fd: int, memory: memoryview, nbytes: int, start: int, syscalls: Syscalls) -> bool:
    window = memory[start : start + nbytes]
    try:
        syscalls.read(fd, [window], 0)
    except OSError:
        return False  # whatever it is: reading through the cache meets it if it matters
    finally:
        window.release()
    return True


def _block_bytes(folder: Path) -> int:
    """Return the unit in which the file system gives out disk, at least a sector."""
    block_bytes = os.statvfs(folder).f_frsize
    is_plausible = 0 < block_bytes <= _LARGEST_BLOCK_BYTES and block_bytes & (block_bytes - 1) == 0
    return max(512, block_bytes) if is_plausible else _PAGE_BYTES


def _probe_direct(path: Path, syscalls: Syscalls) -> tuple[int, int] | None:
    """Return the finest alignments, in the file and in memory, that work; ``None``: none does."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        fd = os.open(path, OPEN_FLAGS | os.O_DIRECT, 0o600)
    except OSError as error:
        path.unlink(missing_ok=True)  # some file systems make the file and then refuse
        if error.errno in _REFUSALS:
            return None
        raise
    try:
        with mmap.mmap(-1, 4 * _PAGE_BYTES) as pages, memoryview(pages) as memory:
            offset_bytes = _first(_OFFSET_ALIGNMENTS, lambda n: _echoes(fd, memory, n, 0, syscalls))
            if offset_bytes is None:
                return None
            memory_bytes = _first(
                _MEMORY_ALIGNMENTS, lambda n: _echoes(fd, memory, offset_bytes, n % _PAGE_BYTES, syscalls)
            )
            return None if memory_bytes is None else (offset_bytes, memory_bytes)
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


def _first(candidates: Sequence[int], does_work: Callable[[int], bool]) -> int | None:
    return next((candidate for candidate in candidates if does_work(candidate)), None)


def _echoes(fd: int, memory: memoryview, offset: int, start: int, syscalls: Syscalls) -> bool:
    """Whether bytes written from and read to ``memory[start:]`` at ``offset`` come back equal.

    The memory crosses a page, as most buffers do.
    """
    nbytes = _PAGE_BYTES + offset
    window = memory[start : start + nbytes]
    pattern = os.urandom(nbytes)
    try:
        window[:] = pattern
        if syscalls.write(fd, [window], offset) != nbytes:
            return False
        window[:] = bytes(nbytes)
        return syscalls.read(fd, [window], offset) == nbytes and window == pattern
    except OSError as error:
        if error.errno in _REFUSALS:
            return False
        raise
    finally:
        window.release()
