"""One dispatch mode for all that watch the operators of a thread.

1. It is in force while somebody watches, and only then: operators cost nothing where nobody asks.
2. Where a mode of others has come into force since, ours cannot end.  It sees nothing then, and ends, or is
   used again, when somebody begins or ends to watch the next time.
3. What the library does while it packs a tensor is no part of the model: nobody sees it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from tierstore.modes import run_operator
from tierstore.torch_private import OpOverload, TorchDispatchMode, current_dispatch_mode, dispatch_modes
from tierstore.training.activations.runtime.operators import Arguments, Named
from tierstore.training.pytorch.function_modes import are_function_modes_on, out_of_sight


class OperatorWatcher(Protocol):
    """Watches the operators of a thread."""

    def before(self, func: OpOverload, args: Arguments, kwargs: Named) -> object:
        """Take in an operator that is about to run; return what `after` is to know; ``None``: nothing."""
        ...

    def after(self, noted: Any, func: OpOverload, args: Arguments, kwargs: Named, result: object) -> None:  # noqa: ANN401
        """Take in what an operator has returned.  Not called where `before` has returned ``None``.

        Args:
            noted: what it returned.
            func: the operator.
            args: that it was given.
            kwargs: likewise.
            result: that it returned.
        """
        ...


class _Pause(AbstractContextManager[None]):
    """A context, entered any number of times, in which a mode tells nobody of operators."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        self.count += 1

    def __exit__(self, *_: object) -> None:
        self.count -= 1


class _OperatorMode(TorchDispatchMode):
    """Has the operators of a thread run, and tells those who watch them.

    Attributes:
        watchers: the last one to begin first.
        pause: the contexts in which nobody watches, one inside another.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watchers: tuple[OperatorWatcher, ...] = ()
        self.pause = _Pause()

    # torch's signature: the types of arguments and result are those of the operation.
    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Arguments = (),
        kwargs: Named | None = None,
    ) -> Any:  # noqa: ANN401
        """Run the operator."""
        named = kwargs or {}
        if self.pause.count or not self.watchers or not isinstance(func, OpOverload):
            return run_operator(func, args, named)
        if are_function_modes_on():
            with out_of_sight():
                return self._run(func, args, named)
        return self._run(func, args, named)

    def _run(self, func: OpOverload, args: Arguments, kwargs: Named) -> Any:  # noqa: ANN401
        if len(self.watchers) == 1:  # the rule, and each operator pays for it
            watcher = self.watchers[0]
            note = watcher.before(func, args, kwargs)
            result = run_operator(func, args, kwargs)
            if note is not None:
                watcher.after(note, func, args, kwargs, result)
            return result
        noted = [(each, each.before(func, args, kwargs)) for each in self.watchers]
        result = run_operator(func, args, kwargs)
        for watcher, note in reversed(noted):
            if note is not None:
                watcher.after(note, func, args, kwargs, result)
        return result


class WatchedOperators(threading.local):
    """Who watches the operators of a thread while it runs a model."""

    def __init__(self) -> None:
        self._mode = _OperatorMode()

    def begin(self, watcher: OperatorWatcher) -> None:
        """Let somebody watch from now on."""
        mode = self._mode
        if not mode.watchers:
            mode.pause.count = 0  # an interrupt may have come between
        mode.watchers = (watcher, *mode.watchers)
        if not any(each is mode for each in dispatch_modes()):
            mode.__enter__()  # type: ignore[no-untyped-call]

    def end(self, watcher: OperatorWatcher) -> None:
        """Let somebody watch no more."""
        self._mode.watchers = tuple(each for each in self._mode.watchers if each is not watcher)
        self.settle()

    def settle(self) -> None:
        """Be in force no more if nobody watches, unless a mode of others is above."""
        if not self._mode.watchers and current_dispatch_mode() is self._mode:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def unwatched(self) -> AbstractContextManager[None]:
        """Return a context in which nobody watches what happens: it is no part of the model."""
        return self._mode.pause
