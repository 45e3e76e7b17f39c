"""One event loop in a thread of its own, for a library that is asynchronous inside.

Promises: what is asked for is begun in the loop's thread whoever asks; `close` waits for all of it
and ends every thread.  Works until the very end of the interpreter, when the pools of the standard library
refuse new work and scratch arrays still have to be removed.  Knows nothing of zarr.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")
Work = Callable[[], None]


class LoopWorkers(ThreadPoolExecutor):
    """Daemon threads that take calls, also while the interpreter ends.

    A subclass, because asyncio takes no other executor as its default one.
    """

    def __init__(self, most_threads: int) -> None:
        super().__init__(max_workers=1)  # never used: a pool of its own refuses work at the interpreter's end
        self._most_threads = most_threads
        self._calls: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._guard = threading.Lock()
        self._idle = 0  # guarded by _guard, as is the next: threads that wait, less the calls for them
        self._all: list[threading.Thread] = []
        self._add()  # now: at the interpreter's end no new one can be started

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call ``fn`` in a worker."""
        future: Future[T] = Future()
        calls = [functools.partial(fn, *args, **kwargs)]

        def work() -> None:
            call = calls.pop  # taken out: when the result is told, nothing here may refer to what was given
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = call()()
            except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._guard:
            self._idle -= 1
            is_short = self._idle < 0 and len(self._all) < self._most_threads
        if is_short:
            with contextlib.suppress(RuntimeError):  # no new thread any more: one of the others does it
                self._add()
        self._calls.put(work)
        return future

    @property
    def threads(self) -> Collection[threading.Thread]:
        """The workers there are."""
        return self._all

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """Let the workers end when the calls are done, and wait for them."""
        for _ in self._all:
            self._calls.put(None)
        for thread in self._all:
            if wait and thread is not threading.current_thread():
                thread.join()
        self._all.clear()

    def _add(self) -> None:
        thread = threading.Thread(target=self._serve, name="tierstore-zarr-worker", daemon=True)
        thread.start()
        with self._guard:
            self._idle += 1
            self._all.append(thread)

    def _serve(self) -> None:
        while (work := self._calls.get()) is not None:
            work()
            del work  # it refers to what it worked on
            with self._guard:
                self._idle += 1


class LoopThread:
    """An event loop that runs until it is closed.

    Args:
        workers: the most threads for calls that block.
    """

    def __init__(self, workers: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._workers = LoopWorkers(workers)
        self._loop.set_default_executor(self._workers)
        self._tasks: set[asyncio.Task[None]] = set()  # touched in the loop's thread only
        self._guard = threading.Lock()
        self._refuses = False  # guarded by _guard
        self._thread = threading.Thread(target=self._serve, name="tierstore-zarr-loop", daemon=True)
        self._thread.start()

    def is_own_thread(self) -> bool:
        """Whether the calling thread is the loop's or one of its workers."""
        current = threading.current_thread()
        return current is self._thread or current in self._workers.threads

    def begin(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run ``work()`` in the loop.  Returns at once.  ``work`` must not raise.

        Raises:
            RuntimeError: after `refuse`.
        """
        with self._guard:
            if self._refuses:
                raise RuntimeError("the event loop is ending")
            self._loop.call_soon_threadsafe(self._start, work)

    def run(self, work: Coroutine[None, None, T]) -> T:
        """Run ``work`` in the loop and wait for it; not from a thread of its own, nor after `close`."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def refuse(self) -> None:
        """Let nothing more be begun."""
        with self._guard:
            self._refuses = True

    async def settled(self) -> None:
        """Wait, in the loop, for everything that was begun."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def close(self) -> None:
        """Wait for what was begun, and end the threads.  Once, and not from one of them."""
        self.refuse()
        self.run(self.settled())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._workers.shutdown()
        self._loop.close()

    def _start(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        task = self._loop.create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
