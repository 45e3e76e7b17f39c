"""Tasks of an event loop that ask through aiofiles: the engine for what can do nothing special.

The loop has a thread of its own; aiofiles has the threads that block, as many as there are tasks.
Slower than worker threads, for every call hops between threads, twice and more.  See
`tierstore_backends.files.engines.base` for the rules.
"""

from __future__ import annotations

import asyncio
import enum
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import ParamSpec, TypeVar

from tierstore.errors import StoreClosed
from tierstore_backends.files.engines.base import Pace, count_off, note_unforeseen, tidy_or_log
from tierstore_backends.files.engines.batch_io import BatchIo, Outcome
from tierstore_backends.files.engines.fragment_queue import FragmentQueues
from tierstore_backends.files.io.io_request import Fragment
from tierstore_backends.files.io.syscalls import FileStreams, Syscalls

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class _TaskOrder(enum.Enum):
    """What a task does when it does not move a batch."""

    WAIT = enum.auto()
    TIDY = enum.auto()
    STOP = enum.auto()


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
        self._pace = pace
        self._lock = threading.Lock()  # guards the queues and the flags below
        self._waiting = waiting
        self._is_told = False  # the loop will look into the queues
        self._is_closed = False
        self._is_tidy_due = False
        # The loop's thread alone has the rest.
        self._is_tidying = False
        self._in_flight = 0
        self.most_in_flight = 0
        self._last_moved_s = time.monotonic()
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

    def submit(self, fragments: Sequence[Fragment]) -> None:
        """See `Engine`."""
        with self._lock:
            if self._is_closed:
                raise StoreClosed("the scratch files were closed")
            self._waiting.put(fragments)
            self._tell()

    def tidy_when_quiet(self) -> None:
        """See `Engine`."""
        if self._is_tidy_due:  # a stale answer only delays tidying until the next call
            return
        with self._lock:
            if not self._is_closed:
                self._is_tidy_due = True
                self._tell()

    def close(self) -> None:
        """See `Engine`."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._tell()
        if not self.is_worker():
            self._thread.join()

    def is_worker(self) -> bool:
        """See `Engine`."""
        return threading.current_thread() is self._thread

    def _tell(self) -> None:
        """Have the loop look into the queues.  Called with the lock, before the loop can have ended."""
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
        order = self._next()
        match order:
            case _TaskOrder.STOP:
                self._changed.set()  # those who wait for the depth wait no more
                return False
            case _TaskOrder.TIDY:
                await asyncio.wrap_future(self._blocking.submit(tidy_or_log, self._pace.tidy))
                self._is_tidying = False
                self._changed.set()
            case _TaskOrder.WAIT:
                await self._wait()
            case batch:
                await self._carry_out(batch, batch_io, streams)
        return True

    def _next(self) -> list[Fragment] | _TaskOrder:
        room = self._pace.depth - self._in_flight
        with self._lock:
            if room > 0 and not self._is_tidying:
                batch = self._waiting.take(room)
                if batch:
                    self._in_flight += len(batch)
                    self.most_in_flight = max(self.most_in_flight, self._in_flight)
                    return batch
                if self._is_closed:
                    return _TaskOrder.STOP
            if self._is_quiet():
                self._is_tidy_due = False
                self._is_tidying = True
                return _TaskOrder.TIDY
            self._is_told = False
            self._changed.clear()
            return _TaskOrder.WAIT

    def _is_quiet(self) -> bool:
        quiet_s = time.monotonic() - self._last_moved_s
        return self._is_tidy_due and not self._is_tidying and quiet_s >= self._pace.quiet_s

    async def _wait(self) -> None:
        may_tidy = self._is_tidy_due and not self._is_tidying
        try:
            async with asyncio.timeout(self._pace.quiet_s if may_tidy else None):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _carry_out(self, batch: Sequence[Fragment], batch_io: BatchIo, streams: FileStreams) -> None:
        try:
            await _move(batch, batch_io, streams)
        except Exception as error:  # noqa: BLE001 - handed to whoever waits, and logged
            note_unforeseen(batch, error)
        self._in_flight -= len(batch)
        self._last_moved_s = time.monotonic()
        self._changed.set()  # for those who wait for the depth
        for transfer in count_off(batch):
            transfer.finish()


async def _move(batch: Sequence[Fragment], batch_io: BatchIo, streams: FileStreams) -> None:
    steps = batch_io.steps(batch)
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
