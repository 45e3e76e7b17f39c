"""Signal handlers wait until a turn, or the library's part of a training step, has ended.

Python runs a signal's handler between two instructions of the main thread, whatever these are, and what the
handler raises comes out there: ``KeyboardInterrupt``, or anything that a handler of a user's raises.  Code
that must not be parted is marked `uninterrupted`:

1. A handler that is due inside of it is called when it has ended, in the main thread, once for each signal.
   What it raises then comes out of the call that surrounds the marked one.
2. A handler may use whatever the marked code uses, as it does not run in the midst of it.
3. A function of Python that traces or profiles is set aside meanwhile, as it may raise as well.  Those of C,
   such as cProfile's and coverage's, stay.
4. The same holds, with nothing marked, for all functions of a directory and for what they call (`wait_in`).
   There a handler waits for `PATIENCE_S` at most, as hardware may hang, and tracers stay.  What takes long by
   design is `interruptible`, but for functions in it that are to be `in_one_piece`.
5. As the end of such a function tells nobody, what waits is sent again, at first after a millisecond and then
   ever more seldom; what comes after all was handled, as often as the first.
6. Handlers are called in a context (`call_in`), as Python may run them where something is switched off.

From the first store on, Python's handlers are called through here, those that are set later, too: all of
them are set by ``_signal.signal``, whose place is taken.  ``signal.getsignal`` and ``signal.signal`` return
what was set, as ever.  What else may raise between two instructions, ``PyThreadState_SetAsyncExc`` and
callbacks of ``sys.monitoring``, does not wait.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # typeshed has no stub of it
import _thread
import atexit
import enum
import functools
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
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

PATIENCE_S = 30.0
"""How long a handler waits for functions of a directory, in seconds."""

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.25
"""Between two times that a signal is sent: each leaves a byte in the pipe of `signal.set_wakeup_fd`."""

# As they are now: tests of programs replace them.
_sleep = time.sleep
_monotonic = time.monotonic
_send_to = signal.pthread_kill

_marked: Final[set[CodeType]] = set()
_in_one_piece: Final[set[CodeType]] = set()
_interruptible: Final[set[CodeType]] = set()
_rooms: tuple[str, ...] = ()
_set_handler = _signal.signal
_handler_of = _signal.getsignal


class _Waits(enum.Enum):
    """Whether a handler waits where it is due."""

    NOT = enum.auto()
    SOME_TIME = enum.auto()  # for functions of a directory
    TO_THE_END = enum.auto()  # for marked code


def wait_in(directory: Path) -> None:
    """Let handlers wait, some time, while a function whose source is in ``directory`` is under way."""
    global _rooms  # noqa: PLW0603 - a tuple is what str.startswith takes
    _rooms = (*_rooms, str(directory) + os.sep)


def interruptible(function: F) -> F:
    """Mark a function, in a directory where handlers wait, in which they do not: it may take long."""
    _interruptible.add(function.__code__)
    return function


def in_one_piece(function: F) -> F:
    """Mark a function, of whatever directory, in which handlers wait some time, whatever called it."""
    _in_one_piece.add(function.__code__)
    return function


def let_wait(function: F) -> F:
    """Mark a function that no signal handler is to part; what came meanwhile is handled soon after it.

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


_surrounding: Callable[[], AbstractContextManager[object]] | None = None


def call_in(context: Callable[[], AbstractContextManager[object]]) -> None:
    """Let all handlers be called in a context, from now on: one that undoes what code around may have set.

    Args:
        context: makes it; entering and leaving it is no code of Python.
    """
    global _surrounding  # noqa: PLW0603 - handlers are the process's
    _surrounding = context


@let_wait
def _deliver(frame: FrameType | None) -> bool:
    """Call the handlers of what came in the midst of marked code, if that has ended where ``frame`` is.

    What comes meanwhile is called in the same loop, in the order in which it came.

    Returns:
        Whether it has, and this is the main thread.

    Raises:
        BaseException: whatever a handler raises.  The others are called all the same.
    """
    if threading.get_ident() != threading.main_thread().ident or _must_wait(frame):
        return False
    while waiting:
        number = [*waiting][0]  # noqa: RUF015 - no signal can come in the midst of it
        handler = waiting.pop(number)
        try:
            _call(handler, number, frame)
        except BaseException:
            _deliver(frame)
            raise
    return True


def _call(handler: Handler, number: int, frame: FrameType | None) -> None:
    """Call a handler: what it does may be parted again."""
    if _surrounding is None:
        handler(number, frame)
        return
    with _surrounding():
        handler(number, frame)


def _must_wait(frame: FrameType | None) -> bool:
    """Whether handlers wait where ``frame`` is; see to it that they are asked for again."""
    waits = _waits_at(frame)
    return waits is not _Waits.NOT and (_asking.has_patience() or waits is _Waits.TO_THE_END)


