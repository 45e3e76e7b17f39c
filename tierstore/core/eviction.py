"""Who goes next: what may be evicted of one tier, kept in an order.

Each policy is a class of `Order`, of which each tier has one.  It is told what may be evicted and what is
used, and it never touches the books.  What an eviction costs does not grow with the number of keys: an order
is kept, not made.

A policy with a state of its own, such as ARC, is one more class here, under its name in `POLICIES`.
"""

from __future__ import annotations

import abc
import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tierstore.core.foresight import Foresight

if TYPE_CHECKING:
    from tierstore.core.entry import Replica

SMALLEST_CLASS_BYTES = 16 * 1024**2
CLASS_COUNT = 8


class Order(abc.ABC):
    """What may be evicted of one tier; iterating goes through it, oldest use first.

    Args:
        foresight: what will be used when.
    """

    def __init__(self, foresight: Foresight) -> None:
        self._foresight = foresight
        self._members: OrderedDict[int, Replica] = OrderedDict()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._members.values())

    def __contains__(self, replica: Replica) -> bool:
        return self._members.get(replica.entry.uid) is replica

    def add(self, replica: Replica) -> None:
        """A replica may be evicted from now on; it was just used."""
        self._members[replica.entry.uid] = replica

    def discard(self, replica: Replica) -> bool:
        """It may be evicted no more; return whether it might have been."""
        return self._members.pop(replica.entry.uid, None) is not None

    def use(self, replica: Replica) -> None:
        """It is used, and may be evicted still."""
        if self.discard(replica):
            self.add(replica)

    def refresh(self, replica: Replica) -> None:  # noqa: B027 - some look at none of this
        """Its key, its size or its next use has changed."""

    def follow(self) -> None:  # noqa: B027 - likewise
        """There is another plan."""

    @abc.abstractmethod
    def victims(self, needed_bytes: int) -> Iterator[Replica]:
        """Yield who is to go, in order, as long as there is anybody.

        Whoever takes one sees to it that it may be evicted no more before it asks for the next.
        """

    def early_victims(self, needed_bytes: int) -> Iterator[Replica]:
        """Yield those of `victims` that go before anybody waits for their room: not what a plan has stay."""
        return self.victims(needed_bytes)

    def needed_later(self, accesses: int) -> Iterator[Replica]:
        """Yield those of `victims` that are known to be used only after so many accesses, or never.

        Nobody, by a policy that does not look at the plan.
        """
        del accesses
        return iter(())


Policy = Callable[[Foresight], Order]


class LeastRecentlyUsed(Order):
    """Evicts what was not used for the longest time."""

    def victims(self, needed_bytes: int) -> Iterator[Replica]:
        """See `Order.victims`."""
        del needed_bytes
        return _first_again_and_again(self._members)


def _first_again_and_again(members: OrderedDict[int, Replica]) -> Iterator[Replica]:
    """Yield whoever is first, until nobody is, or the one that was taken is there still."""
    last = None
    while members:
        first = next(iter(members.values()))
        if first is last:
            return
        yield first
        last = first


