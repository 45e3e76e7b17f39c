"""What tests of steps on the host share: a count of them, a gate before them, faults in their thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tierstore.training.optimizers import steps_aside
from tierstore.training.optimizers.host_stepper import THREAD_NAME, _Work
from tierstore.training.optimizers.made_steps import MadeStep, made_from
from tierstore.training.optimizers.steps_aside import StepAside

PATIENCE_S = 60.0
ON_HOST = {"optimizer_target": "cpu"}


class Asides:
    """Steps that were handed over to the thread.

    Attributes:
        handed: how many.
        made: how many of them it has made, whether they were taken or not.
        threads: the names of those that have made one.
    """

    def __init__(self) -> None:
        self.handed = 0
        self.made = 0
        self.threads: set[str] = set()


@pytest.fixture(name="asides")
def count_asides(monkeypatch: pytest.MonkeyPatch) -> Asides:
    counted = Asides()
    hand_over = StepAside.hand_over

    def count_handed(aside: StepAside) -> None:
        counted.handed += 1
        hand_over(aside)

    def count_made(*args: Any) -> MadeStep:  # noqa: ANN401 - as `made_from`
        made = made_from(*args)
        counted.made += 1
        counted.threads.add(threading.current_thread().name)
        return made

    monkeypatch.setattr(StepAside, "hand_over", count_handed)
    monkeypatch.setattr(steps_aside, "made_from", count_made)
    return counted


class StepGate:
    """Every step on the host waits at it while it is closed.

    Attributes:
        reached: set as a step comes to it.
        passed: set as one has been made.
    """

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.passed = threading.Event()
        self._open = threading.Event()
        self._open.set()

    def pass_by(self) -> None:
        """Wait until it is open."""
        self.reached.set()
        assert self._open.wait(PATIENCE_S)

    def open(self) -> None:
        """Let steps go on."""
        self._open.set()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Let it be closed, until the context's end at the latest."""
        self.reached.clear()
        self.passed.clear()
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> StepGate:
    found = StepGate()

    def wait_and_make(*args: Any) -> MadeStep:  # noqa: ANN401 - as `made_from`
        found.pass_by()
        made = made_from(*args)
        found.passed.set()
        return made

    monkeypatch.setattr(steps_aside, "made_from", wait_and_make)
    return found


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return what is set as somebody waits for the thread."""
    found, wait_while = threading.Event(), _Work.wait_while

    def tell(work: _Work, is_so: Callable[[], bool]) -> None:
        if is_so() and work.thread is not threading.current_thread():
            found.set()
        wait_while(work, is_so)

    monkeypatch.setattr(_Work, "wait_while", tell)
    return found


class FailingThread:
    """Lets the n-th operation of the thread that steps fail.

    Attributes:
        failed: how often one did.
    """

    def __init__(self) -> None:
        self.failed = 0
        self._left = 0
        self._make: Callable[[], Exception] = RuntimeError

    def fail_next(self, number: int, make: Callable[[], Exception]) -> None:
        """Let the operation with this number, counted from now on, fail with what ``make`` returns."""
        self._left, self._make = number, make

    def count(self, act: Callable[..., Any]) -> Callable[..., Any]:
        """Return what does the same, but counts in that thread."""

        def counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as ``act``
            if threading.current_thread().name == THREAD_NAME and self._left:
                self._left -= 1
                if not self._left:
                    self.failed += 1
                    raise self._make()
            return act(*args, **kwargs)

        return counted
