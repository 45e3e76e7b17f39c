"""From a program to requests: what a run asks of its store, in the order in which it does.

Each moment: windows are opened, the host and the device compute, what is made is put or becomes the
program's, windows are closed, what is needed no more is dropped.  Phases, shares, plans and stashing are
decided by `tierstore.planning.deciding`, as in a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierstore.planning.homes import CPU, BundleHomes, Home, Stashing
from tierstore.planning.placement import Placement
from tierstore.planning.program import ByteKind, Datum, Does, Moment, Phase, Program, Unit
from tierstore.planning.simulating.dividing import DividedDevice
from tierstore.planning.simulating.holdings import LIVE, STANDING, WORKSPACE, Holdings
from tierstore.planning.simulating.lanes import Lanes
from tierstore.planning.simulating.ledger_store import LedgerStore
from tierstore.planning.simulating.swapping import Swapping
from tierstore.planning.simulating.windows import KeyWindows

_KEPT = (ByteKind.PARAMETERS, ByteKind.BUFFER, ByteKind.STATE)


class Driver:
    """Drives one run.

    Args:
        program: what it does.
        placement: of it.
        store: where its keys are.
        windows: on them.
        device: divides the first tier; ``None``: nobody does.
        swapping: moves activations.
        lanes: what computes.
        holdings: who holds what.
    """

    def __init__(
        self,
        program: Program,
        placement: Placement,
        store: LedgerStore,
        windows: KeyWindows,
        device: DividedDevice | None,
        swapping: Swapping,
        lanes: Lanes,
        holdings: Holdings,
    ) -> None:
        self._program = program
        self._placement = placement
        self._store = store
        self._windows = windows
        self._device = device
        self._swapping = swapping
        self._lanes = lanes
        self._holdings = holdings
        self._data = program.data
        self._made = {use.key for moment in program.moments for use in moment.uses if use.does is Does.MAKE}
        self._phase = Phase.BETWEEN
        self._units = {unit.bundle: unit for unit in program.units}
        self._optimizers = list(dict.fromkeys(unit.optimizer for unit in program.units))
        self._left = dict.fromkeys(self._optimizers, 0)
        self._closing: dict[int, list[tuple[str, bool]]] = {}  # by moment, what closes after it
        self._turns = [number for number, moment in enumerate(program.moments) if self._unit(moment)]

    # --- the beginning ------------------------------------------------------------------------

    def open(self) -> None:
        """Take everything into the store that is there before the first step."""
        self._holdings.own(STANDING, ByteKind.INPUT, self._program.standing_bytes, self._store.queue.now_s)
        self._store.is_opening = True
        for key, datum in self._data.items():
            if datum.kind in (ByteKind.PARAMETERS, ByteKind.BUFFER):
                home = homes_of(self._placement, key).parameters
                self._store.put(key, datum.nbytes, self._tier(home.tier))
                if homes_of(self._placement, key).is_pinned:
                    self._windows.pin(key, 0)
            elif datum.kind not in _KEPT and key not in self._made:
                self._own(datum, datum.nbytes)
        self._store.settle()
        self._store.is_opening = False

    def _tier(self, name: str | None) -> int | None:
        return None if name is None else self._store.names.index(name)

    # --- a step -------------------------------------------------------------------------------

    def run_step(self) -> None:
        """Run one step."""
        self._closing.clear()
        self._swapping.begin_step()
        self._left = dict.fromkeys(self._optimizers, 0)
        for unit in self._program.units:
            self._left[unit.optimizer] += 1
        for number, moment in enumerate(self._program.moments):
            self._holdings.moment = moment.name
            self._enter(moment.phase)
            self._run(number, moment)
        self._enter(Phase.BETWEEN)
        self._store.settle()

    def _enter(self, phase: Phase) -> None:
        """Another phase begins, or goes on."""
        if phase is self._phase:
            return
        former, self._phase = self._phase, phase
        if phase is Phase.FORWARD:
            self._begin_forward()
        elif former is Phase.FORWARD:
            self._swapping.end_forward()
        if phase is Phase.OPTIMIZER and self._device is not None:
            self._device.begin_optimizer()

    def _begin_forward(self) -> None:
        follower = self._windows.follower
        if self._device is not None:
            if not self._units:
                self._device.end_step()
            self._device.begin_forward()
        self._windows.carry(follower.begin_forward() if self._units else follower.begin_inference())

    def _run(self, number: int, moment: Moment) -> None:
        unit = self._unit(moment)
        if unit is not None:
            self._step(number, moment, unit)
            return
        self._swapping.begin_moment(number)
        opened = self._open(number, moment)
        self._compute(moment, [key for key, _ in opened])
        for use in moment.uses:
            if use.does is Does.MAKE:
                self._make(self._data[use.key])
        for key, is_written in reversed(self._closing.pop(number, [])):
            self._windows.close_all([key], [key] if is_written else [])
        for use in moment.uses:
            if use.does is Does.END:
                self._end(self._data[use.key])
        self._swapping.end_moment(number)

    def _open(self, number: int, moment: Moment) -> list[tuple[str, bool]]:
        """Open the windows of a moment; return the keys, and whether they are written."""
        opened: list[tuple[str, bool]] = []
        together: dict[int, list[str]] = {}
        for use in moment.uses:
            if use.does not in (Does.READ, Does.WRITE) or use.key not in self._store:
                continue
            tier = self._use_tier(self._data[use.key])
            if self._data[use.key].kind in _KEPT:
                together.setdefault(tier, []).append(use.key)
            else:
                together.setdefault(tier, [])
            opened.append((use.key, use.does is Does.WRITE))
            last = min(number + use.moments, len(self._program.moments)) - 1
            self._closing.setdefault(last, []).append(opened[-1])
        for tier, keys in together.items():
            self._windows.open_all(keys, tier)
        for key, _ in opened:
            if self._data[key].kind not in _KEPT:
                self._windows.open_all([key], self._use_tier(self._data[key]))
        return opened

    def _use_tier(self, datum: Datum) -> int:
        is_on_host = homes_of(self._placement, datum.owner or datum.key).parameters.device == CPU
        return self._lanes.host_tier if is_on_host and datum.kind in _KEPT else 0

    def _compute(self, moment: Moment, keys: Sequence[str]) -> None:
        now_s = self._store.queue.now_s
        if self._device is not None:
            self._device.require(moment.workspace_bytes + moment.live_bytes - self._holdings.owned(LIVE))
        self._holdings.own(LIVE, ByteKind.ACTIVATION, moment.live_bytes, now_s)
        self._holdings.own(WORKSPACE, ByteKind.WORKSPACE, moment.workspace_bytes, now_s)
        self._lanes.compute(moment, keys)
        self._holdings.own(WORKSPACE, ByteKind.WORKSPACE, 0, self._store.queue.now_s)

    # --- what comes to be, and ends -----------------------------------------------------------

    def _make(self, datum: Datum) -> None:
        if datum.kind is ByteKind.GRADIENT:
            self._make_gradient(datum)
        elif datum.kind is ByteKind.ACTIVATION and self._swapping.is_marked(datum.key):
            self._swapping.make(datum)
        elif datum.kind in _KEPT:
            if datum.key not in self._store:
                self._store.put(datum.key, datum.nbytes, None)
        else:
            self._own(datum, datum.nbytes)

    def _own(self, datum: Datum, nbytes: int) -> None:
        if nbytes and self._device is not None:
            self._device.require(nbytes - self._holdings.owned(datum.key))
        self._holdings.own(datum.key, datum.kind, nbytes, self._store.queue.now_s)

    def _make_gradient(self, datum: Datum) -> None:
        if datum.key in self._store:  # of an earlier pass: it is added to
            self._windows.open_all([datum.key], 0)
            self._windows.close_all([datum.key], [datum.key])
            return
        if self._device is not None:
            self._device.settle()
            self._device.look(datum.nbytes)
        if self._must_stash(datum):
            self._windows.carry(self._windows.follower.note_gradient(datum.key))
            home = homes_of(self._placement, datum.owner).gradients
            self._store.put(datum.key, datum.nbytes, self._tier(home.tier))
        elif not self._holdings.owned(datum.key):
            self._own(datum, datum.nbytes)
            self._stay(datum.nbytes)
        if self._device is not None:
            self._device.settle()
            self._device.look(0)

    def _must_stash(self, datum: Datum) -> bool:
        if self._holdings.owned(datum.key):
            return False
        home = homes_of(self._placement, datum.owner).gradients
        if home.device == CPU and self._lanes.host_tier != 0:
            return True
        if self._placement.stashing is Stashing.WITHOUT_ROOM:
            return self._device is None or not self._device.has_room_for_gradients
        return self._placement.stashing is Stashing.ALWAYS

    def _stay(self, nbytes: int) -> None:
        if self._device is not None:
            self._device.staying_bytes += nbytes

    def _end(self, datum: Datum) -> None:
        if datum.key in self._store:
            self._store.drop(datum.key)
        elif self._holdings.owned(datum.key):
            if datum.kind is ByteKind.GRADIENT:
                self._stay(-datum.nbytes)
            self._own(datum, 0)

    @property
    def own_bytes(self) -> int:
        """What of the first tier is the store's own."""
        return 0 if self._device is None else self._device.own_bytes

    # --- optimizers ---------------------------------------------------------------------------

    def _unit(self, moment: Moment) -> Unit | None:
        """Return what a moment steps, if it is an optimizer's turn."""
        if moment.phase is not Phase.OPTIMIZER:
            return None
        return next((self._units[use.key] for use in moment.uses if use.key in self._units), None)

    def _step(self, number: int, moment: Moment, unit: Unit) -> None:
        self._advise_next(number)
        tier = self._step_tier(unit)
        gradients = [key for key in unit.gradients if key in self._store]
        state = [] if unit.state is None else [unit.state]
        kept = [key for key in state if key in self._store]
        keys = [unit.bundle, *gradients, *kept]
        self._windows.open_all(keys, tier)
        if tier == 0:
            self._compute(moment, keys)
        else:
            seconds = moment.compute_s if unit.host_step_s is None else unit.host_step_s
            self._lanes.step_on_host(moment.name, seconds, moment.host_s)
        self._windows.close_all(keys, [unit.bundle, *kept])
        for key in state:
            if key not in self._store:
                home = homes_of(self._placement, unit.bundle).state
                self._store.put(key, self._data[key].nbytes, self._tier(home.tier))
        self._end_turn(unit)

    def _end_turn(self, unit: Unit) -> None:
        self._left[unit.optimizer] -= 1
        if not self._left[unit.optimizer]:
            self._windows.follower.note_step(self._optimizers.index(unit.optimizer))
            if self._device is not None and not any(self._left.values()):
                self._device.end_step()

    def _step_tier(self, unit: Unit) -> int:
        is_on_host = homes_of(self._placement, unit.bundle).state.device == CPU
        return self._lanes.host_tier if is_on_host else 0

    def _advise_next(self, number: int) -> None:
        """While no plan does it, prefetch what the next turn needs."""
        is_ahead = self._store.names[0] in self._placement.ahead
        following = next((each for each in self._turns if each > number), None)
        if self._windows.follower.has_plan or not is_ahead or following is None:
            return
        unit = self._unit(self._program.moments[following])
        assert unit is not None
        for key in (unit.bundle, *unit.gradients, *([] if unit.state is None else [unit.state])):
            self._store.prefetch(key, self._step_tier(unit))


_NO_HOMES = BundleHomes()


def homes_of(placement: Placement, key: str | None) -> BundleHomes:
    """Return where a bundle lives; where nothing is said: as fast as there is room."""
    return placement.bundles.get(key or "", _NO_HOMES)


def return_homes(program: Program, placement: Placement) -> Mapping[str, Home]:
    """Return by key the homes that are gone back to after every use."""
    found: dict[str, Home] = {}
    for key, datum in program.data.items():
        homes = homes_of(placement, datum.owner or key)
        home = {
            ByteKind.PARAMETERS: homes.parameters,
            ByteKind.BUFFER: homes.parameters,
            ByteKind.GRADIENT: homes.gradients,
            ByteKind.STATE: homes.state,
        }.get(datum.kind)
        if home is not None and home.returns:
            found[key] = home
    return found
