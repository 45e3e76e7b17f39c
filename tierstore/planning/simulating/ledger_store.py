"""A store without bytes: the product's own ledger, told what happens by a virtual clock.

Requests wait by letting happen what is next, so a wait takes the time that hardware takes.  What hardware
does comes from the links; nothing else is made up here, and no decision.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tierstore.core import messages as m
from tierstore.core.entry import WantPhase
from tierstore.core.eviction import POLICIES
from tierstore.core.ledger import Ledger
from tierstore.core.model import Plan, Tier
from tierstore.errors import CapacityError, InvariantError, KeyNotFound, LeaseError
from tierstore.planning.simulating.holdings import Holdings
from tierstore.planning.simulating.links import MachineLinks, Transit
from tierstore.planning.simulating.queue import EventQueue
from tierstore.planning.timeline import Interval, StallCause

_HOLDER = "the program"


@dataclass(frozen=True, slots=True)
class Waited:
    """A part of a wait.

    Attributes:
        begin_s: when.
        end_s: when.
        cause: what was waited for.
        key: whose bytes.
    """

    begin_s: float
    end_s: float
    cause: StallCause
    key: str


@dataclass(frozen=True, slots=True)
class StoreRoom:
    """What is known of a tier: see `tierstore.planning.deciding.TierRoom`."""

    capacity_bytes: int
    charged_bytes: int
    leased_bytes: int


class LedgerStore:
    """Requests to a ledger under a virtual clock.

    Args:
        tiers: fastest first.
        policy: who is evicted next.
        queue: the clock.
        links: between the tiers.
        holdings: told of every change.
        has_streams: whether what is copied to the first tier may be used in the order of its streams.
        is_checked: whether the ledger's rules are verified after every event.

    Attributes:
        moved: bytes by link's name, since they were taken.
        copies: what was on the links.
        waits: parts of waits, since they were taken.
        arriving: keys of the first tier that may be used in the order of its streams, and are on their way.
        used_until_s: by key, until when the device works with its bytes.
        is_device_first: whether the first tier is a device's.
        is_opening: whether bytes come from outside, and take no time.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        policy: str,
        queue: EventQueue,
        links: MachineLinks,
        holdings: Holdings,
        *,
        has_streams: bool,
        is_checked: bool,
    ) -> None:
        self.ledger = Ledger(tiers, POLICIES[policy])
        self.names = [tier.name for tier in tiers]
        self.queue = queue
        self._links = links
        self._holdings = holdings
        self.has_streams = has_streams
        self._is_checked = is_checked
        self.is_device_first = not (tiers[0].is_host or tiers[0].is_storage)
        self._number = 0
        self._answers: dict[int, BaseException | None] = {}
        self._granted: dict[int, Sequence[m.Granted]] = {}
        self._told: dict[int, Callable[[BaseException | None], None]] = {}
        self.moved: Counter[str] = Counter()
        self.copies: list[Interval] = []
        self.waits: list[Waited] = []
        self.arriving: set[str] = set()
        self.used_until_s: dict[str, float] = {}
        self._copied_within: set[str] = set()
        self.is_opening = False

    # --- telling ------------------------------------------------------------------------------

    def tell(self, *events: m.Event) -> None:
        """Tell the ledger what happened, and set the hardware to what it says."""
        commands = self.ledger.apply(*events)
        self._holdings.note_store(self.ledger.books, self.queue.now_s)
        for command in commands:
            self._carry_out(command)
        if self._is_checked:
            self.ledger.check()

    def _carry_out(self, command: m.Command) -> None:
        match command:  # the most frequent first
            case m.Settle():
                self._answer(command.request, command.error)
            case m.StartCopy():
                self._copy(command)
            case m.FreeSlot():
                self._free(command.place)
            case m.Grant():
                self._granted[command.request] = command.replicas
                self._answer(command.request, None)
            case m.SetCapacity() | m.Commit():
                pass

    def _answer(self, request: int, error: BaseException | None) -> None:
        tell = self._told.pop(request, None)
        if tell is not None:
            tell(error)
        else:
            self._answers[request] = error

    def _copy(self, command: m.StartCopy) -> None:
        target = command.target.tier
        source = 0 if command.source is None else command.source.tier
        is_adopted = command.source is None and (target == 0 or not self.is_device_first)
        if command.source is None and command.key in self._copied_within:
            self._copied_within.discard(command.key)
            is_adopted = True
        if self.is_opening or is_adopted:
            self.queue.at(self.queue.now_s, functools.partial(self.tell, m.CopyDone(command.copy)))
            return
        ready_s = max(self.queue.now_s, self.used_until_s.get(command.key, 0.0) if source == 0 else 0.0)
        if target == 0 and self.has_streams:
            self.arriving.add(command.key)
            self.queue.at(self.queue.now_s, functools.partial(self._order, command.copy))
        self._links.send(source, target, command.nbytes, ready_s, functools.partial(self._arrive, command))

    def _order(self, copy: int) -> None:
        if copy in self.ledger.scheduler.traffic.copies:
            self.tell(m.CopyOrdered(copy))

    def _arrive(self, command: m.StartCopy, transit: Transit) -> None:
        self.moved[transit.link] += command.nbytes
        self.copies.append(
            Interval(transit.begin_s, transit.end_s, transit.link, command.key, command.key, command.nbytes)
        )
        if command.target.tier == 0:
            self.arriving.discard(command.key)
        self.tell(m.CopyDone(command.copy))

    def _free(self, place: m.ReplicaId) -> None:
        replica = self.ledger.books.replicas[place.replica]
        until_s = self.used_until_s.get(replica.key, 0.0) if place.tier == 0 else 0.0
        self.queue.at(max(self.queue.now_s, until_s), functools.partial(self._freed, place))

    def _freed(self, place: m.ReplicaId) -> None:
        self._holdings.note_freed(place, self.queue.now_s)
        self.tell(m.Freed(place))

    # --- asking -------------------------------------------------------------------------------

    def ask(self, event_of: Callable[[int], m.Event]) -> int:
        """Begin a request; return its number."""
        self._number += 1
        self.tell(event_of(self._number))
        return self._number

    def wait(self, request: int, keys: Sequence[str], tier: int) -> None:
        """Let time go on until a request is answered.

        Raises:
            CapacityError: there is no room for it; or as the ledger refuses it.
            InvariantError: nothing happens any more, and it was not answered: a bug.
        """
        while request not in self._answers:
            begin_s, next_s = self.queue.now_s, self.queue.next_s
            if next_s is None:
                raise InvariantError(f"nothing happens any more, and request {request} for {keys} waits")
            cause = self._cause(keys, tier) if next_s > begin_s else None
            self.queue.run_next()
            if cause is not None:
                self.waits.append(Waited(begin_s, self.queue.now_s, *cause))
        error = self._answers.pop(request)
        if error is not None:
            raise error

    def wait_for_bytes(self, key: str) -> None:
        """Let time go on until the bytes of a key that may be used are there."""
        while key in self.arriving:
            begin_s = self.queue.now_s
            self.queue.run_next()
            if self.queue.now_s > begin_s:
                self.waits.append(Waited(begin_s, self.queue.now_s, StallCause.COPY_UP, key))

    def _cause(self, keys: Sequence[str], tier: int) -> tuple[StallCause, str]:
        """Say what is waited for, and whose bytes."""
        for key in keys:
            entry = self.ledger.books.index.get(key)
            want = None if entry is None else entry.wants.get(tier)
            if entry is None or want is None:
                continue
            if want.phase is WantPhase.QUEUED:
                return StallCause.ROOM, key
            sources = [replica.tier for replica in entry.ready()]
            states = self.ledger.books.tier_states
            if sources and states[min(sources)].tier.is_storage:
                return StallCause.DISK, key
            return (StallCause.COPY_DOWN if sources and min(sources) < tier else StallCause.COPY_UP), key
        return StallCause.COPY_DOWN, keys[0] if keys else ""

    def settle(self) -> None:
        """Let everything happen that takes no time."""
        self.queue.run_until(self.queue.now_s)

    def put(self, key: str, nbytes: int, tier: int | None) -> None:
        """Bring bytes: see `tierstore.Store.put`."""
        request = self.ask(lambda n: m.PutRequested(n, key, nbytes, tier, replace=False))
        self.wait(request, [key], 0 if tier is None else tier)

    def lease(self, keys: Sequence[str], tier: int, access: m.Access = m.Access.WRITE) -> int:
        """Have keys in a tier; return the lease's number."""
        request = self.ask(lambda n: m.LeaseRequested(n, keys, tier, access, _HOLDER))
        self.wait(request, keys, tier)
        return request

    def lease_later(
        self,
        keys: Sequence[str],
        tier: int,
        access: m.Access,
        told: Callable[[int, BaseException | None], None],
    ) -> None:
        """Begin to lease keys; it is told when they are leased, or cannot be."""
        number = self._number + 1
        self._begin(
            lambda n: m.LeaseRequested(n, keys, tier, access, "a step on the host"),
            functools.partial(told, number),
        )

    def put_later(
        self, key: str, nbytes: int, tier: int, told: Callable[[BaseException | None], None]
    ) -> None:
        """Begin to copy bytes within a tier; it is told when they are there, or cannot be."""
        self._copied_within.add(key)
        self._begin(lambda n: m.PutRequested(n, key, nbytes, tier, replace=False), told)

    def release(self, lease: int, *, is_written: bool) -> None:
        """End a lease."""
        self._granted.pop(lease, None)
        self.tell(m.LeaseReleased(lease, is_written))
        self.settle()

    def split(self, lease: int, names: Mapping[str, str]) -> bool:
        """Let leased replicas be keys of their own; return whether there are others left behind."""
        places = {each.place: names[each.key] for each in self._granted[lease] if each.key in names}
        request = self.ask(lambda n: m.SplitRequested(n, lease, places))
        self.wait(request, list(names), 0)
        return self._granted.pop(request, None) is not None

    def rename(self, names: Mapping[str, str]) -> None:
        """Let what is under some keys be under others."""
        self.tell(m.RenameRequested(names, replace=True))
        self.settle()

    def fetch(
        self,
        keys: Sequence[str],
        tier: int,
        told: Callable[[BaseException | None], None] | None = None,
    ) -> None:
        """Begin to bring keys to a tier; it is told when they are there, or cannot be."""
        self._begin(lambda n: m.FetchRequested(n, keys, tier, m.Urgency.DEMAND), told or _ignore)

    def prefetch(self, keys: Iterable[str], tier: int) -> None:
        """Bring keys to a tier if there is room: advice."""
        there = [key for key in keys if key in self.ledger]
        if there:
            self._begin(lambda n: m.FetchRequested(n, there, tier, m.Urgency.PREFETCH), _ignore)

    def evict(self, key: str, to: int | None) -> None:
        """Push a key down, if nobody holds it."""
        try:
            self._begin(lambda n: m.EvictRequested(n, (key,), to), _ignore)
        except (KeyNotFound, LeaseError):
            return

    def _begin(
        self, event_of: Callable[[int], m.Event], told: Callable[[BaseException | None], None]
    ) -> None:
        self._number += 1
        self._told[self._number] = told
        try:
            self.tell(event_of(self._number))
        except BaseException:
            del self._told[self._number]
            raise
        self.settle()

    def drop(self, key: str) -> None:
        """Forget a key."""
        self.tell(m.DropRequested((key,)))
        self.settle()

    def resize(self, tier: int, capacity_bytes: int, high_bytes: int, low_bytes: int) -> None:
        """Give a tier another quota."""
        request = self.ask(lambda n: m.ResizeRequested(n, tier, capacity_bytes, high_bytes, low_bytes))
        self.wait(request, [], tier)

    def follow(self, plan: Plan) -> None:
        """Follow a plan."""
        self.tell(m.PlanFollowed(plan))

    def advance(self, position: int) -> None:
        """The plan's access at a position happens now."""
        self.tell(m.Advanced(position))

    # --- looking ------------------------------------------------------------------------------

    def __contains__(self, key: str) -> bool:
        return key in self.ledger

    def is_ready(self, key: str, tier: int) -> bool:
        """Say whether a key's bytes are in a tier."""
        return tier in self.ledger.where(key)

    def nbytes_of(self, key: str) -> int:
        """Return the bytes of a key."""
        return self.ledger.books.index[key].nbytes

    def rooms(self) -> dict[str, StoreRoom]:
        """Return what is known of each tier, fastest first."""
        return {
            each.tier.name: StoreRoom(each.tier.capacity_bytes, each.charged_bytes, each.leased_bytes)
            for each in self.ledger.books.tier_states
        }

    def leased_bytes(self, tier: int) -> int:
        """Return what leases hold in a tier."""
        return self.ledger.books.tier_states[tier].leased_bytes

    def digest(self) -> tuple[tuple[str, int, str], ...]:
        """Return where everything is: two that are equal go on alike."""
        replicas = self.ledger.books.replicas.values()
        return tuple(sorted((each.key, each.tier, each.state.name) for each in replicas))


def _ignore(error: BaseException | None) -> None:
    """Advice that comes to nothing is no matter."""
    if error is not None and not isinstance(error, CapacityError | LeaseError | KeyNotFound):
        raise error
