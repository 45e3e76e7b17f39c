"""Where processes have the sockets that show their runs, and which of those are there.

They are in ``$XDG_RUNTIME_DIR/tierstore``, or where there is no such directory in ``tierstore-UID`` in the
directory for temporary files, each under the number of its process.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

LONGEST_PATH: Final = 100
"""Bytes of a socket's path, with what it is called at first; Linux takes 107."""

_NAME: Final = re.compile(r"([1-9]\d*)\.sock")
_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid


def folders() -> list[Path]:
    """Return the directories that sockets may be in, those of this environment first."""
    user = os.geteuid()
    found = [Path(each) / "tierstore" for each in (os.environ.get("XDG_RUNTIME_DIR"),) if each]
    found += [Path(f"/run/user/{user}/tierstore"), Path(tempfile.gettempdir()) / f"tierstore-{user}"]
    return [each for each in dict.fromkeys(found) if each.is_absolute()]


def make_folder() -> Path:
    """Return a directory that only this user can enter; make it if it is not there.

    Raises:
        OSError: there is none, and none can be made: each is missing its parent, somebody else's, or open to
            others.
    """
    faults: list[str] = []
    for folder in folders():
        if len(os.fsencode(folder)) > LONGEST_PATH - len(".4194304.sock.new/"):
            faults.append(f"{str(folder)!r} is too long for a socket")
            continue
        with contextlib.suppress(OSError):  # it is there, or the next line says what is wrong
            folder.mkdir(mode=0o700)
        if (fault := fault_of(folder)) is None:
            return folder
        faults.append(fault)
    raise OSError(f"no directory for sockets: {'; '.join(faults)}")


def fault_of(folder: Path) -> str | None:
    """Say why sockets in a directory are not to be trusted; ``None``: they are."""
    try:
        found = folder.lstat()
    except OSError as error:
        return f"{str(folder)!r}: {error.strerror}"
    if not stat.S_ISDIR(found.st_mode):
        return f"{str(folder)!r} is no directory"
    if found.st_uid != os.geteuid():
        return f"{str(folder)!r} belongs to user {found.st_uid}"
    if found.st_mode & 0o077:
        return f"{str(folder)!r} is open to others (mode {stat.S_IMODE(found.st_mode):o}): chmod 700"
    return None


def sockets() -> dict[int, list[Path]]:
    """Return the sockets of this user's processes by their number; some may be left over.

    Of several with one number, as of containers that share a directory, those of this environment come first.
    """
    found: dict[int, list[Path]] = {}
    for folder in folders():
        if fault_of(folder) is not None:
            continue
        for path in sorted(folder.iterdir()):
            if (named := _NAME.fullmatch(path.name)) is not None and path.is_socket():
                found.setdefault(int(named[1]), []).append(path)
    return found


def name_of(pid: int) -> str:
    """Return what the socket of a process is called."""
    return f"{pid}.sock"


def user_at(connection: socket.socket) -> int:
    """Return the user whose process is at the other end, as the kernel says."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def is_answered(path: Path) -> bool:
    """Whether a process listens at a socket; what cannot be known counts as one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


def sweep(folder: Path) -> None:
    """Remove the sockets of processes that have ended without doing so: nobody listens there."""
    for path in _left_over(folder):
        with contextlib.suppress(OSError):
            path.unlink()


def _left_over(folder: Path) -> Iterator[Path]:
    for path in list(folder.iterdir()):
        if _NAME.fullmatch(path.name) and path.is_socket() and not is_answered(path):
            yield path
