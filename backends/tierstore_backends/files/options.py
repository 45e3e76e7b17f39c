"""What a user may say about scratch files: read and checked as a whole.

Promises: all faults in one message, each with what was given and what is accepted.
Knows nothing of what the options do; that is told where they are used.
"""

from __future__ import annotations

import enum
import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tierstore.errors import ConfigError
from tierstore.quoting import quoted
from tierstore.units import MIB, parse_rate
from tierstore_backends.options import Reader, count, read_all, size, switch

MOST_DRIVES = 256
_MOST_THREADS = 1024


class Direct(enum.Enum):
    """Whether I/O goes past the page cache."""

    AUTO = enum.auto()  # where a probe says that it works, else through the cache with a warning
    ALWAYS = enum.auto()  # or the backend does not open
    NEVER = enum.auto()


class EngineName(enum.Enum):
    """Who moves the bytes."""

    AUTO = "auto"  # what measured best: worker threads; or nobody, where ``enable_aio`` is off
    THREADS = "threads"
    IO_URING = "io_uring"
    AIOFILES = "aiofiles"
    PLAIN = "plain"  # the calling thread


@dataclass(frozen=True, slots=True)
class DriveOption:
    """One directory of several.

    Attributes:
        path: the directory.
        bandwidth_bytes_per_s: what its share of the bytes follows; ``None``: what is measured.
    """

    path: Path
    bandwidth_bytes_per_s: int | None = None


@dataclass(frozen=True, slots=True)
class FilesOptions:
    """How to use a directory, or several.

    Attributes:
        path: the directory; made with its parents where it is missing.  In the mapping also a list of
            directories, each on a drive of its own, over which bytes are spread by bandwidth: texts, or
            mappings such as ``{"path": "/mnt/a", "bandwidth": "2GB"}``, which say the bytes per second
            and must then do so for each.  Here the first of them.
        aio_block_size: the most bytes that one system call moves: larger transfers are cut, and
            neighbours are merged up to it.  Rounded up to the alignment.  4 MiB is what measured
            best: with 1 MiB, threads meet at the interpreter's lock four times as often, which
            cost 10 to 20 % of a disk of 4 GB/s.
        aio_queue_depth: at most this many fragments are in flight at a time, on each drive.
        enable_aio: ``False`` moves every transfer in the calling thread, before the call returns.
        engine: who moves the bytes: ``"auto"``, ``"threads"``, ``"io_uring"``, ``"aiofiles"`` or
            ``"plain"`` in the mapping.
        checksum: whether bytes are summed when written and compared when read.
        threads: how many workers move bytes, on each drive; how many callers do with the engine ``plain``.
        direct: ``"auto"``, ``True`` or ``False`` in the mapping.
        durable: whether what was committed is found again when the directory is opened later.
        create: whether a directory that nothing is kept in becomes a durable one; ``False`` refuses it.
        salvage: open a durable directory also if its manifest is damaged and names are lost: with what
            can be read, for good.
        read_only: look into a durable directory and change nothing in it: no lock, no repair, no new bytes.
            It may be on read-only media, and several may look at a time.
        drives: the directories if ``path`` is a list of several, in its order; not in the mapping.
    """

    path: Path
    aio_block_size: int = 4 * MIB
    aio_queue_depth: int = 1024
    enable_aio: bool = True
    checksum: bool = True
    threads: int = 4
    direct: Direct = Direct.AUTO
    engine: EngineName = EngineName.AUTO
    durable: bool = False
    create: bool = True
    salvage: bool = False
    read_only: bool = False
    drives: tuple[DriveOption, ...] = ()

    @property
    def folders(self) -> tuple[Path, ...]:
        """All directories."""
        return tuple(drive.path for drive in self.drives) or (self.path,)


def parse_options(options: Mapping[str, object]) -> FilesOptions:
    """Read the options of the ``files`` backend.

    Raises:
        ConfigError: unknown names, with near misses, and bad values, with what is accepted.
    """
    values = read_all("files", options, _READERS, needed=_NEEDED, contradictions=_contradictions)
    drives = cast("tuple[DriveOption, ...]", values.pop("path"))
    values |= {"path": drives[0].path, "drives": drives if len(drives) > 1 else ()}
    return FilesOptions(**values)  # type: ignore[arg-type]  # each reader returns its field's type


