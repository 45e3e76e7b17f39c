"""Turns: events go into the books, and the commands that they answer with are carried out.  None is lost.

A request comes with its turn.  An *outcome* is told into a queue first, and taken in by that turn or by any
other.  The one lock is held while the books change and never else: no I/O, no device call, no callback.

1. Nothing comes in the midst of a turn: signals' handlers, and functions of Python that trace or profile,
   wait until it has ended (`tierstore.signals`).  So ``KeyboardInterrupt`` leaves nothing behind.
2. An exception that nobody foresaw, from the books or while a command is carried out, is a bug and stops the
   store: everybody who waits, and every later request, is told so by `StoreClosed`.  What the last flush
   made durable is found when it is opened again.  What ``PyThreadState_SetAsyncExc`` puts into a turn counts
   as such.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from tierstore import forks
from tierstore.core import messages as m
from tierstore.core.ledger import Ledger
from tierstore.engine.journal import Journal
from tierstore.errors import InvariantError, StoreClosed, TierStoreError
from tierstore.signals import uninterrupted

T = TypeVar("T")
Work = m.Command | list[m.StartCopy]
"""What is carried out in one piece: a command, or small copies that travel together."""

log = logging.getLogger("tierstore")


class Executor(Protocol):
    """Who carries commands out.  None of it holds the lock."""

    def plan(self, commands: Sequence[m.Command]) -> Sequence[Work]:
        """Put commands into the pieces as which they are carried out, in their order."""
        ...

    def carry_out(self, work: Work) -> None:
        """Do one piece."""
        ...

    def fail_all(self, error: BaseException) -> None:
        """Let nobody wait any longer.  May be repeated."""
        ...


class Dispatcher:
    """The books, and the one lock around them.  Safe from any thread.

    Args:
        ledger: the books; from now on touched only here.
        executor: carries out what they command.
        told: see below.

    Attributes:
        told: outcomes that the books have not taken in yet.  Appending, which nothing can interrupt, is
            enough for one not to be lost; a `turn` sees to it at once.  Only turns take off it, at its
            beginning, and under the lock.
        fault: what stopped the store, if something has.
    """

    def __init__(self, ledger: Ledger, executor: Executor, told: list[m.Event]) -> None:
        self._lock = forks.free_in_child(threading.Lock())  # guards the next two, and nothing else
        self._ledger = ledger
        self._journals: tuple[Journal, ...] = ()
        self._executor = executor
        self.told = told
        self.fault: BaseException | None = None

    @uninterrupted
    def look(self, question: Callable[[Ledger], T]) -> T:
        """Ask the ledger something, under the lock."""
        with self._lock:
            return question(self._ledger)

    @uninterrupted
    def begin(self, journal: Journal) -> None:
        """Tell a journal of every turn from now on."""
        with self._lock:
            journal.begin(self._ledger)
            self._journals = (*self._journals, journal)

    @uninterrupted
    def end(self, journal: Journal) -> None:
        """Tell a journal of nothing any more; nothing happens if it is told of nothing."""
        with self._lock:
            if journal in self._journals:
                self._journals = tuple(each for each in self._journals if each is not journal)
                journal.end()

    def _note(self, events: Sequence[m.Event], commands: Sequence[m.Command]) -> None:
        """Tell those who record of a turn, under the lock."""
        for journal in self._journals:
            journal.note(self._ledger, events, commands)

    def is_broken(self) -> bool:
        """Whether something has stopped the store."""
        return self.fault is not None

    def refuse_if_broken(self) -> None:
        """Raise ``StoreClosed`` if something has stopped the store."""
        if self.fault is None:
            return
        if isinstance(self.fault, Exception):
            raise StoreClosed("the store stopped because of a bug in tierstore; see the log.")
        raise StoreClosed(
            f"the store stopped: {type(self.fault).__name__} was put into the midst of a turn, and nobody "
            "knows how far that came. Close it; what the last flush made durable is found when it is opened "
            "again."
        )

    @uninterrupted
    def turn(self, request: m.Event | None = None) -> None:
        """Take in a request, and what has been told; carry out what the books decide.

        Raises:
            UsageError, CapacityError: the request is refused: nothing was changed.
            StoreClosed: something has stopped the store.
            BaseException: what a signal's handler raises, after the turn's end.
        """
        if request is not None:
            if self.told:  # it does not overtake what was told before it came
                self._take_in()
            self._ask(request)
        while self.told:
            self._take_in()

    def report(self, events: Sequence[m.Event]) -> None:
        """Tell outcomes from a backend's thread, which must not die of our bugs."""
        self.told.extend(events)
        try:
            self.refuse_if_broken()
            self.turn()
        except Exception:
            log.critical("the store is broken by %s", ", ".join(map(repr, events)), exc_info=True)

    # --- one turn -----------------------------------------------------------------------------

    def _ask(self, request: m.Event) -> None:
        """Let the books take in a request; carry out what they decide."""
        try:
            with self._lock:
                self.refuse_if_broken()
                commands = self._ledger.apply(request)
                if self._journals:
                    self._note((request,), commands)
        except BaseException as error:
            is_refused = isinstance(error, TierStoreError) and not isinstance(error, InvariantError)
            if not is_refused:
                self._stop(error)
            raise
        self._carry_out(commands)

    def _take_in(self) -> None:
        """Let the books take in what was told; carry out what they decide."""
        try:
            with self._lock:
                self.refuse_if_broken()
                told = self.told[:]
                commands = self._ledger.apply(*told)
                del self.told[: len(told)]
                if self._journals:
                    self._note(told, commands)
        except BaseException as error:
            self._stop(error)
            raise
        self._carry_out(commands)

    def _carry_out(self, commands: Sequence[m.Command]) -> None:
        if not commands:
            return
        try:
            for work in self._executor.plan(commands):
                self._executor.carry_out(work)
        except BaseException as error:
            self._stop(error)
            raise

    def _stop(self, fault: BaseException) -> None:
        """Nobody knows what holds: let nobody wait for it."""
        self.fault = self.fault or fault
        self._executor.fail_all(self.fault)
