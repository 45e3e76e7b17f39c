"""Wants on their way: room, then a source, then a copy.

A want goes through the phases of `WantPhase`.  It holds its room while it waits for a source, and asks for
room in the host tier only then: room is taken from the fastest tier down.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from itertools import count

from tierstore.core.admission import Admission, SpaceAdmission
from tierstore.core.books import Books
from tierstore.core.entry import Entry, EntryLife, Replica, Want, WantPhase, Watcher, entered, without
from tierstore.core.eviction import Policy
from tierstore.core.inflight import Copy, CopyTraffic
from tierstore.core.messages import CopyDone, CopyOrdered, CopyRefused, StartCopy, Urgency
from tierstore.core.model import Tier
from tierstore.core.requests import refuse_if_written
from tierstore.core.residency import ReplicaState, ReplicaStep
from tierstore.core.resizing import QuotaResizes
from tierstore.core.tier_state import TierState
from tierstore.errors import CapacityError, KeyNotFound, TierStoreError

PUT = -1
"""The source of a copy that the caller of ``put`` makes."""


class CopyScheduler:
    """Carries wants to READY replicas, or fails them.

    Args:
        tiers: fastest first.
        policy: who is evicted next.
        window_bytes: bytes in flight in each direction.
        stride: the most entries of one request that are on their way at a time.

    Attributes:
        striding: requests whose next entries may be examined, by number.
        parting: entries that no flush needs any more, by uid: they are to go.
    """

    def __init__(self, tiers: Sequence[Tier], policy: Policy, window_bytes: int, stride: int) -> None:
        self.books = Books(tiers, policy)
        self.admission = SpaceAdmission(self.books, self.copy_below)
        self.resizes = QuotaResizes(self.books, self.admission)
        self.traffic = CopyTraffic(window_bytes)
        self.stride = stride
        self.host = next((index for index, tier in enumerate(tiers) if tier.is_host), None)
        self.is_closed = False  # nothing new is begun
        self._copy_numbers = count(1)
        self.striding: dict[int, Watcher] = {}
        self.parting: dict[int, Entry] = {}

    # --- wants --------------------------------------------------------------------------------

    def want(self, entry: Entry, tier: int, urgency: Urgency, request: Watcher | None) -> Want:
        """See to it that ``entry`` gets a READY replica in ``tier``: begin, or join what is begun."""
        want = entry.wants.get(tier)
        if want is None:
            want = Want(entry, tier, urgency)
            entry.wants = entered(entry.wants, tier, want)
            tier_state = self.books.tier_states[tier]
            self.admission.reconsider(tier_state)
            tier_state.enqueue(want)
            self.books.restless.add(tier)
        elif urgency < want.urgency:
            self._hurry(want, urgency)
        if request is not None:
            want.requests[request.number] = request
        return want

    def _hurry(self, want: Want, urgency: Urgency) -> None:
        """Let a want, and what it waits for, go with those of ``urgency``."""
        tier_state = self.books.tier_states[want.tier]
        if want.phase is WantPhase.QUEUED:
            tier_state.dequeue(want)
            want.urgency = urgency
            tier_state.enqueue(want)
            self.books.restless.add(want.tier)
            return
        want.urgency = urgency
        replica = want.entry.replicas[want.tier]
        if replica.copy is not None:
            self.traffic.expedite(self.traffic.copies[replica.copy], urgency)
        for other in want.entry.wants.values():
            if want in other.dependents and urgency < other.urgency:
                self._hurry(other, urgency)

    def copy_below(self, victim: Replica, tier: int, urgency: Urgency) -> bool:
        """Begin to copy a leaving replica to the next tier below ``tier`` that can take it, if one can."""
        entry = victim.entry
        for lower in range(tier + 1, len(self.books.tier_states)):
            tier_state = self.books.tier_states[lower]
            if tier_state.charge(entry.nbytes) <= tier_state.limit_bytes:
                self.want(entry, lower, urgency, None)
                return True
        return False

    def pump(self) -> None:
        """Give room to whoever may now get it, until nothing changes."""
        while self.books.restless:
            tier_state = self.books.tier_states[self.books.restless.pop()]
            self.resizes.serve(tier_state)
            self._serve(tier_state)
            self.admission.keep_watermark(tier_state)

    def _serve(self, tier_state: TierState) -> None:
        while (want := tier_state.first()) is not None:
            if tier_state.index in want.entry.replicas:
                return  # its former replica still drains
            try:
                if self.admission.ask(tier_state, want) is Admission.LATER:
                    return
            except CapacityError as error:
                tier_state.counters.refusals += want.urgency is not Urgency.PREFETCH
                self.fail(want, error)
                continue
            tier_state.dequeue(want)
            self.books.reserve(want.entry, want.tier)
            want.phase = WantPhase.RESERVED
            self._find_source(want)

    # --- sources and copies -------------------------------------------------------------------

    def _find_source(self, want: Want) -> None:
        """Start the copy of a RESERVED want, or wait for a replica to copy from."""
        entry = want.entry
        if want.put is not None:
            self._start(want, PUT)
            return
        try:
            refuse_if_written(entry, "copy")
        except TierStoreError as error:
            self.fail(want, error)
            return
        ready = entry.ready()
        if self.host is None or want.tier == self.host or entry.is_ready(self.host):
            source = self.host if self.host is not None and entry.is_ready(self.host) else ready[0].tier
            self._start(want, source)
        elif want.is_direct or not self._passes_host(want, ready[0].tier):
            self._start(want, ready[0].tier)
        else:
            self.want(entry, self.host, want.urgency, None).dependents += (want,)

    def _passes_host(self, want: Want, source: int) -> bool:
        """Whether a copy between two tiers that are not host memory is made in two steps.

        Only on the way up: on the way down the want holds room below already, and waiting for room
        in the host tier, which may need that very room, could close a circle.
        """
        assert self.host is not None
        tier_state = self.books.tier_states[self.host]
        is_upward = want.tier < self.host < source
        return is_upward and tier_state.charge(want.entry.nbytes) <= tier_state.limit_bytes

    def _start(self, want: Want, source: int) -> None:
        entry = want.entry
        copy = Copy(next(self._copy_numbers), want, source, want.tier, entry.nbytes)
        want.phase = WantPhase.COPYING
        entry.replicas[want.tier].copy = copy.number
        if source != PUT:
            entry.replicas[source].readers += 1
        self._issue(self.traffic.submit(copy))

    def _issue(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            entry = copy.want.entry
            self.books.note(entry, sys.intern(f"copy {copy.source} -> {copy.target}"), copy.target)
            source = None if copy.source == PUT else entry.replicas[copy.source].place
            target = entry.replicas[copy.target].place
            self.books.out.append(
                StartCopy(copy.number, entry.key, copy.nbytes, source, target, copy.want.put or 0)
            )

    def copy_ordered(self, event: CopyOrdered) -> None:
        """The target may be used: later work on its device is ordered behind the copy."""
        copy = self.traffic.copies[event.copy]
        replica = copy.want.entry.replicas[copy.target]
        if replica.state is ReplicaState.FILLING:
            self._met(copy.want, replica)

    def copy_refused(self, event: CopyRefused) -> None:
        """The medium has no room in this shape: let more go, and try again; for a prefetch, once."""
        copy = self.traffic.copies[event.copy]
        want, replica = copy.want, copy.want.entry.replicas[copy.target]
        self._end(copy, is_moved=False)
        if replica.state is ReplicaState.DRAINING or (want.urgency is Urgency.PREFETCH and want.slack_bytes):
            self._abandon(want, replica, event.error)
            return
        tier_state = self.books.tier_states[copy.target]
        self.books.fill_failed(replica)
        want.phase = WantPhase.QUEUED
        want.refusal = event.error
        want.slack_bytes += max(replica.charge_bytes, 1)
        tier_state.enqueue(want)

    def copy_done(self, event: CopyDone) -> None:
        """A copy ended."""
        copy = self.traffic.copies[event.copy]
        want, replica = copy.want, copy.want.entry.replicas[copy.target]
        if event.charge_bytes is not None:
            self.books.shrink(replica, event.charge_bytes)
        self._end(copy, is_moved=event.error is None)
        if replica.state is not ReplicaState.FILLING:
            self._settle_late(replica, event.error)
        elif event.error is None:
            self._met(want, replica)
        else:
            self._abandon(want, replica, event.error)

    def _settle_late(self, replica: Replica, error: BaseException | None) -> None:
        """The copy's replica was dropped meanwhile, or was READY in stream order before."""
        entry = replica.entry
        if (
            error is not None
            and replica.state is ReplicaState.READY
            and not replica.leases
            and len(entry.ready()) > 1
        ):
            self.books.drop(replica)

    def _end(self, copy: Copy, *, is_moved: bool) -> None:
        """Take a copy off its source and its target, and let the next ones start."""
        entry = copy.want.entry
        target = entry.replicas[copy.target]
        target.copy = None
        self.books.free_if_idle(target)
        if copy.source != PUT:
            source = entry.replicas[copy.source]
            source.readers -= 1
            self.books.free_if_idle(source)
        self._issue(self.traffic.end(copy, is_moved=is_moved))
        self._ask_again(entry)

    def _met(self, want: Want, replica: Replica) -> None:
        """A want's replica has its bytes."""
        entry = want.entry
        entry.wants = without(entry.wants, want.tier)
        self.books.filled(replica)
        for tier_state in self.books.tier_states[: replica.tier]:
            if (faster := tier_state.leaving.get(entry.uid)) is not None:
                self.books.drop(faster)
        for waiting in list(entry.wants.values()):
            if waiting.phase is WantPhase.RESERVED:
                self._find_source(waiting)

    def _abandon(self, want: Want, replica: Replica, error: BaseException) -> None:
        """A want's copy failed."""
        if replica.state is ReplicaState.FILLING:
            self.books.fill_failed(replica)
        self.fail(want, error)

    # --- failure ------------------------------------------------------------------------------

    def fail(self, want: Want, error: BaseException) -> None:
        """End a want without a replica: fail or content those who waited for it."""
        entry = want.entry
        tier_state = self.books.tier_states[want.tier]
        if entry.wants.get(want.tier) is want:
            entry.wants = without(entry.wants, want.tier)
        tier_state.dequeue(want)
        replica = entry.replicas.get(want.tier)
        if want.phase is WantPhase.RESERVED and replica is not None and replica.state is ReplicaState.FILLING:
            self.books.fill_failed(replica, ReplicaStep.DROP)
        self.books.note(entry, f"failed: {type(error).__name__}", want.tier)
        for dependent in want.dependents:
            self._go_direct(dependent, error)
        self._keep_leaving(want, error)
        for request in list(want.requests.values()):
            if request.decline(entry):
                self.meet(request, entry)
            else:
                self.abandon(request, error)

    def _go_direct(self, want: Want, error: BaseException) -> None:
        """The host replica on the way could not be had: go without, or fail with its reason."""
        if want.phase is not WantPhase.RESERVED:
            return
        if isinstance(error, CapacityError) and want.urgency is not Urgency.PREFETCH:
            want.is_direct = True
            self._find_source(want)
        else:
            self.fail(want, error)

    def _keep_leaving(self, want: Want, error: BaseException) -> None:
        """A replica that was to leave to this tier tries the next lower one, or stays."""
        for tier, replica in list(want.entry.replicas.items()):
            tier_state = self.books.tier_states[tier]
            if tier >= want.tier or tier_state.leaving.get(want.entry.uid) is not replica:
                continue
            if self.is_closed or not self.copy_below(replica, want.tier, want.urgency):
                tier_state.trouble = error if not isinstance(error, CapacityError) else error.__cause__
                self.admission.mark_stuck(replica)

    def cancel_wants(self, entry: Entry, error: BaseException) -> None:
        """End every want of an entry that is dropped or closed."""
        for want in list(entry.wants.values()):
            replica = entry.replicas.get(want.tier)
            copy = None if replica is None else self.traffic.copies.get(replica.copy or 0)
            if copy is not None and self.traffic.cancel(copy):
                assert replica is not None
                replica.copy = None
                source = entry.replicas[copy.source]
                source.readers -= 1
                self.books.free_if_idle(source)
                want.phase = WantPhase.RESERVED
            elif (
                want.phase is WantPhase.COPYING
                and replica is not None
                and replica.state is ReplicaState.FILLING
            ):
                self.books.fill_failed(replica, ReplicaStep.DROP)
            self.fail(want, error)

    # --- requests -----------------------------------------------------------------------------

    def begin(self, request: Watcher) -> None:
        """Begin to examine a new request at its entries; it may be met at once.

        A request of ten thousand keys goes in strides: what is on its way to all of them at a time
        would be found by every full garbage collection, and the hardware would wait for the books.

        Raises:
            UsageError: the call is wrong as things are; nothing was changed.
        """
        entries = list(request.pending.values())
        for entry in entries:
            request.check(entry)
        if not entries:
            request.finish()
        for entry in entries:
            entry.watchers = entered(entry.watchers, request.number, request)
        if len(entries) > self.stride:
            request.unseen = deque(entries)
            self._go_on(request)
            return
        for entry in entries:
            if request.examine(entry):
                self.meet(request, entry)

    def _go_on(self, request: Watcher) -> None:
        """Examine a request's next entries, as many as its stride has room for."""
        while request.unseen and len(request.pending) - len(request.unseen) < self.stride:
            entry = request.unseen.popleft()
            if entry.uid in request.pending and request.examine(entry):
                self.meet(request, entry)

    def _go_on_with_all(self) -> None:
        while self.striding:
            _, request = self.striding.popitem()
            try:
                self._go_on(request)
            except TierStoreError as error:
                self.abandon(request, error)

    def meet(self, request: Watcher, entry: Entry) -> None:
        """One entry satisfies the request; the last one finishes it."""
        if request.pending.pop(entry.uid, None) is None:
            return
        self._unwatch(entry, request)
        if not request.pending:
            request.finish()
        elif request.unseen:
            self.striding[request.number] = request

    def abandon(self, request: Watcher, error: BaseException) -> None:
        """Fail a request and give back what it took."""
        if not request.pending:
            return
        self.forget(request)
        request.undo()
        request.fail(error)

    def forget(self, request: Watcher) -> None:
        """Let no entry tell a request anything any more."""
        for entry in request.pending.values():
            for want in entry.wants.values():
                want.requests.pop(request.number, None)
            self._unwatch(entry, request)
        request.pending = {}
        request.unseen = None

    def _unwatch(self, entry: Entry, request: Watcher) -> None:
        """An entry need not tell a request what happens to it any more."""
        entry.watchers = without(entry.watchers, request.number)
        if request.keeps_bytes:
            self._ask_again(entry)
            if entry.life is EntryLife.PARTING and not entry.is_kept:
                self.parting[entry.uid] = entry

    def part_with(self, entry: Entry, error: BaseException) -> None:
        """Let an entry go that is nobody's and that no flush needs."""
        entry.life = EntryLife.GONE
        for replica in entry.ready():
            self.books.drop(replica)
        self.cancel_wants(entry, error)
        self.books.forget_if_empty(entry)

    def _part_with_all(self) -> None:
        while self.parting:
            _, entry = self.parting.popitem()
            if entry.life is EntryLife.PARTING and not entry.is_kept:
                self.part_with(entry, KeyNotFound(f"{entry.key!r} is not there any more.", key=entry.key))

    def _ask_again(self, entry: Entry) -> None:
        if entry.watchers:
            self.books.changed[entry.uid] = entry

    def ask_watchers(self) -> None:
        """Examine again the requests that wait for entries that changed."""
        while self.books.changed:
            _, entry = self.books.changed.popitem()
            for request in list(entry.watchers.values()):
                try:
                    if request.examine(entry):
                        self.meet(request, entry)
                except TierStoreError as error:
                    self.abandon(request, error)

    def run_to_rest(self) -> None:
        """Follow everything that an event set in motion to its end."""
        if self.is_closed:
            self._part_with_all()
            self.books.changed.clear()
            self.books.restless.clear()
            self.striding.clear()
        books = self.books
        while books.changed or books.restless or self.striding or self.parting:
            self.ask_watchers()
            if self.striding:
                self._go_on_with_all()
            if self.parting:
                self._part_with_all()
            self.pump()
