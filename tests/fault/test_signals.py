"""Signals at every line: whatever their handlers raise or do, the store goes on, and has every byte.

Signals come as an operating system sends them, at any moment, from a timer; and at each line of what our code
does, by a trace function that sends one at the n-th.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

import tierstore as ts
from tests.fault.test_interrupts import (
    OURS,
    STEPS,
    check_that_all_is_well,
    close_soon,
    durable_memory,
    filled_store,
    flush,
    get,
    lease,
    move,
    put,
)
from tests.stores import numbered
from tierstore import signals

Handler = Callable[[int, FrameType | None], object]
NUMBER = signal.SIGUSR1


class AlarmError(Exception):
    """What a user's handler may raise: an ordinary error, as ``TimeoutError`` is."""


RAISED: list[type[BaseException]] = [KeyboardInterrupt, AlarmError, SystemExit]


@contextlib.contextmanager
def handled(handler: Handler, number: int = NUMBER) -> Iterator[None]:
    """Have a handler for a signal."""
    former = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, former)


def raising(kind: type[BaseException]) -> Handler:
    """Return a handler that raises."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        raise kind

    return handle


class AtLine:
    """Does something at the n-th line of what our code does here.

    Attributes:
        line: where that was; ``None``: it has not come.
    """

    def __init__(self, number: int, act: Callable[[], object], of: tuple[str, ...] = OURS) -> None:
        self.left = number
        self.of = of
        self.act = act
        self.line: str | None = None

    def trace(self, frame: FrameType, event: str, _argument: object) -> object:
        if not frame.f_code.co_filename.startswith(self.of):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                self.act()
        return self.trace

    def __enter__(self) -> AtLine:
        # A function of C as far as anybody can tell, so that it sees what is traced by no other.
        sys.settrace(functools.lru_cache(maxsize=0)(self.trace))  # type: ignore[arg-type]
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


class RaisingAtLine(AtLine):
    """The same as an ordinary trace function, which is set aside in turns."""

    def __enter__(self) -> RaisingAtLine:
        sys.settrace(self.trace)  # type: ignore[arg-type]
        return self


def send() -> None:
    signal.raise_signal(NUMBER)


def let_come() -> None:
    """Return when no signal waits; the thread that sends those has the interpreter meanwhile."""
    while signals.waiting:
        select.select([], [], [], 0)  # gives the interpreter away for a moment


def raise_alarm() -> None:
    raise AlarmError


def sweep(
    step: Callable[[ts.Store], None], at: Callable[[int], AtLine], every: int, raised: type[BaseException]
) -> int:
    """Do a step with stores of their own, each met at a later line, until none is left; say how many."""
    for count in itertools.count():
        store = filled_store(durable_memory())
        met = at(1 + count * every)
        try:
            with met:
                step(store)
            let_come()
        except raised:
            pass
        else:
            assert raised is not KeyboardInterrupt or met.line is None, met.line
        line = met.line or "none"
        assert not store._engine.is_closed, line
        check_that_all_is_well(store, line)
        close_soon(store, line)
        if met.line is None:
            return count
    raise AssertionError


def every_line(step: Callable[[ts.Store], None], every: int, raised: type[BaseException]) -> None:
    with handled(raising(raised)):
        assert sweep(step, lambda number: AtLine(number, send), every, raised) > 5


@pytest.mark.parametrize("raised", RAISED)
@pytest.mark.parametrize("step", STEPS)
def test_whatever_a_handler_raises_leaves_the_store_as_it_was(
    step: Callable[[ts.Store], None], raised: type[BaseException]
) -> None:
    every_line(step, 29, raised)


@pytest.mark.long
@pytest.mark.parametrize("raised", RAISED)
@pytest.mark.parametrize("step", STEPS)
def test_whatever_a_handler_raises_at_any_line_leaves_the_store_as_it_was(
    step: Callable[[ts.Store], None], raised: type[BaseException]
) -> None:
    every_line(step, 1, raised)


@pytest.mark.parametrize("step", STEPS)
def test_whatever_a_trace_function_raises_leaves_the_store_as_it_was(
    step: Callable[[ts.Store], None],
) -> None:
    assert sweep(step, lambda number: RaisingAtLine(number, raise_alarm), 1, AlarmError) > 5


@pytest.mark.parametrize("raised", [KeyboardInterrupt, AlarmError])
def test_signals_at_any_moment_leave_the_store_as_it_was(raised: type[BaseException]) -> None:
    with handled(raising(raised), signal.SIGALRM):
        for shot, step in itertools.product(range(25), STEPS):
            store = filled_store(durable_memory())
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 + shot * 3e-6)
                step(store)
                while True:
                    pass
            except raised:
                pass
            check_that_all_is_well(store, f"{step.__name__} {shot}")
            close_soon(store)


def handlers_that_use_the_store(step: Callable[[ts.Store], None], every: int) -> None:
    for count in itertools.count():
        store = filled_store(durable_memory())
        came: list[bool] = []

        def use(_number: int, _frame: FrameType | None) -> None:
            store.put("by the handler", numbered(5), replace=True)  # noqa: B023 - it is called in this turn
            store.flush()  # noqa: B023
            came.append(store.stats().tiers["disk"].charged_bytes > 0)  # noqa: B023

        with handled(use), AtLine(1 + every * count, send) as met:
            step(store)
        assert came == ([True] if met.line else []), met.line
        check_that_all_is_well(store, met.line or "none")
        close_soon(store, met.line or "none")
        if met.line is None:
            break
    assert count > 5


@pytest.mark.parametrize("step", [put, get, lease, move, flush])
def test_a_handler_may_use_the_store(step: Callable[[ts.Store], None]) -> None:
    handlers_that_use_the_store(step, 43)


@pytest.mark.long
@pytest.mark.parametrize("step", [put, get, lease, move, flush])
def test_a_handler_may_use_the_store_wherever_it_comes(step: Callable[[ts.Store], None]) -> None:
    handlers_that_use_the_store(step, 1)


# --- what users see of it ---------------------------------------------------------------------


def use_store() -> None:
    with ts.Store(ts.StoreConfig.default("cpu", None, "1MB", 0)) as store:
        store.put("a", numbered(1))


def test_handlers_are_told_as_they_were_set() -> None:
    def mine(_number: int, _frame: FrameType | None) -> None: ...

    use_store()
    with handled(mine):
        assert signal.getsignal(NUMBER) is mine
        assert signal.signal(NUMBER, signal.SIG_IGN) is mine
        assert signal.getsignal(NUMBER) is signal.SIG_IGN
        assert signal.signal(NUMBER, mine) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(TypeError, match="signal handler must be"):
        signal.signal(NUMBER, "mine")  # type: ignore[arg-type]


def test_asyncio_cancels_its_task_on_an_interrupt_beside_a_store() -> None:
    async def main() -> None:
        use_store()
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())


@signals.uninterrupted
def together(*numbers: int, came: list[int]) -> None:
    """Be hit by several signals in one piece."""
    for number in numbers:
        signal.raise_signal(number)
    assert came == []


def test_every_signal_of_a_turn_is_handled_once_when_it_has_ended() -> None:
    use_store()
    came: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        raise AlarmError

    with handled(note), handled(note, signal.SIGUSR2), pytest.raises(AlarmError):
        together(NUMBER, signal.SIGUSR2, NUMBER, came=came)
    assert came == [NUMBER, signal.SIGUSR2]
    assert not signals.waiting


def test_a_handler_waits_for_the_outermost_turn() -> None:
    store = filled_store(durable_memory())
    came: list[str] = []

    @signals.uninterrupted
    def outer() -> None:
        signal.raise_signal(NUMBER)
        store.get("a")
        came.append("outer")

    with handled(lambda *_: came.append("handler")):
        outer()
    assert came == ["outer", "handler"]
    close_soon(store)


def test_another_thread_does_not_handle_what_the_main_thread_waits_with() -> None:
    store = filled_store(durable_memory())
    came: list[int] = []

    @signals.uninterrupted
    def outer() -> None:
        signal.raise_signal(NUMBER)
        thread = threading.Thread(target=store.get, args=("a",))
        thread.start()
        thread.join(30)
        assert came == []

    with handled(lambda *_: came.append(threading.get_ident())):
        outer()
    assert came == [threading.get_ident()]
    close_soon(store)


OPENED_ELSEWHERE = """
import signal, sys, threading, torch
import tierstore as ts
from signal import signal as set_handler  # before anything of ours was used

