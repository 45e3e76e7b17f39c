"""Shows the runs of this process to who connects; see `tierstore.live`.

A socket gets its name when it listens already: where nobody answers a name, its process has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from tierstore import forks
from tierstore.live import places

VERSION: Final = 1
MOST_BYTES: Final = 4 * 1024 * 1024
"""Of one snapshot; one that would be larger says so instead."""

SEND_TIMEOUT_S: Final = 1.0
"""How long whoever connects may take to read a snapshot: others wait meanwhile."""

_SAME_SNAPSHOT_S: Final = 0.05
"""So long a snapshot is sent again: whoever connects in a loop does not make the process compute in one."""

_NO_DESCRIPTORS_S: Final = 1.0
"""How long to wait when the process has no descriptor left for a connection."""

log = logging.getLogger("tierstore")


class LiveView(Protocol):
    """One thing that can be looked at."""

    def look(self) -> Mapping[str, object] | None:
        """Return what is to be seen now, in words that JSON has; ``None``: it is gone.  In any thread."""
        ...


class Shown:
    """Something that is shown, until this is removed."""

    def __init__(self, view: LiveView) -> None:
        self.view = view
        self.process = forks.here()

    def remove(self) -> None:
        """Show it no more.  Idempotent; does not wait for who is looking."""
        if self.process is forks.here():
            _room.remove(self)


class _Listener:
    """One socket, and the thread that answers there.

    Args:
        snapshot: returns what is sent.

    Raises:
        OSError: there is no place for a socket, or no thread.
    """

    def __init__(self, snapshot: Callable[[], bytes]) -> None:
        self._snapshot = snapshot
        self._is_closed = threading.Event()
        self._process = forks.here()
        self.path, self._socket = _listening()
        forks.tell_in_child(self)
        thread = threading.Thread(target=self._serve, name="tierstore-live", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self.close()
            raise OSError(f"no thread could be started: {error}") from error

    def close(self) -> None:
        """Take the socket away.  The thread ends soon."""
        if self._process is not forks.here():
            return
        self._is_closed.set()
        with contextlib.suppress(OSError):
            self.path.unlink()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes who is blocked in accept
        forks.tell_no_more(self)
        self._socket.close()

    def disown(self) -> None:
        """See `forks.Disowning`: the socket is the parent's."""
        self._socket.close()

    def _serve(self) -> None:
        while not self._is_closed.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                self._is_closed.wait(_NO_DESCRIPTORS_S)  # it is closed, or there is no descriptor just now
                continue
            with connection:
                try:
                    self._answer(connection)
                except Exception:  # who looked is gone, or a view is not as it should be
                    log.debug("somebody who looked was not answered", exc_info=True)

    def _answer(self, connection: socket.socket) -> None:
        if places.user_at(connection) != os.geteuid():
            return
        connection.settimeout(SEND_TIMEOUT_S)  # of all of it
        # Where the program lets SIGPIPE end it, one that does not read to the end must not.
        connection.sendall(self._snapshot(), socket.MSG_NOSIGNAL)


def _listening() -> tuple[Path, socket.socket]:
    """Return a socket that listens, and where."""
    folder = places.make_folder()
    places.sweep(folder)
    path = folder / places.name_of(os.getpid())
    if path.exists():
        raise FileExistsError(f"{str(path)!r} is that of a process in another container")
    partial = folder / f".{path.name}.new"
    with contextlib.suppress(FileNotFoundError):
        partial.unlink()  # of a process with our number that was killed just then
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(str(partial))
        partial.chmod(0o600)
        listening.listen(8)
        partial.rename(path)
    except BaseException:
        listening.close()
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    return path, listening


_Last = tuple[float, tuple[Shown, ...], bytes]
"""When something was shown last, what, and how it was said."""


class _Everything:
    """All that this process shows."""

    def __init__(self) -> None:
        self._lock = forks.free_in_child(threading.Lock())  # guards the next two
        self._shown: dict[Shown, None] = {}
        self._listener: _Listener | None = None
        self._last: _Last = (-math.inf, (), b"")  # of the listener's thread alone
        forks.tell_in_child(self)

    def disown(self) -> None:
        """See `forks.Disowning`."""
        self._shown = {}
        self._listener = None
        self._last = (-math.inf, (), b"")

    def add(self, shown: Shown) -> None:
        """Show one thing more.

        Raises:
            OSError: that is not possible.
        """
        with self._lock:
            self._shown[shown] = None
            if self._listener is None:
                self._listener = _Listener(self.snapshot)

    def remove(self, shown: Shown) -> None:
        """Show it no more; the last one takes the socket with it."""
        with self._lock:
            self._shown.pop(shown, None)
            if not self._shown:
                self._close()

    def close(self) -> None:
        """Show nothing more: the process ends."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def snapshot(self) -> bytes:
        """Return what is to be seen, as one line."""
        with self._lock:
            shown = tuple(self._shown)
        at_s, of, text = self._last
        if of != shown or time.monotonic() - at_s >= _SAME_SNAPSHOT_S:
            text = self._look(shown)
            self._last = time.monotonic(), shown, text
        return text

    def _look(self, shown: Sequence[Shown]) -> bytes:
        runs: list[Mapping[str, object]] = []
        for each in shown:
            found = _looked_at(each.view)
            if found is None:  # nobody has it any more, and nobody has removed it
                self.remove(each)
            else:
                runs.append(found)
        text = _line(runs)
        return text if len(text) <= MOST_BYTES else _line([{"fault": f"more than {MOST_BYTES} bytes"}])


def _line(runs: list[Mapping[str, object]]) -> bytes:
    whole = {"version": VERSION, "pid": os.getpid(), "at_s": time.monotonic(), "runs": runs}
    return json.dumps(_sayable(whole), default=repr).encode() + b"\n"


def _sayable(value: Any) -> Any:  # noqa: ANN401 - whatever JSON has
    """Return a value with what JSON has no word for left out: NaN and infinities."""
    if isinstance(value, Mapping):
        return {str(name): _sayable(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_sayable(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _looked_at(view: LiveView) -> Mapping[str, object] | None:
    try:
        return view.look()
    except Exception as error:  # noqa: BLE001 - who looks is told
        return {"fault": f"{type(error).__name__}: {error}"[:500]}


_room = _Everything()
atexit.register(_room.close)


def show(view: LiveView) -> Shown | None:
    """Show something to who looks, until what is returned is removed; ``None``: that is not possible.

    Args:
        view: what; it is kept.
    """
    shown = Shown(view)
    try:
        _room.add(shown)
    except (OSError, ValueError) as error:
        _room.remove(shown)
        log.debug("'tierstore top' cannot look at this process: %s", error)
        return None
    return shown
