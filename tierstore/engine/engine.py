"""The engine as the store sees it: requests, waits for what they come to, and the end.

Requests and outcomes go through `Dispatcher`, which has the books and the one lock; what the books command is
carried out by `CommandExecutor`.  Here is who waits for what, and how a put fills its room.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from operator import attrgetter
from typing import TypeVar, cast

import torch

from tierstore import forks
from tierstore.core import messages as m
from tierstore.core.ledger import Ledger
from tierstore.engine.dispatcher import Dispatcher
from tierstore.engine.executor import CommandExecutor, Opening, orphaned
from tierstore.engine.given import Given
from tierstore.engine.holds import when_granted
from tierstore.engine.journal import Journal
from tierstore.engine.mover import DataMover
from tierstore.engine.part_reads import PartReads
from tierstore.engine.transfer import Transfer
from tierstore.errors import StoreClosed, TierStoreError
from tierstore.recorded import Recording
from tierstore.signals import in_one_piece, uninterrupted
from tierstore.spi import AddressableSlot, Backend, Medium, Record, Slot, WaitingBackend, held_bytes

T = TypeVar("T")

_RECORD_FIELDS = attrgetter("name", "note", "slot")

MOST_NOTED = 64
"""How much waits to be taken in at most, where nobody asks for anything."""

log = logging.getLogger("tierstore")


class Engine:
    """Carries out what the ledger decides, on backends.  Safe from any thread.

    Args:
        ledger: the books; from now on touched only here.
        backends: one for each tier, fastest first.
        names: the tiers' names, for messages.
        note_of: puts a caller's description of bytes into text, for those that are to survive.

    Attributes:
        told: outcomes that callers have to tell.  Append one, which nothing can interrupt, then `take_in`.
        part_reads: of replicas that are held; the books know nothing of them.
    """

    def __init__(
        self,
        ledger: Ledger,
        backends: Sequence[Backend],
        names: Sequence[str],
        note_of: Callable[[object], str] = str,
    ) -> None:
        self._resizing = threading.Lock()  # one resize at a time, lest media hear of them out of order
        self.backends = tuple(backends)
        self.names = tuple(names)
        self.media = tuple(backend.capabilities.medium for backend in backends)
        self._numbers = count(1)
        self.told: list[m.Event] = []
        self.part_reads = PartReads(self.backends)
        self._mover = DataMover(self.backends, self.names, self.told.extend, self._report)
        self._executor = CommandExecutor(self._mover, note_of)
        self._dispatcher = Dispatcher(ledger, self._executor, self.told)
        self._is_closed = False
        self._process = forks.here()
        self._closing = threading.Lock()  # held by whoever closes; guards the next two
        self._closer: int | None = None
        # Host memory is closed last: what still moves after a bug, or an interrupt, moves to or from it.
        in_order = sorted(range(len(self.backends)), key=lambda tier: self.media[tier] is not Medium.HOST)
        self._open = [self.backends[tier] for tier in in_order]

    def _report(self, events: Sequence[m.Event]) -> None:
        self._dispatcher.report(events)

    # --- requests -----------------------------------------------------------------------------

    def recover(self, tier: int, records: Sequence[Record], spec_of: Callable[[str, int], object]) -> None:
        """Take in what an earlier process made durable in ``tier``.  Once, before anything else.

        Args:
            tier: whose backend is a `DurableBackend`.
            records: what that has recovered.
            spec_of: reads what ``note_of`` wrote for so many bytes; never fails, lest one key block all.

        Raises:
            CapacityError: the tier's quota cannot hold it.
        """
        capabilities = self.backends[tier].capabilities
        found = [
            m.Found(name, slot.nbytes, held_bytes(slot, capabilities), spec_of(note, slot.nbytes))
            for name, note, slot in map(_RECORD_FIELDS, records)
        ]
        number = self.number()
        granted = self.request(m.RecordsRecovered(number, tier, found), number).result()
        for replica, record in zip(granted, records, strict=True):
            self._mover.adopt(replica.place, record.slot)

    def number(self) -> int:
        """Return a new request number."""
        return next(self._numbers)

    def request(
        self, event: m.Event, number: int, keys: tuple[str, ...] = (), tier: str | None = None
    ) -> Transfer[Sequence[m.Granted]]:
        """Put a request to the ledger; what it comes to is in the transfer.

        Raises:
            UsageError: the call is wrong; nothing was changed.
            StoreClosed: too late.
        """
        transfer: Transfer[Sequence[m.Granted]] = Transfer(keys, tier)
        self.ask(event, number, transfer)
        return transfer

    def ask(self, event: m.Event, number: int, transfer: Transfer[Sequence[m.Granted]]) -> None:
        """Put a request to the ledger; what it comes to will be in ``transfer``.

        Raises:
            UsageError: the call is wrong; nothing was changed.
            StoreClosed: too late.
        """
        self._executor.waiting[number] = transfer
        try:
            self.turn(event)
        except TierStoreError:
            self._executor.waiting.pop(number, None)
            raise

    @uninterrupted
    def put(
        self, event: m.PutRequested, fill: Callable[[Opening], None], memory: torch.Tensor | None = None
    ) -> None:
        """Make room for a key and let ``fill`` bring its bytes, in this thread.  Blocks.

        No signal's handler comes before its end: a flush in one would wait for this.

        Args:
            event: what is put, and where.
            fill: is called once there is room, unless ``memory`` is that.
            memory: with the bytes, which the fastest tier adopts if that is where they go.
        """
        number, key = event.request, event.key
        settled: Transfer[Sequence[m.Granted]] = Transfer((key,))
        opening: Transfer[Opening | None] = Transfer((key,))
        self._executor.openings[number] = opening
        if memory is not None:
            self._executor.given[number] = Given.by_caller(memory)
        try:
            self.ask(event, number, settled)
            room = opening.result()
        except BaseException:
            if not opening.resolve(error=orphaned(key)):  # it may have been granted, and nobody will fill it
                when_granted(opening, lambda room: None if room is None else self.tell(room.end))
            raise
        finally:
            del self._executor.openings[number]
            self._executor.given.pop(number, None)
        if room is None:  # it was adopted
            settled.result()
            return
        try:
            fill(room)
            room.end.charge_bytes = self._mover.charge_bytes(room.place)
            room.end.error = None
        except Exception as failure:  # others leave what it says: that the call was interrupted
            room.end.error = failure
            raise
        finally:
            self.tell(room.end)
        settled.result()

    @uninterrupted
    def adopt(self, event: m.PutRequested, memory: torch.Tensor) -> None:
        """Let memory be a key's bytes, as they are there.  Blocks.

        Args:
            event: what is put, and in the tier of which backend, which adopts.
            memory: with the bytes.
        """
        number = event.request
        settled: Transfer[Sequence[m.Granted]] = Transfer((event.key,))
        self._executor.given[number] = Given.by_caller(memory)
        try:
            self.ask(event, number, settled)
            settled.result()
        finally:
            self._executor.given.pop(number, None)

    def slot(self, granted: m.Granted) -> Slot:
        """Return the slot of a replica that a grant keeps READY."""
        return self._mover.slot(granted.place)

    def addressable(self, slot: Slot, tier: int) -> AddressableSlot | None:
        """Return the slot as one whose bytes can be used in place, if those of its tier can."""
        # By medium: asking the slot itself, a runtime protocol check, takes as long as a whole turn.
        return None if self.media[tier] is Medium.STORAGE else cast("AddressableSlot", slot)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called, or a bug has stopped everything."""
        return self._is_closed or self._dispatcher.is_broken()

    def look(self, question: Callable[[Ledger], T]) -> T:
        """Ask the ledger something, under the lock.

        Raises:
            StoreForked: this is the child of a fork.
        """
        self.require_here()
        return self._dispatcher.look(question)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[Recording]:
        """Record what the books see, inside the context.

        Raises:
            StoreClosed: too late; `StoreForked` in the child of a fork.
        """
        self.require_open()
        journal = Journal(self.names)
        try:
            self._dispatcher.begin(journal)
            yield journal.recording
        finally:
            if self.is_here:  # else it is the parent's
                self._dispatcher.end(journal)

    @property
    def is_here(self) -> bool:
        """Whether this is the process that the engine belongs to, and not the child of a fork."""
        return self._process is forks.here()

    def require_here(self) -> None:
        """Raise ``StoreForked`` in the child of a fork, which has none of the threads and owns no bytes."""
        forks.require_here(self._process)

    @in_one_piece
    def resize(self, event: m.ResizeRequested) -> None:
        """Change a tier's quota.  Blocks until what has to leave has left.

        Raises:
            CapacityError: leases forbid it; nothing was changed.
            BackendError: the medium did not take it.
        """
        self.require_here()
        tier, capacity_bytes = event.tier, event.capacity_bytes
        with self._resizing:
            is_larger = self.look(
                lambda ledger: capacity_bytes > ledger.books.tier_states[tier].tier.capacity_bytes
            )
            if is_larger:
                # The medium must be able to hold more before the ledger may ask it to.
                self._executor.tell_quota(tier, capacity_bytes)
            self.request(event, event.request).result()
            # Again if it refused, or if an earlier resize, whose caller was interrupted, came after that.
            self._executor.tell_quota(tier, capacity_bytes)

    def close(self) -> None:
        """Fail what waits, wait for what moves, close the backends.  Idempotent.

        A call while another one closes waits for it, and does what is left if that one was interrupted.  So
        do not call it from a callback of a transfer, for which the other one may wait; in the thread that is
        closing, such a call returns at once.  So does one in the child of a fork, which closes nothing.

        Raises:
            Exception: whatever the first backend raised that could not be closed; the others are closed.
        """
        me = threading.get_ident()
        if self._closer == me or not self.is_here:
            return
        with self._closing:
            try:
                self._closer = me
                self._is_closed = True
                self.part_reads.refuse()
                self._wait_for_end()
                self._mover.clear()
                close_all(self._open)
            finally:
                self._closer = None

    def _wait_for_end(self) -> None:
        """Let the books come to rest, unless they are broken."""
        if not self._open or self._dispatcher.is_broken():
            return
        number = self.number()  # a new one for each call: the books may not have heard of an interrupted one
        end: Transfer[Sequence[m.Granted]] = Transfer()
        self._executor.waiting[number] = end
        try:
            self._dispatcher.turn(m.CloseRequested(number))
            # Now nobody waits for what is under way, but for its end.
            for backend in self._open:
                if backend.capabilities.has_waits:
                    cast("WaitingBackend", backend).stop_waiting()
            end.result()
            self.part_reads.wait()
        except Exception:
            if not self._dispatcher.is_broken():
                raise
            log.exception("the store stopped while it was closed")

    # --- the turn -----------------------------------------------------------------------------

    def turn(self, event: m.Event) -> None:
        """Put a request to the ledger; carry out what it decides.  From any thread.

        Raises:
            UsageError: a request is wrong as things are; nothing was changed.
            StoreClosed: a request came after `close`; `StoreForked` in the child of a fork.
        """
        self.require_open()
        self._dispatcher.turn(event)

    def require_open(self) -> None:
        """Raise unless requests may come.

        Raises:
            StoreClosed: after `close`, or where something has stopped the store; `StoreForked` in the child
                of a fork.
        """
        self.require_here()
        self._dispatcher.refuse_if_broken()
        if self._is_closed:
            raise StoreClosed("the store is closed.")

    def note(self, advice: m.Event) -> None:
        """Tell what the books are to know when they decide something next; whoever comes next takes it in.

        Raises:
            StoreClosed: too late; `StoreForked` in the child of a fork.
        """
        self.require_open()
        self.told.append(advice)
        if len(self.told) >= MOST_NOTED:
            self.take_in()

    def tell(self, outcome: m.Event) -> None:
        """Tell what something came to that a caller did; carry out what follows.  Also after `close`."""
        self.told.append(outcome)
        self.take_in()

    def take_in(self) -> None:
        """See to what was told.  If this is interrupted, or not called, the next call of anybody does.

        Raises:
            StoreClosed: a bug or an interrupt has stopped the store, and something was told.
        """
        if self.is_here:
            self._dispatcher.turn()


def close_all(backends: list[Backend]) -> None:
    """Close ``backends``, the last first, also those after one that fails, and take them off the list.

    Raises:
        Exception: what the first of those that failed raised; the other failures are logged.
    """
    first: Exception | None = None
    while backends:
        try:
            backends[-1].close()  # if it is interrupted, it stays, and is closed again by the next call
        except Exception as error:
            if first is None:
                first = error
            else:
                log.exception("a second backend could not be closed")
        del backends[-1]
    if first is not None:
        raise first
