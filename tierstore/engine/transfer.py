"""A copy under way: a future that blocks, calls back or is awaited."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from tierstore import forks
from tierstore.signals import uninterrupted

T = TypeVar("T")
_log = logging.getLogger("tierstore")

_lock = forks.free_in_child(
    threading.Lock()
)  # guards the waiters of every transfer; held for a few instructions


class Transfer(Generic[T]):
    """What a request will come to.  Safe from any thread; resolved once.

    Attributes:
        keys: the keys that move.
        tier: where they move to; None: nowhere in particular.
    """

    __slots__ = ("_callbacks", "_error", "_is_done", "_process", "_value", "keys", "tier")

    def __init__(self, keys: tuple[str, ...] = (), tier: str | None = None) -> None:
        self.keys = keys
        self.tier = tier
        self._process = forks.here()
        self._is_done = False  # guarded by _lock, as are the next three
        self._value: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], object]] | None = None

    def done(self) -> bool:
        """Whether it has ended, well or badly.

        Raises:
            StoreForked: this is the child of a fork, where nothing ends that its parent has begun.
        """
        forks.require_here(self._process, "the transfer")
        return self._is_done

    def result(self, timeout_s: float | None = None) -> T:
        """Block until it has ended, at most ``timeout_s`` seconds; return its value.

        Raises:
            TimeoutError: it has not ended in time; it goes on.
            TierStoreError: it failed; the cause is attached.
            StoreForked: this is the child of a fork.
        """
        forks.require_here(self._process, "the transfer")
        if not self._is_done:
            event = threading.Event()
            self.add_done_callback(event.set)
            if not forks.wait(event, timeout_s):
                raise TimeoutError(f"the transfer of {self.keys!r} has not ended within {timeout_s} s")
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # the error's traceback refers to this frame: no cycle
        return self._value  # type: ignore[return-value]

    @uninterrupted
    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call ``callback()`` when it has ended: in the resolving thread, or now.

        Raises:
            StoreForked: this is the child of a fork.
        """
        forks.require_here(self._process, "the transfer")
        with _lock:
            if not self._is_done:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                return
        callback()

    def resolve(self, value: T | None = None, error: BaseException | None = None) -> bool:
        """End it, and return True; or return False if it has ended.  For the engine, in a turn.

        A callback that raises is logged: it must cost neither those after it nor the engine's turn.
        """
        with _lock:
            if self._is_done:
                return False
            self._value = value
            self._error = error
            self._is_done = True
            callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            try:
                callback()
            except BaseException:  # noqa: BLE001 - logged
                _log.exception("a transfer's callback failed")
        return True

    def __await__(self) -> Generator[object, None, T]:
        """Wait without blocking the event loop."""
        if not self._is_done:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()

            def wake() -> None:
                if not future.done():
                    future.set_result(None)

            self.add_done_callback(lambda: loop.call_soon_threadsafe(wake))
            yield from future
        return self.result()
