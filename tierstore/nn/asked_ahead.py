"""Whether a thread asks a loader for a batch before its time: a table that is looked up then is too old.

`tierstore.data.lookahead` enters here; a table asks here before it is read.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from tierstore.errors import UsageError


class _OfThread(threading.local):
    """What a thread does."""

    def __init__(self) -> None:
        self.is_ahead = False


_here = _OfThread()


@contextlib.contextmanager
def asking_ahead() -> Iterator[None]:
    """A batch is asked for, before the steps on those before it were made."""
    former, _here.is_ahead = _here.is_ahead, True
    try:
        yield
    finally:
        _here.is_ahead = former


def require_in_time(table: str, what: str) -> None:
    """Make sure that no batch is asked for ahead.

    Args:
        table: its name.
        what: is done with it.

    Raises:
        UsageError: one is.
    """
    if _here.is_ahead:
        raise UsageError(
            f"table {table!r} {what} by the loader that lookahead asks for a batch ahead: the steps on the "
            "batches before are still to come, and the rows would be older than those that the bare loader "
            "sees. Iterate over the loader itself."
        )
