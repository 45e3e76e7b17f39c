"""A quota that changes while the store runs.

A smaller quota binds new wants at once; it becomes the tier's capacity when what is charged fits in
it, so that no moment shows more charged bytes than capacity.  Resizes of one tier go one by one.
"""

from __future__ import annotations

from collections import deque

from tierstore.core.admission import SpaceAdmission
from tierstore.core.books import Books
from tierstore.core.messages import ResizeRequested, SetCapacity, Settle, Urgency
from tierstore.core.tier_state import TierState
from tierstore.errors import CapacityError
from tierstore.units import format_bytes


class QuotaResizes:
    """The resizes that wait for bytes to leave, by tier."""

    def __init__(self, books: Books, admission: SpaceAdmission) -> None:
        self.books = books
        self.admission = admission
        self.waiting: dict[int, deque[ResizeRequested]] = {}

    def begin(self, event: ResizeRequested) -> None:
        """Take a new quota, now or when what is charged fits in it.

        Raises:
            CapacityError: leases hold more than the new quota; nothing was changed.
        """
        tier_state = self.books.tier_states[event.tier]
        if tier_state.bound_bytes > event.capacity_bytes:
            raise self._refusal(tier_state, event.capacity_bytes)
        queue = self.waiting.setdefault(event.tier, deque())
        queue.append(event)
        if len(queue) == 1:
            self._start(tier_state, event)

    def _start(self, tier_state: TierState, event: ResizeRequested) -> None:
        tier_state.is_resizing = True
        tier_state.limit_bytes = min(event.capacity_bytes, tier_state.tier.capacity_bytes)
        self.admission.reconsider(tier_state)
        self.books.restless.add(tier_state.index)

    def serve(self, tier_state: TierState) -> None:
        """Finish the first resize of a tier if it can be, or let more go, or fail it."""
        queue = self.waiting.get(tier_state.index)
        if not queue:
            return
        event = queue[0]
        if tier_state.charged_bytes <= event.capacity_bytes:
            is_smaller = event.capacity_bytes < tier_state.tier.capacity_bytes
            tier_state.set_quota(event.capacity_bytes, event.high_bytes, event.low_bytes)
            if is_smaller:
                self.books.out.append(SetCapacity(tier_state.index, event.capacity_bytes))
            self._end(tier_state, queue, None)
            return
        missing = -tier_state.coming_free_bytes
        if missing > 0:
            self.admission.evict(tier_state, missing, tier_state.evictable.victims(missing), Urgency.DEMAND)
        if tier_state.coming_free_bytes < 0 and not tier_state.is_in_motion:
            tier_state.limit_bytes = tier_state.tier.capacity_bytes
            self._end(tier_state, queue, self._refusal(tier_state, event.capacity_bytes))

    def _end(self, tier_state: TierState, queue: deque[ResizeRequested], error: BaseException | None) -> None:
        self.books.out.append(Settle(queue.popleft().request, error))
        tier_state.is_resizing = False
        self.books.restless.add(tier_state.index)
        if queue:
            self._start(tier_state, queue[0])

    def cancel(self, error: BaseException) -> None:
        """Fail every resize that waits."""
        for queue in self.waiting.values():
            while queue:
                self.books.out.append(Settle(queue.popleft().request, error))

    def _refusal(self, tier_state: TierState, capacity_bytes: int) -> CapacityError:
        held = tier_state.charged_bytes - sum(replica.charge_bytes for replica in tier_state.evictable)
        holders = {
            holder for replica in tier_state.leased.values() for holder in replica.entry.holders.values()
        }
        reason = f"leased by {', '.join(sorted(holders))}" if holders else "no lower tier takes them"
        if tier_state.retained_bytes:
            reason += (
                f"; {format_bytes(tier_state.retained_bytes)} are kept only for the last flush: flush again"
            )
        error = CapacityError(
            f"{tier_state.tier.name!r} cannot shrink to {format_bytes(capacity_bytes)}: "
            f"{format_bytes(held)} of {format_bytes(tier_state.charged_bytes)} cannot leave ({reason}). "
            f"{'' if tier_state.tier.setting else 'Release leases, drop keys or choose a larger capacity.'}",
            tier=tier_state.tier.name,
            needed_bytes=tier_state.charged_bytes - capacity_bytes,
            free_bytes=tier_state.free_bytes,
            holders=sorted(holders),
        )
        error.__cause__ = tier_state.trouble
        return error
