"""What becomes of everything here in the child of a fork: it stays the parent's, and the child never hangs.

The child has a copy of every object and none of the threads that work for them; files, rings and file locks
it shares with its parent.  So whatever works with either notes in which process it was made.

Rule 1: it is of use in that process only.  In a child every use raises `StoreForked` before a lock is taken
that a thread of the parent may have held, and ends (`close`, leaving a ``with`` block, finalizers, the end of
the interpreter) do nothing.
Rule 2: what has copies of descriptors of its parent's files lets go of them in the child, without touching
what they stand for: a child that lives longer keeps no directory locked.
Rule 3: what is made in the child is the child's own, and works as anywhere.

Only forks that Python makes are noticed: ``os.fork``, ``multiprocessing``, ``os.forkpty``.  Knows nothing of
stores.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import Any, Final, Protocol, TypeVar

import torch

from tierstore.errors import StoreForked

_LOOK_AGAIN_S: Final = 1.0
"""How long a wait that a fork has cut off goes on in the child: a signal's handler may fork in its midst."""

_log = logging.getLogger("tierstore")


class Process:
    """One process, as what was made in it notes it.  There is one object for each.

    Attributes:
        pid: its number, for messages.
    """

    __slots__ = ("pid",)

    def __init__(self) -> None:
        self.pid = os.getpid()


_here = Process()


def here() -> Process:
    """Return the process that this is."""
    return _here


def require_here(process: Process, what: str = "the store") -> None:
    """Raise unless this is the process that something was made in.

    Args:
        process: that was `here` then.
        what: it is, for the message.

    Raises:
        StoreForked: this is a child of it.
    """
    if process is not _here:
        raise StoreForked(
            f"{what} is of no use in this process ({_here.pid}): it belongs to process {process.pid}, which "
            "this one was forked from without its threads. Open a store of its own here, take what is "
            "needed out as tensors before the fork, or start this process with 'spawn'."
        )


def wait(event: threading.Event, timeout_s: float | None) -> bool:
    """Wait for an event that another thread sets, at most so long; return whether it was set.

    Raises:
        StoreForked: a signal's handler has forked meanwhile, and this is the child, where no thread sets it.
    """
    process = _here
    left_s = timeout_s
    while not event.wait(_LOOK_AGAIN_S if left_s is None else min(left_s, _LOOK_AGAIN_S)):
        require_here(process, "what is waited for")
        if left_s is not None:
            left_s -= _LOOK_AGAIN_S
            if left_s <= 0:
                return False
    return True


_computes_in_threads = _here


def let_threads_compute() -> None:
    """Have PyTorch ready for threads; call it before one starts that computes.

    A thread's first operation asks PyTorch for its pool of threads, where their number has been set.  In a
    child the first to ask makes the pool anew, without a lock: another that asks meanwhile is told that there
    is none ("Invalid thread pool!", in PyTorch 2.13 still).  So it is made here, before there are two.
    """
    global _computes_in_threads  # noqa: PLW0603 - there is one for each process
    if _computes_in_threads is not _here:
        torch.set_num_threads(torch.get_num_threads())
        _computes_in_threads = _here


# ---------------------------------------------------------------------- in the child


class Disowning(Protocol):
    """Something that is told in the child."""

    def disown(self) -> None:
        """Let go of what is the parent's, without touching it.  In the child; takes no lock, never waits."""
        ...


Lock = TypeVar("Lock")

_told: weakref.WeakSet[Disowning] = weakref.WeakSet()
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def tell_in_child(each: Disowning) -> None:
    """Tell something in every child, as long as it lives."""
    _told.add(each)


def tell_no_more(each: Disowning) -> None:
    """Take something back that was to be told: it has nothing to let go of any more."""
    _told.discard(each)


def free_in_child(lock: Lock) -> Lock:
    """Return the lock that is given; in a child it is free, whichever thread of the parent held it.

    For locks that may be taken in a child before anything can be refused there: those of modules, and of what
    finalizers do.
    """
    _locks.add(lock)
    return lock


def _begin_child() -> None:
    global _here  # noqa: PLW0603 - there is one for each process
    _here = Process()
    for lock in list(_locks):
        # One that is the thread's own, around the fork, is given back by it.
        if not (hasattr(lock, "_is_owned") and lock._is_owned()):  # noqa: SLF001 - as the standard library does
            lock._at_fork_reinit()  # noqa: SLF001 - likewise
    for each in list(_told):
        try:
            each.disown()
        except Exception:  # noqa: BLE001 - the others are to be told, too
            _log.exception("the child of a fork could not let go of what is its parent's")


os.register_at_fork(after_in_child=_begin_child)
