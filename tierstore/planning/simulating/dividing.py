"""The first tier, divided between program and store as the product divides it.

`tierstore.planning.deciding.DeviceShare` decides; here the ledger is given what it says, and the program's
bytes are those that are simulated.  Where nothing is divided, the store has all of it.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Hashable, Mapping
from fractions import Fraction

from tierstore.errors import CapacityError
from tierstore.planning.deciding import (
    ALIGNMENT_BYTES,
    CameBytes,
    DeviceShare,
    PhasePeak,
    StepPhase,
    TrainedBytes,
)
from tierstore.planning.homes import CPU
from tierstore.planning.placement import Placement
from tierstore.planning.program import ByteKind, Program
from tierstore.planning.simulating.holdings import Holdings, told
from tierstore.planning.simulating.homes_of import homes_of
from tierstore.planning.simulating.ledger_store import LedgerStore
from tierstore.units import align_up, format_bytes

ELEMENTS = 1  # of inputs: all steps have the same


class DividedDevice:
    """Gives the first tier's store its quota.

    Args:
        store: whose first tier.
        holdings: what the program has.
        limit_bytes: of program and store together.
        trained: what the store has to hold.
        early: the share above which the store writes back, as of `DeviceShare.said_high`, and how much of
            that share it writes down to.
        standing_bytes: that the program has all the time.
        set_ahead: told how much is the store's own.
        is_enforced: whether more than the limit is refused where no lease asks for it.

    Raises:
        CapacityError: one bundle alone does not fit.
    """

    def __init__(
        self,
        store: LedgerStore,
        holdings: Holdings,
        limit_bytes: int,
        trained: TrainedBytes,
        early: tuple[float | None, float],
        standing_bytes: int,
        set_ahead: Callable[[int], None],
        *,
        is_enforced: bool = True,
    ) -> None:
        self._store = store
        self._holdings = holdings
        self._limit_bytes = limit_bytes
        said_high, low_share = early
        self._low_share = Fraction(low_share)
        self._high: float | None = None  # as the store has it
        self._standing_bytes = standing_bytes
        self._set_ahead = set_ahead
        self._is_enforced = is_enforced
        self.staying_bytes = 0  # of gradients that are the program's for now
        if trained.largest_bytes > limit_bytes:
            raise CapacityError(
                f"one bundle with its gradients and state needs {format_bytes(trained.largest_bytes)} in "
                f"{store.names[0]!r}, which has {format_bytes(limit_bytes)}. Raise it.",
                tier=store.names[0],
                needed_bytes=trained.largest_bytes,
                free_bytes=limit_bytes,
            )
        below = store.ledger.books.tier_states[1:]
        self._share = DeviceShare(
            limit_bytes,
            trained,
            sum(each.tier.capacity_bytes for each in below),
            lambda: self.staying_bytes,
            lambda: CameBytes(trained.gradient_bytes, trained.state_bytes),
            said_high,
            has_streams=store.has_streams,
        )
        self._give(self._share.own_bytes)

    @property
    def own_bytes(self) -> int:
        """What of the first tier is the store's own."""
        return self._share.own_bytes

    @property
    def staying_room_bytes(self) -> int:
        """See `DeviceShare.staying_room_bytes`."""
        return self._share.staying_room_bytes

    @property
    def has_room_for_gradients(self) -> bool:
        """See `DeviceShare.has_room_for_gradients`."""
        return self._share.has_room_for_gradients

    def allows_step_in_backward(self, key: str) -> bool:
        """See `DeviceShare.allows_step_in_backward`."""
        return self._share.allows_step_in_backward(key)

    # --- a step -------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The model begins to run."""
        self._share.begin_use(StepPhase.MODEL)
        self._enter(StepPhase.MODEL)
        if self._share.expect_more(StepPhase.MODEL, ELEMENTS):
            self._enter(StepPhase.MODEL)
        if self._share.begin_learning(StepPhase.MODEL, ELEMENTS):
            self._share.note_standing(self._standing_bytes)
            self._holdings.take_phase_peak()

    def begin_optimizer(self) -> None:
        """An optimizer begins to step."""
        self._enter(StepPhase.OPTIMIZER)
        if self._share.learns_from(StepPhase.MODEL):
            self._share.begin_step(self._holdings.own_bytes)

    def end_step(self) -> None:
        """An optimizer has stepped."""
        self._enter(StepPhase.BETWEEN)
        self._share.end_step()

    def _enter(self, phase: StepPhase) -> None:
        if phase is not self._share.phase:
            peak_bytes = self._holdings.take_phase_peak()
            self._share.enter(phase, PhasePeak(peak_bytes) if self._share.is_measuring else PhasePeak())
        self._set_ahead(self._share.own_bytes)
        if self._share.quota_bytes < self._share.own_bytes or self._share.high != self._high:
            self._give(max(self._share.quota_bytes, self._share.own_bytes))
        self.settle()

    def look(self, more_bytes: int) -> None:
        """A gradient is accumulated, beside what the program has."""
        if self._share.is_learning:
            self._share.note_at_gradients(self._holdings.own_bytes + more_bytes)

    def note_uses(self, keys: Mapping[Hashable, int]) -> None:
        """Bundles of so many bytes are used; leases of others may have ended."""
        if self._share.meet(keys):
            self._set_ahead(self._share.own_bytes)
        self.settle()

    # --- quotas -------------------------------------------------------------------------------

    def prepare(self, needed_bytes: int) -> None:
        """See to it that so many bytes can be leased, where they may be more than the store's own."""
        if self._share.is_to_prepare:
            self.grow(needed_bytes)

    def grow(self, needed_bytes: int) -> bool:
        """Give the store room for so much beside what is leased; return whether it had less.

        Raises:
            CapacityError: the program uses what would be given.
        """
        leased_bytes, live_bytes = self._store.leased_bytes(0), self._holdings.own_bytes
        quota_bytes = self._share.grow(needed_bytes, leased_bytes, live_bytes)
        if quota_bytes is None:
            raise self._too_much(needed_bytes, leased_bytes, live_bytes)
        had_less = quota_bytes > self._share.quota_bytes
        self._give(quota_bytes)
        return had_less

    def settle(self) -> None:
        """Take back what was given to the store for leases that have ended."""
        if self._share.has_more_than_own:
            try:
                self._give(self._share.settled_bytes(self._store.leased_bytes(0)))
            except CapacityError:
                if self._share.is_in_the_way(self._holdings.own_bytes):
                    raise

    def require(self, more_bytes: int) -> None:
        """Refuse what the program is about to have more, if the store's leases leave no room for it.

        Raises:
            CapacityError: there is none.
        """
        held_bytes = self._holdings.here_bytes
        if self._is_enforced and held_bytes + more_bytes > self._limit_bytes:
            leased_bytes, live_bytes = self._store.leased_bytes(0), self._holdings.own_bytes
            raise self._too_much(more_bytes, leased_bytes, live_bytes)

    def _too_much(self, needed_bytes: int, leased_bytes: int, live_bytes: int) -> CapacityError:
        name = self._store.names[0]
        account = self._holdings.account_now(self._store.queue.now_s)
        return CapacityError(
            f"no room for {format_bytes(needed_bytes)} in {name!r} of {format_bytes(self._limit_bytes)}: "
            f"{format_bytes(leased_bytes)} are in use there, and the program has {format_bytes(live_bytes)} "
            f"beside the store. {told(account, name)}",
            tier=name,
            needed_bytes=needed_bytes,
            free_bytes=max(0, self._limit_bytes - leased_bytes - live_bytes),
        )

    def _give(self, quota_bytes: int) -> None:
        share = self._share.high
        if quota_bytes != self._share.quota_bytes or share != self._high:
            high = Fraction(share) * quota_bytes
            self._store.resize(0, quota_bytes, math.floor(high), math.floor(high * self._low_share))
            self._share.quota_bytes, self._high = quota_bytes, share


