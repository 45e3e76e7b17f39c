"""No engine at all: bytes move in the calling thread, before the call returns.

What ``enable_aio: false`` asks for.  See `tierstore_backends.files.engines.base` for the rules; there is no
queue, so there is no order, and nothing is in flight but one fragment of each caller.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

from tierstore.errors import StoreClosed
from tierstore_backends.files.engines.base import Move, move_or_note
from tierstore_backends.files.io.io_request import Fragment


class PlainEngine:
    """Moves fragments in the calling thread, as many callers at a time as there are ``moves``."""

    def __init__(self, moves: Sequence[Move]) -> None:
        self._closing = threading.Lock()  # guards _is_closed; held while close waits
        self._is_closed = False
        self._counting = threading.Lock()  # guards the next two
        self._in_flight = 0
        self.most_in_flight = 0
        self._count = len(moves)
        # The last used first: its memory is warm.  ``None``, once closed, is for ever on top.
        self._idle: queue.LifoQueue[Move | None] = queue.LifoQueue()
        for move in moves:
            self._idle.put(move)

    def submit(self, fragments: Sequence[Fragment]) -> None:
        """See `IoEngine`."""
        move = self._idle.get()
        if move is None:
            self._idle.put(None)
            raise StoreClosed("the files were closed")
        self._count_callers(1)
        try:
            for fragment in fragments:
                move_or_note(move, [fragment])
        finally:
            self._count_callers(-1)
            self._idle.put(move)  # also when somebody interrupts the program
        transfer = fragments[0].transfer
        transfer.remaining = 0
        transfer.finish()

    def tidy_when_quiet(self) -> None:
        """Do nothing: without workers nobody knows when it is quiet."""

    def close(self) -> None:
        """See `IoEngine`."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            for _ in range(self._count):
                self._idle.get()
            self._idle.put(None)

    def is_worker(self) -> bool:
        """See `IoEngine`: callers run no callbacks, for they have not yet been given a completion."""
        return False

    def _count_callers(self, change: int) -> None:
        with self._counting:
            self._in_flight += change
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
