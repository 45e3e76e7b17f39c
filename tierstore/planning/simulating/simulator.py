"""What a program on a machine under a placement does when: `simulate`.

The product's own ledger and its own decisions, under a virtual clock: what is predicted and what happens
cannot drift apart.  Deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from tierstore.core.model import Tier
from tierstore.errors import CapacityError
from tierstore.planning.deciding import Follower, PrefetchWindow, ResidentChoice
from tierstore.planning.homes import CPU, Treatment
from tierstore.planning.machine import Machine, TierMedium
from tierstore.planning.placement import Placement
from tierstore.planning.program import ByteKind, Program
from tierstore.planning.residents import Staying, Trained
from tierstore.planning.simulating.conditions import Conditions
from tierstore.planning.simulating.dividing import DividedDevice, trained_bytes
from tierstore.planning.simulating.driver import Driver
from tierstore.planning.simulating.exchanges import NetworkLanes
from tierstore.planning.simulating.holdings import Holdings, told
from tierstore.planning.simulating.homes_of import homes_of, return_homes
from tierstore.planning.simulating.host_lane import HostLane
from tierstore.planning.simulating.lanes import Lanes
from tierstore.planning.simulating.ledger_store import LedgerStore
from tierstore.planning.simulating.links import MachineLinks
from tierstore.planning.simulating.own_bytes import OwnBytes
from tierstore.planning.simulating.parts import RunParts
from tierstore.planning.simulating.queue import EventQueue
from tierstore.planning.simulating.recomputing import with_recomputation
from tierstore.planning.simulating.stepping import OptimizerTurns
from tierstore.planning.simulating.swapping import Swapping
from tierstore.planning.simulating.windows import KeyWindows
from tierstore.planning.timeline import WAITING, StallCause, StepTotals, Timeline

LEAST_STEPS = 3
MOST_STEPS = 8
_PERIOD_WITHOUT_ONE = 4

_FOLLOWED = (ByteKind.PARAMETERS, ByteKind.BUFFER, ByteKind.STATE)


def simulate(
    program: Program,
    machine: Machine,
    placement: Placement,
    *,
    conditions: Conditions = Conditions(),  # noqa: B008 - it is frozen
    steps: int | None = None,
    checked: bool = False,
) -> Timeline:
    """Return what a run would do when, from its beginning on.

    On the first tier are, beside the store's keys, the program's own bytes: `Program.standing_bytes` all
    the time, `Moment.live_bytes` from one moment to the next, `Moment.workspace_bytes` while it computes, and
    data that the store has not.

    Args:
        program: what each step does.
        machine: what it runs on.
        placement: where everything lives; bundles that it does not name live where there is room.
        conditions: what else the run does.
        steps: how many; ``None``: until the end of one is as that of an earlier one was, at least 3 and at
            most 8.
        checked: verify the ledger's rules after every event: slow, for tests.

    Returns:
        the timeline.  The steps that repeat are its last ones.

    Raises:
        CapacityError: it does not fit; the text says who holds what of the first tier then.
        ConfigError: a mark's pattern is wrong.
    """
    return Simulator(program, machine, placement, conditions, is_checked=checked).run(steps)


class Simulator:
    """One run under a virtual clock: see `simulate`."""

    def __init__(
        self,
        program: Program,
        machine: Machine,
        placement: Placement,
        conditions: Conditions,
        *,
        is_checked: bool,
    ) -> None:
        recomputed = [each for each in placement.marks if each.treatment is Treatment.RECOMPUTE]
        self._program = with_recomputation(program, placement.marks) if recomputed else program
        self._machine = machine
        self._placement = placement
        self._conditions = conditions
        self._is_checked = is_checked
        self._assumptions = list(program.assumptions)
        self._queue = EventQueue()
        names = [tier.name for tier in machine.tiers]
        self._holdings = Holdings(names, self._program.data)
        tiers = [self._tier(name) for name in names]
        self._store = LedgerStore(
            tiers,
            conditions.policy,
            self._queue,
            MachineLinks(machine, self._queue),
            self._holdings,
            has_streams=machine.has_streams,
            is_checked=is_checked,
        )
        host = next((index for index, tier in enumerate(tiers) if tier.is_host), 0)
        self._device: DividedDevice | None = None
        self._choice = ResidentChoice(
            placement,
            self._room_bytes,
            self._low_share,
            in_backward=conditions.optimizer_in_backward,
        )
        self._host_lane = HostLane(self._store, host)
        exchanges = conditions.exchanges
        self._lanes = Lanes(
            self._store,
            has_streams=machine.has_streams,
            host_tier=host,
            network=NetworkLanes(exchanges, self._store.moved) if exchanges.begun else None,
        )

    def _tier(self, name: str) -> Tier:
        figures = self._machine.tier(name)
        share = Fraction(self._placement.shares.get(name, 1.0))
        capacity_bytes = math.floor(share * figures.capacity_bytes)
        high, low = self._ratios(name)
        return Tier(
            name,
            capacity_bytes,
            math.floor(Fraction(high) * capacity_bytes),
            math.floor(Fraction(low) * capacity_bytes),
            figures.alignment_bytes,
            is_host=figures.medium is TierMedium.HOST,
            is_storage=figures.medium is TierMedium.STORAGE,
        )

    def _ratios(self, name: str) -> tuple[float, float]:
        """Return the shares of a tier above which, and down to which, it writes back."""
        if name in self._placement.high:
            high = self._placement.high[name]
            return high, high
        high = self._conditions.high.get(name, 1.0)
        return high, min(high, self._conditions.low.get(name, high))

    # --- running ------------------------------------------------------------------------------

    def run(self, steps: int | None) -> Timeline:
        """Run so many steps, or until they repeat."""
        try:
            return self._run(steps)
        except CapacityError as error:
            raise self._explained(error) from error

    def _run(self, steps: int | None) -> Timeline:
        driver = self._driver()
        driver.open()
        self._holdings.take_step_peaks()
        self._store.moved.clear()
        totals: list[StepTotals] = []
        seen: list[object] = []
        period = 0
        while len(totals) < (MOST_STEPS if steps is None else steps):
            totals.append(self._step(driver))
            state = (self._store.digest(), driver.own_bytes, sorted(totals[-1].moved_bytes.items()))
            period = next((back + 1 for back, each in enumerate(reversed(seen)) if each == state), 0)
            seen.append(state)
            if steps is None and period and len(totals) >= LEAST_STEPS:
                break
        if not period:
            period = min(_PERIOD_WITHOUT_ONE, len(totals))
            if steps is None:
                self._assumptions.append(
                    f"no step of {len(totals)} ended as an earlier one did: one in the steady state is the "
                    f"mean of the last {period}"
                )
        return self._timeline(totals, period)

    def _driver(self) -> Driver:
        capacities = {
            state.tier.name: state.tier.capacity_bytes for state in self._store.ledger.books.tier_states
        }
        ahead = [name for name in capacities if name in self._placement.ahead]
        prefetched = [
            PrefetchWindow(
                name,
                self._placement.ahead_bytes(name, capacities[name]),
                is_slowest=name == self._store.names[-1],
            )
            for name in ahead
        ]
        first = self._store.names[0]
        data = self._program.data
        followed = {key: datum.nbytes for key, datum in data.items() if datum.kind in _FOLLOWED}
        follower = Follower(
            prefetched,
            first,
            lambda key: followed[key] if key in followed and key in self._store else 0,
            len({unit.optimizer for unit in self._program.units}),
            self,
            self._store.__contains__,
        )
        trained = trained_bytes(self._program, self._placement)
        device = None
        if self._conditions.is_divided and self._store.is_device_first and trained is not None:
            device = DividedDevice(
                self._store,
                self._holdings,
                capacities[first],
                trained,
                (
                    self._placement.said_high(first, self._conditions.high.get(first, 1.0)),
                    self._low_share(),
                ),
                self._program.standing_bytes if self._machine.has_streams else 0,
                lambda own_bytes: follower.set_limit(first, self._placement.ahead_bytes(first, own_bytes)),
                is_enforced=self._conditions.is_enforced,
            )
        self._device = device
        homes = return_homes(self._program, self._placement)
        windows = KeyWindows(self._store, follower, device, data, homes, self._host_lane)
        swapping = Swapping(self._program, self._placement.marks, self._store, windows)
        own = OwnBytes(self._holdings, device, self._lanes, self._queue)
        parts = RunParts(
            self._program,
            self._placement,
            self._conditions,
            self._store,
            windows,
            device,
            own,
            self._lanes,
            self._host_lane,
            self._holdings,
        )
        return Driver(parts, swapping, OptimizerTurns(parts))

    def _step(self, driver: Driver) -> StepTotals:
        begin_s = self._queue.now_s
        first = len(self._lanes.intervals)
        driver.run_step()
        self._lanes.synchronize()
        moved = {name: nbytes for name, nbytes in self._store.moved.items() if nbytes}
        self._store.moved.clear()
        stalls: dict[StallCause, float] = {}
        for each in self._lanes.intervals[first:]:
            if each.lane == WAITING and each.cause is not None:
                stalls[each.cause] = stalls.get(each.cause, 0.0) + each.end_s - each.begin_s
        peaks = self._holdings.take_step_peaks()
        return StepTotals(begin_s, self._queue.now_s, moved, stalls, peaks)

    @property
    def is_stale(self) -> bool:
        """See `tierstore.planning.deciding.ResidentChooser.is_stale`."""
        return self._choice.is_stale

    def _room_bytes(self) -> int:
        """Return what of the first tier can be kept from step to step: what is above ``high`` goes early."""
        if self._device is not None:
            return self._device.staying_room_bytes
        first = self._store.ledger.books.tier_states[0].tier
        return int(first.capacity_bytes * self._ratios(self._store.names[0])[0])

    def _low_share(self) -> float:
        high, low = self._ratios(self._store.names[0])
        return low / high

    def choose(self, accesses: Sequence[str], gradients: Sequence[str]) -> Staying:
        """See `tierstore.planning.deciding.ResidentChooser.choose`."""
        sizes = {key: datum.nbytes for key, datum in self._program.data.items()}
        return self._choice.choose(self._trained(accesses, gradients), accesses, sizes)

    def _trained(self, accesses: Sequence[str], gradients: Sequence[str]) -> dict[str, Trained]:
        """Return what is trained together, by the bundle's key, in the order of its use."""
        units = {unit.bundle: unit for unit in self._program.units}
        data = self._program.data
        states = {each.owner: key for key, each in data.items() if each.kind is ByteKind.STATE}
        trained = {}
        there = frozenset((*accesses, *gradients))  # one that is zeroed was there before the step
        for key in dict.fromkeys(accesses):
            if key in data and data[key].kind in (ByteKind.PARAMETERS, ByteKind.BUFFER):
                unit = units.get(key)
                own = states.get(key) if unit is None else unit.state
                state = [] if own is None or own not in self._store else [own]
                made = [each for each in (unit.gradients if unit is not None else ()) if each in there]
                trained[key] = Trained(
                    (key, *state),
                    tuple(made),
                    sum(data[each].nbytes for each in (key, *state)),
                    sum(data[each].nbytes for each in made),
                    sum(data[each].nbytes for each in state),
                    is_trained=unit is not None or bool(state),  # of some programs units are not known
                    may_stay=self._is_stepped_first(key),
                )
        return trained

    def _is_stepped_first(self, bundle: str) -> bool:
        """Whether a bundle is stepped in the first tier: else it has new values elsewhere in every step."""
        is_on_cpu = homes_of(self._placement, bundle).state.device == CPU
        return not self._store.is_device_first or not is_on_cpu

    # --- what came of it ----------------------------------------------------------------------

    def _timeline(self, steps: Sequence[StepTotals], period: int) -> Timeline:
        intervals = sorted(
            (*self._lanes.intervals, *self._host_lane.intervals, *self._store.copies),
            key=lambda each: (each.begin_s, each.end_s, each.lane, each.name),
        )
        return Timeline(
            self._program.name,
            "simulated",
            tuple(intervals),
            tuple(steps),
            self._holdings.account(self._queue.now_s),
            {tier: tuple(entries) for tier, entries in self._holdings.charges.items()},
            self._holdings.held,
            period,
            tuple(self._assumptions),
        )

    def _explained(self, error: CapacityError) -> CapacityError:
        """Return an error whose text says who holds what."""
        account = told(self._holdings.account_now(self._queue.now_s), self._store.names[0])
        text = str(error) if account in str(error) else f"{error} {account}"
        return CapacityError(
            text,
            key=error.key,
            tier=error.tier,
            needed_bytes=error.needed_bytes,
            free_bytes=error.free_bytes,
            holders=error.holders,
        )
