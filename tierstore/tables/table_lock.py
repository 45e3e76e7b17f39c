"""The lock of a table: whoever has it has the rows in hand."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Concatenate, Final, ParamSpec, Protocol, TypeVar

from tierstore.modes import Unseen


class TableLock:
    """May be had several times by one thread.  In the child of a fork it is free."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        """Have it, as soon as no other thread does."""
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        """Let it go."""
        self._lock.release()

    def be_free(self) -> None:
        """Nobody has it any more: the threads that did are another process's."""
        self._lock = threading.RLock()


_locks: Final[weakref.WeakSet[TableLock]] = weakref.WeakSet()


def new_table_lock() -> TableLock:
    """Return a lock that nobody has."""
    lock = TableLock()
    _locks.add(lock)
    return lock


class _Locked(Protocol):
    lock: TableLock


_L = TypeVar("_L", bound=_Locked)
_P = ParamSpec("_P")
_T = TypeVar("_T")


def locked(method: Callable[Concatenate[_L, _P], _T]) -> Callable[Concatenate[_L, _P], _T]:
    """Let a method have the table for itself; what it makes on the way is nothing of the program's."""

    @functools.wraps(method)
    def alone(self: _L, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with self.lock, Unseen():
            return method(self, *args, **kwargs)

    return alone


def _free_all() -> None:
    for lock in list(_locks):
        lock.be_free()


os.register_at_fork(after_in_child=_free_all)