def trained_bytes(program: Program, placement: Placement) -> TrainedBytes | None:
    """Return what a store has to hold of a program; ``None``: nothing.

    What modules on the host use never comes to the device, and counts for nothing.  What the host only steps
    counts in full: the product wants room for a step on the device, too.
    """
    states = {unit.bundle: unit.state for unit in program.units}
    gradients = {unit.bundle: unit.gradients for unit in program.units}
    all_gradients = collections.Counter[str | None]()  # by bundle; no optimizer need step them
    for each in program.data.values():
        if each.kind is ByteKind.GRADIENT:
            all_gradients[each.owner] += align_up(each.nbytes, ALIGNMENT_BYTES)
    bundles = [each for each in program.data.values() if each.kind in (ByteKind.PARAMETERS, ByteKind.BUFFER)]
    if not bundles:
        return None
    kept, kept_state, made, pinned, largest, alone = 0, 0, 0, 0, 0, [0]
    for each in bundles:
        homes = homes_of(placement, each.key)
        if homes.parameters.device == CPU:
            continue
        state = states.get(each.key)
        state_bytes = align_up(program.data[state].nbytes, ALIGNMENT_BYTES) if state else 0
        own_bytes = align_up(each.nbytes, ALIGNMENT_BYTES)
        gradient_bytes = sum(
            align_up(program.data[key].nbytes, ALIGNMENT_BYTES) for key in gradients.get(each.key, ())
        )
        pinned_bytes = own_bytes if homes.is_pinned else 0
        kept += own_bytes + state_bytes
        kept_state += state_bytes
        made += max(gradient_bytes, all_gradients[each.key])
        pinned += pinned_bytes
        largest = max(largest, own_bytes)
        alone.append(own_bytes + state_bytes + gradient_bytes - pinned_bytes)
    return TrainedBytes(
        all_bytes=kept + made,
        gradient_bytes=made,
        pinned_bytes=pinned,
        largest_bytes=pinned + max(alone),
        largest_bundle_bytes=largest,
        state_bytes=kept_state,
    )
