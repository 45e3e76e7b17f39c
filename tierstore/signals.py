"""Signal handlers wait until a turn has ended; trace and profile functions of Python do not see one.

Python runs a signal's handler between two instructions of the main thread, whatever these are, and what the
handler raises comes out there: ``KeyboardInterrupt``, or anything that a handler of a user's raises.  Code
that must not be parted is marked `uninterrupted`:

1. A handler that is due inside of it is called when it has ended, in the main thread, once for each signal.
   What it raises then comes out of the call that surrounds the marked one.
2. A handler may use whatever the marked code uses, as it does not run in the midst of it.
3. A function of Python that traces or profiles is set aside meanwhile, as it may raise as well.  Those of C,
   such as cProfile's and coverage's, stay.

From the first store on, Python's handlers are called through here, those that are set later, too: all of
them are set by ``_signal.signal``, whose place is taken.  ``signal.getsignal`` and ``signal.signal`` return
what was set, as ever.  What else may raise between two instructions, ``PyThreadState_SetAsyncExc`` and
callbacks of ``sys.monitoring``, does not wait.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed has no stub of it
import functools
import inspect
import signal
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, Final, ParamSpec, TypeVar

Handler = Callable[[int, FrameType | None], object]
P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

waiting: Final[dict[int, Handler]] = {}
"""The signals that came in the midst of marked code, with their handlers.  Of the main thread alone."""

not_yet: Final[set[int]] = set(signal.valid_signals())
"""The signals whose handlers do not wait yet: all, or none."""

_marked: Final[set[CodeType]] = set()
_set_handler = _signal.signal
_handler_of = _signal.getsignal


def let_wait(function: F) -> F:
    """Mark a function that no signal handler is to part; what came meanwhile is handled after the next turn.

    For the beginning of a context, out of which nothing may come, or nobody would leave it.
    """
    _marked.add(function.__code__)
    return function


def uninterrupted(function: Callable[P, R]) -> Callable[P, R]:
    """Let no signal handler, and no trace or profile function of Python, part what a function does.

    Not for what may wait for long: it could not be interrupted.
    """
    _marked.add(function.__code__)

    @let_wait
    @functools.wraps(function)
    def whole(*args: P.args, **kwargs: P.kwargs) -> R:
        if not_yet:
            set_up()
        try:
            if sys.gettrace() is None and sys.getprofile() is None:
                return function(*args, **kwargs)
            with Untraced():
                return function(*args, **kwargs)
        finally:
            while waiting and _deliver(sys._getframe(1)):  # noqa: SLF001 - its only name
                pass  # again: one may have come as that returned

    vars(whole)["_torchdynamo_disable"] = True  # as torch.compiler.disable does: nothing for it to compile
    return whole


def _deliver(frame: FrameType | None) -> bool:
    """Call the handlers of what came in the midst of marked code, if that has ended where ``frame`` is.

    Returns:
        Whether it has, and this is the main thread.

    Raises:
        BaseException: whatever a handler raises.  The others are called all the same.
    """
    if threading.get_ident() != threading.main_thread().ident or _is_marked(frame):
        return False
    while waiting:
        number = next(iter(waiting))
        handler = waiting.pop(number)
        try:
            handler(number, frame)
        except BaseException:
            _deliver(frame)
            raise
    return True


def set_up() -> None:
    """Let handlers wait, those that are there and those that are set from now on.

    Those that are there from the first call in the main thread on: only there can they be set.
    """
    _signal.signal = _signal_signal
    _signal.getsignal = _signal_getsignal
    if not not_yet or threading.current_thread() is not threading.main_thread():
        return
    for number in not_yet:
        handler = _handler_of(number)
        if callable(handler) and not isinstance(handler, _Waiting):
            _set_handler(number, _Waiting(handler))
    not_yet.clear()


class _Waiting:
    """A signal's handler, which is called once no marked code is under way."""

    __slots__ = ("handler",)

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _is_marked(frame):
            waiting[number] = self.handler
            return
        if waiting:
            waiting[number] = self.handler
            _deliver(frame)
        else:
            self.handler(number, frame)


def _is_marked(frame: FrameType | None) -> bool:
    """Whether a frame or one that led to it is marked, but for what a handler that waited is called from."""
    while frame is not None and frame.f_code is not _deliver.__code__:
        if frame.f_code in _marked:
            return True
        frame = frame.f_back
    return False


@functools.wraps(_set_handler)
def _signal_signal(number: int, handler: Any, /) -> Any:  # noqa: ANN401 - as in the standard library
    if callable(handler):
        handler = _Waiting(handler)
    return _plain(_set_handler(number, handler))


@functools.wraps(_handler_of)
def _signal_getsignal(number: int, /) -> Any:  # noqa: ANN401 - as in the standard library
    return _plain(_handler_of(number))


def _plain(handler: Any) -> Any:  # noqa: ANN401 - as in the standard library
    return handler.handler if isinstance(handler, _Waiting) else handler


# --- functions that trace ---------------------------------------------------------------------


def may_raise(tracer: object) -> bool:
    """Whether a trace or profile function is one of Python: what it raises comes out where it was called."""
    if isinstance(tracer, FunctionType | MethodType | functools.partial):
        return True
    return isinstance(inspect.getattr_static(type(tracer), "__call__", None), FunctionType)


class Untraced:
    """A context in which no function of Python traces or profiles this thread."""

    __slots__ = ("_profiler", "_tracer")

    def __enter__(self) -> None:
        tracer, profiler = sys.gettrace(), sys.getprofile()
        self._tracer = tracer if may_raise(tracer) else None
        self._profiler = profiler if may_raise(profiler) else None
        if self._profiler is not None:
            sys.setprofile(None)
        if self._tracer is not None:
            sys.settrace(None)

    def __exit__(self, *_: object) -> None:
        if self._tracer is not None:
            sys.settrace(self._tracer)
        if self._profiler is not None:
            sys.setprofile(self._profiler)
