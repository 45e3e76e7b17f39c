"""From a program to requests: what a run asks of its store, in the order in which it does.

Each moment: windows are opened, the host and the device compute, what is made is put or becomes the
program's, windows are closed, what is needed no more is dropped.  Phases, shares, plans and stashing are
decided by `tierstore.planning.deciding`, as in a run.
"""

from __future__ import annotations

from tierstore.planning.deciding import is_stashed, must_stash, room_bytes
from tierstore.planning.homes import CPU
from tierstore.planning.program import ByteKind, Datum, Does, Moment, Phase
from tierstore.planning.simulating.homes_of import homes_of
from tierstore.planning.simulating.parts import RunParts
from tierstore.planning.simulating.stepping import OptimizerTurns
from tierstore.planning.simulating.swapping import Swapping

_KEPT = (ByteKind.PARAMETERS, ByteKind.BUFFER, ByteKind.STATE)


class Driver:
    """Drives one run.

    Args:
        parts: of the run.
        swapping: moves activations.
        turns: of the optimizers.
    """

    def __init__(self, parts: RunParts, swapping: Swapping, turns: OptimizerTurns) -> None:
        self._program = parts.program
        self._placement = parts.placement
        self._steps_in_backward = parts.conditions.optimizer_in_backward
        self._store = parts.store
        self._windows = parts.windows
        self._device = parts.device
        self._own = parts.own
        self._lanes = parts.lanes
        self._holdings = parts.holdings
        self._swapping = swapping
        self._turns = turns
        self._data = parts.program.data
        self._made = {
            use.key for moment in parts.program.moments for use in moment.uses if use.does is Does.MAKE
        }
        self._made_in_turns = {unit.state for unit in parts.program.units}
        self._phase = Phase.BETWEEN
        self._closing: dict[int, list[tuple[str, bool]]] = {}  # by moment, what closes after it

    # --- the beginning ------------------------------------------------------------------------

    def open(self) -> None:
        """Take everything into the store that is there before the first step."""
        self._own.stand(self._program.standing_bytes)
        self._store.is_opening = True
        for key, datum in self._data.items():
            if datum.kind in (ByteKind.PARAMETERS, ByteKind.BUFFER):
                home = homes_of(self._placement, key).parameters
                self._store.put(key, datum.nbytes, self._tier(home.tier))
                if homes_of(self._placement, key).is_pinned:
                    self._windows.pin(key, 0)
            elif datum.kind is ByteKind.STATE and key not in self._made_in_turns:  # moments use it themselves
                home = homes_of(self._placement, datum.owner or key).state
                self._store.put(key, datum.nbytes, self._tier(home.tier))
            elif datum.kind not in _KEPT and key not in self._made:
                self._own.take(datum)
        self._store.settle()
        self._store.is_opening = False

    def _tier(self, name: str | None) -> int | None:
        return None if name is None else self._store.names.index(name)

    # --- a step -------------------------------------------------------------------------------

    def run_step(self) -> None:
        """Run one step."""
        self._closing.clear()
        self._swapping.begin_step()
        self._turns.begin_step()
        for number, moment in enumerate(self._program.moments):
            self._holdings.moment = moment.name
            if moment.phase is not self._phase:
                self._own.begin_phase(moment)
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
        if phase is Phase.OPTIMIZER and self._device is not None and not self._steps_in_backward:
            self._device.begin_optimizer()

    def _begin_forward(self) -> None:
        follower = self._windows.follower
        if self._device is not None:
            if not self._program.units or self._steps_in_backward:
                self._device.end_step()
            self._device.begin_forward()
        self._windows.carry(follower.begin_forward() if self._program.units else follower.begin_inference())

    def _run(self, number: int, moment: Moment) -> None:
        unit = self._turns.unit_of(moment)
        if unit is not None:
            self._turns.step(moment, unit)
            return
        self._swapping.begin_moment(number)
        opened = self._open(number, moment)
        self._own.compute(moment, [key for key, _ in opened])
        made = [self._data[use.key] for use in moment.uses if use.does is Does.MAKE]
        for datum in made:
            if datum.kind is not ByteKind.GRADIENT:
                self._make(datum)
        for key, is_written in reversed(self._closing.pop(number, [])):
            self._windows.close_all([key], [key] if is_written else [])
        for datum in made:  # autograd accumulates when the node has let go of what it used
            if datum.kind is ByteKind.GRADIENT:
                self._make_gradient(datum)
        self._finish(moment)
        self._swapping.end_moment(number)

    def _finish(self, moment: Moment) -> None:
        """A moment's windows are closed: what was accumulated may be stepped, what ends goes."""
        for use in moment.uses if moment.phase is Phase.BACKWARD else ():
            if use.does in (Does.MAKE, Does.WRITE) and self._data[use.key].kind is ByteKind.GRADIENT:
                self._land(self._data[use.key])
        for use in moment.uses:
            if use.does is Does.END:
                self._end(self._data[use.key])

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

    # --- what comes to be, and ends -----------------------------------------------------------

    def _make(self, datum: Datum) -> None:
        if datum.kind is ByteKind.ACTIVATION and self._swapping.is_marked(datum.key):
            self._swapping.make(datum)
        elif datum.kind in _KEPT:
            if datum.key not in self._store:
                self._store.put(datum.key, datum.nbytes, None)
        else:
            self._own.take(datum)

    def _make_gradient(self, datum: Datum) -> None:
        if datum.key in self._store:  # of an earlier pass: it is added to
            self._windows.open_all([datum.key], 0)
            self._windows.close_all([datum.key], [datum.key])
            return
        if self._device is not None:
            self._device.settle()
            self._device.look(datum.nbytes)
        if self._is_stashed(datum):
            home = homes_of(self._placement, datum.owner).gradients
            needed_bytes = room_bytes(home, self._store.names[0], datum.nbytes)
            self._windows.carry(self._windows.follower.note_gradient(datum.key, needed_bytes))
            self._store.put(datum.key, datum.nbytes, self._tier(home.tier))
            if self._device is not None:
                self._device.require(0)  # it may have come beside what the program has
        elif not self._own.has(datum.key):
            self._own.take(datum)
        if self._device is not None:
            self._device.settle()
            self._device.look(0)

    def _is_stashed(self, datum: Datum) -> bool:
        """Say whether a gradient goes to the store."""
        if self._own.has(datum.key) or self._turns.steps_at_once(datum.key):
            return False
        has_room = self._device is not None and self._device.has_room_for_gradients
        must = must_stash(self._placement.stashing, has_room=has_room)
        home = homes_of(self._placement, datum.owner).gradients
        return must or (self._store.is_device_first and is_stashed(home, self._store.names[0], must=False))

    def _land(self, datum: Datum) -> None:
        """A gradient was accumulated: its bundle's step may be made."""
        self._turns.land(datum.key)
        for key in self._turns.used_up_by(datum.key):
            self._own.give_up(self._data[key])

    def _end(self, datum: Datum) -> None:
        if datum.key in self._store:
            self._store.drop(datum.key)
        else:
            self._own.give_up(datum)

    @property
    def own_bytes(self) -> int:
        """What of the first tier is the store's own."""
        return 0 if self._device is None else self._device.own_bytes
