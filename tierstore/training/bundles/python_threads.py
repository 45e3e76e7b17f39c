"""Threads that Python has started: autograd's own, and a program's in C++, are none."""

from __future__ import annotations

import threading


def started_by_python(ident: int) -> list[threading.Thread]:
    """Return the thread with an identifier; nothing, if it is none that Python has started."""
    return [
        each
        for each in threading.enumerate()
        if each.ident == ident and not isinstance(each, threading._DummyThread)  # noqa: SLF001
    ]
