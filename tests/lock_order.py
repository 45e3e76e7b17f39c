"""Locks that see to the order in which a thread takes them: `tierstore.training.locks`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from unittest import mock

from tierstore import forks
from tierstore.training import locks
from tierstore.training.locks import NESTED, Rank

_here = threading.local()


class OrderedLock:
    """An ``RLock`` that notes whoever takes it after one that comes later."""

    def __init__(self, rank: Rank, out_of_order: list[str]) -> None:
        self.rank = rank
        self._out_of_order = out_of_order
        self._lock = forks.free_in_child(threading.RLock())

    def acquire(self, blocking: bool = True) -> bool:
        held: list[OrderedLock] = _here.__dict__.setdefault("held", [])
        if blocking and self not in held:
            last = max((each.rank for each in held), default=None)
            if last is not None and (last > self.rank or (last == self.rank and self.rank not in NESTED)):
                self._out_of_order.append(f"{self.rank.name} was taken by a thread that has {last.name}")
        if not self._lock.acquire(blocking):
            return False
        held.append(self)
        return True

    def release(self) -> None:
        held: list[OrderedLock] = _here.held
        del held[len(held) - 1 - held[::-1].index(self)]
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


@contextlib.contextmanager
def locks_in_order() -> Iterator[list[str]]:
    """Let locks that are made inside the context see to their order; yield what was out of order."""
    out_of_order: list[str] = []
    with mock.patch.object(locks, "new_lock", lambda rank: OrderedLock(rank, out_of_order)):
        yield out_of_order
