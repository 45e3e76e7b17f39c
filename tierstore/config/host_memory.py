"""How much host memory this process can still take: of the machine's, of its cgroups', and of its own limits.

1. Of several bounds the least counts.  Each is named, so that a message can say which one it was.
2. What the kernel gives back by itself, which is cached files, counts as free, as it does for the machine.
3. Limits of a process (``setrlimit``) count addresses and not memory: what is mapped counts whether it was
   ever touched, and it counts until it is unmapped.
4. What cannot be read bounds nothing: other systems than Linux, or a container that does not show its cgroup.
"""

from __future__ import annotations

import contextlib
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tierstore.units import KIB

_CGROUPS = Path("/sys/fs/cgroup")
_CGROUP_OF_SELF = Path("/proc/self/cgroup")
_STATUS_OF_SELF = Path("/proc/self/status")

_CACHED = ("inactive_file", "active_file")  # of memory.stat; of version 1 with "total_": of all that is below


class HostRoom(NamedTuple):
    """One bound of host memory.

    Attributes:
        nbytes: what is left within it.
        name: what messages call it.
        counts_addresses: whether it is of what is mapped, touched or not.
    """

    nbytes: int
    name: str
    counts_addresses: bool = False


_Read = Callable[[Path], HostRoom | None]


def host_rooms() -> list[HostRoom]:
    """Return every bound of host memory that can be known, now."""
    import psutil

    return [
        HostRoom(int(psutil.virtual_memory().available), "the machine's available memory"),
        *_of_cgroups(),
        *_of_limits(),
    ]


# ---------------------------------------------------------------------- cgroups


def _of_cgroups() -> Iterator[HostRoom]:
    with contextlib.suppress(OSError):
        for line in _CGROUP_OF_SELF.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from _up_from(_CGROUPS, path, _of_version_2)
            elif "memory" in controllers.split(","):
                yield from _up_from(_CGROUPS / "memory", path, _of_version_1)


def _up_from(root: Path, path: str, read: _Read) -> Iterator[HostRoom]:
    """Read a cgroup and all that it is in: each may have a bound.  A container may not see its own path."""
    folder = root / path.lstrip("/")
    for each in (folder, *folder.parents):
        room = read(each)
        if room is not None:
            yield room
        if each == root:
            return


def _of_version_2(folder: Path) -> HostRoom | None:
    bounds = [
        found for name in ("memory.max", "memory.high") if (found := _number(folder / name)) is not None
    ]
    used_bytes = _number(folder / "memory.current")
    if not bounds or used_bytes is None:
        return None
    return _room_in(folder, min(bounds), used_bytes, "")


def _of_version_1(folder: Path) -> HostRoom | None:
    bound_bytes = _number(folder / "memory.limit_in_bytes")
    used_bytes = _number(folder / "memory.usage_in_bytes")
    if bound_bytes is None or used_bytes is None:
        return None
    return _room_in(folder, bound_bytes, used_bytes, "total_")


def _room_in(folder: Path, bound_bytes: int, used_bytes: int, prefix: str) -> HostRoom:
    cached_bytes = sum(_figure(folder / "memory.stat", prefix + name) for name in _CACHED)
    return HostRoom(max(0, bound_bytes - used_bytes + cached_bytes), f"the limit of the cgroup {folder}")


def _number(path: Path) -> int | None:
    """Return what a file says; ``None``: it is not there, or says that there is no bound."""
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text(encoding="ascii"))
    return None


def _figure(path: Path, name: str) -> int:
    with contextlib.suppress(OSError):
        found = re.search(rf"^{name} (\d+)$", path.read_text(encoding="ascii"), re.MULTILINE)
        return int(found[1]) if found is not None else 0
    return 0


# ---------------------------------------------------------------------- limits of the process


def _of_limits() -> Iterator[HostRoom]:
    for name, limit, figure in (
        ("RLIMIT_DATA", resource.RLIMIT_DATA, "VmData"),
        ("RLIMIT_AS", resource.RLIMIT_AS, "VmSize"),
    ):
        bound_bytes, _ = resource.getrlimit(limit)
        used_bytes = _mapped_bytes(figure)
        if bound_bytes != resource.RLIM_INFINITY and used_bytes is not None:
            yield HostRoom(max(0, bound_bytes - used_bytes), name, counts_addresses=True)


def _mapped_bytes(figure: str) -> int | None:
    with contextlib.suppress(OSError):
        found = re.search(
            rf"^{figure}:\s+(\d+) kB$", _STATUS_OF_SELF.read_text(encoding="ascii"), re.MULTILINE
        )
        return int(found[1]) * KIB if found is not None else None
    return None
