"""Making very many objects that all stay: without the garbage collector looking at them again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Let no collection of garbage begin inside the context.

    A store of 100,000 keys makes a million objects when it is opened; the collector would walk over all
    that are there dozens of times and find nothing.  Of several contexts at a time in different threads,
    the first to begin ends it for all.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
