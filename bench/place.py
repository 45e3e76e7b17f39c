"""Directories that a benchmark works in: there while it runs, and gone afterwards if it made them."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


class PlaceError(Exception):
    """A directory cannot be made or written.  The message names it and what stands in the way."""


@contextlib.contextmanager
def made(path: Path) -> Iterator[Path]:
    """Yield ``path``, an existing directory; in the end remove what had to be made for it and is empty.

    Raises:
        PlaceError: it cannot be made.
    """
    path = path.absolute()
    missing: list[Path] = []
    try:
        missing = [each for each in (path, *path.parents) if not each.exists()]
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _remove(missing)
        raise PlaceError(f"{path} cannot be made: {error}; give another directory") from error
    try:
        yield path
    finally:
        _remove(missing)


@contextlib.contextmanager
def scratch(parent: Path, prefix: str = "bench-") -> Iterator[Path]:
    """Yield a directory of one's own in ``parent``, which is made if it is missing; remove what was made.

    Raises:
        PlaceError: it cannot be made.
    """
    with made(parent) as there:
        try:
            directory = Path(tempfile.mkdtemp(prefix=prefix, dir=there))
        except OSError as error:
            raise PlaceError(f"{there} cannot be written: {error}; give another directory") from error
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def _remove(missing: list[Path]) -> None:
    with contextlib.suppress(OSError):  # it is not empty, and so are those above
        for each in missing:
            each.rmdir()