def _contradictions(values: Mapping[str, object]) -> Iterator[str]:
    """Yield what is wrong with options that are each well by themselves."""
    engine = cast("EngineName", values.get("engine", EngineName.AUTO))
    if values.get("enable_aio") is False and engine not in (EngineName.AUTO, EngineName.PLAIN):
        yield (
            f"engine={engine.value!r} moves bytes in the background and enable_aio=False forbids that: "
            "leave one out, or say engine='plain'"
        )
    if values.get("direct") is Direct.ALWAYS and engine is EngineName.AIOFILES:
        yield "engine='aiofiles' goes through the page cache and direct=True forbids that: leave one out"
    if values.get("read_only") and not values.get("durable"):
        yield "read_only=True is for what was kept: say durable=True, too"
    if values.get("read_only") and engine in (EngineName.IO_URING, EngineName.AIOFILES):
        yield (
            f"engine={engine.value!r} needs files that it can write and read_only=True forbids that: "
            "leave one out"
        )


def _drives(given: object) -> tuple[DriveOption, ...]:
    """Read one directory, or a list of them."""
    if not isinstance(given, list | tuple):
        return (DriveOption(_path(given)),)
    drives = tuple(_drive(each) for each in given)
    if not 0 < len(drives) <= MOST_DRIVES:
        raise ConfigError(f"accepted: 1 to {MOST_DRIVES} directories")
    places = [(drive.path, Path(os.path.realpath(drive.path))) for drive in drives]
    for (one, where), (other, there) in itertools.permutations(places, 2):
        if there.is_relative_to(where):
            what = "the same directory as" if there == where else "inside"
            raise ConfigError(f"{other} is {what} {one}; accepted: directories on different drives")
    if len({drive.bandwidth_bytes_per_s is None for drive in drives}) > 1:
        raise ConfigError("bandwidth is given for some directories; accepted: for all, or for none")
    return drives


def _drive(given: object) -> DriveOption:
    if not isinstance(given, Mapping):
        return DriveOption(_path(given))
    unknown = [name for name in given if name not in ("path", "bandwidth")]
    if unknown:
        raise ConfigError(f"unknown key {quoted(unknown[0])} of a drive; accepted: 'path' and 'bandwidth'")
    return DriveOption(_path(given.get("path")), _bandwidth(given.get("bandwidth")))


def _bandwidth(given: object) -> int | None:
    return None if given is None else parse_rate(cast("int | str", given))


def _path(given: object) -> Path:
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise ConfigError("accepted: the path of a directory, as text or a Path")
    text = os.fspath(given)
    if not isinstance(text, str) or "\0" in text:
        raise ConfigError("accepted: the path of a directory, as text or a Path")
    # Absolute now: the program may change its working directory later.
    return Path(text).expanduser().absolute()


def _direct(given: object) -> Direct:
    if given == "auto":
        return Direct.AUTO
    if given is True:
        return Direct.ALWAYS
    if given is False:
        return Direct.NEVER
    raise ConfigError("accepted: 'auto', True or False")


def _engine(given: object) -> EngineName:
    for name in EngineName:
        if given == name.value:
            return name
    raise ConfigError(f"accepted: {', '.join(repr(name.value) for name in EngineName)}")


_READERS: Mapping[str, Reader] = {
    "path": _drives,
    "aio_block_size": size("1GiB", example="1MiB"),  # Linux moves less than 2 GiB at a time
    "aio_queue_depth": count(),
    "enable_aio": switch,
    "checksum": switch,
    "threads": count(_MOST_THREADS),
    "direct": _direct,
    "engine": _engine,
    "durable": switch,
    "create": switch,
    "salvage": switch,
    "read_only": switch,
}

_NEEDED = {"path": "the directory to keep files in"}
