"""Python's search for garbage, off where next to none is made and much would be looked through."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Let Python look for no garbage: while modules are imported, or where all of PyTorch is in its way."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
