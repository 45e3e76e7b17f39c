"""Who holds what: charges by tier, the first tier's bytes by kind, and the account of its peak.

The program's own bytes are on the first tier beside the store's: activations that no mark moves, gradients
that are not stashed, what stands there all the time, and operators' workspace.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import TypeVar

from tierstore.core.books import Books
from tierstore.core.messages import ReplicaId
from tierstore.planning.program import ByteKind, Datum
from tierstore.planning.timeline import Account
from tierstore.units import format_bytes

_V = TypeVar("_V")

_LARGEST = 10

STANDING = "what stands there all the time"
LIVE = "what is live beside it"
WORKSPACE = "workspace of operators"


class Holdings:
    """Follows what is held.

    Args:
        tiers: their names, fastest first.
        data: of the program, by key.

    Attributes:
        moment: the name of what is computed.
        charges: by tier, time and bytes at each change.
    """

    def __init__(self, tiers: Sequence[str], data: Mapping[str, Datum]) -> None:
        self._tiers = tiers
        self._data = data
        self.moment = ""
        self.charges: dict[str, list[tuple[float, int]]] = {tier: [] for tier in tiers}
        self._held: list[tuple[float, Mapping[ByteKind, int]]] = []
        self._charged = [0] * len(tiers)
        self._here: dict[int, tuple[str, int]] = {}  # replicas in the first tier: key and charge
        self._own: dict[str, tuple[ByteKind, int]] = {}  # the program's
        self._kinds = dict.fromkeys(ByteKind, 0)
        self._kinds_at_s: float | None = (
            None  # when they changed to what they are, and `_held` says it not yet
        )
        self._newest = 0
        self._phase_peak = 0
        self._step_peaks = [0] * len(tiers)
        self._peak = 0
        self._is_peak_to_tell = False
        self.own_bytes = 0
        self._told = Account(0.0, 0, {})

    # --- changes ------------------------------------------------------------------------------

    def note_store(self, books: Books, now_s: float) -> None:
        """Take in what an event changed in the books."""
        if books.replicas:
            newest = next(reversed(books.replicas))
            if newest > self._newest:
                self._take_in(books, now_s)
                self._newest = newest
        charged = [tier_state.charged_bytes for tier_state in books.tier_states]
        if charged != self._charged:  # few events change that
            self._note_charged(charged, now_s)

    def _note_charged(self, charged: Sequence[int], now_s: float) -> None:
        for index, nbytes in enumerate(charged):
            if nbytes != self._charged[index]:
                self._charged[index] = nbytes
                self._enter(self.charges[self._tiers[index]], now_s, nbytes)
                self._step_peaks[index] = max(self._step_peaks[index], self._held_in(index))
                self._look()

    def _take_in(self, books: Books, now_s: float) -> None:
        self._note_kinds(now_s)
        for number in reversed(books.replicas):
            if number <= self._newest:
                break
            replica = books.replicas[number]
            if replica.tier == 0:
                self._here[number] = (replica.key, replica.charge_bytes)
                self._kinds[self._kind(replica.key)] += replica.charge_bytes

    def note_freed(self, place: ReplicaId, now_s: float) -> None:
        """A replica's bytes are given back: to be told before the books are."""
        if place.tier == 0:
            self._tell_peak(now_s)
            key, nbytes = self._here.pop(place.replica)
            self._note_kinds(now_s)
            self._kinds[self._kind(key)] -= nbytes

    def own(self, name: str, kind: ByteKind, nbytes: int, now_s: float) -> None:
        """Let the program have so many bytes under a name; 0: none any more."""
        _, former = self._own.get(name, (kind, 0))
        if nbytes == former:
            return
        if nbytes < former:
            self._tell_peak(now_s)
        if nbytes:
            self._own[name] = (kind, nbytes)
        else:
            del self._own[name]
        self._note_kinds(now_s)
        self._kinds[kind] += nbytes - former
        self.own_bytes += nbytes - former
        self._phase_peak = max(self._phase_peak, self.own_bytes)
        self._step_peaks[0] = max(self._step_peaks[0], self._held_in(0))
        self._look()

    def owned(self, name: str) -> int:
        """Return how many bytes the program has under a name."""
        return self._own.get(name, (ByteKind.WORKSPACE, 0))[1]

    def _kind(self, key: str) -> ByteKind:
        return self._data[key.removesuffix("~next")].kind

    def _held_in(self, index: int) -> int:
        return self._charged[index] + (self.own_bytes if index == 0 else 0)

    def _note_kinds(self, now_s: float) -> None:
        """Before kinds change: what they were until now is entered, once for each time."""
        if self._kinds_at_s is not None and self._kinds_at_s != now_s:
            self._held.append((self._kinds_at_s, self._kinds_now()))
        self._kinds_at_s = now_s

    @property
    def held(self) -> tuple[tuple[float, Mapping[ByteKind, int]], ...]:
        """Time and bytes by kind of the first tier, at each change."""
        last = [] if self._kinds_at_s is None else [(self._kinds_at_s, self._kinds_now())]
        return (*self._held, *last)

    def _kinds_now(self) -> dict[ByteKind, int]:
        return {kind: nbytes for kind, nbytes in self._kinds.items() if nbytes}

    @staticmethod
    def _enter(entries: list[tuple[float, _V]], now_s: float, value: _V) -> None:
        if entries and entries[-1][0] == now_s:
            entries[-1] = (now_s, value)
        else:
            entries.append((now_s, value))

    # --- peaks --------------------------------------------------------------------------------

    @property
    def here_bytes(self) -> int:
        """Bytes of the first tier, the program's with them."""
        return self._held_in(0)

    def _look(self) -> None:
        if self.here_bytes > self._peak:
            self._peak = self.here_bytes
            self._is_peak_to_tell = True

    def _tell_peak(self, now_s: float) -> None:
        """Before anything goes: if now most is held, remember who holds it."""
        if self._is_peak_to_tell and self.here_bytes == self._peak:
            self._told = self.account_now(now_s)
            self._is_peak_to_tell = False

    def account_now(self, now_s: float) -> Account:
        """Return who holds what of the first tier now."""
        named = [(name, nbytes) for name, (_, nbytes) in self._own.items()]
        held = [*self._here.values(), *named]
        largest = heapq.nlargest(_LARGEST, held, key=lambda each: each[1])
        return Account(now_s, self.here_bytes, self._kinds_now(), tuple(largest), self.moment)

    def account(self, now_s: float) -> Account:
        """Return who held what of the first tier when most was held."""
        self._tell_peak(now_s)
        return self._told

    def take_phase_peak(self) -> int:
        """Return the most that the program had since the last call."""
        peak, self._phase_peak = self._phase_peak, self.own_bytes
        return peak

    def take_step_peaks(self) -> dict[str, int]:
        """Return the most that each tier held since the last call."""
        peaks = dict(zip(self._tiers, self._step_peaks, strict=True))
        self._step_peaks = [self._held_in(index) for index in range(len(self._tiers))]
        return peaks


def told(account: Account, tier: str) -> str:
    """Return an account as the end of an error's text."""
    kinds = ", ".join(
        f"{kind.value} {format_bytes(nbytes)}"
        for kind, nbytes in sorted(account.kinds.items(), key=lambda each: -each[1])
    )
    largest = ", ".join(f"{key} {format_bytes(nbytes)}" for key, nbytes in account.largest)
    return (
        f"In {tier!r} were {format_bytes(account.nbytes)} at {account.moment or 'the beginning'!r}: "
        f"{kinds or 'nothing'}. The largest: {largest or 'none'}."
    )
