"""Handlers wait for functions of a directory and what they call, but not for ever, nor in what takes long."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fault.test_signals import NUMBER, AlarmError, handled, raising
from tierstore import signals

SOURCE = """
def outer(step):
    inner(step)
    return "outer"

def inner(step):
    step()

def slowly(step):
    inner(step)

def slowly_but_for(step):
    outer(step)
"""


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Callable[..., Any]]]:
    """Functions of a directory in which handlers wait."""
    monkeypatch.setattr(signals, "_rooms", ())
    signals.set_up()
    signals.wait_in(tmp_path)
    functions: dict[str, Any] = {}
    exec(compile(SOURCE, str(tmp_path / "room.py"), "exec"), functions)
    yield functions
    assert not signals.waiting


class Noting:
    """A handler that notes what was over when it was called."""

    def __init__(self) -> None:
        self.over: list[str] = []
        self.seen: list[list[str]] = []

    def __call__(self, *_: object) -> None:
        self.seen.append(list(self.over))

    def send(self) -> None:
        """Send the signal, in the midst of a function, and go on for a while."""
        signal.raise_signal(NUMBER)
        wait(0.02)
        self.over.append("sent")


def wait(duration_s: float) -> None:
    end_s = time.monotonic() + duration_s
    while time.monotonic() < end_s:
        pass


def test_a_handler_waits_until_no_function_of_the_directory_is_under_way(room: dict[str, Any]) -> None:
    noting = Noting()
    with handled(noting):
        assert room["outer"](noting.send) == "outer"
        noting.over.append("outer")
        while not noting.seen:
            pass
    assert noting.seen == [["sent", "outer"]]


def test_what_a_handler_raises_comes_out_of_what_the_program_waits_for(room: dict[str, Any]) -> None:
    with handled(raising(AlarmError)):
        room["outer"](lambda: signal.raise_signal(NUMBER))
        begin_s = time.monotonic()
        with pytest.raises(AlarmError):
            threading.Event().wait(60)
    assert time.monotonic() - begin_s < 30


def test_signals_that_come_again_and_others_are_each_handled_once(room: dict[str, Any]) -> None:
    noting, other = Noting(), Noting()

    def send() -> None:
        for _ in range(5):
            noting.send()
        signal.raise_signal(signal.SIGUSR2)
        assert not noting.seen
        assert not other.seen

    with handled(noting), handled(other, signal.SIGUSR2):
        room["outer"](send)
        while signals.waiting:
            pass
        wait(0.05)
    assert len(noting.seen) == len(other.seen) == 1


def test_in_what_takes_long_a_handler_is_called_at_once(room: dict[str, Any]) -> None:
    signals.interruptible(room["slowly"])
    noting = Noting()
    with handled(noting):
        room["slowly"](noting.send)
    assert noting.seen == [[]]


def test_what_is_to_be_in_one_piece_is_so_also_in_what_takes_long(room: dict[str, Any]) -> None:
    signals.interruptible(room["slowly_but_for"])
    signals.in_one_piece(room["outer"])
    noting = Noting()
    with handled(noting):
        room["slowly_but_for"](noting.send)
        while not noting.seen:
            pass
    assert noting.seen == [["sent"]]


def test_a_handler_waits_for_hardware_that_hangs_only_some_time(
    room: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "PATIENCE_S", 0.1)

    def hang() -> None:
        signal.raise_signal(NUMBER)
        threading.Event().wait(60)

    begin_s = time.monotonic()
    with handled(raising(AlarmError)), pytest.raises(AlarmError):
        room["outer"](hang)
    assert 0.1 <= time.monotonic() - begin_s < 30


def let_former_end() -> None:
    """Return when the thread that sends what waits, of a former test, has ended."""
    while signals._asking._is_under_way:
        pass


def test_where_no_thread_can_be_started_a_handler_does_not_wait(
    room: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    let_former_end()
    monkeypatch.setattr("_thread.start_new_thread", refuse)
    noting = Noting()
    with handled(noting):
        room["outer"](noting.send)
    assert noting.seen == [[]]


def test_a_handler_that_waits_is_called_before_another_is_set(room: dict[str, Any]) -> None:
    """As in Python; sent again later, the signal would do what the system does: end the process."""
    noting = Noting()

    def reset() -> None:
        signal.raise_signal(NUMBER)
        wait(0.01)
        signal.signal(NUMBER, signal.SIG_DFL)

    for number in range(100):
        with handled(noting):
            room["outer"](noting.send if number % 2 else reset)
    assert len(noting.seen) == 100


def test_a_handler_may_use_what_it_waited_for_and_be_interrupted_itself(room: dict[str, Any]) -> None:
    inner = Noting()

    def handle(*_: object) -> None:
        room["outer"](lambda: signal.raise_signal(signal.SIGUSR2))
        inner.over.append("handler's own")
        while not inner.seen:
            pass

    with handled(handle), handled(inner, signal.SIGUSR2):
        room["outer"](lambda: signal.raise_signal(NUMBER))
        while signals.waiting or not inner.seen:
            pass
    assert inner.seen == [["handler's own"]]


def test_a_callback_of_asyncio_is_called_once(room: dict[str, Any]) -> None:
    called = 0

    def callback() -> None:
        nonlocal called
        called += 1

    def send() -> None:
        signal.raise_signal(NUMBER)
        wait(0.05)

    async def main() -> None:
        asyncio.get_running_loop().add_signal_handler(NUMBER, callback)
        room["outer"](send)
        await asyncio.sleep(0.05)

    former = signal.getsignal(NUMBER)
    try:
        asyncio.run(main())
    finally:
        signal.signal(NUMBER, former)
    assert called == 1


def test_a_signal_that_waits_at_a_fork_is_the_parents(room: dict[str, Any]) -> None:
    noting = Noting()
    children: list[int] = []

    def fork() -> None:
        signal.raise_signal(NUMBER)
        child = os.fork()
        if child == 0:
            wait(0.05)
            os._exit(bool(signals.waiting) or bool(noting.seen))
        children.append(child)

    with handled(noting):
        room["outer"](fork)
        while not noting.seen:
            pass
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
    assert len(noting.seen) == 1


def test_a_signal_that_is_blocked_while_it_waits_does_not_end_the_process(room: dict[str, Any]) -> None:
    noting = Noting()

    def block() -> None:
        noting.send()
        signal.pthread_sigmask(signal.SIG_BLOCK, {NUMBER})
        wait(0.05)

    with handled(noting):
        room["outer"](block)
        signal.signal(NUMBER, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {NUMBER})
        assert len(noting.seen) == 1


def test_a_signal_that_waits_is_not_sent_again_before_it_came(room: dict[str, Any]) -> None:
    noting = Noting()
    received = 0

    def receive() -> None:
        nonlocal received
        signal.raise_signal(NUMBER)
        signal.pthread_sigmask(signal.SIG_BLOCK, {NUMBER})
        for _ in range(20):
            received += signal.sigtimedwait({NUMBER}, 0.02) is not None

    with handled(noting):
        room["outer"](receive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {NUMBER})
    assert received <= 1
    assert len(noting.seen) == 1


def test_it_is_sent_ever_more_seldom(room: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time leaves a byte in the pipe of ``signal.set_wakeup_fd``, which holds some 280."""
    pauses: list[float] = []
    sent: list[int] = []
    send_to = signals._send_to

    def note_pause(pause_s: float) -> None:
        pauses.append(pause_s)
        wait(0.0001)

    def note_sent(thread: int, number: int) -> None:
        sent.append(number)
        send_to(thread, number)

    let_former_end()
    monkeypatch.setattr(signals, "_sleep", note_pause)
    monkeypatch.setattr(signals, "_send_to", note_sent)
    noting = Noting()

    def send() -> None:
        signal.raise_signal(NUMBER)
        while len(pauses) < 60:
            pass

    with handled(noting):
        room["outer"](send)
        while signals.waiting:
            pass
    assert pauses[:60] == pytest.approx([min(0.001 * 1.2**number, 0.25) for number in range(60)])
    assert 1 < len(sent) <= len(pauses)  # not while one is pending, and the two threads share the interpreter
    assert signals.PATIENCE_S / 0.25 + 60 < 280


