"""Who reads the snapshot of a process trusts nothing that is sent; `tierstore.live.client`."""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierstore import live
from tierstore.errors import UsageError
from tierstore.live import client


@pytest.fixture
def folder() -> Iterator[Path]:
    """Make a directory for a socket: pytest's own are too long for one."""
    with tempfile.TemporaryDirectory(prefix="ts") as place:
        yield Path(place)


@contextlib.contextmanager
def answering(folder: Path, *parts: bytes, is_ended: bool = True) -> Iterator[Path]:
    """Answer at a socket as no process of ours would."""
    path = folder / "1.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def answer() -> None:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):
                for part in parts:
                    connection.sendall(part)
                if not is_ended:
                    connection.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        yield path
        thread.join()


_NO_SNAPSHOTS = [
    b"",
    b"\n",
    b"garbage",
    b"\xff\xfe\x00",
    b"[]",
    b"null",
    b"{}",
    b'{"version": null}',
    b'{"version": "1"}',
    b"[" * 100_000,
    b'{"version": 1',
    b"9" * 5000,
]


@pytest.mark.parametrize("raw", _NO_SNAPSHOTS, ids=lambda raw: repr(raw[:20]))
def test_what_is_no_snapshot_is_refused(folder: Path, raw: bytes) -> None:
    with answering(folder, raw) as path, pytest.raises(UsageError, match="sends no snapshot"):
        live.read(path)


def test_a_snapshot_of_another_version_is_refused_by_its_number(folder: Path) -> None:
    with answering(folder, b'{"version": 2}') as path, pytest.raises(UsageError, match="of version 2"):
        live.read(path)


_ODD: list[object] = [None, True, -1, 1e400, 10**400, "x" * 10_000, [], {}, [[[]]], {"a": {}}, ["\x1b[2J\n"]]


@pytest.mark.parametrize("odd", _ODD, ids=lambda odd: repr(odd)[:20])
@pytest.mark.parametrize(
    "field", ["pid", "at_s", "runs", "name", "opened_by", "paths", "metrics", "moving", "fault"]
)
def test_a_field_that_is_not_what_it_should_be_is_left_out(folder: Path, field: str, odd: object) -> None:
    whole: dict[str, object] = {"version": 1, "pid": 1, "at_s": 1.0, "runs": [{}]}
    if field in whole:
        whole[field] = odd
    else:
        whole["runs"] = [{field: odd}, {"metrics": {"a": odd}, "moving": [{"key": odd, "nbytes": odd}]}]
    with answering(folder, json.dumps(whole).encode()) as path:
        found = live.read(path)
    texts = [
        text for run in found.runs for text in (run.name, run.opened_by, run.fault, *run.paths, *run.metrics)
    ]
    texts += [each.key for run in found.runs for each in run.moving]
    assert all(text.isprintable() and len(text) <= 500 for text in texts)
    numbers = [found.pid, found.at_s, *(each for run in found.runs for each in run.metrics.values())]
    assert all(abs(each) < 1e300 for each in numbers)


def test_who_sends_without_an_end_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MOST_BYTES", 1 << 20)
    with (
        answering(folder, *[b"x" * (1 << 16)] * 100) as path,
        pytest.raises(UsageError, match="more than 1048576 bytes"),
    ):
        live.read(path)


@pytest.mark.parametrize("parts", [(), (b'{"ver',)], ids=["nothing", "a part"])
def test_who_never_answers_is_left(folder: Path, parts: tuple[bytes, ...]) -> None:
    with (
        answering(folder, *parts, is_ended=False) as path,
        pytest.raises(TimeoutError, match=r"no whole answer in 0\.2 s"),
    ):
        live.read(path, timeout_s=0.2)


def test_who_sends_a_byte_at_a_time_is_left_in_time(folder: Path) -> None:
    path = folder / "1.sock"
    ended = threading.Event()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def drip() -> None:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):
                while not ended.wait(0.02):
                    connection.sendall(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            live.read(path, timeout_s=0.3)
        assert time.monotonic() - begun < 5
        ended.set()
        thread.join()
