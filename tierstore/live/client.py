"""Reads the snapshot that a process shows of its runs; see `tierstore.live`.

What it sends is not trusted: so many bytes in so much time, and each part is what it should be or left out.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tierstore.errors import UsageError
from tierstore.live import places
from tierstore.live.server import MOST_BYTES, VERSION

TIMEOUT_S: Final = 3.0
"""How long a process may take for the whole of a snapshot."""

_PAUSE_S: Final = 0.01
_MOST_MOVING: Final = 100
_LONGEST_TEXT: Final = 500


@dataclass(frozen=True, slots=True)
class MovingBytes:
    """A copy that is under way."""

    key: str
    source: str
    target: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class LiveRun:
    """One run as it was at a moment.

    Attributes:
        name: of the model.
        opened_by: which call of the program made it.
        paths: the directories of its tiers.
        metrics: as `tierstore.training.Offload.metrics` returns them.
        moving: copies that are under way, the oldest first; not all, if there are many.
        fault: why it could not be looked at; "": it could.
    """

    name: str = ""
    opened_by: str = ""
    paths: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    moving: tuple[MovingBytes, ...] = ()
    fault: str = ""


@dataclass(frozen=True, slots=True)
class LiveProcess:
    """A process as it was at a moment.

    Attributes:
        pid: its number.
        at_s: when, by the monotonic clock of its machine.
        runs: that are open.
    """

    pid: int
    at_s: float
    runs: tuple[LiveRun, ...]


def read(path: Path, timeout_s: float = TIMEOUT_S) -> LiveProcess:
    """Return what a process shows at a socket.

    Args:
        path: of the socket.
        timeout_s: how long all of it may take.

    Raises:
        OSError: nobody is there, or it takes too long.
        UsageError: another user is there, or what it sends is no snapshot.
    """
    raw = _read_all(path, timeout_s)
    try:
        found = json.loads(raw)
        if not isinstance(found, dict) or not isinstance(found.get("version"), int):
            raise ValueError("it has no version")  # noqa: TRY004, TRY301 - caught below, with what json raises
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{str(path)!r}: what answers there sends no snapshot: {error}") from error
    if found["version"] != VERSION:
        raise UsageError(
            f"{str(path)!r}: that process has another version of tierstore: its snapshots are of version "
            f"{found['version']}, and this command reads version {VERSION}."
        )
    runs = found.get("runs")
    return LiveProcess(
        int(_number(found.get("pid"))),
        _number(found.get("at_s")),
        tuple(_run(each) for each in runs if isinstance(each, dict)) if isinstance(runs, list) else (),
    )


def _read_all(path: Path, timeout_s: float) -> bytes:
    until_s = time.monotonic() + timeout_s
    parts: list[bytes] = []
    nbytes = 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        _connect(connection, path, until_s)
        if (user := places.user_at(connection)) != os.geteuid():
            raise UsageError(f"{str(path)!r}: what answers there belongs to user {user}.")
        while True:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"{str(path)!r}: no whole answer in {timeout_s:.3g} s.")
            connection.settimeout(left_s)
            try:
                part = connection.recv(1 << 16)
            except TimeoutError as error:
                raise TimeoutError(f"{str(path)!r}: no whole answer in {timeout_s:.3g} s.") from error
            if not part:
                return b"".join(parts)
            parts.append(part)
            nbytes += len(part)
            if nbytes > MOST_BYTES:
                raise UsageError(f"{str(path)!r}: what answers there sends more than {MOST_BYTES} bytes.")


def _connect(connection: socket.socket, path: Path, until_s: float) -> None:
    """Connect; while as many others wait as may, try again."""
    while True:
        connection.settimeout(max(0.001, until_s - time.monotonic()))
        try:
            connection.connect(str(path))
        except BlockingIOError as error:
            if time.monotonic() >= until_s:
                raise TimeoutError(f"{str(path)!r}: too many look there at a time.") from error
            time.sleep(_PAUSE_S)
        else:
            return


def _run(found: Mapping[str, object]) -> LiveRun:
    metrics, paths, moving = found.get("metrics"), found.get("paths"), found.get("moving")
    return LiveRun(
        _text(found.get("name")),
        _text(found.get("opened_by")),
        tuple(map(_text, paths)) if isinstance(paths, list) else (),
        {_text(name): _number(each) for name, each in metrics.items() if _is_number(each)}
        if isinstance(metrics, dict)
        else {},
        tuple(_moving(each) for each in moving[:_MOST_MOVING] if isinstance(each, dict))
        if isinstance(moving, list)
        else (),
        _text(found.get("fault")),
    )


def _moving(found: Mapping[str, object]) -> MovingBytes:
    key, source, target = (_text(found.get(name)) for name in ("key", "source", "target"))
    return MovingBytes(key, source, target, int(_number(found.get("nbytes"))))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _number(value: object) -> float:
    """Return a number; 0 if it is none, or one that a float cannot hold."""
    if not isinstance(value, int | float):
        return 0.0
    try:
        return value if abs(float(value)) < 1e300 else 0.0
    except OverflowError:
        return 0.0


def _text(value: object) -> str:
    """Return a text that stays on its line; empty if it is none."""
    if not isinstance(value, str):
        return ""
    return "".join(each if each.isprintable() else "?" for each in value[:_LONGEST_TEXT])
