"""Watches steps of a run: is told what happens, and keeps it with its time.

1. While it is off, which is nearly always, whoever could tell it something looks at `StepRecorder.is_on`, and
   that is all.
2. By itself it records two steps after the first one, which makes state and is like no other.  A step in
   whose midst an exception came does not count, and another one is recorded instead.
3. It keeps names and sizes, never a tensor, takes no lock, and is told from any thread.
4. Of an accelerator it notes how far that has come, at each mark and around each question to the store, and
   waits for nothing: what the device took is asked for when steps have ended.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from tierstore.recorded import Recording
from tierstore.training.recording.device_clock import DeviceClock
from tierstore.training.recording.marks import BundleStep, RecordedStep, RecordedSteps, RunMark, Sign

FIRST_STEP = 2
"""The first one makes state, and gradients that are never seen again."""

STEPS = 2
"""How many are recorded without being asked: what computing takes is the least of them."""

MOST_STEPS_WITHOUT_ALL = 16
"""As with `tierstore.training.budgets.prefetcher`: one optimizer may step so often before all have."""

Sample = Callable[[], tuple[int | None, int | None]]


def nothing_known() -> tuple[int | None, int | None]:
    """Return what is known of a device that there is not."""
    return None, None


class StepRecorder:
    """See the module.

    Args:
        recorded: what begins to record the store, for a while.
        sample: returns the bytes that the program has on the device, and the most since it was asked last.
        optimizers: how many train.
        clock: of the accelerator that computes; ``None``: the host does.

    Attributes:
        is_on: whether steps are recorded now.
        learned: the steps that were recorded without being asked; ``None``: none were.
        number: of the step that the run is in, from 1; 0: before the first one.
    """

    def __init__(
        self,
        recorded: Callable[[], AbstractContextManager[Recording]],
        sample: Sample,
        optimizers: int,
        clock: DeviceClock | None = None,
    ) -> None:
        self.is_on = False
        self.learned: RecordedSteps | None = None
        self.number = 0
        self._recorded = recorded
        self._sample = sample
        self._clock = clock
        self._stepped = [0] * optimizers
        self._watching: tuple[RecordedSteps, ...] = ()
        self._learning = contextlib.ExitStack()

    # --- who watches --------------------------------------------------------------------------

    @contextlib.contextmanager
    def watched(self) -> Iterator[RecordedSteps]:
        """Record steps, inside the context."""
        with self._recorded() as recording:
            steps = RecordedSteps(recording)
            try:
                steps.begin_step(max(1, self.number), recording.begin_s)
                if self._clock is not None and not self.is_on:
                    self._clock.begin_anew()
                self._watching = (*self._watching, steps)
                self.is_on = True
                yield steps
            finally:
                self._watching = tuple(each for each in self._watching if each is not steps)
                self.is_on = bool(self._watching)
                steps.end_step(time.perf_counter())

    @property
    def ended(self) -> int:
        """How many steps have come to their end, as far as one can see."""
        return max(0, self.number - 1 + self.is_between)

    @property
    def missing(self) -> int:
        """How many steps have to come before enough are known; 0: none."""
        if self.learned is None:
            return FIRST_STEP - 1 + STEPS - self.ended
        return max(0, STEPS - len(self.known()))

    def known(self) -> list[RecordedStep]:
        """Return the whole steps that were recorded without being asked, as far as one can see."""
        if self.learned is None:
            return []
        is_amid = self.learned in self._watching and not self.is_between
        return [each for each in self.learned.whole if not (is_amid and each is self.learned.steps[-1])]

    def close(self) -> None:
        """Learn nothing any more.  Idempotent."""
        self._learning.close()

    # --- where a step is ----------------------------------------------------------------------

    @property
    def is_between(self) -> bool:
        """Whether all optimizers have stepped since the model was used first: the step could be over."""
        return self.number > 0 and (
            not self._stepped or all(self._stepped) or max(self._stepped) >= MOST_STEPS_WITHOUT_ALL
        )

    def begin_forward(self, inputs: Sequence[object]) -> None:
        """The model begins to run, for a step: maybe the first time in it."""
        if self.number == 0 or self.is_between:
            self._begin_step()
        if self.is_on:
            for steps in self._watching:
                steps.steps[-1].inputs = steps.steps[-1].inputs or _looks(inputs)
            self.mark(Sign.FORWARD)

    def _begin_step(self) -> None:
        self.number += 1
        self._stepped = [0] * len(self._stepped)
        now = time.perf_counter()
        self._note_point(now)  # the end of one step, and the begin of the next
        for steps in self._watching:
            points = steps.steps[-1].points
            steps.begin_step(self.number, now)
            steps.steps[-1].points = None if points is None else points[-1:]
        if self._clock is not None:
            self._clock.read_passed()
        if self.learned is None and self.number >= FIRST_STEP:
            self.learned = self._learning.enter_context(self.watched())
        elif self.learned is not None and len(self.learned.whole) > STEPS:
            self.close()

    def note_step(self, optimizer: int) -> None:
        """An optimizer has stepped."""
        self._stepped[optimizer] += 1

    def break_step(self, fault: str) -> None:
        """An exception came in the midst of a step: it is like no other."""
        for steps in self._watching:
            steps.steps[-1].fault = steps.steps[-1].fault or fault

    # --- what happens -------------------------------------------------------------------------

    def tell(self, sign: Sign) -> None:
        """Something happens to the whole step."""
        if self.is_on:
            self.mark(sign)

    def mark(self, sign: Sign, key: str = "", nbytes: int = 0, owner: str | None = None) -> None:
        """Something happens; to be called while it `is_on` only."""
        self._add(sign, key, nbytes, owner, None)

    def mark_step(self, sign: Sign, step: BundleStep) -> None:
        """Something happens to one bundle's step; to be called while it `is_on` only."""
        self._add(sign, step.bundle, 0, None, step)

    def _add(self, sign: Sign, key: str, nbytes: int, owner: str | None, step: BundleStep | None) -> None:
        live_bytes, peak_bytes = self._sample()
        now, thread = time.perf_counter(), threading.get_ident()
        self._note_point(now)
        mark = RunMark(now, sign, thread, key, nbytes, owner, step, live_bytes, peak_bytes)
        for steps in self._watching:
            steps.steps[-1].marks.append(mark)

    # --- what the device does -----------------------------------------------------------------

    @property
    def asking(self) -> AbstractContextManager[None]:
        """A context in which somebody asks the store for something: a device computes nothing in it."""
        is_noted = self.is_on and self._clock is not None
        return self._asking() if is_noted else contextlib.nullcontext()

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        self._note_point(time.perf_counter())
        try:
            yield
        finally:
            self._note_point(time.perf_counter(), is_apart=True)

    def _note_point(self, now: float, *, is_apart: bool = False) -> None:
        if self._clock is not None and self._watching:
            point = self._clock.point(now, is_apart=is_apart)
            for steps in self._watching:
                steps.steps[-1].add_point(point)

    def await_device(self) -> None:
        """Wait until an accelerator has come past all that was noted, so that it is known when."""
        if self._clock is not None:
            self._clock.read_all()


def _looks(inputs: Sequence[object]) -> str:
    """Return shapes and dtypes of the tensors among the model's inputs."""
    tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
    return ", ".join(f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in tensors)
