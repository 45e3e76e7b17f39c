"""Who opened something: the call in the program, for messages about what is still open.

Knows no store.  What is noted is text: nothing of the caller is kept.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Iterator

_opener: contextvars.ContextVar[str] = contextvars.ContextVar("tierstore_opener", default="")


def opener() -> str:
    """Return which call opens what is opened now: ``offload(...) in train.py, line 12``; empty: unknown."""
    return _opener.get()


@contextlib.contextmanager
def opening(what: str) -> Iterator[None]:
    """Note that ``what`` opens whatever is opened inside the context.  Of several, the outermost counts.

    Args:
        what: the call, as users write it; where it stands is found.
    """
    if opener():
        yield
        return
    token = _opener.set(f"{what} in {_place()}")
    try:
        yield
    finally:
        _opener.reset(token)


@contextlib.contextmanager
def opened_by(text: str) -> Iterator[None]:
    """Note that whatever is opened inside the context is opened by a call that was made before.

    Args:
        text: what `opener` has said of it.
    """
    token = _opener.set(text)
    try:
        yield
    finally:
        _opener.reset(token)


def _place() -> str:
    """Return where the program called this library."""
    frame = sys._getframe(1)  # noqa: SLF001 - as `warnings` does, and cheaper than `inspect`
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}"


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("tierstore", "contextlib")
