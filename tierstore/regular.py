"""Regular files that somebody hands in: opened without waiting, read no further than they may be long.

Rule 1: what is no regular file is refused before it is opened: opening a pipe waits for who writes to it, and
opening a device may do things.  Links are followed.
Rule 2: a file has the length that the file system said when it was opened.  One that then gives less or more
(one in ``/proc``, one that is written meanwhile) is refused.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotRegularError(OSError):
    """What is called so is there, and no regular file."""


def open_regular(path: Path) -> tuple[int, int]:
    """Open a file for reading, and return its descriptor and its bytes.  Never waits for another program.

    Raises:
        NotRegularError: it is no regular file.
        OSError: it is not there, or must not be read; ``strerror`` says which.
    """
    try:
        _require_regular(path.stat(), path)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as cause:  # a null byte, or what the file system's encoding has not
        raise OSError(errno.EINVAL, "its name is none that a file can have") from cause
    try:
        found = os.fstat(descriptor)  # it may be another one by now
        _require_regular(found, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, found.st_size


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Return what a file holds.

    Raises:
        OSError: as `open_regular`, or it is longer than ``most_bytes``, or of another length than it seemed.
    """
    descriptor, nbytes = open_regular(path)
    with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123 - it is opened already
        if nbytes > most_bytes:
            raise OSError(
                errno.EFBIG, f"it holds {nbytes} bytes; accepted: a file of at most {most_bytes}", str(path)
            )
        content = bytearray()
        while len(content) <= nbytes and (piece := file.read(nbytes + 1 - len(content))):
            content += piece
    if len(content) != nbytes:
        more = "more" if len(content) > nbytes else f"only {len(content)}"
        raise OSError(
            errno.EIO,
            f"the file system says that it holds {nbytes} bytes, and it gave {more}; accepted: a file that "
            "nobody writes to meanwhile",
            str(path),
        )
    return bytes(content)


def _require_regular(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise NotRegularError(errno.EINVAL, f"it is {kind}; accepted: a regular file", str(path))
