"""The end of a backend that owns something beyond this process's memory: files, objects, a thread's work.

Rule 1: it ends once: when it is closed, when nobody refers to it any more, or when the interpreter ends.
Rule 2: who closes it while another does waits until that is done.
Rule 3: the child of a fork owns nothing: there it is over, and nothing was touched.

Knows nothing of what is to be done.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import ParamSpec

from tierstore import forks

_Args = ParamSpec("_Args")


class BackendLifetime:
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
        self._closing = threading.Lock()  # held while the first to close waits
        self._finalizer = weakref.finalize(
            backend, _unless_forked, forks.here(), functools.partial(shut, *args, **kwargs)
        )
        forks.tell_in_child(self)

    @property
    def is_over(self) -> bool:
        """Whether it has begun at least: the backend is of no more use."""
        return not self._finalizer.alive

    def close(self) -> None:
        """End the backend, or wait until that is done.  Raises what ``shut`` does, to the first to call."""
        with self._closing:
            self._finalizer()
        forks.tell_no_more(self)

    def disown(self) -> None:
        """Let it be over, with nothing touched.  See `tierstore.forks.Disowning`."""
        self._finalizer.detach()
        self._closing = threading.Lock()  # a thread that the child does not have may hold the old one
        self._disown()


def _unless_forked(process: forks.Process, shut: Callable[[], None]) -> None:
    """Shut, unless this is a child that was forked before its parent had noted that there is an end."""
    if process is forks.here():
        shut()
