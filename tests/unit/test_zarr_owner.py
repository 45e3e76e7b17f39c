"""Who may use a place in a store, and what is swept from it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import pytest
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper  # type: ignore[import-untyped]
from zarr.abc.store import Store
from zarr.core.buffer import Buffer
from zarr.storage import FsspecStore, LocalStore, MemoryStore

from tests.zarr_stores import TIMEOUT_S, FaultyStore, change, memory, objects, open_zarr, pattern, stored
from tierstore.errors import BackendError, UsageError
from tierstore_backends.zarr import owner
from tierstore_backends.zarr.owner import MARKER, Note, is_dead, new_note, parse_note, started_at


def marked(note: Note) -> MemoryStore:
    """Return a store with an owner's marker, something in its group, and something of others."""
    store = memory()
    change(store, MARKER, note.encode())
    change(store, f"{note.group}/0/c/0", b"left over")
    change(store, "theirs", b"foreign")
    change(store, f"tierstore-{'0' * 32}/0/c/0", b"another's")
    return store


def left_by_a_dead_process() -> Note:
    """Return the note of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    note = dataclasses.replace(new_note(), pid=child.pid, started=started_at(child.pid) or 0)
    assert not is_dead(note)
    child.communicate()
    return note


@pytest.fixture
def process() -> Iterator[Note]:
    """Return the note of another process that lives."""
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    ) as child:
        yield dataclasses.replace(new_note(), pid=child.pid, started=started_at(child.pid) or 0)
        child.communicate()


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_two_backends_on_one_place_refuse_each_other(kind: str, tmp_path: Path) -> None:
    store: Store = memory() if kind == "memory" else LocalStore(tmp_path)
    backend = open_zarr(store)
    source = pattern(1000, seed=1)
    stored(backend, source)
    before = objects(store)
    again = LocalStore(tmp_path) if kind == "local" else store
    with pytest.raises(UsageError, match=rf"is in use by a live backend of process {os.getpid()} on"):
        open_zarr(again)
    assert objects(store) == before
    backend.close()
    open_zarr(again).close()
    assert objects(store) == {}


def test_the_first_of_many_wins() -> None:
    store = memory()
    barrier = threading.Barrier(6)
    won: list[object] = []
    refused: list[BaseException] = []

    def contend() -> None:
        barrier.wait(TIMEOUT_S)
        try:
            won.append(open_zarr(store))
        except UsageError as error:
            refused.append(error)

    threads = [threading.Thread(target=contend) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert (len(won), len(refused)) == (1, 5)
    won[0].close()  # type: ignore[attr-defined]
    assert objects(store) == {}


def test_what_a_dead_process_left_is_swept_and_nothing_else() -> None:
    store = marked(left_by_a_dead_process())
    backend = open_zarr(store)
    left = [key for key in objects(store) if "/c/" in key or "/" not in key]
    assert set(left) == {f"tierstore-{'0' * 32}/0/c/0", MARKER, "theirs"}
    backend.close()
    assert set(objects(store)) == {"theirs", f"tierstore-{'0' * 32}/0/c/0"}


def test_what_this_process_gave_up_is_swept() -> None:
    store = FaultyStore(memory())
    backend = open_zarr(store)
    stored(backend, pattern(1000, seed=1))
    store.arm(1, error=OSError("the store is away"), on=("delete",))
    with pytest.raises(BackendError, match="the store is away"):
        backend.close()
    assert any("/c/" in key for key in objects(store))
    store.heal()
    again = open_zarr(store)
    assert not any("/c/" in key for key in objects(store))
    again.close()
    assert objects(store) == {}


def test_a_place_of_a_process_that_lives_is_refused(process: Note) -> None:
    store = marked(process)
    before = objects(store)
    with pytest.raises(UsageError, match=rf"of process {process.pid} on {process.host!r}"):
        open_zarr(store)
    assert objects(store) == before


@pytest.mark.parametrize("field", ["boot", "namespace"])
@pytest.mark.parametrize("value", ["another", ""])
def test_a_death_that_cannot_be_proved_from_here_is_not_assumed(field: str, value: str) -> None:
    note = dataclasses.replace(left_by_a_dead_process(), **{field: value})  # type: ignore[arg-type]
    store = marked(note)
    before = objects(store)
    with pytest.raises(UsageError, match="whose end cannot be proved from here") as caught:
        open_zarr(store)
    assert f"remove the objects under {note.group + '/'!r} and then {MARKER!r}" in str(caught.value)
    assert objects(store) == before


def test_a_process_number_that_came_again_is_another_process(process: Note) -> None:
    assert not is_dead(process)
    assert is_dead(dataclasses.replace(process, started=process.started - 1))


def test_a_marker_that_is_not_ours_is_not_touched() -> None:
    good = json.loads(new_note().encode())
    for text in (
        b"",
        b"{",
        b"[]",
        b"{}",
        json.dumps({**good, "format": 2}).encode(),
        json.dumps({**good, "owner": "../../theirs"}).encode(),
        json.dumps({**good, "owner": ""}).encode(),
        json.dumps({**good, "owner": "A" * 32}).encode(),
        json.dumps({**good, "pid": "1"}).encode(),
        json.dumps({**good, "pid": True}).encode(),
        json.dumps({**good, "more": 1}).encode(),
        json.dumps({**good, "host": "h" * 10_000}).encode(),
        b"[" * 4000,
        b"[" * 100_000,
        b'{"pid": ' + b"9" * 50_000 + b"}",
        b"\xff\xfe",
    ):
        store = memory()
        change(store, MARKER, text)
        with pytest.raises(UsageError, match="is not a marker of this version of tierstore"):
            open_zarr(store)
        assert objects(store) == {MARKER: text}
    assert parse_note(new_note().encode()) is not None


def _socket(path: Path) -> None:
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as bound:  # a path of 107 bytes at most
        bound.bind(path.name)


def _link_to_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (os.mkfifo, "it is a pipe; accepted: a regular file"),
    "a directory": (Path.mkdir, "it is a directory; accepted: a regular file"),
    "a socket": (_socket, "it is a socket; accepted: a regular file"),
    "an endless device": (lambda path: path.symlink_to("/dev/zero"), "it is a device; accepted: a regular"),
    "a link to a pipe": (_link_to_pipe, "it is a pipe; accepted: a regular file"),
    "a link to nothing": (lambda path: path.symlink_to("gone"), "No such file"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "Too many levels"),
}


@pytest.mark.parametrize("is_path", [True, False])
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_marker_that_is_no_regular_file_is_refused_at_once(
    kind: str, is_path: bool, tmp_path: Path
) -> None:
    make, message = HOSTILE[kind]
    make(tmp_path / MARKER)
    with pytest.raises(BackendError, match=f"becoming the owner of .* failed: .*{message}"):
        open_zarr(tmp_path if is_path else LocalStore(tmp_path))


def test_a_marker_longer_than_memory_is_not_read(tmp_path: Path) -> None:
    (tmp_path / MARKER).touch()
    os.truncate(tmp_path / MARKER, 1 << 42)  # no program has 4 TiB
    with pytest.raises(UsageError, match="not a marker"):
        open_zarr(tmp_path)


def test_a_marker_of_another_that_came_meanwhile_is_not_removed() -> None:
    store = memory()
    backend = open_zarr(store)
    other = new_note().encode()
    change(store, MARKER, other)
    backend.close()
    assert objects(store) == {MARKER: other}


class Vanishing(MemoryStore):
    """A store in which whoever was there has always just left."""

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        """Write nothing: another's marker is there."""


