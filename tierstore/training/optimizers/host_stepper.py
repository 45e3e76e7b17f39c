"""One thread that makes steps on the host while the device, and the thread that tells it what to do, go on.

It runs one task after another, in the order in which they were handed over.  A task has two parts:

1. *Getting ready*: bytes come to host memory, and leases are taken.  It may take locks of the run.
2. *Holding* (`HostStepper.holding`): leases are held, and the step is made.  It takes no lock of the run, and
   waits for hardware only.  So whoever has locks, and needs what is leased, may wait for its end.

Who waits for what:

- Whoever is refused something because of those leases waits until they have ended, and tries again
  (`tierstore.training.bundles.patient_store`).  So nobody is ever refused anything because of them.
- Whoever finds no room is given that of steps that were made and not asked for yet: see `HostStepper.spare`.
- `cancel` waits for nothing but that, either: a task that does not hold yet never will.
- `finish` waits for all tasks.  It is for who has no lock of the run.

What a task raises is raised nowhere.  The thread begins with the first task; it waits for more until the
stepper ends, or nobody has it any more, or the interpreter ends.  In the child of a fork there is no thread,
and nothing is waited for.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import logging
import threading
import weakref
from collections.abc import Callable, Iterator

import torch

from tierstore import forks

log = logging.getLogger("tierstore")

THREAD_NAME = "tierstore-host-steps"

_hands_over: contextvars.ContextVar[bool] = contextvars.ContextVar("hands_over", default=True)


@contextlib.contextmanager
def steps_in_their_time() -> Iterator[None]:
    """Return a context in which runs are opened that hand no step over: to compare with those that do.

    It holds for the thread that enters it.  What a run does is decided when it is opened, and stays so.
    """
    before = _hands_over.set(False)
    try:
        yield
    finally:
        _hands_over.reset(before)


class HostTask:
    """Something for the thread to do.

    Args:
        run: does it; it is called once at most.
        nbytes: that it will add to the tiers.

    Attributes:
        nbytes: see above.
    """

    __slots__ = ("is_cancelled", "nbytes", "run")

    def __init__(self, run: Callable[[], None], nbytes: int) -> None:
        self.run: Callable[[], None] | None = run
        self.nbytes = nbytes
        self.is_cancelled = False


class _Work:
    """What the thread and those who wait for it have in common; the thread keeps nothing else alive."""

    def __init__(self) -> None:
        # Guards all below.  Nothing is done while it is held, and no other lock is taken.
        self.changed = threading.Condition(forks.free_in_child(threading.RLock()))
        self.process = forks.here()
        self.waiting: collections.deque[HostTask] = collections.deque()
        self.running: HostTask | None = None
        self.holding: HostTask | None = None
        self.releases = 0
        self.spare: dict[object, Callable[[], None]] = {}
        self.thread: threading.Thread | None = None
        self.intraop_threads = 0
        self.has_ended = False

    def serve(self) -> None:
        """Run tasks until the work ends, or another thread is to go on with it."""
        while (task := self._next()) is not None:
            try:
                run, task.run = task.run, None
                if run is not None and not task.is_cancelled:
                    run()
            except BaseException:  # what it was to make is made in its time
                log.debug("a step on the host was not made ahead", exc_info=True)
            finally:
                del run  # or what it refers to lives until the next one
                with self.changed:
                    self.running = None
                    self.changed.notify_all()
                del task

    def _next(self) -> HostTask | None:
        with self.changed:
            while not self.waiting or self.running is not None:
                if self._is_over:
                    return None
                self.changed.wait()
            if self._is_over:
                return None
            self.running = self.waiting.popleft()
            return self.running

    @property
    def _is_over(self) -> bool:
        return self.has_ended or self.thread is not threading.current_thread()

    def rest(self) -> None:
        """Run nothing that has not begun; wait for what has."""
        with self.changed:
            self.waiting.clear()
            self.wait_while(lambda: self.running is not None)

    def end(self) -> None:
        """Rest, for ever."""
        with self.changed:
            self.has_ended = True
            self.changed.notify_all()
            self.rest()

    def wait_while(self, is_so: Callable[[], bool]) -> None:
        """Wait as long as something is so; ``changed`` is held."""
        if self.thread is threading.current_thread():
            return
        while is_so() and self.process is forks.here():
            self.changed.wait()


class HostStepper:
    """Runs tasks in a thread of its own.  Safe from any thread.

    Attributes:
        is_wanted: whether steps are to be handed over to it: see `steps_in_their_time`.
        turn: held by whoever lets an optimizer's double step: one does at a time.
    """

    def __init__(self) -> None:
        self.is_wanted = _hands_over.get()
        self._work = _Work()
        self._end = weakref.finalize(self, _Work.end, self._work)  # also as the interpreter ends
        self.turn = forks.free_in_child(threading.RLock())  # nothing else is taken while it is held

    def hand_over(self, task: HostTask) -> None:
        """Let the thread run a task after those that it has.

        It computes with as many threads as this one: what adds up in parallel comes to the same bits.

        Raises:
            RuntimeError: no thread can be started; the task is not run.
        """
        work, intraop_threads = self._work, torch.get_num_threads()
        with work.changed:
            if work.has_ended or work.process is not forks.here():
                return
            if work.thread is None or work.intraop_threads != intraop_threads:
                # A thread takes over how many there are when it first computes.
                forks.let_threads_compute()
                thread = threading.Thread(target=work.serve, name=THREAD_NAME, daemon=True)
                former, work.thread = work.thread, thread
                try:
                    thread.start()
                except BaseException:
                    work.thread = former
                    raise
                work.intraop_threads = intraop_threads
            work.waiting.append(task)
            work.changed.notify_all()

    @property
    def pending_bytes(self) -> int:
        """What tasks that have not ended will add to the tiers."""
        with self._work.changed:
            running = [] if self._work.running is None else [self._work.running]
            return sum(task.nbytes for task in (*self._work.waiting, *running))

    @contextlib.contextmanager
    def holding(self, task: HostTask) -> Iterator[bool]:
        """Hold leases inside the context; to be entered by the task itself, before the first of them.

        Yields:
            Whether it may: it was not cancelled.
        """
        work = self._work
        with work.changed:
            may = not task.is_cancelled and not work.has_ended
            work.holding = task if may else None
        try:
            yield may
        finally:
            with work.changed:
                work.releases += work.holding is not None
                work.holding = None
                work.changed.notify_all()

    # --- waiting ------------------------------------------------------------------------------

    @property
    def releases(self) -> int:
        """How often leases were held, and have ended."""
        return self._work.releases

    def wait_for_release(self, seen: int) -> bool:
        """Wait until no leases are held; return whether some have ended since `releases` was ``seen``."""
        work = self._work
        with work.changed:
            if work.thread is threading.current_thread():
                return False
            work.wait_while(lambda: work.holding is not None)
            return work.releases != seen

    def spare(self, owner: object, let_go: Callable[[], None]) -> None:
        """Take in what can be let go of where room is short; ``let_go`` takes no lock of the run."""
        with self._work.changed:
            self._work.spare[owner] = let_go

    def withdraw(self, owner: object) -> bool:
        """Return whether there still is what an owner could spare; from now on it is not let go of."""
        with self._work.changed:
            return self._work.spare.pop(owner, None) is not None

    def make_room(self) -> bool:
        """Let go of all that can be spared; return whether there was something."""
        with self._work.changed:
            if self._work.thread is threading.current_thread():
                return False  # what it makes next is worth no more
            spare, self._work.spare = self._work.spare, {}
        for let_go in spare.values():
            let_go()
        return bool(spare)

    def cancel(self, task: HostTask) -> None:
        """Let a task not begin; if it holds leases, wait until it does not."""
        work = self._work
        with work.changed:
            task.is_cancelled = True
            if task in work.waiting:
                work.waiting.remove(task)
            work.wait_while(lambda: work.holding is task)

    def finish(self) -> None:
        """Wait until every task is done.  Not for who has a lock of the run."""
        work = self._work
        with work.changed:
            work.wait_while(lambda: work.running is not None or bool(work.waiting))

    def rest(self) -> None:
        """Run nothing that has not begun, and wait for what has.  Not for who has a lock of the run."""
        self._work.rest()

    def end(self) -> None:
        """Rest, and end the thread.  Not for who has a lock of the run."""
        self._end()