class _Asking:
    """Sends signals that wait again, until their handlers are called: what they wait for tells nobody."""

    def __init__(self) -> None:
        self.sent: set[int] = set()  # and has not come
        self.began_s = 0.0  # when the first of what waits came
        self._is_under_way = False
        self.lock = _thread.allocate_lock()

    def has_patience(self) -> bool:
        """Begin, unless it is under way; return whether it has not gone on for too long."""
        if not self._is_under_way:
            self._is_under_way = True
            try:
                # Not by the module threading: the main thread may be in the midst of it, and have its locks.
                _thread.start_new_thread(self._send, ())
            except RuntimeError:  # no thread can be started
                self._is_under_way = False
                return False
        return _monotonic() - self.began_s < PATIENCE_S

    def _send(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        pause_s, began_s = _FIRST_PAUSE_S, self.began_s
        try:
            while waiting:
                _sleep(pause_s)
                pause_s = min(1.2 * pause_s, _LONGEST_PAUSE_S)
                if self.began_s != began_s:  # what waited was handled, and what waits now has just come
                    pause_s, began_s = _FIRST_PAUSE_S, self.began_s
                for number in tuple(waiting):
                    with self.lock:
                        if number in waiting and number not in self.sent:
                            self.sent.add(number)
                            _send_to(main, number)
        finally:
            self._is_under_way = False
        if waiting:  # came between the two lines above
            self.has_patience()

    def flush(self, number: int) -> None:
        """Let a signal that was sent come before what follows; the lock is held."""
        if number in self.sent:
            if number in signal.sigpending():  # it is blocked, and would come later
                signal.sigtimedwait([number], 0)
            os.getppid()  # as a call of the system returns, what was sent to this thread comes
            self.sent.discard(number)

    def forget(self) -> None:
        """Forget what waits: this is the child of a fork, and the signals were its parent's."""
        waiting.clear()
        self.sent.clear()
        self.lock = _thread.allocate_lock()
        self._is_under_way = False


_asking = _Asking()
os.register_at_fork(after_in_child=_asking.forget)
atexit.register(_deliver, None)


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
        if may_wait(handler) and not isinstance(handler, _Waiting):
            _set_handler(number, _Waiting(handler))
    not_yet.clear()


def may_wait(handler: object) -> bool:
    """Whether it is one of Python, and does something.

    asyncio's does nothing: its loop reads the numbers of signals from a pipe, and would see one twice that is
    sent again.
    """
    return callable(handler) and getattr(handler, "__name__", None) != "_sighandler_noop"


class _Waiting:
    """A signal's handler, which is called once no marked code is under way."""

    __slots__ = ("handler",)

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    @let_wait
    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number in _asking.sent:
            _asking.sent.discard(number)
            if number not in waiting:  # it was called before this came
                return
            handler = waiting[number]
        else:
            handler = self.handler
        if not waiting:
            _asking.began_s = _monotonic()
        waiting[number] = handler
        _deliver(frame)


def _waits_at(frame: FrameType | None) -> _Waits:
    """Whether a frame, or one that led to it, lets handlers wait.

    What led to a handler that had waited does not count.
    """
    waits = _Waits.NOT
    if frame is not None and frame.f_code is _call.__code__:  # the handler has not begun, or has ended
        return _Waits.TO_THE_END
    while frame is not None and frame.f_code is not _call.__code__:
        code = frame.f_code
        if code in _marked:
            return _Waits.TO_THE_END
        if code in _in_one_piece:
            return _Waits.SOME_TIME
        if code in _interruptible:
            return _Waits.NOT
        if waits is _Waits.NOT and code.co_filename.startswith(_rooms):
            waits = _Waits.SOME_TIME
        frame = frame.f_back
    return waits


@functools.wraps(_set_handler)
def _signal_signal(number: int, handler: Any, /) -> Any:  # noqa: ANN401 - as in the standard library
    if may_wait(handler):
        handler = _Waiting(handler)
    if threading.current_thread() is not threading.main_thread():
        return _plain(_set_handler(number, handler))  # which raises
    frame = sys._getframe(1)  # noqa: SLF001 - its only name
    _call_before(number, frame)
    former, late = _exchange(number, handler)
    if late is not None:
        _call(late, number, frame)
    return _plain(former)


def _call_before(number: int, frame: FrameType | None) -> None:
    """Call a handler that waits: Python, too, calls what is due before a handler is set."""
    handler = waiting.pop(number, None)
    if handler is not None:
        _call(handler, number, frame)


@let_wait
def _exchange(number: int, handler: Any) -> tuple[Any, Handler | None]:  # noqa: ANN401 - as in the standard library
    """Set a handler; return the former one, and the one that is due by now, if a signal has come.

    Nothing is sent meanwhile, or it would do what the new handler says, as to end the process.
    """
    with _asking.lock:
        _asking.flush(number)
        former = _set_handler(number, handler)
        return former, waiting.pop(number, None)


@functools.wraps(_handler_of)
def _signal_getsignal(number: int, /) -> Any:  # noqa: ANN401 - as in the standard library
    return _plain(_handler_of(number))


def _plain(handler: Any) -> Any:  # noqa: ANN401 - as in the standard library
    return handler.handler if isinstance(handler, _Waiting) else handler


# --- functions that trace ---------------------------------------------------------------------


_called_in_python: Final[dict[type, bool]] = {}
"""Which classes of tracers are called by a function of Python: asked in every turn that one of C traces."""


def may_raise(tracer: object) -> bool:
    """Whether a trace or profile function is one of Python: what it raises comes out where it was called."""
    if isinstance(tracer, FunctionType | MethodType | functools.partial):
        return True
    kind = type(tracer)
    if kind not in _called_in_python:
        _called_in_python[kind] = isinstance(inspect.getattr_static(kind, "__call__", None), FunctionType)
    return _called_in_python[kind]


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
