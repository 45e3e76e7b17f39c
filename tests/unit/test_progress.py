"""Bars are shown to people, on stderr, when something takes long, and change nothing else."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tierstore import progress as module
from tierstore.progress import ProgressBar, is_wanted, polled, progress


class Terminal(io.StringIO):
    """A stderr that a person looks at."""

    def isatty(self) -> bool:
        return True


class Broken(Terminal):
    """One whose window was closed after some writes."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._left = after

    def write(self, text: str) -> int:
        self._left -= 1
        if self._left < 0:
            raise OSError(5, "Input/output error")
        return super().write(text)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DELAY_S", 0.0)
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    monkeypatch.delenv(module.VARIABLE, raising=False)
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    found = Terminal()
    monkeypatch.setattr(module, "sys", SimpleNamespace(stderr=found))
    return found


def _closed() -> io.StringIO:
    found = io.StringIO()
    found.close()
    return found


@pytest.mark.parametrize("stderr", [io.StringIO(), _closed(), None], ids=["a pipe", "closed", "none"])
def test_without_a_terminal_no_bar_is_shown_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO | None
) -> None:
    monkeypatch.setattr(module, "sys", SimpleNamespace(stderr=stderr))
    assert not is_wanted()
    monkeypatch.setenv(module.VARIABLE, "1")
    assert is_wanted()


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, True),
        ({"RANK": "0"}, True),
        ({"RANK": "3"}, False),
        ({module.VARIABLE: "0"}, False),
        ({module.VARIABLE: "1", "RANK": "3"}, True),
        ({module.VARIABLE: "yes"}, True),
        ({module.VARIABLE: ""}, True),
    ],
)
def test_on_a_terminal_the_first_process_shows_one_unless_told_otherwise(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], wanted: bool
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_wanted() is wanted


def test_it_shows_what_is_done_and_goes_away(terminal: Terminal) -> None:
    assert list(progress("abc", [1 << 20, 2 << 20, 1 << 20], "loading")) == list("abc")
    said = terminal.getvalue()
    assert "loading" in said
    assert "/4.00M" in said
    assert said.split("\r")[-1].strip() == ""


def test_what_is_over_soon_shows_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DELAY_S", 60.0)
    assert list(progress(range(3), [1, 2, 3], "loading")) == [0, 1, 2]
    assert terminal.getvalue().strip() == ""


def test_nothing_is_printed_and_no_thread_is_made_where_nobody_looks() -> None:
    program = (
        "import sys\nfrom tierstore.progress import progress, polled\n"
        "assert list(progress('ab', [1, 2], 'x')) == ['a', 'b']\n"
        "with polled('x', lambda: 1 / 0): pass\n"
        "import threading; assert threading.active_count() == 1"
    )
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": path}
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


@pytest.mark.parametrize("after", range(6))
def test_a_terminal_that_goes_away_ends_nothing(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    monkeypatch.setattr(module, "sys", SimpleNamespace(stderr=Broken(after)))
    assert list(progress(range(50), [1] * 50, "loading")) == list(range(50))


def test_what_fails_inside_is_raised_and_the_bar_goes_away(terminal: Terminal) -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError("third")

    with pytest.raises(KeyError, match="third"):
        list(progress(items(), [1, 1, 1], "loading"))
    assert terminal.getvalue().split("\r")[-1].strip() == ""


@pytest.mark.parametrize("sizes", [[1], [1, 1, 1]])
def test_items_and_sizes_have_to_be_as_many(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match=r"zip\(\)"):
        list(progress("ab", sizes, "loading"))


def test_a_bar_whose_end_nobody_knows_is_polled(terminal: Terminal) -> None:
    done, asked = [1000], threading.Event()

    def count() -> int:
        done[0] += 1 << 20
        if done[0] > 5 << 20:
            asked.set()
        return done[0]

    with polled("flushing", count):
        assert asked.wait(10)
    said = terminal.getvalue()
    assert "flushing" in said
    assert "B/s" in said
    assert not [each for each in threading.enumerate() if each.name == "tierstore-progress"]


def test_what_cannot_be_polled_ends_nothing(terminal: Terminal) -> None:
    asked = threading.Event()

    def count() -> int:
        asked.set()
        raise RuntimeError("closed")

    with polled("flushing", count):
        assert asked.wait(10)


def test_without_a_thread_there_is_no_bar(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with polled("flushing", lambda: 1):
        pass
    assert terminal.getvalue() == ""


def test_a_bar_counts_up_to_what_it_is_set_to(terminal: Terminal) -> None:
    with ProgressBar("x", 10) as bar:
        bar.set(4)
        bar.set(7)
        bar.add(1)
        assert bar._bar is not None
        assert bar._bar.n == 8
    bar.add(1)
    bar.set(1)
    bar.close()


@pytest.mark.parametrize("size", [(24, 80), (0, 0)])  # none is what a terminal that nobody sized says
def test_on_a_real_terminal_it_is_drawn(size: tuple[int, int]) -> None:
    program = (
        "from tierstore import progress\nprogress.DELAY_S = 0.0\n"
        "for _ in progress.progress(range(5), [1 << 20] * 5, 'loading'): pass"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop(module.VARIABLE, None)
    environment.pop("RANK", None)
    ours, theirs = pty.openpty()
    try:
        termios.tcsetwinsize(theirs, size)
        subprocess.run(
            [sys.executable, "-c", program], stderr=theirs, env=environment, check=True, timeout=60
        )
        assert select.select([ours], [], [], 10.0)[0], "nothing was drawn"
        said = os.read(ours, 4096)
    finally:
        os.close(ours)
        os.close(theirs)
    assert b"loading" in said