def test_a_place_that_is_never_free_is_a_transient_error() -> None:
    with pytest.raises(BackendError, match="taken and given up again and again") as caught:
        open_zarr(Vanishing())
    assert caught.value.transient


class WithoutCreate(AsyncFileSystemWrapper):  # type: ignore[misc]  # fsspec has no types
    """A file system whose server knows no conditional create."""

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None:
        if mode == "create":
            raise OSError(errno.ENOSYS, "Not Implemented")
        Path(path).write_bytes(value)


def test_a_server_without_conditional_create_refuses_a_second_owner_too(tmp_path: Path) -> None:
    def store() -> FsspecStore:
        wrapped = WithoutCreate(fsspec.filesystem("local"), asynchronous=True)
        # The wrapper made one of its own.
        wrapped.__dict__["_pipe_file"] = functools.partial(WithoutCreate._pipe_file, wrapped)
        return FsspecStore(wrapped, path=str(tmp_path))

    first = asyncio.run(owner.claim(store(), "here"))
    with pytest.raises(UsageError, match="is in use"):
        asyncio.run(owner.claim(store(), "here"))
    asyncio.run(first.release())
    assert list(tmp_path.iterdir()) == []


FORKED = """
import os, sys, torch
from tierstore.errors import StoreClosed
from tierstore_backends.zarr import open_backend
backend = open_backend(capacity_bytes=10**6, options={"store": sys.argv[1]})
slot = backend.reserve(5000)
backend.write(slot, torch.ones(5000, dtype=torch.uint8))
child = os.fork()
if child == 0:
    try:
        backend.reserve(1)
    except StoreClosed:
        backend.close()
        del backend
        sys.exit(7)
    sys.exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
into = torch.zeros(5000, dtype=torch.uint8)
import threading
done = threading.Event()
backend.read(slot, into).add_done_callback(lambda error: done.set())
assert done.wait(30)
assert into.all()
backend.close()
"""


def test_the_child_of_a_fork_owns_nothing(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORKED, str(tmp_path / "scratch")],
        check=False, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []
