"""Making room: who gets it next, and who has to go for it.

Targets are computed over what can be evicted, so that nothing spins: a want that cannot get room now
either waits for hardware that is already at it, or is refused at once.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator

from tierstore.core.books import Books
from tierstore.core.entry import Replica, Want
from tierstore.core.messages import Urgency
from tierstore.core.requests import FlushRequest
from tierstore.core.tier_state import TierState
from tierstore.core.tier_state import advice as advice_on
from tierstore.errors import CapacityError
from tierstore.units import format_bytes


class Admission(enum.Enum):
    """The answer to a want that asks for room."""

    NOW = enum.auto()  # it is free
    LATER = enum.auto()  # the hardware is making it


class SpaceAdmission:
    """Decides about room; who goes for it is up to each tier's order.

    Args:
        books: the books.
        copy_below: begins to copy a replica to the tier below, so that it can be dropped; returns
            False if no lower tier can ever take it.
    """

    def __init__(self, books: Books, copy_below: Callable[[Replica, int, Urgency], bool]) -> None:
        self.books = books
        self.copy_below = copy_below

    def ask(self, tier_state: TierState, want: Want) -> Admission:
        """Say whether ``want`` can have room now or later, and set the hardware to it.

        Raises:
            CapacityError: it cannot, and no hardware will change that.
        """
        needed = tier_state.charge(want.entry.nbytes) + want.slack_bytes
        if want.urgency is Urgency.PREFETCH:
            needed += tier_state.expected_bytes  # nobody waits for it, and somebody would for that
        if needed <= tier_state.free_bytes:
            return Admission.NOW
        self._refuse_if_hopeless(tier_state, want, needed)
        missing = needed - tier_state.coming_free_bytes
        if missing > 0:
            self.evict(tier_state, missing, self._victims(tier_state, want, needed), want.urgency)
        if needed <= tier_state.coming_free_bytes:
            return Admission.LATER
        if want.urgency is Urgency.PREFETCH:
            raise CapacityError("a prefetch only takes what is free or what is needed later")
        if tier_state.is_in_motion:
            return Admission.LATER
        raise self._refusal(tier_state, want, needed)

    def evict(
        self, tier_state: TierState, missing_bytes: int, victims: Iterable[Replica], urgency: Urgency
    ) -> None:
        """Evict victims, in their order, until ``missing_bytes`` more are coming free."""
        target = tier_state.coming_free_bytes + missing_bytes
        for victim in victims:
            if tier_state.coming_free_bytes >= target:
                return
            self.evict_one(tier_state, victim, urgency)

    def evict_one(self, tier_state: TierState, victim: Replica, urgency: Urgency) -> None:
        """Evict one replica: drop it if another is READY, else copy it to a lower tier first."""
        if victim not in tier_state.evictable:
            return
        if len(victim.entry.ready()) > 1:
            tier_state.counters.evictions += 1
            self.books.drop(victim)
            return
        self.books.mark_leaving(victim)
        if not self.copy_below(victim, victim.tier, urgency):
            self.mark_stuck(victim)

    def mark_stuck(self, victim: Replica) -> None:
        """A leaving replica finds no room below: it stays, and is no candidate until that may change."""
        tier_state = self.books.tier_states[victim.tier]
        self.books.unmark_leaving(victim)
        tier_state.stuck[victim.entry.uid] = victim
        self.books.restless.add(tier_state.index)

    def reconsider(self, tier_state: TierState) -> None:
        """What was stuck may find room below again."""
        if tier_state.stuck:
            for replica in tier_state.stuck.values():
                tier_state.evictable.add(replica)
            tier_state.stuck.clear()

    def keep_watermark(self, tier_state: TierState) -> None:
        """Above ``high``, evict down to ``low``, over what can be evicted."""
        leaving = tier_state.draining_bytes + tier_state.leaving_bytes
        if tier_state.charged_bytes - leaving <= tier_state.high_bytes or not tier_state.evictable:
            return
        excess = tier_state.charged_bytes - leaving - tier_state.low_bytes
        self.evict(tier_state, excess, tier_state.evictable.early_victims(excess), Urgency.WRITE_BACK)

    def _victims(self, tier_state: TierState, want: Want, needed: int) -> Iterator[Replica]:
        """A prefetch may only push out what the plan needs later than the prefetched."""
        if want.urgency is not Urgency.PREFETCH:
            return tier_state.evictable.victims(needed)
        own = self.books.foresight.distance(want.entry.key)
        return iter(()) if own is None else tier_state.evictable.needed_later(own)

    def _refuse_if_hopeless(self, tier_state: TierState, want: Want, needed: int) -> None:
        """Refuse at once what only a lease's holder, or nobody, could make room for."""
        if needed > tier_state.limit_bytes - tier_state.bound_bytes:
            if want.urgency is Urgency.PREFETCH:
                raise CapacityError("a prefetch is not worth saying who is in its way")
            raise self._refusal(tier_state, want, needed)

    def _refusal(self, tier_state: TierState, want: Want, needed: int) -> CapacityError:
        """Say what was needed, what there is and who holds the rest."""
        leased = [replica.entry for replica in tier_state.leased.values()]
        holders = tuple(dict.fromkeys(holder for entry in leased for holder in entry.holders.values()))
        own = needed - want.slack_bytes
        message = (
            f"{want.entry.key!r} needs {format_bytes(own)} in {tier_state.tier.name!r} "
            f"({format_bytes(tier_state.free_bytes)} free of {format_bytes(tier_state.limit_bytes)})"
        )
        if want.slack_bytes:
            message += f"; the free bytes are not in one piece: {want.refusal}"
        if leased:
            message += f"; {len(leased)} replicas ({format_bytes(tier_state.leased_bytes)}) are leased there"
        full = [tier_state]
        if tier_state.stuck:
            below = self.books.tier_states[tier_state.index + 1 :]
            free = ", ".join(f"{format_bytes(each.free_bytes)} free in {each.tier.name!r}" for each in below)
            there = f" ({free})" if below else ", for there is none"
            message += f"; {len(tier_state.stuck)} replicas could not be moved to a lower tier{there}"
            if (
                tier_state.trouble is not None
            ):  # else one would look for room in quotas where the medium has none
                message += f", because of: {tier_state.trouble}"
            full += below
        retained = [each for each in full if each.retained_bytes]
        for each in retained:
            where = "there" if each is tier_state else f"in {each.tier.name!r}"
            message += f"; {format_bytes(each.retained_bytes)} are kept {where} only for the last flush"
        advice = advice_on(full, "Release a lease, or raise" if leased else "Drop keys, or raise")
        if retained and tier_state.tier.setting is None:  # else its user knows of no flushes
            advice = f"{_about_flushes(want)}. {advice}"
        error = CapacityError(
            f"{message}. {advice}",
            key=want.entry.key,
            tier=tier_state.tier.name,
            needed_bytes=own,
            free_bytes=tier_state.free_bytes,
            holders=holders,
        )
        error.__cause__ = want.refusal or tier_state.trouble
        return error


def _about_flushes(want: Want) -> str:
    if any(isinstance(request, FlushRequest) for request in want.requests.values()):
        return "A flush needs room beside them: flush some keys at a time"
    return "Flush, so that newer bytes take their place"
