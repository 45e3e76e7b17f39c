"""What a process shows of its runs: to its own user, to nobody else, and at no cost to anybody."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.forked import in_child, run_python
from tierstore import live
from tierstore.errors import UsageError
from tierstore.live import client, places, server

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

NAME = f"{os.getpid()}.sock"


class View:
    """Shows what it is given."""

    def __init__(self, shows: Mapping[str, object] | None) -> None:
        self.shows = shows
        self.looks = 0

    def look(self) -> Mapping[str, object] | None:
        self.looks += 1
        return self.shows


class Raising:
    """Cannot be looked at."""

    def look(self) -> Mapping[str, object] | None:
        raise RuntimeError("its\nstore is broken")


_others: frozenset[threading.Thread] = frozenset()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let sockets be in a directory of this test's; pytest's own are too long for them."""
    room = server._Everything()  # another test may have left a run open
    monkeypatch.setattr(server, "_room", room)
    monkeypatch.setattr(sys.modules[__name__], "_others", frozenset(threading.enumerate()))
    with tempfile.TemporaryDirectory(prefix="ts") as place:
        monkeypatch.setenv("XDG_RUNTIME_DIR", place)
        yield Path(place) / "tierstore"
    room.close()


@contextlib.contextmanager
def shown(*views: live.LiveView) -> Iterator[Path]:
    """Show something, for a while; yield the socket."""
    handles = [live.show(each) for each in views]
    assert all(handles)
    try:
        yield live.sockets()[os.getpid()][0]
    finally:
        for each in handles:
            assert each is not None
            each.remove()


def threads() -> list[threading.Thread]:
    """Return those of this test that answer."""
    every = (each for each in threading.enumerate() if each.name == "tierstore-live")
    return [each for each in every if each not in _others]


def wait_until(is_so: object) -> None:
    """Wait for something that another thread does soon."""
    assert callable(is_so)
    until = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < until
        threading.Event().wait(0.01)


# ---------------------------------------------------------------------- what is shown


def test_what_is_shown_is_read(folder: Path) -> None:
    run = {
        "name": "net",
        "opened_by": "train.py, line 3",
        "paths": ["/a"],
        "metrics": {"tierstore_run_steps_total": 3, "tierstore_run_forward_seconds_total": 0.5},
        "moving": [{"key": "k", "source": "host", "target": "disk", "nbytes": 5}],
    }
    with shown(View(run), View({"name": "other"}), View(None)) as path:
        assert path == folder / NAME
        found = live.read(path)
    assert found.pid == os.getpid()
    assert abs(time.monotonic() - found.at_s) < 10
    first, second = found.runs
    assert (first.name, first.opened_by, first.paths, first.fault) == ("net", "train.py, line 3", ("/a",), "")
    assert first.metrics == run["metrics"]
    assert first.moving == (client.MovingBytes("k", "host", "disk", 5),)
    assert second.name == "other"


def test_what_is_gone_is_shown_no_more_and_the_last_takes_its_socket_with_it(folder: Path) -> None:
    views = View({"name": "one"}), View({"name": "other"})
    with shown(*views) as path:
        views[0].shows = None
        assert [each.name for each in live.read(path).runs] == ["other"]
        views[1].shows = None
        assert live.read(path).runs == ()
        wait_until(lambda: not threads())
        assert os.getpid() not in live.sockets()
        assert views[0].looks == 1
    with shown(View({"name": "another"})) as path:
        assert live.read(path).runs[0].name == "another"


def test_one_that_cannot_be_looked_at_says_so_and_the_others_are_shown(folder: Path) -> None:
    with shown(Raising(), View({"name": "net"})) as path:
        broken, whole = live.read(path).runs
    assert broken.fault == "RuntimeError: its?store is broken"
    assert whole.name == "net"


def test_what_json_has_no_word_for_is_left_out(folder: Path) -> None:
    shows = {"metrics": {"a": float("nan"), "b": float("inf"), "c": 1.5}, "paths": ("x",)}
    with shown(View(shows)) as path:
        (found,) = live.read(path).runs
    assert found.metrics == {"c": 1.5}
    assert found.paths == ("x",)


def test_what_json_does_not_know_ends_nothing(folder: Path) -> None:
    circle: dict[str, object] = {}
    circle["name"] = circle
    view = View({"name": object(), "metrics": {"a": 1}})
    with shown(view) as path:
        assert live.read(path).runs[0].metrics == {"a": 1}
        view.shows = circle
        with contextlib.suppress(UsageError):  # nothing is sent
            live.read(path)
        view.shows = {"name": "again"}
        wait_until(lambda: _name_at(path) == "again")


def _name_at(path: Path) -> str:
    try:
        return live.read(path).runs[0].name
    except UsageError:
        return ""


