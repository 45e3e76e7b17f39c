"""Text files that a command line names: read within bounds, written whole or not at all.

1. What cannot be read or written is a `UsageError`: the path that was given is wrong.
2. A file that is written replaces the former one in one step, when all of it is there; or, where it must be
new, comes to be in one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tierstore.cli.ending import held
from tierstore.errors import ConfigError, UsageError
from tierstore.regular import read_regular


def read_text(path: Path, most_bytes: int) -> str:
    """Return what a file says.

    Raises:
        UsageError: it cannot be read, is too long, or no text.
    """
    try:
        return read_regular(path, most_bytes).decode("utf-8")
    except OSError as cause:
        raise UsageError(f"{path}: cannot be read: {cause.strerror or cause}") from cause
    except UnicodeDecodeError as cause:
        raise UsageError(f"{path}: no text in UTF-8: {cause}") from cause


@contextlib.contextmanager
def named_file(path: str) -> Iterator[None]:
    """Say of a fault in what a file says which file it is.

    Raises:
        ConfigError: as within, with the path before it.
    """
    try:
        yield
    except ConfigError as cause:
        if str(cause).startswith(f"{path}: "):
            raise
        raise ConfigError(f"{path}: {cause}") from cause


def require_places(paths: Sequence[str]) -> None:
    """See to it that files can be written, before anything is computed for them.

    Raises:
        UsageError: a path is a directory, a device or a pipe; no file can be made there; or two are the same.
    """
    seen: set[Path] = set()
    for each in paths:
        path = Path(each)
        try:
            is_folder, has_folder = path.is_dir(), path.absolute().parent.is_dir()
            place = path.absolute().parent.resolve() / path.name
        except (OSError, ValueError) as cause:
            raise UsageError(f"{each!r}: no path of a file: {cause}") from cause
        if "\0" in each:
            raise UsageError(f"{each!r}: no path of a file: it has a null byte")
        if path.exists() and not is_folder and not path.is_file():
            raise UsageError(f"{path} is a device, a pipe or a socket; give the path of a file")
        if is_folder or not path.name:
            raise UsageError(f"{path} is a directory; give the path of a file")
        if not has_folder:
            raise UsageError(f"{path}: the directory {path.parent} is not there")
        if place in seen:
            raise UsageError(f"{path} is to be written twice; give another path")
        seen.add(place)


def require_own(path: str, beginning: bytes, written_by: str) -> None:
    """Refuse to write an output over something else: a source file, a machine file, a configuration.

    Args:
        path: that is to be written.
        beginning: of all that is written there.
        written_by: who writes it, for the message.

    Raises:
        UsageError: the file is there, and does not begin so.
    """
    try:
        with Path(path).open("rb") as file:
            begin = file.read(len(beginning))
    except OSError:
        return
    if begin and begin != beginning:
        raise UsageError(f"{path} is there, and was not {written_by}: give another path, or remove it")


def write_text(path: Path, text: str) -> None:
    """Write a file, or replace the former one.

    Raises:
        UsageError: it cannot be written.
    """
    write_bytes(path, text.encode("utf-8", "surrogateescape"))


def write_bytes(path: Path, content: bytes) -> None:
    """As `write_text`, of bytes."""
    _write(path, content, Path.replace)


def write_new_text(path: Path, text: str) -> None:
    """Write a file that is not there yet; one that somebody makes meanwhile stays.

    Raises:
        UsageError: it is there, or it cannot be written.
    """
    _write(path, text.encode("utf-8", "surrogateescape"), lambda fresh, path: path.hardlink_to(fresh))


def _write(path: Path, content: bytes, put_in_place: Callable[[Path, Path], object]) -> None:
    fresh = path.with_name(f".{path.name[:200]}.{os.getpid()}")
    try:
        with _taken_away(fresh):
            fresh.write_bytes(content)
            put_in_place(fresh, path)
    except FileExistsError as cause:
        raise UsageError(f"{path} is there already, and stays; give another path") from cause
    except OSError as cause:
        raise UsageError(f"{path}: cannot be written: {cause.strerror or cause}") from cause


@contextlib.contextmanager
def _taken_away(fresh: Path) -> Iterator[None]:
    """Remove a file on the way out, whatever ends the verb: one that got its name is no longer there."""
    try:
        yield
    finally:
        with held(), contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
