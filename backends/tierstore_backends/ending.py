"""The end of a backend that owns something beyond this process's memory: files, objects, a thread's work.

Rule 1: it ends once: when it is closed, when nobody refers to it any more, or when the interpreter ends.
Rule 2: who closes it while another does waits until that is done.
Rule 3: the child of a fork owns nothing: there it is over, and nothing was touched.

Knows nothing of what is to be done.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import ParamSpec

_Args = ParamSpec("_Args")


class Ending:
    """The end of one backend, which is to keep it as long as it lives.

    Neither function nor any argument may refer to the backend, for then it would never be forgotten.

    Args:
        backend: whose end it is.
        disown: called in the child of a fork: lets go of what is the parent's, without touching it.
        shut: ends everything; may raise.
        args: what ``shut`` is called with.
        kwargs: likewise.
    """

    def __init__(
        self,
        backend: object,
        disown: Callable[[], None],
        shut: Callable[_Args, None],
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> None:
        self._disown = disown
        self._finalizer = weakref.finalize(backend, shut, *args, **kwargs)
        self._closing = threading.Lock()  # held while the first to close waits
        _to_come.add(self)

    @property
    def is_over(self) -> bool:
        """Whether it has begun at least: the backend is of no more use."""
        return not self._finalizer.alive

    def close(self) -> None:
        """End the backend, or wait until that is done.  Raises what ``shut`` does, to the first to call."""
        with self._closing:
            self._finalizer()
        _to_come.discard(self)

    def disown(self) -> None:
        """Let it be over, with nothing touched."""
        self._finalizer.detach()
        self._closing = threading.Lock()  # a thread that the child does not have may hold the old one
        self._disown()


_to_come: weakref.WeakSet[Ending] = weakref.WeakSet()


def _disown_all() -> None:
    for ending in list(_to_come):
        ending.disown()


os.register_at_fork(after_in_child=_disown_all)
