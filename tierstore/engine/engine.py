"""Takes the lock, asks the ledger, lets go of the lock, and does what it says.

`Engine.turn` is the only way in: a request from a caller or an outcome from a backend goes to the
ledger under the one lock; the commands it answers with are carried out after the lock is let go, and
what they come to are events again.  No I/O, no device call and no callback happens under the lock.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from typing import TypeVar, cast

import torch

from tierstore.core import messages as m
from tierstore.core.ledger import Ledger
from tierstore.engine.batches import batches
from tierstore.engine.carrier import Carrier
from tierstore.engine.transfer import Transfer
from tierstore.errors import BackendError, InvariantError, StoreClosed, TierStoreError
from tierstore.spi import AddressableSlot, Backend, DurableBackend, Medium, Slot, held_bytes

T = TypeVar("T")
_AFTER_CLOSE = (
    m.CopyDone,
    m.CopyOrdered,
    m.CopyRefused,
    m.CommitDone,
    m.Freed,
    m.ReadDone,
    m.LeaseReleased,
)

_RECORD_FIELDS = attrgetter("name", "note", "slot")

log = logging.getLogger("tierstore")


def _orphaned(key: str) -> BackendError:
    return BackendError(f"the call that was putting {key!r} was interrupted.", key=key)


def _undo_when_granted(transfer: Transfer[T], undo: Callable[[T], None]) -> None:
    def act() -> None:
        try:
            granted = transfer.result()
        except Exception:  # noqa: BLE001 - nothing was granted, and whoever resolves it cares for nobody's wait
            return
        undo(granted)

    transfer.add_done_callback(act)


@dataclass(slots=True)
class Opening:
    """Room that a caller of ``put`` is to fill."""

    copy: int
    place: m.Place
    slot: Slot

    @property
    def tier(self) -> int:
        """Index of the tier that the room is in."""
        return self.place.tier


class Engine:
    """Carries out what the ledger decides, on backends.  Safe from any thread.

    Args:
        ledger: the books; from now on touched only here.
        backends: one for each tier, fastest first.
        names: the tiers' names, for messages.
        note_of: puts a caller's description of bytes into text, for those that are to survive.
    """

    def __init__(
        self,
        ledger: Ledger,
        backends: Sequence[Backend],
        names: Sequence[str],
        note_of: Callable[[object], str] = str,
    ) -> None:
        self._lock = threading.Lock()  # guards _ledger, and nothing else
        self._resizing = threading.Lock()  # one resize at a time, lest media hear of them out of order
        self._ledger = ledger
        self.backends = tuple(backends)
        self.names = tuple(names)
        self._note_of = note_of
        self.media = tuple(backend.capabilities.medium for backend in backends)
        self._numbers = count(1)
        self._carrier = Carrier(self.backends, self.names, self._turn, self._report)
        self._waiting: dict[int, Transfer[Sequence[m.Granted]]] = {}
        self._openings: dict[int, Transfer[Opening]] = {}
        self._given: dict[int, torch.Tensor] = {}  # what puts bring as the room itself
        self._is_closed = False
        self._is_broken = False

    # --- requests -----------------------------------------------------------------------------

    def recover(self, tier: int, spec_of: Callable[[str], object]) -> None:
        """Take in what an earlier process made durable in ``tier``.  Once, before anything else.

        Args:
            tier: whose backend is a `DurableBackend`.
            spec_of: reads what ``note_of`` wrote.

        Raises:
            CapacityError: the tier's quota cannot hold it.
            BackendError: the medium failed, or a note cannot be read.
        """
        backend = cast("DurableBackend", self.backends[tier])
        alignment_bytes = backend.capabilities.alignment_bytes
        records = backend.recovered()
        found = [
            m.Found(name, slot.nbytes, held_bytes(slot, alignment_bytes), spec_of(note))
            for name, note, slot in map(_RECORD_FIELDS, records)
        ]
        number = self.number()
        granted = self.request(m.Recovered(number, tier, found), number).result()
        for replica, record in zip(granted, records, strict=True):
            self._carrier.adopt(replica.place, record.slot)

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
        self._waiting[number] = transfer
        try:
            self.turn(event)
        except BaseException:
            self._waiting.pop(number, None)
            raise
        return transfer

    def put(
        self,
        event: m.PutRequested,
        fill: Callable[[Opening], None],
        given: torch.Tensor | None = None,
    ) -> None:
        """Make room for a key and let ``fill`` bring its bytes, in this thread.  Blocks.

        Args:
            event: what is put, and where.
            fill: is called once there is room.
            given: memory that is to be the room itself, where the backend of the event's tier adopts.
        """
        number, key = event.request, event.key
        opening: Transfer[Opening] = Transfer((key,))
        self._openings[number] = opening
        if given is not None:
            self._given[number] = given
        try:
            settled = self.request(event, number, (key,))
            room = self.wait(opening, lambda room: self.turn(m.CopyDone(room.copy, _orphaned(key))))
        finally:
            del self._openings[number]
            self._given.pop(number, None)
        error: BaseException | None = None
        try:
            fill(room)
        except BaseException as failure:
            error = failure
            raise
        finally:
            charge_bytes = None if error is not None else self._carrier.charge_bytes(room.place)
            self.turn(m.CopyDone(room.copy, error, charge_bytes))
        settled.result()

    def wait(self, transfer: Transfer[T], undo: Callable[[T], None]) -> T:
        """Return what a transfer comes to; if the wait is interrupted, undo it when it comes.

        A wait is interrupted by ``KeyboardInterrupt`` and the like: nobody is left who could release
        what is granted afterwards.
        """
        try:
            return transfer.result()
        except BaseException as error:
            if not isinstance(error, Exception):
                _undo_when_granted(transfer, undo)
            raise
        finally:
            del transfer  # a failed one keeps its error, whose traceback refers to this frame

    def slot(self, granted: m.Granted) -> Slot:
        """Return the slot of a replica that a grant keeps READY."""
        return self._carrier.slot(granted.place)

    def addressable(self, slot: Slot, tier: int) -> AddressableSlot | None:
        """Return the slot as one whose bytes can be used in place, if those of its tier can."""
        # By medium: asking the slot itself, a runtime protocol check, takes as long as a whole turn.
        return None if self.media[tier] is Medium.STORAGE else cast("AddressableSlot", slot)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called, or a bug has stopped everything."""
        return self._is_closed or self._is_broken

    def look(self, question: Callable[[Ledger], T]) -> T:
        """Ask the ledger something, under the lock."""
        with self._lock:
            return question(self._ledger)

    def resize(self, event: m.ResizeRequested) -> None:
        """Change a tier's quota.  Blocks until what has to leave has left."""
        tier = event.tier
        with self._resizing:
            is_larger = self.look(
                lambda ledger: event.capacity_bytes > ledger.books.shelves[tier].tier.capacity_bytes
            )
            if is_larger:
                # The medium must be able to hold more before the ledger may ask it to.
                self.backends[tier].resize(event.capacity_bytes)
            self.request(event, event.request).result()

    def close(self) -> None:
        """Fail what waits, wait for what moves, close the backends.  Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        if not self._is_broken:
            number = self.number()
            transfer: Transfer[Sequence[m.Granted]] = Transfer()
            self._waiting[number] = transfer
            self._turn([m.CloseRequested(number)])
            transfer.result()
        self._carrier.clear()
        with contextlib.ExitStack() as all_of_them:  # also those after one that fails
            for backend in reversed(self.backends):
                all_of_them.callback(backend.close)

    # --- the turn -----------------------------------------------------------------------------

    def turn(self, event: m.Event) -> None:
        """Tell the ledger what happened; carry out what it decides.  From any thread.

        Raises:
            UsageError: a request is wrong as things are; nothing was changed.
            StoreClosed: a request came after `close`.
        """
        self._refuse_if_broken()
        if self._is_closed and not isinstance(event, _AFTER_CLOSE):
            raise StoreClosed("the store is closed.")
        self._turn([event])

    def _refuse_if_broken(self) -> None:
        if self._is_broken:
            raise StoreClosed("the store stopped because of a bug in tierstore; see the log.")

    def _turn(self, events: list[m.Event]) -> None:
        while events:
            try:
                with self._lock:
                    commands = self._ledger.apply(*events)
            except Exception as error:
                if isinstance(error, TierStoreError) and not isinstance(error, InvariantError):
                    raise  # a request is refused: nothing was changed
                self._break(error)
                raise
            events = []
            small: list[m.StartCopy] = []
            for command in commands:
                if isinstance(command, m.StartCopy) and self._carrier.is_batched(command):
                    small.append(command)
                else:
                    self._carry_out(command, events)
            if small:
                for batch in batches(small):
                    self._carrier.start_batch(batch, events)

    def _break(self, error: Exception) -> None:
        """The books are wrong, which is a bug: let nobody wait for them."""
        self._is_broken = True
        for waiting in list(self._waiting.values()):
            waiting.resolve(error=error)
        for opening in list(self._openings.values()):
            opening.resolve(error=error)

    def _report(self, events: list[m.Event]) -> None:
        """Bring in outcomes from a backend's thread, which must not die of our bugs."""
        try:
            self._refuse_if_broken()
            self._turn(events)
        except (TierStoreError, RuntimeError, LookupError):
            told = ", ".join(map(repr, events))
            log.critical("the store is broken by %s", told, exc_info=True)

    def _carry_out(self, command: m.Command, events: list[m.Event]) -> None:
        """Do one command; add to ``events`` what is already known of its outcome."""
        if isinstance(command, m.Settle):
            self._settle(command)
        elif isinstance(command, m.Grant):
            self._waiting.pop(command.request).resolve(command.replicas)
        elif isinstance(command, m.StartCopy):
            if command.source is None:
                self._open_room(command, events)
            else:
                self._carrier.start(command, events)
        elif isinstance(command, m.FreeSlot):
            self._carrier.free(command.place, events)
        elif isinstance(command, m.Commit):
            self._carrier.commit(command, self._note_of, events)
        else:
            self.backends[command.tier].resize(command.capacity_bytes)

    def _settle(self, command: m.Settle) -> None:
        transfer = self._waiting.pop(command.request, None)
        if command.error is not None:
            command.error.__traceback__ = None  # it would keep the frames of whoever happened to come by
        if transfer is not None:
            transfer.resolve((), command.error)
        opening = self._openings.get(command.request)
        if opening is not None and command.error is not None:
            opening.resolve(error=command.error)

    def _open_room(self, command: m.StartCopy, events: list[m.Event]) -> None:
        """Let the caller of ``put`` fill the room that it waits for."""
        slot = self._carrier.reserve(command, events, self._given.get(command.request))
        if slot is None:
            return
        opening = self._openings.get(command.request)
        room = Opening(command.copy, command.target, slot)
        if opening is None or not opening.resolve(room):
            # The put has failed meanwhile (its key was dropped): nobody is left to fill the room.
            events.append(m.CopyDone(command.copy, _orphaned(command.key)))
