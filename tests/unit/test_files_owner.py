"""Who may use a directory, and what is left of it afterwards."""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.files_disk import TIMEOUT_S, Gate, ScriptedKernel, blank, buffer, finish, open_files
from tierstore.errors import BackendError, UsageError
from tierstore_backends.files.directory.ownership import DirectoryOwner, segment_name

LOCK = "tierstore.lock"

OPEN_AND_WRITE = """
import sys, torch
from tierstore_backends.files import open_backend
files = open_backend(capacity_bytes=1 << 20, options={"path": sys.argv[1]})
done = files.write(files.reserve(5000), torch.ones(5000, dtype=torch.uint8))
while not done.is_done:
    pass
print("ready", flush=True)
"""


def run_python(code: str, path: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def kill_while_it_owns(path: Path) -> None:
    """Open ``path`` in another process, kill it without warning, and look at what it left."""
    with run_python(OPEN_AND_WRITE + "sys.stdin.read()", path) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        with pytest.raises(UsageError, match=f"process {child.pid} .pid {child.pid}"):
            open_files(path)
        child.send_signal(signal.SIGKILL)
    assert (path / segment_name(0)).stat().st_size > 0


def test_a_directory_is_made_with_its_parents_and_removed_with_them(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    files = open_files(path)
    assert (path / LOCK).read_text().startswith(f"{os.getpid()}\n")
    files.close()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_was_there_stays(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    finish(files.write(files.reserve(100), buffer(100)))
    assert {entry.name for entry in tmp_path.iterdir()} == {LOCK, segment_name(0)}
    files.close()
    assert tmp_path.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_foreign_files_keep_the_directory_and_are_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "scratch"
    files = open_files(path)
    foreign = [path / "tierstore-scratch-0000.bin.bak", path / "model.bin", path / "tierstore-scratch-x.bin"]
    for each in foreign:
        each.write_text("mine")
    files.close()
    open_files(path).close()
    assert sorted(path.iterdir()) == sorted(foreign)
    assert all(each.read_text() == "mine" for each in foreign)


def test_a_link_or_a_directory_with_our_name_is_not_swept(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    path = tmp_path / "scratch"
    (path / segment_name(1)).mkdir(parents=True)
    (path / segment_name(2)).symlink_to(target)
    open_files(path).close()
    assert (path / segment_name(1)).is_dir()
    assert (path / segment_name(2)).read_text() == "mine"


def test_a_second_backend_in_this_process_is_refused_until_the_first_closes(tmp_path: Path) -> None:
    first = open_files(tmp_path)
    slot = first.reserve(100)
    finish(first.write(slot, buffer(100)))
    with pytest.raises(UsageError, match=f"this process .pid {os.getpid()}"):
        open_files(tmp_path)
    into = blank(100)
    finish(first.read(slot, into))
    assert into.equal(buffer(100))
    first.close()
    open_files(tmp_path).close()


def test_what_a_killed_owner_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "made" / "by the dead"
    kill_while_it_owns(path)
    foreign = path / "notes.txt"
    foreign.write_text("mine")
    files = open_files(path)
    assert {entry.name for entry in path.iterdir()} == {LOCK, foreign.name}
    foreign.unlink()
    files.close()
    assert list(tmp_path.iterdir()) == []  # the directory was made for the dead: it goes with its heir


@pytest.mark.parametrize("ending", ["", "raise ValueError('the program failed')"])
def test_a_program_that_forgets_to_close_leaves_nothing(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "scratch"
    with run_python(f"import os; os.dup2(1, 2)\n{OPEN_AND_WRITE}\n{ending}", path) as child:
        child.communicate()
    assert not path.exists()


def test_a_backend_that_is_forgotten_leaves_nothing(tmp_path: Path) -> None:
    files = open_files(tmp_path / "scratch")
    finish(files.write(files.reserve(100), buffer(100)))
    del files
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_backend_that_is_collected_in_its_own_thread_waits_for_no_lock_of_that_thread(
    tmp_path: Path,
) -> None:
    gate, kernel = Gate("write"), ScriptedKernel()
    files = open_files(tmp_path / "scratch", syscalls=kernel)
    kernel.twist = gate
    has_returned = threading.Event()

    def collect(error: BaseException | None) -> None:
        del error
        assert files.is_worker()
        with files._engine._schedule.lock:  # type: ignore[attr-defined]  # as where the collector comes by
            files._ending._finalizer()
        has_returned.set()

    files.write(files.reserve(100), buffer(100)).add_done_callback(collect)
    gate.open()
    assert has_returned.wait(TIMEOUT_S)
    for thread in threading.enumerate():
        if thread.name == "tierstore-files-end":
            thread.join(TIMEOUT_S)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_directory_that_is_gone_is_no_fault_of_closing(tmp_path: Path, *, is_forgotten: bool) -> None:
    folder = tmp_path / "temporary" / "scratch"
    files = open_files(folder)
    finish(files.write(files.reserve(100), buffer(100)))
    shutil.rmtree(folder.parent)
    if is_forgotten:
        files._ending._finalizer()
    files.close()
    assert list(tmp_path.iterdir()) == []


FORK = """
import os, sys, torch
from tierstore.errors import StoreClosed, UsageError
from tierstore_backends.files import open_backend
def fds_that_are_open():
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]

path = sys.argv[1]
options = {"path": path}
files = open_backend(capacity_bytes=1 << 20, options=options)
slot = files.reserve(5000)
source = torch.arange(5000, dtype=torch.int64).to(torch.uint8)
done = files.write(slot, source)
while not done.is_done:
    pass
child = os.fork()
if child == 0:
    for call in (lambda: files.reserve(1), lambda: files.read(slot, source)):
        try:
            call()
        except StoreClosed:
            continue
        os._exit(1)
    if any("tierstore-scratch" in os.readlink(f"/proc/self/fd/{fd}") for fd in fds_that_are_open()):
        os._exit(3)
    try:
        open_backend(capacity_bytes=1, options=options)
    except UsageError:
        files.close()
        sys.exit(0)
    os._exit(2)
assert os.waitpid(child, 0)[1] == 0
into = torch.zeros(5000, dtype=torch.uint8)
done = files.read(slot, into)
while not done.is_done:
    pass
assert done.error is None and into.equal(source)
files.close()
assert not os.path.exists(path)
print("fine")
"""


def test_the_child_of_a_fork_owns_nothing_and_removes_nothing(tmp_path: Path) -> None:
    with run_python(FORK, tmp_path / "scratch") as child:
        assert child.communicate()[0].endswith("fine\n")


def test_a_lock_file_that_its_owner_removes_meanwhile_is_not_taken_for_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving = [DirectoryOwner.claim(tmp_path)]
    lock = fcntl.flock

    def lock_when_the_owner_has_left(fd: int, operation: int) -> None:
        while leaving:
            leaving.pop().release()  # between the opening of the file and its locking
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", lock_when_the_owner_has_left)
    owner = DirectoryOwner.claim(tmp_path)
    assert (tmp_path / LOCK).exists()
    with pytest.raises(UsageError):
        DirectoryOwner.claim(tmp_path)
    owner.release()


def test_of_many_who_claim_and_release_at_once_one_owns_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "scratch"
    owners: list[int] = []
    failures: list[BaseException] = []
    successes: list[int] = []

    def claim_and_release(who: int) -> None:
        for _ in range(50):
            try:
                owner = DirectoryOwner.claim(path)
            except UsageError:
                continue
            except BackendError as error:
                failures.append(error)
                continue
            owners.append(who)
            if owners != [who]:
                failures.append(AssertionError(f"{owners} own it together"))
            owners.remove(who)
            successes.append(who)
            owner.release()

    threads = [threading.Thread(target=claim_and_release, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert successes
    assert list(path.glob("*")) == []  # the directory itself may stay when they are that close


def test_a_path_that_is_a_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    for taken in (path, path / "below"):
        with pytest.raises(BackendError, match="cannot be kept in"):
            open_files(taken)
    assert path.read_text() == "mine"


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("mine")
    (tmp_path / LOCK).symlink_to(tmp_path / "target")
    with pytest.raises(BackendError, match="cannot be kept in"):
        open_files(tmp_path)
    assert (tmp_path / "target").read_text() == "mine"


@pytest.mark.parametrize("note", ["", "garbage", "999999999999999999999999\nx", "\xff\xfe"])
def test_a_lock_file_with_anything_in_it_is_taken_over(tmp_path: Path, note: str) -> None:
    (tmp_path / LOCK).write_text(note, encoding="utf-8")
    owner = DirectoryOwner.claim(tmp_path)
    assert (tmp_path / LOCK).read_text().startswith(f"{os.getpid()}\n0\n0\n-\n")
    owner.release()
    owner.release()
    assert list(tmp_path.iterdir()) == []