class Alarm(Exception): ...
def handle(*_):
    raise Alarm
set_handler(signal.SIGALRM, handle)
stores = []
opening = threading.Thread(
    target=lambda: stores.append(ts.Store(ts.StoreConfig.default("cpu", None, "64KB", "1MB", sys.argv[1])))
)
opening.start(); opening.join()
store, = stores
store.put("a", torch.ones(64))
shots = 0
for n in range(400):
    if n == 200:
        set_handler(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-6 + n % 100 * 2e-6)
        store.put("a", torch.full((64,), float(n)), replace=True)
        store.get("a")
        while True:
            pass
    except Alarm:
        shots += 1
    store.get("a")
store.check()
store.close()
print("well", shots)
"""


def test_handlers_set_by_any_name_before_a_store_was_opened_in_another_thread_wait_too(
    tmp_path: object,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OPENED_ELSEWHERE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "well 400\n", done.stderr


BUSY = """
import sys, torch
import tierstore as ts
store = ts.Store(ts.StoreConfig.default("cpu", None, "64KB", "1MB", sys.argv[1]))
store.put("a", torch.ones(64))
came = 0
while came < 40:
    try:
        print(came, flush=True)
        while True:
            store.put("b", torch.ones(4000), replace=True)
            store.get("a")
            store.evict("b").result()
    except KeyboardInterrupt:
        came += 1
