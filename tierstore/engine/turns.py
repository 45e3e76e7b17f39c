"""Turns: events go into the books, and the commands that they answer with are carried out.  None is lost.

A request comes with its turn.  An *outcome* is told into a queue first, and taken in by that turn or by any
other.  The one lock is held while the books change and never else: no I/O, no device call, no callback.

An *interrupt* is an exception that is no `Exception`: ``KeyboardInterrupt`` and its like, which Python may
raise at almost any instruction of the main thread.  It never leaves work behind: the turn goes on to its end
and lets the interrupt through then.  What was under way when it came:

1. *Waiting for the lock*: is taken up again; an interrupted request may have been carried out.
2. *Answering a caller*: the answer is given again.
3. *Inside a backend's call*: nobody knows whether the operation began.  The command is given up: its outcome
   is an error, for whoever waits for it, and the room that it may still touch is never used again.
4. *Inside the call that begins a commit, or while the books change*: nobody knows what holds.  The store
   stops: everybody who waits, and every later request, is told so by `StoreClosed`.  What the last flush
   made durable is found when it is opened again.

An exception that nobody foresaw, from the books or while a command is carried out, is a bug and stops the
store as in 4.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol, TypeVar

from tierstore.core import messages as m
from tierstore.core.ledger import Ledger
from tierstore.engine.progress import Progress
from tierstore.errors import InvariantError, StoreClosed, TierStoreError

T = TypeVar("T")
Work = m.Command | list[m.StartCopy]
"""What is carried out in one piece: a command, or small copies that travel together."""

log = logging.getLogger("tierstore")


class Hands(Protocol):
    """Who carries commands out.  None of it holds the lock."""

    def plan(self, commands: Sequence[m.Command]) -> list[Work]:
        """Put commands into the pieces as which they are carried out, the last one first."""
        ...

    def carry_out(self, work: Work, progress: Progress) -> None:
        """Do one piece.  If it was interrupted before it had begun, it is done again from its beginning."""
        ...

    def give_up(self, work: Work, interrupt: BaseException) -> list[m.Event]:
        """Say what a piece came to that was interrupted after it had begun, and before it had ended.

        Raises:
            StoreClosed: nobody can say.
        """
        ...

    def fail_all(self, error: BaseException) -> None:
        """Let nobody wait any longer.  May be repeated."""
        ...


_NO_COMMANDS: Sequence[m.Command] = ()
_NO_WORK: list[Work] = []  # most turns have nothing to do; nobody changes this


class _Turn:
    """How far a turn has come; of the piece that is under way it is the `Progress`."""

    __slots__ = ("commands", "has_begun", "has_ended", "interrupt", "request", "work")

    def __init__(self, request: m.Event | None) -> None:
        self.request = request  # until the books have it
        self.commands = _NO_COMMANDS  # until they are planned
        self.work = _NO_WORK  # what is left; its last is under way
        self.has_begun = self.has_ended = False
        self.interrupt: BaseException | None = None


class Turns:
    """The books, and the one lock around them.  Safe from any thread.

    Args:
        ledger: the books; from now on touched only here.
        hands: carries out what they command.
        told: see below.

    Attributes:
        told: outcomes that the books have not taken in yet.  Appending, which nothing can interrupt, is
            enough for one not to be lost; a `turn` sees to it at once.  Only turns take off it, at its
            beginning, and under the lock.
        fault: what stopped the store, if something has.
    """

    def __init__(self, ledger: Ledger, hands: Hands, told: list[m.Event]) -> None:
        self._lock = threading.Lock()  # guards _ledger and the next two, and nothing else
        self._ledger = ledger
        self._changing: _Turn | None = None
        self._given_up: set[int | m.Place] = set()  # of which another outcome may be told
        self._hands = hands
        self.told = told
        self.fault: BaseException | None = None

    def look(self, question: Callable[[Ledger], T]) -> T:
        """Ask the ledger something, under the lock."""
        with self._lock:
            return question(self._ledger)

    def is_broken(self) -> bool:
        """Whether something has stopped the store."""
        return self.fault is not None

    def refuse_if_broken(self) -> None:
        """Raise ``StoreClosed`` if something has stopped the store."""
        if self.fault is None:
            return
        if isinstance(self.fault, StoreClosed):
            raise StoreClosed(str(self.fault))
        raise StoreClosed("the store stopped because of a bug in tierstore; see the log.")

    def turn(self, request: m.Event | None = None) -> None:
        """Take in a request, and what has been told; carry out what the books decide.

        Raises:
            UsageError, CapacityError: the request is refused: nothing was changed.
            StoreClosed: something has stopped the store.
            BaseException: an interrupt, after the turn's end.
        """
        turn = _Turn(request)
        while True:
            try:
                if turn.interrupt is None or self._mend(turn):
                    while turn.request is not None or self.told:
                        self._step(turn)
                break
            except Exception:
                if turn.interrupt is None:
                    raise
                break
            except BaseException as interrupt:  # noqa: BLE001 - raised when the turn has ended
                turn.interrupt = interrupt
        if turn.interrupt is not None:
            try:
                raise turn.interrupt
            finally:
                del turn  # the interrupt's traceback refers to this frame: no cycle

    def report(self, events: Sequence[m.Event]) -> None:
        """Tell outcomes from a backend's thread, which must not die of our bugs."""
        self.told.extend(events)
        try:
            self.refuse_if_broken()
            self.turn()
        except Exception:
            log.critical("the store is broken by %s", ", ".join(map(repr, events)), exc_info=True)

    # --- one turn -----------------------------------------------------------------------------

    # In what follows, what has come to be is noted without a call, so that no interrupt comes between.

    def _step(self, turn: _Turn) -> None:
        """Let the books take in the request, or else what was told; carry out what they decide."""
        try:
            with self._lock:
                if self.fault is not None or self._changing is not None:
                    self._refuse()
                if turn.request is None:
                    told: Sequence[m.Event] = self.told[:]
                    count = len(told)
                    if self._given_up:
                        told = self._without_repeated(told)
                    self._changing = turn
                    turn.commands = self._ledger.apply(*told)
                    del self.told[:count]
                else:
                    self._changing = turn
                    try:
                        turn.commands = self._ledger.apply(turn.request)
                    except TierStoreError as error:
                        self._changing = turn if isinstance(error, InvariantError) else None
                        raise
                    turn.request = None
                self._changing = None
        except Exception as error:
            if self._changing is turn:  # else a request was refused, and nothing was changed
                self._stop(error)
            raise
        if turn.commands:
            self._carry_out(turn)

    def _carry_out(self, turn: _Turn) -> None:
        """Do what was decided, and what is left."""
        try:
            if turn.commands:
                turn.work = self._hands.plan(turn.commands)
                turn.commands = _NO_COMMANDS
            while turn.work:
                self._hands.carry_out(turn.work[-1], turn)
                turn.has_begun = turn.has_ended = False
                del turn.work[-1]
        except Exception as error:
            self._stop(error)
            raise

    def _refuse(self) -> NoReturn:
        self.refuse_if_broken()
        raise StoreClosed("the store stopped: a call that was changing its books was interrupted.")

    # --- what goes wrong ----------------------------------------------------------------------

    def _mend(self, turn: _Turn) -> bool:
        """See to what an interrupted turn was about, and to what is left; return whether it can go on."""
        assert turn.interrupt is not None
        if self._changing is turn:
            self._stop(_stopped(turn.interrupt, "its books were being changed"))
        if self.fault is not None:
            self._hands.fail_all(self.fault)
            return False
        if turn.work and (turn.has_begun or turn.has_ended):
            if not turn.has_ended and not self._give_up(turn):
                return False
            turn.has_begun = turn.has_ended = False
            del turn.work[-1]
        self._carry_out(turn)
        return True

    def _give_up(self, turn: _Turn) -> bool:
        """Tell what the piece under way came to; return whether anybody can say."""
        assert turn.interrupt is not None
        try:
            outcomes = self._hands.give_up(turn.work[-1], turn.interrupt)
        except StoreClosed:
            self._stop(_stopped(turn.interrupt, "a commit was being begun"))
            return False
        with self._lock:
            for outcome in filter(self._is_owed, outcomes):
                self._given_up.add(_subject(outcome))
                self.told.append(outcome)
        return True

    def _is_owed(self, outcome: m.Event) -> bool:
        """Whether the books still wait for an outcome."""
        subject = _subject(outcome)
        if isinstance(subject, m.Place):
            return subject.replica in self._ledger.books.replicas
        return subject in self._ledger.moving.traffic.copies

    def _without_repeated(self, told: Sequence[m.Event]) -> Sequence[m.Event]:
        """Leave out outcomes of what has come to something before: it was given up, but had begun."""
        if not self._given_up:
            return told
        events: list[m.Event] = []
        ended: set[int | m.Place] = set()
        for event in told:
            subject = _subject(event)
            if subject in self._given_up and (subject in ended or not self._is_owed(event)):
                continue
            if not isinstance(event, m.CopyOrdered):
                ended.add(subject)
            events.append(event)
        return events

    def _stop(self, fault: BaseException) -> None:
        """Nobody knows what holds: let nobody wait for it."""
        self.fault = self.fault or fault
        self._hands.fail_all(self.fault)


def _subject(event: m.Event) -> int | m.Place:
    """Return what an outcome is the outcome of, if it is a copy or a room; 0: neither."""
    if isinstance(event, m.CopyDone | m.CopyRefused | m.CopyOrdered):
        return event.copy
    return event.place if isinstance(event, m.Freed) else 0


def _stopped(interrupt: BaseException, when: str) -> StoreClosed:
    return StoreClosed(
        f"the store stopped: {type(interrupt).__name__} came while {when}, and nobody knows how far. "
        "Close it; what the last flush made durable is found when it is opened again."
    )
