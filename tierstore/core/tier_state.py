"""Capacity and watermarks of one tier, in bytes.

A `TierState` keeps the sums that decisions need beside the replicas they are made of, so that no
decision walks over all keys.  `Ledger.check` recomputes every sum.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tierstore.core.entry import Replica, Want
from tierstore.core.eviction import Order
from tierstore.core.messages import Urgency
from tierstore.core.model import Tier
from tierstore.units import format_bytes


@dataclass(slots=True)
class Counters:
    """What happened in a tier since the start."""

    hits: int = 0
    faults: int = 0
    evictions: int = 0
    refusals: int = 0


def advice(tier_states: Sequence[TierState], otherwise: str) -> str:
    """Say what makes room in tiers: their settings, if they have some; else ``otherwise`` with capacities."""
    if any(tier_state.tier.setting is None for tier_state in tier_states):
        names = " or ".join(repr(tier_state.tier.name) for tier_state in tier_states)
        return f"{otherwise} the capacity of {names}."
    return f"Raise {' or '.join(map(_setting, tier_states))}."


def _setting(tier_state: TierState) -> str:
    is_shared = not (
        tier_state.tier.is_host or tier_state.tier.is_storage
    )  # a device's, with what a program has there
    there = f"{format_bytes(tier_state.limit_bytes)}{' for the store' if is_shared else ''}"
    return f"{tier_state.tier.setting} ({there})"


class TierState:
    """The books of one tier.

    Attributes:
        tier: name, quota and watermarks.
        limit_bytes: what may be charged from now on; below the quota while a resize is under way.
        charged_bytes: over the replicas that are not ABSENT.
        draining_bytes: the part of it that the hardware is giving back, without anybody's leave.
        filling_bytes: the part of it that copies are writing, or are about to.
        leased_bytes: the part of it that leases hold.
        promised_bytes: the part of it that commits and flushes count on: no eviction frees it.
        retained_bytes: the part of that which is of no other use.
        leaving: READY replicas whose copy to a lower tier is under way, by uid; they then drop.
        evictable: READY replicas that nobody holds and that are not leaving, in the policy's order.
        leased: READY or DRAINING replicas that leases hold, by uid.
        kept: READY replicas that nobody holds, but that are promised: to evict them would free nothing.
        lost_bytes: what the backend could not give back: charged for good.
        stuck: evictable ones for which no lower tier had room; they return when that may change.
        trouble: why the last replica got stuck, where a medium is to blame.
        queues: wants that wait for room, by urgency, first come first.
        waiting: how many there are in the queues.
        expected_bytes: what is put here soon, as the plan says: room for it is made in good time.
        is_resizing: whether a smaller quota waits for bytes to leave.
        is_committing: whether a commit is under way, after which promises may be void.
    """

    __slots__ = (
        "charged_bytes",
        "counters",
        "draining_bytes",
        "evictable",
        "expected_bytes",
        "filling_bytes",
        "index",
        "is_committing",
        "is_resizing",
        "kept",
        "leased",
        "leased_bytes",
        "leaving",
        "leaving_bytes",
        "limit_bytes",
        "lost_bytes",
        "peak_charged_bytes",
        "promised_bytes",
        "queues",
        "ready_bytes",
        "retained_bytes",
        "stuck",
        "tier",
        "trouble",
        "waiting",
    )

    def __init__(self, index: int, tier: Tier, order: Order) -> None:
        self.index = index
        self.tier = tier
        self.limit_bytes = tier.capacity_bytes
        self.charged_bytes = 0
        self.draining_bytes = 0
        self.filling_bytes = 0
        self.ready_bytes = 0
        self.leased_bytes = 0
        self.leaving_bytes = 0
        self.peak_charged_bytes = 0
        self.promised_bytes = 0
        self.retained_bytes = 0
        self.leaving: dict[int, Replica] = {}
        self.evictable = order
        self.leased: dict[int, Replica] = {}
        self.stuck: dict[int, Replica] = {}
        self.kept: dict[int, Replica] = {}
        self.lost_bytes = 0
        # Ordered ones know their first in no time; a dict looks for it behind all that were taken before.
        self.queues: dict[Urgency, OrderedDict[Want, None]] = {u: OrderedDict() for u in Urgency}
        self.trouble: BaseException | None = None
        self.waiting = 0
        self.expected_bytes = 0
        self.is_resizing = False
        self.is_committing = False
        self.counters = Counters()

    @property
    def free_bytes(self) -> int:
        """What may be charged at once."""
        return self.limit_bytes - self.charged_bytes

    @property
    def coming_free_bytes(self) -> int:
        """What will be free when the hardware has done what it was told."""
        return self.free_bytes + self.draining_bytes + self.leaving_bytes

    @property
    def is_in_motion(self) -> bool:
        """Whether the hardware is at something here that may change what can be evicted."""
        return bool(self.draining_bytes or self.leaving or self.filling_bytes or self.is_committing)

    @property
    def bound_bytes(self) -> int:
        """What neither eviction nor the hardware will free: only callers can."""
        promised = 0 if self.is_committing else self.promised_bytes
        return self.leased_bytes + self.lost_bytes + promised

    @property
    def is_restless(self) -> bool:
        """Whether a change here may let somebody go on, or calls for eviction."""
        return bool(self.waiting) or self.is_resizing or self.charged_bytes > self.high_bytes

    @property
    def high_bytes(self) -> int:
        """Above this many charged bytes, eviction begins ..."""
        return min(self.tier.high_bytes, self.limit_bytes - self.expected_bytes)

    @property
    def low_bytes(self) -> int:
        """... and goes on down to this many."""
        return min(self.tier.low_bytes, self.limit_bytes - self.expected_bytes)

    def charge(self, nbytes: int) -> int:
        """Return what a replica of ``nbytes`` is charged here."""
        alignment = self.tier.alignment_bytes
        return -(-nbytes // alignment) * alignment

    def set_quota(self, capacity_bytes: int, high_bytes: int, low_bytes: int) -> None:
        """Take a new quota and its watermarks."""
        self.limit_bytes = capacity_bytes
        self.tier = replace(
            self.tier, capacity_bytes=capacity_bytes, high_bytes=high_bytes, low_bytes=low_bytes
        )

    def enqueue(self, want: Want) -> None:
        """Let ``want`` wait for room, behind those of its urgency."""
        self.queues[want.urgency][want] = None
        self.waiting += 1

    def dequeue(self, want: Want) -> None:
        """Let ``want`` wait no more."""
        queue = self.queues[want.urgency]
        if want in queue:
            del queue[want]
            self.waiting -= 1

    def first(self) -> Want | None:
        """Return who is next for room."""
        if not self.waiting:
            return None
        for queue in self.queues.values():
            for want in queue:
                return want
        return None
