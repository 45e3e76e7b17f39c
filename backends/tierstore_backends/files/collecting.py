"""A pause of Python's cyclic garbage collector.

Who makes a hundred thousand objects that stay makes the collector look at all of them again and
again: two thirds of the time of opening a large directory went there.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Collect no cycles within; in any thread of the program, so not for long."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
