"""Carries out what the ledger commands: answers callers, makes room for puts, and has bytes moved and freed.

Knows no ledger and takes no lock.  Outcomes that are known at once are told with the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tierstore.core import messages as m
from tierstore.engine.batches import batches
from tierstore.engine.dispatcher import Work
from tierstore.engine.given import Given
from tierstore.engine.mover import DataMover
from tierstore.engine.transfer import Transfer
from tierstore.errors import BackendError
from tierstore.signals import uninterrupted
from tierstore.spi import Slot

log = logging.getLogger("tierstore")


@dataclass(slots=True)
class Opening:
    """Room that a caller of ``put`` is to fill.

    Attributes:
        end: what the filling came to, to be told when it has ended; an error until somebody knows better.
    """

    end: m.CopyDone
    place: m.ReplicaId
    slot: Slot

    @property
    def tier(self) -> int:
        """Index of the tier that the room is in."""
        return self.place.tier


def orphaned(key: str) -> BackendError:
    """Return what a put comes to whose caller is gone."""
    return BackendError(f"the call that was putting {key!r} was interrupted.", key=key)


class CommandExecutor:
    """See `tierstore.engine.dispatcher.Executor`.  Safe from any thread.

    Args:
        mover: moves and frees bytes.
        note_of: puts a caller's description of bytes into text, for those that are to survive.

    Attributes:
        waiting: by request, what callers wait for.
        openings: by request, the rooms that callers of ``put`` wait for; ``None``: nobody has to fill it.
        given: by request, what puts bring as the room itself, in the first tier.
        quotas: by tier, what its medium was last told to hold at most, if it was told and took it.
    """

    def __init__(self, mover: DataMover, note_of: Callable[[object], str]) -> None:
        self.mover = mover
        self.waiting: dict[int, Transfer[Sequence[m.Granted]]] = {}
        self.openings: dict[int, Transfer[Opening | None]] = {}
        self.given: dict[int, Given] = {}
        self.quotas: dict[int, int] = {}
        self._note_of = note_of

    def plan(self, commands: Sequence[m.Command]) -> Sequence[Work]:
        """See `Executor.plan`: small copies go last, in batches."""
        work: list[Work] = []
        small: list[m.StartCopy] = []
        for command in commands:
            if isinstance(command, m.StartCopy) and self.mover.is_batched(command):
                small.append(command)
            else:
                work.append(command)
        return [*work, *batches(small)] if small else work

    def carry_out(self, work: Work) -> None:
        """See `Executor.carry_out`."""
        self._KINDS[type(work)](self, work)

    def fail_all(self, error: BaseException) -> None:
        """See `Executor.fail_all`."""
        for waiting in list(self.waiting.values()):
            waiting.resolve(error=error)
        for opening in list(self.openings.values()):
            opening.resolve(error=error)

    @uninterrupted
    def tell_quota(self, tier: int, capacity_bytes: int) -> None:
        """Tell a medium how much it is to hold at most, unless it knows.

        Raises:
            BackendError: it refused.
        """
        if self.quotas.get(tier) == capacity_bytes:
            return
        self.mover.resize(tier, capacity_bytes)
        self.quotas[tier] = capacity_bytes

    def _start(self, command: m.StartCopy) -> None:
        if command.source is None:
            self._open_room(command)
        else:
            self.mover.start(command)

    def _shrink(self, command: m.SetCapacity) -> None:
        try:
            self.tell_quota(command.tier, command.capacity_bytes)
        except BackendError:
            # Whoever asked for it tries again, and is told.
            log.warning("a smaller quota was refused", exc_info=True)

    def _answer(self, request: int, replicas: Sequence[m.Granted], error: BaseException | None) -> None:
        transfer = self.waiting.get(request)
        if transfer is not None:  # else nobody waits, or the answer is a second one
            transfer.resolve(replicas, error)
            self.waiting.pop(request, None)

    def _settle(self, command: m.Settle) -> None:
        if command.error is not None:
            command.error.__traceback__ = None  # it would keep the frames of whoever happened to come by
        self._answer(command.request, (), command.error)
        opening = self.openings.get(command.request)
        if opening is not None and command.error is not None:
            opening.resolve(error=command.error)

    def _open_room(self, command: m.StartCopy) -> None:
        """Let the caller of ``put`` fill the room that it waits for."""
        given = self.given.get(command.request) if command.target.tier == 0 else None
        slot = self.mover.reserve(command, given)
        if slot is None:
            return
        opening = self.openings.get(command.request)
        if given is not None:  # its bytes are there
            self.mover.tell([self.mover.outcome(command)])
            if opening is not None:
                opening.resolve(None)
            return
        room = Opening(m.CopyDone(command.copy, orphaned(command.key)), command.target, slot)
        if opening is None or not opening.resolve(room):
            # The put has failed meanwhile (its key was dropped): nobody is left to fill the room.
            self.mover.tell([room.end])

    _KINDS: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        m.Grant: lambda self, command: self._answer(command.request, command.replicas, None),
        m.Settle: _settle,
        m.StartCopy: _start,
        list: lambda self, copies: self.mover.start_batch(copies),
        m.FreeSlot: lambda self, command: self.mover.free(command.place),
        m.Commit: lambda self, command: self.mover.commit(command, self._note_of),
        m.SetCapacity: _shrink,
    }
    """How each kind of work is done."""
