"""Which drive of which store a directory is: a small file in each, where a store has several.

So a drive that is missing, not mounted, another store's or in another's place is refused by its name
before anything is touched: its addresses mean nothing without the others'.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tierstore.errors import BackendError, IntegrityError, UsageError
from tierstore_backends.files.directory.ownership import DRIVE_NAME
from tierstore_backends.paths import explain

_MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Identity:
    """What a directory says of itself.

    Attributes:
        store: what the manifest calls its directory.
        drive: which one it is, from 1.
        drives: of how many.
    """

    store: str
    drive: int
    drives: int


def store_of(folders: Sequence[Path]) -> str | None:
    """Return which store has these directories, in this order; ``None`` if none has several.

    Touches nothing.

    Raises:
        BackendError: one of its drives is missing.
        UsageError: a directory is another drive than it was given as, or of another store.
        IntegrityError: what a directory says of itself cannot be read.
    """
    found = [_read(folder) for folder in folders]
    known = [identity for identity in found if identity is not None]
    if not known:
        return None
    faults = list(_faults(folders, found, known[0]))
    if not faults:
        return known[0].store
    message = f"{'; '.join(faults)}. Nothing was touched"
    raise BackendError(message) if len(known) < len(found) else UsageError(message)


@contextlib.contextmanager
def written(folders: Sequence[Path], store: str) -> Iterator[None]:
    """Let each of ``folders`` say which drive of ``store`` it is, for good if no error is raised within.

    Raises:
        BackendError: a directory cannot be written.
    """
    paths: list[Path] = []
    try:
        for i, folder in enumerate(folders):
            paths.append(folder / DRIVE_NAME)
            _write(paths[-1], Identity(store, i + 1, len(folders)))
        yield
    except BaseException:
        for path in paths:
            with contextlib.suppress(OSError):  # the error under way says more
                path.unlink(missing_ok=True)
        raise


def _faults(folders: Sequence[Path], found: Sequence[Identity | None], first: Identity) -> Iterator[str]:
    count = len(folders)
    for i, (folder, identity) in enumerate(zip(folders, found, strict=True)):
        if identity is None:
            yield (
                f"{folder} was given as drive {i + 1} of the store {first.store}, and there is no "
                f"{DRIVE_NAME} in it (is the drive there, and mounted?)"
            )
        elif identity.store != first.store:
            yield f"{folder} is a drive of the store {identity.store}, and others are of {first.store}"
        elif (identity.drive, identity.drives) != (i + 1, count):
            yield (
                f"{folder} is drive {identity.drive} of {identity.drives}, and was given as drive {i + 1} "
                f"of {count}: give all directories of the store, in their order"
            )


def _read(folder: Path) -> Identity | None:
    path = folder / DRIVE_NAME
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BackendError(f"{path} cannot be read: {explain(error)}") from error
    try:
        found = json.loads(content)
        store, drive, drives = found["store"], found["drive"], found["drives"]
        if isinstance(store, str) and 1 <= drive <= drives:
            return Identity(store, drive, drives)
    except (ValueError, KeyError, TypeError):
        pass
    raise IntegrityError(
        f"{path} is damaged: it says {content[:200]!r}. Those in the store's other directories differ "
        f"from it only in 'drive': write it again after them. Nothing was touched"
    )


def _write(path: Path, identity: Identity) -> None:
    try:
        path.touch(mode=0o600, exist_ok=False)
        with path.open("w", encoding="utf-8") as file:
            file.write(json.dumps(asdict(identity)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        folder_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder_fd)
        finally:
            os.close(folder_fd)
    except OSError as error:
        raise BackendError(f"{path} cannot be written: {error}") from error
