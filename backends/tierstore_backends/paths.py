"""What is the matter with a path at which a directory is wanted: said in words, with what to do.

Only looks; what it says is about the moment at which it looks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import Final

_KINDS: Final = (
    (stat.S_ISREG, "a file"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_ADVICE: Final = {
    errno.EROFS: "that file system is mounted to be read only: give a path that can be written",
    errno.ENOSPC: "that file system is full: make room there, or give a path on another one",
    errno.EDQUOT: "this user's quota of that file system is used up: make room there, or give another path",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.ESTALE: "that file system was taken away by its server: mount it again",
}


def explain(error: OSError) -> str:
    """Say what an error of the system means: what is at the path, whose it is, and what to do."""
    if not isinstance(error.filename, str):
        return f"{error} ({_ADVICE[error.errno]})" if error.errno in _ADVICE else str(error)
    path = Path(error.filename)
    why = _whose(error, path) or _ADVICE.get(error.errno or 0)
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        why = matter_with(path)
    elif error.errno == errno.ELOOP:
        why = matter_with(path.parent) or f"{path} is a link, and links are not followed here: remove it"
    return f"{error} ({why})" if why else str(error)


def matter_with(path: Path) -> str | None:
    """Say why there can be no directory at ``path``, if what is there shows it."""
    for place in reversed((path.absolute(), *path.absolute().parents)):
        with contextlib.suppress(OSError):  # nothing is there, or who asks may not look
            found = place.lstat()
            if stat.S_ISLNK(found.st_mode):
                try:
                    found = place.stat()
                except OSError as error:
                    return _matter_with_link(place, error)
            kind = next((name for is_one, name in _KINDS if is_one(found.st_mode)), None)
            if kind is not None:
                return f"{place} is {kind}, and a directory is needed: give another path"
    return None


def takes_nothing(folder: Path) -> str | None:
    """Say that the file system takes no directory ``folder``, or no file in it, if trying shows that.

    Some, such as those of the kernel, say of what they do not take that it is not there.
    """
    there = next((each for each in (folder, *folder.parents) if os.path.isdir(each)), None)  # noqa: PTH112 - whatever the name
    if there is None:
        return None
    try:
        if there == folder:
            probe = folder / f"tierstore-{os.urandom(4).hex()}"
            os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
            probe.unlink()
        else:
            name = folder.relative_to(there).parts[0]
            (there / name).mkdir()
            (there / name).rmdir()
    except FileNotFoundError:
        if there.is_dir():
            return f"{there} takes nothing new, as no file system of the kernel's does: give a path on a disk"
    except OSError:
        pass
    return None


def _matter_with_link(link: Path, error: OSError) -> str | None:
    if error.errno == errno.ENOENT:
        return f"{link} is a link to {link.readlink()}, which is not there: make that directory first"
    if error.errno == errno.ELOOP:
        return f"{link} is a link that leads back to itself: give another path"
    return None


def _whose(error: OSError, path: Path) -> str | None:
    if error.errno not in (errno.EACCES, errno.EPERM):
        return None
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            found = place.stat()
            whose = (
                f"{place} belongs to user {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):04o}, "
                f"and this process is user {os.geteuid()}"
            )
            if (found.st_uid == os.geteuid() and found.st_mode & stat.S_IWUSR) or not os.geteuid():
                return f"{whose}: it is the file system that refuses; give another path"
            return f"{whose}: run it as that user, or change the mode"
    return None