def test_a_snapshot_that_would_be_too_large_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_BYTES", 1000)
    with shown(View({"paths": ["x" * 2000]})) as path:
        assert live.read(path).runs[0].fault == "more than 1000 bytes"


# ---------------------------------------------------------------------- while nobody looks


def test_nothing_is_computed_while_nobody_looks_and_once_for_each_look(folder: Path) -> None:
    view = View({"name": "net"})
    with shown(view) as path:
        assert view.looks == 0
        live.read(path)
        assert view.looks == 1


def test_who_looks_over_and_over_makes_nobody_compute_over_and_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_SAME_SNAPSHOT_S", 60.0)
    view = View({"name": "net"})
    with shown(view) as path:
        for _ in range(100):
            live.read(path)
    assert view.looks == 1


def test_there_is_one_thread_for_all_that_is_shown_and_none_before_and_after(folder: Path) -> None:
    wait_until(lambda: not threads())
    with shown(View({}), View({}), View({})):
        assert len(threads()) == 1
        assert threads()[0].daemon
    wait_until(lambda: not threads())
    assert list(folder.iterdir()) == []


def test_it_can_be_shown_again(folder: Path) -> None:
    for name in ("first", "second"):
        with shown(View({"name": name})) as path:
            assert live.read(path).runs[0].name == name


def test_removing_twice_does_nothing(folder: Path) -> None:
    handle, other = live.show(View({"name": "a"})), live.show(View({"name": "b"}))
    assert handle is not None
    assert other is not None
    handle.remove()
    handle.remove()
    assert [each.name for each in live.read(folder / NAME).runs] == ["b"]
    other.remove()


# ---------------------------------------------------------------------- only the same user


def test_only_its_user_can_open_the_socket(folder: Path) -> None:
    former = os.umask(0)
    try:
        with shown(View({})) as path:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    finally:
        os.umask(former)


def test_another_user_is_sent_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = View({})
    with shown(view) as path:
        monkeypatch.setattr(places, "user_at", lambda _: os.geteuid() + 1)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            assert connection.recv(100) == b""
        assert view.looks == 0
        with pytest.raises(UsageError, match=f"belongs to user {os.geteuid() + 1}"):
            live.read(path)


def test_the_kernel_says_whose_the_other_end_is() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert places.user_at(one) == places.user_at(other) == os.geteuid()


def test_a_directory_that_others_can_enter_is_not_used(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    handle = live.show(View({}))
    assert list(folder.iterdir()) == []
    assert folder / NAME not in [each for paths in live.sockets().values() for each in paths]
    if handle is not None:  # in the next directory
        handle.remove()


def test_a_link_to_a_directory_is_not_used(folder: Path) -> None:
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    handle = live.show(View({}))
    assert list(elsewhere.iterdir()) == []
    if handle is not None:
        handle.remove()


def test_a_directory_of_another_user_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert places.fault_of(folder) == f"{str(folder)!r} belongs to user {folder.stat().st_uid}"


# ---------------------------------------------------------------------- where there is no place


@pytest.mark.parametrize("length", [150, 3000])
def test_a_path_that_is_too_long_for_a_socket_is_passed_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder.parent / ("x" * 100) / ("y" * (length - 100))))
    monkeypatch.setattr(
        "tierstore.live.places.tempfile", SimpleNamespace(gettempdir=lambda: str(folder.parent))
    )
    with shown(View({"name": "net"})) as path:
        assert live.read(path).runs[0].name == "net"


def test_without_a_place_nothing_is_shown_and_nothing_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "tierstore")
    monkeypatch.setattr(places, "folders", lambda: [folder.parent / "not" / "there"])
    assert live.show(View({})) is None
    assert "No such file or directory" in caplog.text
    monkeypatch.setattr(places, "folders", lambda: [folder])
    with shown(View({"name": "later"})) as path:  # there is one by now
        assert live.read(path).runs[0].name == "later"


