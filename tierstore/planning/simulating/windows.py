"""KeyWindows on keys, as the product opens them: leased while they are open, and noted as used.

1. Keys that are opened together are leased first, the largest first, and noted then, in that order; they are
   closed in the reverse of the order that they were given in.
2. A key that has a window has one lease, however many windows it has.
3. After the last window a key goes back where its home says that it returns, or down if it does not stay.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tierstore.core.messages import Access
from tierstore.errors import CapacityError, LeaseError
from tierstore.planning.deciding import Advance, Advice, Follow, Follower, Prefetch
from tierstore.planning.homes import Home
from tierstore.planning.program import ByteKind, Datum
from tierstore.planning.simulating.dividing import DividedDevice
from tierstore.planning.simulating.host_lane import HostLane
from tierstore.planning.simulating.ledger_store import LedgerStore


@dataclass(slots=True)
class _Window:
    lease: int
    count: int = 0
    is_written: bool = False


class KeyWindows:
    """Opens and closes windows.

    Args:
        store: where the keys are.
        follower: told of every use.
        device: gives the first tier its quota; ``None``: nobody does.
        data: by key.
        homes: by key, where it goes back to, if it does.
        host_lane: may have leases that are waited for.
    """

    def __init__(
        self,
        store: LedgerStore,
        follower: Follower,
        device: DividedDevice | None,
        data: Mapping[str, Datum],
        homes: Mapping[str, Home],
        host_lane: HostLane,
    ) -> None:
        self._store = store
        self.follower = follower
        self._device = device
        self._data = data
        self._homes = homes
        self._host_lane = host_lane
        self._open: dict[str, _Window] = {}
        self._passing: dict[str, int] = {}

    def let_pass(self, key: str) -> None:
        """Take in that a key is an activation's: others tell when it has to be on the device."""
        self._passing[key] = self._data[key].nbytes

    # --- windows ------------------------------------------------------------------------------

    def open_all(self, keys: Sequence[str], tier: int) -> None:
        """Open windows on keys in a tier.

        Raises:
            CapacityError: they cannot be there together beside what is in use.
        """
        order = sorted(keys, key=lambda key: -self._data[key].nbytes)
        for key in order:
            window = self._open.get(key)
            if window is None:
                window = self._open[key] = _Window(self.acquire(key, tier))
            window.count += 1
        self.note(*order)

    def acquire(self, key: str, tier: int) -> int:
        """Lease a key, with as much room made for it as can be; return the lease."""
        nbytes = self._data[key].nbytes
        access = Access.READ if key in self._passing else Access.WRITE  # nobody changes what was saved
        if tier == 0 and self._device is not None:
            self._device.prepare(nbytes)
        try:
            return self._store.lease((key,), tier, access)
        except CapacityError:
            if tier != 0 or self._device is None:
                raise
            self._device.grow(nbytes)
        except LeaseError:  # a step beside the device has it
            self._host_lane.finish()
        return self._store.lease((key,), tier, access)

    def close_all(self, keys: Sequence[str], written: Iterable[str] = ()) -> None:
        """Close a window on each key; some of the keys were written."""
        changed = frozenset(written)
        for key in reversed(keys):
            window = self._open[key]
            window.count -= 1
            window.is_written |= key in changed
            if not window.count:
                del self._open[key]
                self._store.release(window.lease, is_written=window.is_written)
                self.go_home(key)

    def pin(self, key: str, tier: int) -> None:
        """Keep a window open for good."""
        self._open[key] = _Window(self.acquire(key, tier), 1)

    def is_open(self, key: str) -> bool:
        """Say whether a key has a window."""
        return key in self._open

    def go_home(self, key: str) -> None:
        """After its use, push a key down if its home says so, or who says what stays."""
        home = self._homes.get(key)
        if home is None and key in self.follower.leaving and key in self._store:
            self._store.evict(key, None)
        if home is not None and home.returns and home.tier is not None and key in self._store:
            self._store.evict(key, self._store.names.index(home.tier))

    # --- what is followed ---------------------------------------------------------------------

    def note(self, *keys: str) -> None:
        """Keys are used now, in this order."""
        if self._device is not None:
            self._device.note_uses(
                {key: datum.nbytes for key in keys if (datum := self._data[key]).kind is ByteKind.PARAMETERS}
            )
        passing = self._passing
        self.carry(
            itertools.chain.from_iterable(
                map(self.follower.note, [key for key in keys if key not in passing])
            )
        )
        for key in keys:
            if key in passing:
                self.carry(self.follower.note_passing(key, passing[key]))

    def carry(self, advices: Iterable[Advice]) -> None:
        """Carry advice out: what is to come to one tier is asked for together."""
        ahead: dict[str, list[str]] = {}
        for each in advices:
            match each:
                case Prefetch():  # the most frequent first
                    ahead.setdefault(each.tier, []).append(each.key)
                case Advance():
                    self._store.advance(each.position)
                case Follow():
                    self._store.follow(each.plan)
        for tier, keys in ahead.items():
            self._store.prefetch(keys, self._store.names.index(tier))
