"""What the dispatcher saw, with times, for who records a store.

1. It is told of every turn under the dispatcher's lock: it keeps numbers and names, never an event, an
   error or bytes, and takes no lock.
2. What goes wrong in it costs the store nothing: it ends itself, and its recording says that it is not whole.
3. What was under way when it began is left out, but for the bytes that were there.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tierstore.core import messages as m
from tierstore.core.ledger import Ledger
from tierstore.recorded import (
    CALLER,
    CopyRecord,
    LeaseRecord,
    Put,
    Recording,
    Renaming,
    Stay,
    WaitedFor,
    WaitRecord,
)

log = logging.getLogger("tierstore")


@dataclass(slots=True)
class _Unanswered:
    """A request that was not answered yet."""

    at_s: float
    reason: WaitedFor
    keys: tuple[str, ...]
    tier: str | None
    thread: int


class Journal:
    """Fills a recording.

    Args:
        names: the tiers', fastest first.

    Attributes:
        recording: see above; whole when the journal has ended.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.recording = Recording(tuple(names))
        self._asked: dict[int, _Unanswered] = {}
        self._fresh: set[int] = set()  # asked for in this turn: an answer in it was not waited for
        self._copies: dict[int, CopyRecord] = {}
        self._leases: dict[int, LeaseRecord] = {}
        self._stays: dict[int, Stay] = {}
        self._last_replica = 0
        self._now = 0.0

    def begin(self, ledger: Ledger) -> None:
        """Take in what there is.  Under the dispatcher's lock, as are all calls."""
        recording = self.recording
        recording.unix_ns = time.time_ns()
        recording.begin_s = self._now = time.perf_counter()
        for name in recording.tiers:
            recording.charges[name] = []
            recording.quotas[name] = []
        self._look(ledger)

    def note(self, ledger: Ledger, events: Sequence[m.Event], commands: Sequence[m.Command]) -> None:
        """Take in one turn: what the ledger was told, and what it has answered."""
        if not self.recording.is_whole:
            return
        try:
            self._now = time.perf_counter()
            for message in (*events, *commands):
                kind = self._KINDS.get(type(message))
                if kind is not None:
                    kind(self, message)
            self._fresh.clear()
            self._look(ledger)
        except Exception:
            self.recording.is_whole = False
            log.exception("a store is not recorded any more")

    def end(self) -> None:
        """Let what has not ended be as it is."""
        recording = self.recording
        recording.end_s = time.perf_counter()
        recording.copies += self._copies.values()
        recording.leases += self._leases.values()
        recording.stays += self._stays.values()
        recording.waits += [self._wait(asked, recording.end_s) for asked in self._asked.values()]
        for each in (self._copies, self._leases, self._stays, self._asked):
            each.clear()

    # --- tiers --------------------------------------------------------------------------------

    def _look(self, ledger: Ledger) -> None:
        """Take in what is charged, and which replicas are new: their numbers grow."""
        now, recording = self._now, self.recording
        for tier_state, name in zip(ledger.books.tier_states, recording.tiers, strict=True):
            _note(recording.charges[name], now, tier_state.charged_bytes)
            _note(recording.quotas[name], now, tier_state.tier.capacity_bytes)
        last = self._last_replica
        for number in reversed(ledger.books.replicas):
            if number <= last:
                break
            replica = ledger.books.replicas[number]
            name = recording.tiers[replica.tier]
            self._stays[number] = Stay(replica.key, name, replica.charge_bytes, now)
            self._last_replica = max(self._last_replica, number)

    def _freed(self, event: m.Freed) -> None:
        stay = self._stays.pop(event.place.replica, None)
        if stay is not None:
            self.recording.stays.append(replace(stay, end_s=self._now))

    # --- copies -------------------------------------------------------------------------------

    def _start_copy(self, command: m.StartCopy) -> None:
        tiers = self.recording.tiers
        source = CALLER if command.source is None else tiers[command.source.tier]
        target = tiers[command.target.tier]
        self._copies[command.copy] = CopyRecord(
            command.key, command.nbytes, source, target, self._now, math.inf, is_whole=False
        )
        if command.source is None:
            self._answered(command.request)

    def _end_copy(self, event: m.CopyDone | m.CopyRefused) -> None:
        copy = self._copies.pop(event.copy, None)
        if copy is not None:
            ended = replace(copy, end_s=self._now, is_whole=event.error is None)
            self.recording.copies.append(ended)

    # --- requests -----------------------------------------------------------------------------

    def _ask(self, number: int, reason: WaitedFor, keys: tuple[str, ...], tier: int | None) -> None:
        name = None if tier is None else self.recording.tiers[tier]
        self._asked[number] = _Unanswered(self._now, reason, keys, name, threading.get_ident())
        self._fresh.add(number)

    def _put(self, event: m.PutRequested) -> None:
        self._ask(event.request, WaitedFor.ROOM, (event.key,), event.tier)
        asked = self._asked[event.request]
        self.recording.puts.append(Put(self._now, event.key, event.nbytes, asked.tier, asked.thread))

    def _grant(self, command: m.Grant) -> None:
        asked = self._answered(command.request)
        if asked is not None and asked.reason is WaitedFor.LEASE and asked.tier is not None:
            self._leases[command.request] = LeaseRecord(
                asked.keys, asked.tier, asked.at_s, self._now, math.inf, is_written=False, thread=asked.thread
            )

    def _answered(self, number: int) -> _Unanswered | None:
        asked = self._asked.pop(number, None)
        if asked is not None and number not in self._fresh:
            self.recording.waits.append(self._wait(asked, self._now))
        return asked

    @staticmethod
    def _wait(asked: _Unanswered, end_s: float) -> WaitRecord:
        return WaitRecord(asked.at_s, end_s, asked.reason, asked.keys, asked.tier, asked.thread)

    def _release(self, event: m.LeaseReleased) -> None:
        lease = self._leases.pop(event.request, None)
        if lease is not None:
            self.recording.leases.append(replace(lease, end_s=self._now, is_written=event.written))

    def _rename(self, names: dict[str, str | None]) -> None:
        self.recording.renamings.append(Renaming(self._now, names))

    _KINDS: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        m.LeaseRequested: lambda self, event: self._ask(
            event.request, WaitedFor.LEASE, tuple(event.keys), event.tier
        ),
        m.ReadRequested: lambda self, event: self._ask(event.request, WaitedFor.READ, (event.key,), None),
        m.ResizeRequested: lambda self, event: self._ask(event.request, WaitedFor.QUOTA, (), event.tier),
        m.PutRequested: _put,
        m.LeaseReleased: _release,
        m.DropRequested: lambda self, event: self._rename(dict.fromkeys(event.keys)),
        m.RenameRequested: lambda self, event: self._rename(dict(event.names)),
        m.CopyDone: _end_copy,
        m.CopyRefused: _end_copy,
        m.Freed: _freed,
        m.StartCopy: _start_copy,
        m.Grant: _grant,
        m.Settle: lambda self, command: self._answered(command.request),
    }
    """What is taken in of each message; of others nothing."""


def _note(changes: list[tuple[float, int]], now: float, value: int) -> None:
    """Note a value if it is another one; of one time the last."""
    if changes and changes[-1][1] == value:
        return
    if changes and changes[-1][0] == now:
        changes[-1] = now, value
    else:
        changes.append((now, value))
