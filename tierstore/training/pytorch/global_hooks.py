"""Hooks that PyTorch calls for every module or optimizer of the process, and that keep no run alive.

PyTorch keeps such hooks for ever.  Here it keeps a function that knows a method weakly: when the run is
dropped without being closed, the function does nothing any more.  It is taken away when the next hook is
registered, and not at once: an optimizer may be walking over the hooks just then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch.utils.hooks import RemovableHandle

Method = Callable[..., Any]

_left: list[RemovableHandle] = []  # of hooks whose run is gone


class Removable(Protocol):
    """A hook that is there until it is removed."""

    def remove(self) -> None:
        """Take it away.  Idempotent."""
        ...


class HookEverywhere:
    """A hook that is called as long as this object lives, and it is not removed.

    Args:
        register: PyTorch's function that registers such a hook.
        method: what is called; its object is kept by this one.
    """

    def __init__(self, register: Callable[[Method], RemovableHandle], method: Method) -> None:
        while _left:
            _left.pop().remove()
        self._method = method
        reference = weakref.WeakMethod(method)

        def call(*args: object) -> object:
            own = reference()
            return None if own is None else own(*args)

        self._handle = register(call)
        self._end = weakref.finalize(self, _left.append, self._handle)
        self._end.atexit = False

    def remove(self) -> None:
        """See `Removable.remove`."""
        self._end.detach()
        self._handle.remove()