store.check()
assert torch.equal(store.get("a"), torch.ones(64))
store.close()
print("well", flush=True)
"""


def test_a_busy_process_outlives_ctrl_c_again_and_again(tmp_path: object) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BUSY, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as busy:
        assert busy.stdout is not None
        assert busy.stderr is not None
        try:
            lines = iter(busy.stdout.readline, "")
            for came in range(40):
                assert next(lines, None) == f"{came}\n", busy.stderr.read()
                os.kill(busy.pid, signal.SIGINT)
            assert next(lines) == "well\n"
        finally:
            busy.kill()


@pytest.mark.parametrize(
    ("tracer", "may_raise"),
    [
        (None, False),
        (lambda *_: None, True),
        (RaisingAtLine(1, send).trace, True),
        (functools.partial(print), True),
        (sys.settrace, False),
    ],
)
def test_functions_of_python_are_set_aside_as_they_may_raise(tracer: object, may_raise: bool) -> None:
    assert signals.may_raise(tracer) is may_raise


def test_a_profile_function_sees_what_is_around_a_turn_and_is_there_afterwards() -> None:
    store = filled_store(durable_memory())
    seen: set[str] = set()

    def profile(frame: FrameType, _event: str, _argument: object) -> None:
        seen.add(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        store.get("a")
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
    assert "Store.get" in seen
    assert "Ledger.apply" not in seen
    close_soon(store)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "use", [*STEPS, lambda store: store.stats(), lambda store: store.resize("host", "1KiB")]
)
@pytest.mark.parametrize("act", [lambda store: store.close(), lambda store: store.stats()])
def test_a_handler_that_closes_or_looks_waits_for_nothing_of_its_own_thread(
    use: Callable[[ts.Store], object], act: Callable[[ts.Store], object]
) -> None:
    for count in itertools.count():
        store = filled_store(durable_memory())
        handler = functools.partial(lambda store, *_: act(store), store)
        with handled(handler), contextlib.suppress(ts.StoreClosed):
            with AtLine(1 + 3 * count, send) as met:
                use(store)
            let_come()
        close_soon(store)
        if met.line is None:
            return