@pytest.mark.parametrize("call", ["bind", "listen", "chmod", "rename", "thread"])
def test_whatever_fails_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise (RuntimeError if call == "thread" else OSError)("no")

    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counted
    with monkeypatch.context() as patch:
        if call in ("bind", "listen"):
            kind = type("Failing", (socket.socket,), {call: fail})
            patch.setattr("tierstore.live.server.socket.socket", kind)
        elif call == "thread":
            patch.setattr(threading.Thread, "start", fail)
        else:
            patch.setattr(Path, call, fail)
        assert live.show(View({})) is None
    assert list(folder.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208
    with shown(View({"name": "net"})) as path:
        assert live.read(path).runs[0].name == "net"


# ---------------------------------------------------------------------- what is left over


def test_what_a_killed_process_has_left_is_removed_by_the_next_one(folder: Path) -> None:
    program = (
        "import os, signal\nfrom tierstore import live\n"
        "class V:\n    def look(self): return {}\n"
        "assert live.show(V())\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    run_python(program, expects=-signal.SIGKILL)
    (left,) = folder.iterdir()
    with pytest.raises(ConnectionRefusedError):
        live.read(left)
    with shown(View({})) as path:
        assert list(folder.iterdir()) == [path]


def test_what_has_our_own_number_and_is_left_over_is_replaced(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(folder / NAME))
    (folder / f".{NAME}.new").touch()
    with shown(View({"name": "net"})) as path:
        assert live.read(path).runs[0].name == "net"
        assert list(folder.iterdir()) == [path]


def test_what_a_living_process_of_our_number_has_is_left_alone(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(str(folder / NAME))
        living.listen()
        assert live.show(View({})) is None
        assert [each.name for each in folder.iterdir()] == [NAME]


def test_other_files_are_left_alone(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    names = ["1.sock.txt", "x.sock", "12.sock", "-1.sock", "012.sock"]
    for name in names:
        (folder / name).touch()
    with shown(View({})):
        assert {each.name for each in folder.iterdir()} == {*names, NAME}
        assert [
            path.name for paths in live.sockets().values() for path in paths if path.parent == folder
        ] == [NAME]


def test_a_process_that_ends_takes_its_socket_with_it(folder: Path) -> None:
    program = (
        "from tierstore import live\n"
        "class V:\n    def look(self): return {}\n"
        "assert live.show(V())\nprint(len(live.sockets()))"
    )
    run_python(program)
    assert list(folder.iterdir()) == []


# ---------------------------------------------------------------------- forks


def test_the_child_of_a_fork_shows_nothing_of_its_parent_s_and_what_is_its_own(folder: Path) -> None:
    def act() -> None:
        handles[0].remove()  # the parent's: nothing happens
        mine = live.show(View({"name": "child's"}))
        assert mine is not None
        assert [each.name for each in live.read(folder / f"{os.getpid()}.sock").runs] == ["child's"]
        mine.remove()
        assert not (folder / f"{os.getpid()}.sock").exists()

    handle = live.show(View({"name": "parent's"}))
    assert handle is not None
    handles = [handle]
    in_child(act)
    assert [each.name for each in live.read(folder / NAME).runs] == ["parent's"]
    handle.remove()


def test_when_the_parent_has_ended_it_a_child_does_not_hold_its_socket(folder: Path) -> None:
    reading, writing = os.pipe()
    handle = live.show(View({}))
    assert handle is not None
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent has looked
        os._exit(0)
    os.close(reading)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as early:
        early.connect(str(folder / NAME))
        handle.remove()
        # Whoever had the listening socket still would leave this one waiting.
        early.settimeout(10)
        while early.recv(1 << 16):
            pass
    os.close(writing)
    assert os.waitpid(child, 0)[1] == 0


def test_a_fork_while_somebody_looks_hangs_nobody(folder: Path) -> None:
    is_in, may_go = threading.Event(), threading.Event()

    class Slow:
        def look(self) -> Mapping[str, object] | None:
            is_in.set()
            may_go.wait(10)
            return {}

    with shown(Slow()) as path:
        looking = threading.Thread(target=lambda: live.read(path, 20))
        looking.start()
        assert is_in.wait(10)

        def act() -> None:
            mine = live.show(View({"name": "child's"}))
            assert mine is not None
            mine.remove()

        in_child(act)
        may_go.set()
        looking.join()


# ---------------------------------------------------------------------- hostile peers


def test_who_never_reads_delays_others_for_a_moment_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SEND_TIMEOUT_S", 0.2)
    with shown(View({"name": "net", "paths": ["x" * 400] * 5000})) as path, contextlib.ExitStack() as stack:
        for _ in range(3):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.connect(str(path))
        assert live.read(path, timeout_s=10).runs[0].name == "net"


def test_what_is_sent_to_it_is_never_read(folder: Path) -> None:
    with shown(View({"name": "net"})) as path:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.settimeout(10)
            with contextlib.suppress(OSError):
                for _ in range(100):
                    connection.sendall(b"GET / HTTP/1.1\r\n" * 1000)
        assert live.read(path).runs[0].name == "net"


def test_who_goes_away_at_once_ends_nothing_also_where_sigpipe_would(folder: Path) -> None:
    former = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        with shown(View({"name": "net", "paths": ["x" * 400] * 1000})) as path:
            for _ in range(20):
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.connect(str(path))
            assert live.read(path).runs[0].name == "net"
    finally:
        signal.signal(signal.SIGPIPE, former)


def test_many_at_once_are_all_answered(folder: Path) -> None:
    found: list[str] = []

    def look() -> None:
        found.append(live.read(path, 30).runs[0].name)

    with shown(View({"name": "net"})) as path:
        looking = [threading.Thread(target=look) for _ in range(40)]
        for each in looking:
            each.start()
        for each in looking:
            each.join()
    assert found == ["net"] * 40
