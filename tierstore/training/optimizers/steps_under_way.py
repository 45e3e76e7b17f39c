"""Which optimizers' steps are under way, thread by thread: another thread's uses are no part of a step."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

from tierstore.training.optimizers.step_units import Steps, runs_of_step


class UnderWay:
    """The steps of one model's optimizers that are under way.  Safe from any thread."""

    def __init__(self) -> None:
        self._of: dict[int, list[Steps]] = {}  # by the thread's number; outermost first

    @property
    def here(self) -> Sequence[Steps]:
        """Those of this thread, outermost first."""
        return self._of.get(threading.get_ident(), ())

    def begin(self, steps: Steps) -> None:
        """An optimizer begins to step in this thread."""
        self._of.setdefault(threading.get_ident(), []).append(steps)

    def end(self, steps: Steps) -> None:
        """A step of this thread has ended, and with it what began inside it."""
        mine = self._of[threading.get_ident()]
        del mine[mine.index(steps) :]
        self._forget()

    def end_interrupted(self) -> None:
        """Let go of steps that an exception has ended, in any thread: PyTorch calls no hooks then."""
        mine = self._of.get(threading.get_ident(), [])
        while mine and not runs_of_step(mine[-1].optimizer):
            mine.pop().abandon()
        self._forget()
        if self._of.keys() - {threading.get_ident()}:
            alive = sys._current_frames()  # noqa: SLF001 - threads that Python has not started, too
            for ident in [ident for ident in self._of if ident not in alive]:
                for steps in reversed(self._of.pop(ident, [])):
                    steps.abandon()

    def _forget(self) -> None:
        if not self._of.get(threading.get_ident(), True):
            del self._of[threading.get_ident()]