def size_class(nbytes: int) -> int:
    """Return the size class: 0 below 16 MiB, doubling, 7 from 1 GiB up.

    Source: the offload memory manager's eight classes (reference, section B.4).
    """
    return min(max(nbytes // SMALLEST_CLASS_BYTES, 0).bit_length(), CLASS_COUNT - 1)


class BySizeClass(Order):
    """Evicts the first in the request's size class that is large enough, then the largest classes.

    Inside a class the order is that of use.  Source: reference, section B.4.
    """

    def __init__(self, foresight: Foresight) -> None:
        super().__init__(foresight)
        self._classes: list[OrderedDict[int, Replica]] = [OrderedDict() for _ in range(CLASS_COUNT)]
        self._sizes: list[dict[int, OrderedDict[int, Replica]]] = [{} for _ in range(CLASS_COUNT)]
        self._known: dict[
            int, tuple[int, int]
        ] = {}  # by uid: its size as it is sorted here, and its last use
        self._uses = 0

    def add(self, replica: Replica) -> None:
        """See `Order.add`."""
        super().add(replica)
        self._uses += 1
        self._enter(replica, self._uses)

    def _enter(self, replica: Replica, use: int) -> None:
        uid, nbytes = replica.entry.uid, replica.charge_bytes
        number = size_class(nbytes)
        self._known[uid] = (nbytes, use)
        self._classes[number][uid] = replica
        self._sizes[number].setdefault(nbytes, OrderedDict())[uid] = replica

    def discard(self, replica: Replica) -> bool:
        """See `Order.discard`."""
        uid = replica.entry.uid
        known = self._known.pop(uid, None)
        if known is not None:
            number = size_class(known[0])
            del self._classes[number][uid]
            same = self._sizes[number][known[0]]
            del same[uid]
            if not same:
                del self._sizes[number][known[0]]
        return super().discard(replica)

    def refresh(self, replica: Replica) -> None:
        """See `Order.refresh`: what has changed its size goes to the end of its class."""
        uid = replica.entry.uid
        if uid in self._known and self._known[uid][0] != replica.charge_bytes:
            self.use(replica)

    def victims(self, needed_bytes: int) -> Iterator[Replica]:
        """See `Order.victims`."""
        large_enough = [
            next(iter(same.values()))
            for nbytes, same in self._sizes[size_class(needed_bytes)].items()
            if nbytes >= needed_bytes
        ]
        if large_enough:
            yield min(large_enough, key=lambda replica: self._known[replica.entry.uid][1])
        for members in reversed(self._classes):
            yield from _first_again_and_again(members)


class ByNextUse(Order):
    """Evicts what the plan needs furthest in the future, and first what it does not know.

    Optimal for equal sizes (Belady, IBM Systems Journal 5(2), 1966).  Without a plan this is least recently
    used.
    """

    def __init__(self, foresight: Foresight) -> None:
        super().__init__(foresight)
        self._unsorted: dict[
            int, Replica
        ] = {}  # when they are used next has not been asked since it may change
        self._unknown: OrderedDict[int, Replica] = OrderedDict()
        self._heap: list[
            tuple[int, int, int]
        ] = []  # the turn of its next use, negative; its last use; its uid
        self._sorted: dict[int, tuple[int, int, int]] = {}  # by uid, what is right of the heap
        self._last_uses: dict[int, int] = {}
        self._uses = 0

    def add(self, replica: Replica) -> None:
        """See `Order.add`."""
        super().add(replica)
        uid = replica.entry.uid
        self._uses += 1
        self._last_uses[uid] = self._uses
        self._unsorted[uid] = replica

    def discard(self, replica: Replica) -> bool:
        """See `Order.discard`."""
        uid = replica.entry.uid
        if not super().discard(replica):
            return False
        del self._last_uses[uid]
        self._forget(uid)
        return True

    def _forget(self, uid: int) -> None:
        self._unsorted.pop(uid, None)
        self._unknown.pop(uid, None)
        self._sorted.pop(uid, None)

    def refresh(self, replica: Replica) -> None:
        """See `Order.refresh`: what no plan knows by its new key goes behind all others of that kind."""
        uid = replica.entry.uid
        if uid in self._members:
            self._forget(uid)
            self._unsorted[uid] = replica

    def follow(self) -> None:
        """See `Order.follow`."""
        self._unknown.clear()
        self._sorted.clear()
        self._heap.clear()
        self._unsorted = dict(self._members)

    def _sort(self) -> None:
        """Take in when those are used next of which it was not asked."""
        for uid, replica in self._unsorted.items():
            distance = self._foresight.distance(replica.key)
            if distance is None:
                self._unknown[uid] = replica
            else:
                found = (-(self._foresight.turn + distance), self._last_uses[uid], uid)
                self._sorted[uid] = found
                heapq.heappush(self._heap, found)
        self._unsorted = {}
        if len(self._heap) > 2 * len(self._sorted) + CLASS_COUNT:
            self._heap = list(self._sorted.values())
            heapq.heapify(self._heap)

    def victims(self, needed_bytes: int) -> Iterator[Replica]:
        """See `Order.victims`."""
        del needed_bytes
        self._sort()
        yield from _first_again_and_again(self._unknown)
        yield from self._from_the_heap(0)

    def early_victims(self, needed_bytes: int) -> Iterator[Replica]:
        """See `Order.early_victims`: residents count as used at once."""
        del needed_bytes
        return self.needed_later(0)

    def needed_later(self, accesses: int) -> Iterator[Replica]:
        """See `Order.needed_later`."""
        self._sort()
        yield from _first_again_and_again(self._unknown)
        yield from self._from_the_heap(self._foresight.turn + accesses + 1)

    def _from_the_heap(self, earliest: int) -> Iterator[Replica]:
        """Yield who is used at a turn or later, furthest first."""
        last = None
        while self._heap:
            found = self._heap[0]
            if self._sorted.get(found[2]) is not found:
                heapq.heappop(self._heap)
                continue
            if found is last or -found[0] < earliest:
                return
            yield self._members[found[2]]
            last = found


POLICIES: dict[str, Policy] = {
    "lru": LeastRecentlyUsed,
    "size-class": BySizeClass,
    "next-use": ByNextUse,
}
