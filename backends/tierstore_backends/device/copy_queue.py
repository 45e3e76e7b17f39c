"""One direction of an emulated link: a thread that copies, and says so when the link would.

1. Copies of one queue begin in the order in which they were asked for.
2. Whatever happens, each completes once: the thread outlives what callbacks raise.
3. A buffer is let go of before its copy completes.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from typing import NamedTuple

from tierstore.spi import Buffer, Completion
from tierstore_backends.device.completion_order import Delivery, PromptDelivery
from tierstore_backends.device.link import EmulatedLink

INLINE_BELOW_BYTES = 65536  # a copy that is cheaper than waking a thread


class _EmulatedCopy(NamedTuple):
    into: Buffer
    source: Buffer
    after: threading.Event | None
    moved: threading.Event | None

    def carry_out(self) -> None:
        if self.after is not None:
            self.after.wait()
        # One thread a direction, as a copy engine: torch would take the cores that compute.
        ctypes.memmove(self.into.data_ptr(), self.source.data_ptr(), self.into.numel())
        if self.moved is not None:
            self.moved.set()


class EmulatedCopyQueue:
    """Copies one after another.  `copy` may be called from any thread.

    Args:
        direction: what tells queues apart.
        link: how long copies take.
        delivery: who tells that they ended.
    """

    def __init__(self, direction: str, link: EmulatedLink, delivery: Delivery) -> None:
        self._direction = direction
        self._link = link
        self._delivery = delivery
        self._is_prompt = link.is_instant and isinstance(delivery, PromptDelivery)
        self._asked: queue.SimpleQueue[tuple[_EmulatedCopy, Completion, float] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued = 0  # copies whose bytes have not moved; guarded by _lock, as is the next
        self._thread: threading.Thread | None = None
        self._is_closing = threading.Event()

    def copy(
        self,
        into: Buffer,
        source: Buffer,
        completion: Completion,
        *,
        after: threading.Event | None = None,
        moved: threading.Event | None = None,
    ) -> None:
        """Copy ``source`` into ``into`` when the link is free, then complete.

        Small copies are done before the call returns where nobody can tell the difference.

        Args:
            into: where to; as many bytes as ``source``.
            source: where from.
            completion: told at the end.
            after: waited for first.
            moved: set when the bytes have moved.
        """
        copy = _EmulatedCopy(into, source, after, moved)
        self._delivery.begin()
        if self._is_prompt and self._queued == 0 and into.numel() < INLINE_BELOW_BYTES:
            copy.carry_out()
            self._delivery.end(self._direction, completion)
            return
        with self._lock:
            self._asked.put((copy, completion, time.monotonic()))
            self._queued += 1
            if self._thread is None or not self._thread.is_alive():  # its start may have been interrupted
                self._thread = threading.Thread(
                    target=self._run, name=f"tierstore-{self._direction}", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """End after what was asked for, without waiting for the link."""
        self._is_closing.set()
        with self._lock:
            thread, self._thread = self._thread, None
            self._asked.put(None)
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            thread.join()

    def abandon(self) -> None:
        """Let the thread end, without waiting for it.  For a finalizer: takes no lock."""
        self._asked.put(None)

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            copy, completion, asked_s = asked
            due_s = self._link.due_s(copy.into.numel(), asked_s)
            copy.carry_out()
            del asked, copy
            self._is_closing.wait(max(due_s - time.monotonic(), 0.0))
            with self._lock:
                self._queued -= 1
            self._delivery.end(self._direction, completion)
            del completion
