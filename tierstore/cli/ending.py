"""How a verb is ended from outside: a signal unwinds it, so that it takes away what it made.

Rule 1: an interrupt, a hangup and a request to terminate raise where the verb is; its exit code is as shells
count.
Rule 2: while something is taken away they are only noted, and raise when that is done.
Rule 3: a signal that somebody else handles, or ignores as ``nohup`` does, is left to them.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OURS_TO_TAKE: Final = (signal.SIG_DFL, signal.default_int_handler)


class EndedBySignal(SystemExit):
    """A signal ends the process.  Its own class: what a user's code raises can be told from it."""


class _InterruptState:
    """What the handler knows.  Only the main thread has it."""

    held = 0
    noted: int | None = None


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let signals raise ``KeyboardInterrupt``, or ``SystemExit`` with the exit code; in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [each for each in _ENDING if signal.getsignal(each) in _OURS_TO_TAKE]
    before = [signal.signal(each, _note_or_raise) for each in taken]
    try:
        yield
    finally:
        for each, handler in zip(taken, before, strict=True):
            signal.signal(each, handler)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Note signals and raise afterwards."""
    _InterruptState.held += 1
    try:
        yield
    finally:
        _InterruptState.held -= 1
        if not _InterruptState.held and _InterruptState.noted is not None:
            number, _InterruptState.noted = _InterruptState.noted, None
            _raise(number)


def _note_or_raise(number: int, frame: FrameType | None) -> None:
    del frame
    if _InterruptState.held:
        _InterruptState.noted = number
    else:
        _raise(number)


def _raise(number: int) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise EndedBySignal(128 + number)
