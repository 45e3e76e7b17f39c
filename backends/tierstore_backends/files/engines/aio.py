"""Tasks of an event loop that ask through aiofiles: the engine for what can do nothing special.

The loop has a thread of its own; aiofiles has the threads that block, as many as there are tasks.
Slower than worker threads, for every call hops between threads, twice and more.  See
`tierstore_backends.files.engines.base` for the rules.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar

from tierstore_backends.files.engines.base import Pace, note_unforeseen
from tierstore_backends.files.engines.batch_io import BatchIo, Outcome, Steps
from tierstore_backends.files.engines.fragment_queue import FragmentQueues
from tierstore_backends.files.engines.schedule import EngineOrder, Schedule
from tierstore_backends.files.io.io_request import Fragment
from tierstore_backends.files.io.syscalls import FileStreams, Syscalls

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class AsyncEngine:
    """Tasks that share one queue for each direction.

    Args:
        batch_ios: one for each task.
        syscalls: opens the streams.
        path_of: names the file that holds an address.
        waiting: the empty queues.
        pace: how much at a time, and what comes after.
    """

    def __init__(
        self,
        batch_ios: Sequence[BatchIo],
        syscalls: Syscalls,
        path_of: Callable[[int], Path],
        waiting: FragmentQueues,
        pace: Pace,
    ) -> None:
        self._batch_ios = batch_ios
        self._schedule = Schedule(waiting, pace, self._tell)
        self._is_told = False  # the loop will look into the queues; guarded by the schedule's lock
        self._changed = asyncio.Event()
        self._blocking = _Blocking(len(batch_ios))
        self._loop = asyncio.new_event_loop()
        try:
            self._streams = [syscalls.open_streams(path_of, self._blocking) for _ in batch_ios]
            self._thread = threading.Thread(target=self._run, name="tierstore-files-aio", daemon=True)
            self._thread.start()
        except BaseException:
            self._loop.close()
            self._blocking.shutdown()
            raise

    @property
    def most_in_flight(self) -> int:
        """See `IoEngine`."""
        return self._schedule.most_in_flight

    def submit(self, fragments: Sequence[Fragment]) -> None:
        """See `IoEngine`."""
        self._schedule.put(fragments)

    def tidy_when_quiet(self) -> None:
        """See `IoEngine`."""
        self._schedule.tidy_when_quiet()

    def close(self) -> None:
        """See `IoEngine`."""
        self._schedule.close()
        if not self.is_worker():
            self._thread.join()

    def is_worker(self) -> bool:
        """See `IoEngine`."""
        return threading.current_thread() is self._thread

    def _tell(self) -> None:
        """Have the loop look into the queues.  With the lock, before the loop can have ended."""
        if not self._is_told:
            self._is_told = True
            self._loop.call_soon_threadsafe(self._changed.set)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._work_all())
        finally:
            self._loop.close()
            self._blocking.shutdown()

    async def _work_all(self) -> None:
        tasks = [
            self._work(batch_io, files)
            for batch_io, files in zip(self._batch_ios, self._streams, strict=True)
        ]
        await asyncio.gather(*tasks)

    async def _work(self, batch_io: BatchIo, streams: FileStreams) -> None:
        try:
            while await self._turn(batch_io, streams):
                pass  # no local here: what has moved must not be kept alive by a task that waits
        finally:
            await streams.close()

    async def _turn(self, batch_io: BatchIo, streams: FileStreams) -> bool:
        """Do the next thing; return whether there may be more."""
        match self._next():
            case EngineOrder.STOP:
                self._changed.set()  # the other tasks stop, too
                return False
            case EngineOrder.TIDY:
                await asyncio.wrap_future(self._blocking.submit(self._schedule.tidy_now))
            case float() | None as timeout_s:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        await self._changed.wait()
            case batch:
                await _move(batch, batch_io, streams)
                self._schedule.end(batch)
        return True

    def _next(self) -> list[Fragment] | Literal[EngineOrder.TIDY, EngineOrder.STOP] | float | None:
        """Return what to do: or how long to wait."""
        with self._schedule.lock:
            order = self._schedule.next()
            if order is not EngineOrder.WAIT:
                return order
            self._is_told = False
            self._changed.clear()
            return self._schedule.timeout_s


async def _move(batch: Sequence[Fragment], batch_io: BatchIo, streams: FileStreams) -> None:
    try:
        await _ask_all(batch_io.steps(batch), streams)
    except Exception as error:  # noqa: BLE001 - handed to whoever waits, and logged
        note_unforeseen(batch, error)


async def _ask_all(steps: Steps, streams: FileStreams) -> None:
    outcome: Outcome | None = None
    while True:
        try:
            call = steps.send(outcome)  # type: ignore[arg-type]  # the first is None, as Python demands
        except StopIteration:
            return
        assert call is not None  # one batch of a BatchIo at a time
        try:
            outcome = await streams.move(call)
        except OSError as error:
            outcome = error.with_traceback(None)  # frames refer to the caller's buffer


class _Blocking(Executor):
    """Daemon threads: unlike those of a `ThreadPoolExecutor`, they still work while the interpreter ends."""

    def __init__(self, count: int) -> None:
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        for i in range(count):
            thread = threading.Thread(target=self._work, name=f"tierstore-files-aio-{i}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no more threads
                self.shutdown()
                raise
            self._threads.append(thread)

    def submit(
        self, fn: Callable[_Args, _Result], /, *args: _Args.args, **kwargs: _Args.kwargs
    ) -> Future[_Result]:
        """Call ``fn`` in one of the threads."""
        future: Future[_Result] = Future()

        def carry_out() -> None:
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - handed to whoever awaits it
                future.set_exception(error)
            else:
                future.set_result(result)

        self._todo.put(carry_out)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end when nothing is left to do."""
        del cancel_futures
        self._todo.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _work(self) -> None:
        while self._turn():
            pass  # no local here: see the engine

    def _turn(self) -> bool:
        task = self._todo.get()
        if task is None:
            self._todo.put(None)  # for the others
            return False
        task()
        return True
