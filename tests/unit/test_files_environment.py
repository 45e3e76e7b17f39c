"""Scratch files where the system gives less than usual: no threads, no calls, no rights, no luck."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.files_disk import (
    PAGE,
    TIMEOUT_S,
    Nth,
    ScriptedKernel,
    blank,
    buffer,
    failing,
    finish,
    open_files,
)
from tierstore.errors import BackendError, UsageError
from tierstore_backends.files.addressing.direct_io_probe import probe
from tierstore_backends.files.directory import ownership
from tierstore_backends.files.directory.ownership import DirectoryOwner, segment_name
from tierstore_backends.files.engines.base import Pace
from tierstore_backends.files.engines.fragment_queue import FragmentQueues
from tierstore_backends.files.engines.threads import ThreadEngine
from tierstore_backends.files.io.io_request import Fragment
from tierstore_backends.files.io.kernel import KERNEL, _Kernel
from tierstore_backends.files.options import Direct

LOCK = "tierstore.lock"


# --- threads ------------------------------------------------------------------------------------


def test_a_system_without_threads_left_ends_those_that_began(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[threading.Thread] = []
    start = threading.Thread.start

    def start_two(thread: threading.Thread) -> None:
        if len(began) == 2:
            raise RuntimeError("can't start new thread")
        began.append(thread)
        start(thread)

    def do_nothing(batch: Sequence[Fragment]) -> None:
        del batch

    monkeypatch.setattr(threading.Thread, "start", start_two)
    waiting = FragmentQueues(PAGE, 1 << 40)
    with pytest.raises(RuntimeError, match="can't start"):
        ThreadEngine([do_nothing] * 4, waiting, Pace(depth=1, tidy=lambda: None, quiet_s=0.0))
    for thread in began:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def test_scratch_files_cannot_be_closed_by_a_completion_s_callback(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    gate = threading.Event()
    refusals: list[BaseException] = []

    def close(_: BaseException | None) -> None:
        try:
            files.close()
        except UsageError as refusal:
            refusals.append(refusal)
        gate.set()

    files.write(files.reserve(PAGE), buffer(PAGE)).add_done_callback(close)
    assert gate.wait(TIMEOUT_S)
    files.close()
    assert all("callback" in str(refusal) for refusal in refusals)


def test_a_disowned_backend_lets_go_of_everything_and_removes_nothing(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    finish(files.write(files.reserve(PAGE), buffer(PAGE)))
    files._ending.disown()
    files.close()
    assert {entry.name for entry in tmp_path.iterdir()} == {LOCK, segment_name(0)}
    open_files(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


# --- the directory ------------------------------------------------------------------------------


def test_a_directory_that_is_lost_again_and_again_is_a_transient_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[Path] = []

    def lose(folder: Path) -> int | None:
        attempts.append(folder)
        return None

    monkeypatch.setattr(ownership, "_lock", lose)
    with pytest.raises(BackendError, match="taken and given up again and again") as caught:
        DirectoryOwner.claim(tmp_path / "scratch")
    assert caught.value.transient
    assert len(attempts) > 10


def test_files_that_cannot_be_swept_fail_the_claim_and_leave_the_directory_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / segment_name(0)).write_text("left by a dead owner")

    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EPERM, "not yours", str(path))

    with monkeypatch.context() as context:
        context.setattr(Path, "unlink", refuse)
        with pytest.raises(BackendError, match="cannot be kept in"):
            DirectoryOwner.claim(tmp_path)
    DirectoryOwner.claim(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_files_that_cannot_be_removed_are_told_and_the_directory_is_given_up_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = DirectoryOwner.claim(tmp_path)
    (tmp_path / segment_name(0)).write_text("ours")

    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EPERM, "not yours", str(path))

    with monkeypatch.context() as context:
        context.setattr(Path, "unlink", refuse)
        with pytest.raises(BackendError, match="cannot be removed from"):
            owner.release()
    DirectoryOwner.claim(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_the_system_does_not_grant_leaves_no_descriptor_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))

    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks on this file system")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(BackendError, match="no locks on this file system"):
        DirectoryOwner.claim(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_parent_that_a_leaving_owner_removes_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a" / "b"
    make = Path.mkdir
    interruptions = [
        FileNotFoundError(errno.ENOENT, "a parent is gone"),
        FileExistsError(errno.EEXIST, "gone"),
    ]

    def make_late(folder: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        if interruptions:
            raise interruptions.pop()
        make(folder, mode, parents, exist_ok)

    monkeypatch.setattr(Path, "mkdir", make_late)
    owner = DirectoryOwner.claim(path)
    assert (path / LOCK).exists()
    owner.release()
    assert list(tmp_path.iterdir()) == [], "what was there before stays, however often we tried"


# --- calls --------------------------------------------------------------------------------------


def test_a_system_without_direct_io_goes_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    assert not probe(tmp_path, Direct.AUTO, KERNEL).is_direct
    with pytest.raises(BackendError, match="refuses direct I/O"):
        probe(tmp_path, Direct.ALWAYS, KERNEL)


def test_a_directory_that_cannot_be_probed_is_a_backend_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EROFS, "read-only file system")
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(BackendError, match="read-only file system"):
        probe(tmp_path, Direct.AUTO, KERNEL)


def test_direct_io_that_moves_only_a_part_is_not_used(tmp_path: Path) -> None:
    halving = ScriptedKernel(lambda kind, offset, nbytes: nbytes // 2 if kind == "write" else None)
    assert not probe(tmp_path, Direct.AUTO, halving).is_direct
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_disk_is_not_taken_for_a_refusal_of_direct_io(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="cannot be written"):
        probe(tmp_path, Direct.AUTO, ScriptedKernel(Nth(1, failing(errno.EIO), "write")))
    assert list(tmp_path.iterdir()) == []


def test_without_fallocate_files_grow_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Elsewhere:
        """A C library without ``fallocate``."""

    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: Elsewhere())
    kernel = _Kernel()
    with pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
        kernel.allocate(0, 0, PAGE)
    files = open_files(tmp_path, syscalls=kernel)
    slot, into = files.reserve(5 * PAGE), blank(5 * PAGE)
    finish(files.write(slot, buffer(5 * PAGE, 3)))
    finish(files.read(slot, into))
    assert into.equal(buffer(5 * PAGE, 3))
    finish(files.free(slot))
    files.close()
    assert list(tmp_path.iterdir()) == []
