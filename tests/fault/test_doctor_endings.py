"""``tierstore doctor`` leaves nothing behind, whatever ends it and wherever that is."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from tierstore.cli import doctor, main, measure, room
from tierstore.cli.ending import ended_by_signals, held
from tierstore.errors import BackendError
from tierstore_backends.files import examination
from tierstore_backends.files.options import EngineName

_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure hardly anything, and try only the engine that is nobody's."""
    monkeypatch.setattr(measure, "_COPY_BYTES", 1 << 16)
    monkeypatch.setattr(measure, "_COPY_SECONDS", 0.0)
    monkeypatch.setattr(measure, "_FILE_BYTES", 4 << 20)
    monkeypatch.setattr(measure, "_DISK_SECONDS", 0.0)
    monkeypatch.setattr(doctor, "_HAVE_NATIVE_PARTS", ())
    trial = examination._engine_fault

    def only_plain(path: Path, name: EngineName, direct: object) -> str | None:
        return trial(path, name, direct) if name is EngineName.PLAIN else None

    monkeypatch.setattr(examination, "_engine_fault", only_plain)


@contextlib.contextmanager
def at_line(number: int, then: signal.Signals, *files: str) -> Iterator[list[int]]:
    """Send a signal at the ``number``-th line that runs in ``files``; yield how many ran."""
    count = [0]

    def trace(frame: FrameType, event: str, arg: object) -> object:
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line":
            count[0] += 1
            if count[0] == number:
                sys.settrace(None)
                signal.raise_signal(then)
        return trace

    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        yield count
    finally:
        sys.settrace(None)


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # files that went before their owner
@pytest.mark.parametrize(
    ("then", "step"),
    [
        (signal.SIGINT, 41),
        (signal.SIGTERM, 7),
        (signal.SIGHUP, 41),
        pytest.param(signal.SIGTERM, 1, marks=pytest.mark.long),
    ],
)
def test_a_signal_anywhere_leaves_nothing_and_is_the_exit_code(
    tmp_path: Path, then: signal.Signals, step: int
) -> None:
    files = ("cli/doctor.py", "cli/room.py", "cli/measure.py", "files/examination.py")
    with at_line(0, then, *files) as count:
        assert main(["doctor", str(tmp_path), "--json"]) == 0
    assert count[0] > 100
    for number in range(1, count[0], step):
        with at_line(number, then, *files):
            assert main(["doctor", str(tmp_path), "--json"]) == _CODES[then], number
        assert list(tmp_path.iterdir()) == [], number


def test_a_signal_while_something_is_taken_away_waits_until_it_is() -> None:
    done = []

    def take_away() -> None:
        with held():
            signal.raise_signal(signal.SIGINT)
            done.append("taken away")
        done.append("never")

    with pytest.raises(KeyboardInterrupt), ended_by_signals():
        take_away()
    assert done == ["taken away"]


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_by_signals():
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_changes_no_signals() -> None:
    seen = []

    def run() -> None:
        with ended_by_signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL]


def test_what_a_killed_doctor_left_is_removed_by_the_next(tmp_path: Path) -> None:
    left = tmp_path / "tierstore-doctor-1-0123abcd"
    (left / "threads").mkdir(parents=True)
    (left / "threads" / "tierstore-scratch-0000.bin").touch()
    with room.room(tmp_path) as own:
        assert list(tmp_path.iterdir()) == [own]
    assert list(tmp_path.iterdir()) == []


def test_what_a_live_doctor_holds_and_what_is_not_a_doctor_s_stays(tmp_path: Path) -> None:
    names = ["tierstore-doctor-1-0123abcd", "tierstore-doctor-mine", "tierstore-doctor-1-0123abcdef", "else"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / "tierstore-doctor-2-0123abcd").symlink_to(tmp_path / "else")
    (tmp_path / "tierstore-doctor-3-0123abcd").touch()
    names += ["tierstore-doctor-2-0123abcd", "tierstore-doctor-3-0123abcd"]
    held_fd = os.open(tmp_path / names[0], os.O_RDONLY)
    try:
        fcntl.flock(held_fd, fcntl.LOCK_EX)
        with room.room(tmp_path):
            pass
    finally:
        os.close(held_fd)
    assert {path.name for path in tmp_path.iterdir()} == set(names)


def test_a_room_that_somebody_takes_for_a_dead_one_s_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir, count = Path.mkdir, [0]

    def taken_away_once(path: Path, **how: object) -> None:
        count[0] += 1
        mkdir(path, **how)  # type: ignore[arg-type]
        if count[0] == 1:
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", taken_away_once)
    with room.room(tmp_path) as own:
        assert own.is_dir()
    assert count[0] == 2


def test_a_place_that_cannot_be_written_is_said_so() -> None:
    with pytest.raises(BackendError, match="/proc: cannot be written or read"), room.room(Path("/proc")):
        pass
