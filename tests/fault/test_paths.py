"""A path at which no store can be is refused with what is the matter with it, never with a guess."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tierstore.errors import BackendError
from tierstore_backends import files, zarr
from tierstore_backends.files.directory import ownership
from tierstore_backends.paths import explain

LOCK = ownership.LOCK_NAME


def _file(path: Path) -> Path:
    path.touch()
    return path


def _fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def _link(path: Path, to: str) -> Path:
    path.symlink_to(path.parent / to)
    return path


def _with_lock(path: Path, make: Callable[[Path], object]) -> Path:
    path.mkdir()
    make(path / LOCK)
    return path


PLACES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a file of the kernel's": (
        lambda _: Path("/proc/tierstore"),
        "/proc takes nothing new, as no file system",
    ),
    "a directory of the kernel's": (lambda _: Path("/proc"), "/proc takes nothing new, as no file system"),
    "a file": (lambda t: _file(t / "a"), "a is a file, and a directory is needed"),
    "below a file": (lambda t: _file(t / "a") / "b", "a is a file, and a directory is needed"),
    "a FIFO": (lambda t: _fifo(t / "a"), "a is a FIFO, and a directory is needed"),
    "below a FIFO": (lambda t: _fifo(t / "a") / "b", "a is a FIFO, and a directory is needed"),
    "a device": (lambda _: Path("/dev/null"), "/dev/null is a device, and a directory is needed"),
    "a loop": (lambda t: _link(t / "a", "a"), "a is a link that leads back to itself"),
    "below a loop": (lambda t: _link(t / "a", "a") / "b", "a is a link that leads back to itself"),
    "a link to nothing": (lambda t: _link(t / "a", "gone"), "gone, which is not there: make that directory"),
    "below a link to nothing": (
        lambda t: _link(t / "a", "gone") / "b",
        "gone, which is not there: make that",
    ),
    "a link to a file": (lambda t: _link(t / "a", _file(t / "b").name), "a is a file, and a directory"),
    "a long name": (lambda t: t / ("n" * 300), "too long"),
}
LOCKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a directory": (Path.mkdir, f"Is a directory: .*{LOCK}"),
    "a FIFO": (_fifo, "a lock has to be a plain file, and this is none: remove it"),
    "a link": (
        lambda lock: _link(lock, "gone"),
        f"{LOCK} is a link, and links are not followed here: remove",
    ),
}


@pytest.mark.parametrize("is_durable", [False, True])
@pytest.mark.parametrize("kind", PLACES)
def test_a_place_for_no_directory_is_said_to_be_what_it_is(
    tmp_path: Path, kind: str, is_durable: bool
) -> None:
    make, matter = PLACES[kind]
    with pytest.raises(BackendError, match=matter) as caught:
        files.open_backend(
            capacity_bytes=1 << 20, options={"path": str(make(tmp_path)), "durable": is_durable}
        )
    assert not caught.value.transient


@pytest.mark.parametrize("kind", [kind for kind in PLACES if kind != "a directory of the kernel's"])
def test_a_place_for_no_zarr_store_is_said_to_be_what_it_is(tmp_path: Path, kind: str) -> None:
    make, matter = PLACES[kind]
    with pytest.raises(BackendError, match=matter):
        zarr.open_backend(capacity_bytes=1 << 20, options={"store": str(make(tmp_path))})


@pytest.mark.parametrize("is_durable", [False, True])
@pytest.mark.parametrize("kind", LOCKS)
def test_a_lock_that_is_none_is_said_to_be_what_it_is(tmp_path: Path, kind: str, is_durable: bool) -> None:
    make, matter = LOCKS[kind]
    place = _with_lock(tmp_path / "a", make)
    if is_durable:
        matter = r"tierstore.lock is a \w+( \w+)?: a durable store has regular files only"
    with pytest.raises(BackendError, match=matter):
        files.open_backend(capacity_bytes=1 << 20, options={"path": str(place), "durable": is_durable})
    assert [path.name for path in place.iterdir()] == [LOCK]


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.EROFS, "mounted to be read only"),
        (errno.ENOSPC, "is full: make room there, or give a path on another one"),
        (errno.EDQUOT, "quota of that file system is used up"),
        (errno.EACCES, "belongs to user"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_what_the_system_refuses_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, advice: str
) -> None:
    def refuse(path: Path, *words: object, **more: object) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(BackendError, match=advice):
        files.open_backend(capacity_bytes=1 << 20, options={"path": str(tmp_path / "new")})


def test_an_error_that_names_no_path_is_explained_too() -> None:
    assert "is full" in explain(OSError(errno.ENOSPC, "No space left on device"))
    assert explain(OSError(errno.EIO, "broken")) == "[Errno 5] broken"