def test_what_comes_after_all_was_handled_is_sent_as_often_as_the_first(
    room: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    second_came = threading.Event()

    def note_pause(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 30:
            second_came.wait(30)
        wait(0.0001)

    def first() -> None:
        signal.raise_signal(NUMBER)
        while len(pauses) < 30:
            pass

    def second() -> None:
        signal.raise_signal(NUMBER)
        second_came.set()
        while len(pauses) < 32:
            pass

    let_former_end()
    monkeypatch.setattr(signals, "_sleep", note_pause)
    noting = Noting()
    with handled(noting):
        room["outer"](first)
        signal.signal(NUMBER, noting)  # which calls what waits, while the thread that sends is in its pause
        room["outer"](second)
        while signals.waiting:
            pass
    assert len(noting.seen) == 2
    assert pauses[29:32] == pytest.approx([0.001 * 1.2**29, 0.001, 0.0012])


@pytest.mark.parametrize("raised", [None, AlarmError])
def test_signals_in_quick_succession(room: dict[str, Any], raised: type[BaseException] | None) -> None:
    handled_numbers = {signal.SIGALRM: 0, NUMBER: 0}
    raises = 0

    def handle(number: int, _frame: object) -> None:
        handled_numbers[signal.Signals(number)] += 1
        if raised is not None and number == NUMBER:
            raise raised

    def send() -> None:
        signal.raise_signal(NUMBER)
        wait(0.0002)

    with handled(handle), handled(handle, signal.SIGALRM):
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        try:
            for _ in range(300):
                try:
                    room["outer"](send)
                    while signals.waiting:
                        pass
                except AlarmError:
                    raises += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            while signals.waiting:
                pass
    assert handled_numbers[NUMBER] == 300
    assert handled_numbers[signal.SIGALRM] > 30
    assert raises == (0 if raised is None else 300)
