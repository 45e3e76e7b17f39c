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

    def __init__(self, books: Books, rooms: SpaceAdmission) -> None:
        self.books = books
        self.rooms = rooms
        self.waiting: dict[int, deque[ResizeRequested]] = {}

    def begin(self, event: ResizeRequested) -> None:
        """Take a new quota, now or when what is charged fits in it.

        Raises:
            CapacityError: leases hold more than the new quota; nothing was changed.
        """
        shelf = self.books.shelves[event.tier]
        if shelf.bound_bytes > event.capacity_bytes:
            raise self._refusal(shelf, event.capacity_bytes)
        queue = self.waiting.setdefault(event.tier, deque())
        queue.append(event)
        if len(queue) == 1:
            self._start(shelf, event)

    def _start(self, shelf: TierState, event: ResizeRequested) -> None:
        shelf.is_resizing = True
        shelf.limit_bytes = min(event.capacity_bytes, shelf.tier.capacity_bytes)
        self.rooms.reconsider(shelf)
        self.books.restless.add(shelf.index)

    def serve(self, shelf: TierState) -> None:
        """Finish the first resize of a tier if it can be, or let more go, or fail it."""
        queue = self.waiting.get(shelf.index)
        if not queue:
            return
        event = queue[0]
        if shelf.charged_bytes <= event.capacity_bytes:
            is_smaller = event.capacity_bytes < shelf.tier.capacity_bytes
            shelf.set_quota(event.capacity_bytes, event.high_bytes, event.low_bytes)
            if is_smaller:
                self.books.out.append(SetCapacity(shelf.index, event.capacity_bytes))
            self._end(shelf, queue, None)
            return
        missing = -shelf.coming_free_bytes
        if missing > 0:
            self.rooms.evict(shelf, missing, self.rooms.evictable(shelf), Urgency.DEMAND, missing)
        if shelf.coming_free_bytes < 0 and not shelf.is_in_motion:
            shelf.limit_bytes = shelf.tier.capacity_bytes
            self._end(shelf, queue, self._refusal(shelf, event.capacity_bytes))

    def _end(self, shelf: TierState, queue: deque[ResizeRequested], error: BaseException | None) -> None:
        self.books.out.append(Settle(queue.popleft().request, error))
        shelf.is_resizing = False
        self.books.restless.add(shelf.index)
        if queue:
            self._start(shelf, queue[0])

    def cancel(self, error: BaseException) -> None:
        """Fail every resize that waits."""
        for queue in self.waiting.values():
            while queue:
                self.books.out.append(Settle(queue.popleft().request, error))

    def _refusal(self, shelf: TierState, capacity_bytes: int) -> CapacityError:
        held = shelf.charged_bytes - sum(replica.charge_bytes for replica in shelf.evictable.values())
        holders = {
            holder
            for entry in self.books.entries.values()
            if (replica := entry.replicas.get(shelf.index)) is not None and replica.leases
            for holder in entry.holders.values()
        }
        reason = f"leased by {', '.join(sorted(holders))}" if holders else "no lower tier takes them"
        if shelf.retained_bytes:
            reason += f"; {format_bytes(shelf.retained_bytes)} are kept only for the last flush: flush again"
        error = CapacityError(
            f"{shelf.tier.name!r} cannot shrink to {format_bytes(capacity_bytes)}: "
            f"{format_bytes(held)} of {format_bytes(shelf.charged_bytes)} cannot leave ({reason}). "
            f"{'' if shelf.tier.setting else 'Release leases, drop keys or choose a larger capacity.'}",
            tier=shelf.tier.name,
            needed_bytes=shelf.charged_bytes - capacity_bytes,
            free_bytes=shelf.free_bytes,
            holders=sorted(holders),
        )
        error.__cause__ = shelf.trouble
        return error
