"""The thread that makes steps on the host: who waits for what, and how it ends."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch

from tests import forked
from tierstore.training.optimizers.host_stepper import (
    THREAD_NAME,
    HostStepper,
    HostTask,
    steps_in_their_time,
)

PATIENCE_S = 30.0


class Work:
    """A task that takes its two parts one at a time, when it is told to."""

    def __init__(self, stepper: HostStepper) -> None:
        self.task = HostTask(self._run, 10)
        self.has_begun = threading.Event()
        self.may_hold = threading.Event()
        self.holds = threading.Event()
        self.may_end = threading.Event()
        self.held: bool | None = None
        self._stepper = stepper

    def _run(self) -> None:
        self.has_begun.set()
        assert self.may_hold.wait(PATIENCE_S)
        with self._stepper.holding(self.task) as self.held:
            self.holds.set()
            if self.held:
                assert self.may_end.wait(PATIENCE_S)

    def hold(self) -> None:
        """Let it come to its second part."""
        self.may_hold.set()
        assert self.holds.wait(PATIENCE_S)


def in_thread(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> bool:
    thread.join(PATIENCE_S)
    return not thread.is_alive()


def test_tasks_run_in_their_order_in_one_thread_that_is_no_other() -> None:
    stepper, seen = HostStepper(), list[tuple[int, str]]()
    for number in range(5):
        stepper.hand_over(
            HostTask(lambda n=number: seen.append((n, threading.current_thread().name)), 0)  # type: ignore[misc]
        )
    stepper.finish()
    assert seen == [(number, THREAD_NAME) for number in range(5)]


def test_a_task_that_has_not_begun_never_does_once_it_is_cancelled() -> None:
    stepper = HostStepper()
    first, second = Work(stepper), Work(stepper)
    stepper.hand_over(first.task)
    stepper.hand_over(second.task)
    assert first.has_begun.wait(PATIENCE_S)
    assert stepper.pending_bytes == 20
    stepper.cancel(second.task)  # which waits for nothing
    assert stepper.pending_bytes == 10
    first.hold()
    first.may_end.set()
    stepper.finish()
    assert not second.has_begun.is_set()
    assert stepper.pending_bytes == 0


def test_a_task_that_gets_ready_is_not_waited_for_and_holds_nothing() -> None:
    stepper = HostStepper()
    work = Work(stepper)
    stepper.hand_over(work.task)
    assert work.has_begun.wait(PATIENCE_S)
    stepper.cancel(work.task)
    assert not stepper.wait_for_release(stepper.releases)
    work.hold()
    assert work.held is False
    stepper.finish()
    assert stepper.releases == 0


@pytest.mark.parametrize("how", ["cancel", "wait_for_release", "finish", "rest", "end"])
def test_who_comes_while_a_task_holds_waits_until_it_does_not(how: str) -> None:
    stepper = HostStepper()
    work = Work(stepper)
    stepper.hand_over(work.task)
    work.hold()
    acts: dict[str, Callable[[], object]] = {
        "cancel": lambda: stepper.cancel(work.task),
        "wait_for_release": lambda: told.append(stepper.wait_for_release(0)),
        "finish": stepper.finish,
        "rest": stepper.rest,
        "end": stepper.end,
    }
    told: list[bool] = []
    waiter = in_thread(acts[how])
    waiter.join(0.05)
    assert waiter.is_alive()
    work.may_end.set()
    assert ended(waiter)
    assert stepper.releases == 1
    assert told in ([], [True])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_child_of_a_fork_waits_for_nothing_and_runs_nothing() -> None:
    stepper, seen = HostStepper(), list[int]()
    work = Work(stepper)
    stepper.hand_over(work.task)
    work.hold()

    def child() -> None:
        stepper.hand_over(HostTask(lambda: seen.append(1), 0))
        stepper.cancel(work.task)
        stepper.finish()
        stepper.end()
        assert not stepper.wait_for_release(0)

    forked.in_child(child)
    work.may_end.set()
    stepper.finish()
    assert not seen


def test_the_thread_itself_waits_for_nobody() -> None:
    stepper, told = HostStepper(), list[object]()

    def run() -> None:
        with stepper.holding(task):
            told.append(stepper.wait_for_release(0))
            told.append(stepper.make_room())
            stepper.finish()

    task = HostTask(run, 0)
    stepper.hand_over(task)
    stepper.finish()
    assert told == [False, False]


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(1)])
def test_what_a_task_raises_is_raised_nowhere(error: BaseException) -> None:
    stepper, seen = HostStepper(), list[int]()

    def fail() -> None:
        raise error

    stepper.hand_over(HostTask(fail, 0))
    stepper.hand_over(HostTask(lambda: seen.append(1), 0))
    stepper.finish()
    assert seen == [1]


def threads_of(act: Callable[[], object]) -> list[threading.Thread]:
    """Return the host stepper's threads that something starts: other tests may have left some."""
    before = threading.enumerate()
    act()
    return [each for each in threading.enumerate() if each.name == THREAD_NAME and each not in before]


def test_after_the_end_nothing_runs() -> None:
    stepper, seen = HostStepper(), list[int]()
    (thread,) = threads_of(lambda: stepper.hand_over(HostTask(lambda: None, 0)))
    stepper.finish()
    stepper.end()
    assert ended(thread)
    stepper.hand_over(HostTask(lambda: seen.append(1), 0))
    stepper.finish()
    assert not seen


def test_the_thread_ends_with_the_stepper() -> None:
    stepper = HostStepper()
    threads = threads_of(functools.partial(stepper.hand_over, HostTask(lambda: None, 0)))
    stepper.finish()
    gone = weakref.ref(stepper)
    del stepper
    gc.collect()
    assert gone() is None
    assert all(map(ended, threads))


def test_a_task_is_gone_once_it_has_run() -> None:
    stepper = HostStepper()
    tensor = torch.zeros(3)
    gone = weakref.ref(tensor)
    stepper.hand_over(HostTask(lambda kept=tensor: kept.zero_(), 0))  # type: ignore[misc]
    del tensor
    stepper.finish()
    stepper.hand_over(HostTask(lambda: None, 0))
    stepper.finish()
    assert gone() is None


def test_it_computes_with_as_many_threads_as_who_hands_over() -> None:
    stepper, seen, before = HostStepper(), list[int](), torch.get_num_threads()
    try:
        for number in (before, before + 1, 1, 1, before):
            torch.set_num_threads(number)
            stepper.hand_over(HostTask(lambda: seen.append(torch.get_num_threads()), 0))
            stepper.finish()
            assert seen.pop() == number
    finally:
        torch.set_num_threads(before)


def test_what_can_be_spared_is_let_go_of_once() -> None:
    stepper, gone = HostStepper(), list[str]()
    stepper.spare("a", lambda: gone.append("a"))
    stepper.spare("b", lambda: gone.append("b"))
    assert stepper.withdraw("a")
    assert not stepper.withdraw("a")
    assert stepper.make_room()
    assert not stepper.make_room()
    assert not stepper.withdraw("b")
    assert gone == ["b"]


def test_steppers_that_are_made_in_the_context_are_not_wanted_and_others_are() -> None:
    of_others: list[bool] = []
    other = threading.Thread(target=lambda: of_others.append(HostStepper().is_wanted))
    before = HostStepper()
    with steps_in_their_time():
        inside = HostStepper()
        other.start()
        other.join(PATIENCE_S)
        with contextlib.suppress(ValueError), steps_in_their_time():
            raise ValueError
        still = HostStepper()
    found = [each.is_wanted for each in (before, inside, still, HostStepper())]
    assert found == [True, False, False, True]
    assert of_others == [True]
