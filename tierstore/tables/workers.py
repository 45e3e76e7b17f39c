"""Threads that read and put blocks beside the caller of a table."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

from tierstore import forks

_P = ParamSpec("_P")
_T = TypeVar("_T")

_THREADS: Final = 5  # four blocks on their way, and a prefetch


class TableWorkers(Executor):
    """Threads of one table, which begin when there is something to do.  A copy has threads of its own.

    Args:
        name: of the table.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """See `concurrent.futures.Executor.submit`."""
        if self._threads is None:
            forks.let_threads_compute()
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=f"tierstore {self._name}")
        return self._threads.submit(work, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `concurrent.futures.Executor.shutdown`."""
        if self._threads is not None:
            self._threads.shutdown(wait, cancel_futures=cancel_futures)

    def __reduce__(self) -> tuple[type[TableWorkers], tuple[str]]:
        return TableWorkers, (self._name,)
