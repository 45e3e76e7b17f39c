"""What one step of a run does, as a program: made of steps that were recorded.

1. What is used, made and ended, and what the program has on the device, is the first recorded step's, in
   which that was measured; what computing takes, and what the host takes, is the least of all of them.  An
   accelerator's events time what it computes, if all steps have them; else the host's clock does.
2. What cannot be known is said in ``assumptions``.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from tierstore.planning.program import (
    ByteKind,
    Datum,
    Does,
    KeyUse,
    Moment,
    Phase,
    Program,
    Unit,
)
from tierstore.training.recording.marks import RecordedStep, RecordedSteps, RunFigures
from tierstore.training.recording.watched import (
    StepWatcher,
    StoreRecords,
    WatchedMoment,
    joined,
    usual_key,
)

ACTIVATION = "activation/"
"""What keys of activations begin with."""

_Place = tuple[Phase, str, int]


class ProgramMaker:
    """Makes a program of recorded steps.

    Args:
        recorded: with two steps at least whose ends are known.
        steps: those of them that are whole.
        figures: of the run's keys.
    """

    def __init__(self, recorded: RecordedSteps, steps: Sequence[RecordedStep], figures: RunFigures) -> None:
        self._recording = recorded.recording
        self._figures = figures
        self._records = StoreRecords(recorded.recording)
        is_timed = all(step.is_timed for step in steps)
        is_bundle = figures.kinds.__contains__
        watched = [StepWatcher(step, recorded.recording, is_bundle, is_timed=is_timed) for step in steps]
        self._step, self._watched = steps[0], watched[0]
        self._others = [joined(each.moments) for each in watched[1:]]
        self._moments = _with_end(joined(self._watched.moments))
        self._made = {key: nbytes for each in self._moments for key, nbytes in each.made}
        self._foreign: set[str] = set()
        self._uses: list[list[KeyUse]] = [self._uses_of(number) for number in range(len(self._moments))]
        self._add_ends()

    def program(
        self, name: str, facts: Mapping[str, str], fingerprint: str, assumptions: Sequence[str]
    ) -> Program:
        """Return it.

        Args:
            name: for people.
            facts: what the run was made with.
            fingerprint: of its model.
            assumptions: what else is not known.
        """
        compute_s = self._least_seconds(lambda each: each.compute_s)
        host_s = self._least_seconds(lambda each: each.host_s)
        moments = tuple(
            self._moment(each, tuple(uses), *seconds)
            for each, uses, *seconds in zip(self._moments, self._uses, compute_s, host_s, strict=True)
        )
        return Program(
            name,
            "trace",
            self._data(),
            moments,
            tuple(self._units(compute_s)),
            accumulations=max([1, *self._watched.landed.values()]),
            facts=dict(facts) | ({"inputs": self._step.inputs} if self._step.inputs else {}),
            assumptions=(*self._assumptions(), *assumptions),
            fingerprint=fingerprint,
        )

    # --- keys ---------------------------------------------------------------------------------

    def _data(self) -> dict[str, Datum]:
        figures = self._figures
        used = {use.key for uses in self._uses for use in uses}
        data = {
            key: Datum(key, nbytes, kind, figures.owners.get(key), figures.layers.get(key))
            for key, (kind, nbytes) in figures.kinds.items()
        }
        for key in sorted(used.difference(data), key=list(self._made).index):
            kind = ByteKind.ACTIVATION if key.startswith(ACTIVATION) else ByteKind.GRADIENT
            layer = _layer_of(key) if kind is ByteKind.ACTIVATION else None
            data[key] = Datum(key, self._made[key], kind, figures.owners.get(key), layer)
        return data

    def _uses_of(self, number: int) -> list[KeyUse]:
        moment = self._moments[number]
        found: list[KeyUse] = []
        for key, at_s in moment.uses:
            name = usual_key(key)
            if name not in self._figures.kinds and name not in self._made:
                self._foreign.add(name)
            elif name not in [use.key for use in found]:
                found.append(self._use(number, name, at_s))
        if moment.is_ahead:  # as windows that are opened together are: the largest first
            sizes = {key: nbytes for key, (_, nbytes) in self._figures.kinds.items()} | self._made
            found.sort(key=lambda use: -sizes[use.key])
        return [*found, *(KeyUse(key, Does.MAKE) for key, _ in moment.made)]

    def _use(self, number: int, key: str, at_s: float) -> KeyUse:
        moment = self._moments[number]
        if moment.is_ahead:
            return KeyUse(key, Does.WRITE if key in self._figures.kinds else Does.READ)
        lease = self._records.lease(key, at_s)
        if lease is None:
            return KeyUse(key, Does.READ)
        begins = [each.asked_s for each in self._moments]
        last = bisect.bisect_left(begins, lease.end_s) - 1
        is_open = lease.end_s <= self._step.end_s
        return KeyUse(
            key, Does.WRITE if lease.is_written else Does.READ, max(1, last - number + 1) if is_open else 1
        )

    def _add_ends(self) -> None:
        """Let what was made end when it was dropped: between steps, if an optimizer was at work."""
        begins = [each.asked_s for each in self._moments]
        makers = {key: number for number, each in enumerate(self._moments) for key, _ in each.made}
        last = len(self._moments) - 1
        ends: dict[str, int] = {}
        for renaming in self._recording.renamings:
            if self._step.begin_s <= renaming.at_s <= self._step.end_s:
                for key in renaming.names:
                    number = max(0, bisect.bisect_right(begins, renaming.at_s) - 1)
                    if key in makers and renaming.names[key] is None and number >= makers[key]:
                        ends.pop(key, None)  # the last time counts, and its order
                        ends[key] = last if self._moments[number].step is not None else number
        for key in makers:
            ends.setdefault(key, last)
        for key, number in ends.items():
            self._uses[number].append(KeyUse(key, Does.END))
        for number, uses in enumerate(self._uses):
            self._uses[number] = [
                use for use in uses if use.key not in makers or makers[use.key] <= number <= ends[use.key]
            ]

    # --- times --------------------------------------------------------------------------------

    def _least_seconds(self, seconds_of: Callable[[WatchedMoment], float]) -> list[float]:
        """Return some seconds of each moment: the least of all steps in which it was seen."""
        others = [dict(_places(each)) for each in self._others]
        return [
            min([seconds_of(each), *(seconds_of(other[place]) for other in others if place in other)])
            for place, each in _places(self._moments)
        ]

    def _moment(
        self, watched: WatchedMoment, uses: tuple[KeyUse, ...], compute_s: float, host_s: float
    ) -> Moment:
        live_bytes, peak_bytes = watched.live_bytes or 0, watched.peak_bytes or 0
        layers = [
            layer
            for use in uses
            if (layer := self._figures.layers.get(self._figures.owners.get(use.key, use.key))) is not None
        ]
        return Moment(
            watched.phase,
            watched.name,
            uses,
            compute_s,
            host_s,
            workspace_bytes=max(0, peak_bytes - live_bytes),
            live_bytes=live_bytes,
            layer=layers[0] if layers else None,
        )

    def _units(self, compute_s: Sequence[float]) -> list[Unit]:
        order = {key: number for number, key in enumerate(self._figures.owners)}
        gradients: defaultdict[str, list[str]] = defaultdict(list)
        for key in sorted(self._made, key=lambda key: order.get(key, len(order))):
            gradients[self._figures.owners.get(key, "")].append(key)
        found: dict[tuple[str, str], tuple[WatchedMoment, float]] = {}
        for each, seconds in zip(self._moments, compute_s, strict=True):
            if each.step is not None:
                unit = (each.step.optimizer, each.step.bundle)
                found[unit] = each, seconds + (found[unit][1] if unit in found else 0.0)
        return [self._unit(each, seconds, gradients) for each, seconds in found.values()]

    def _unit(self, watched: WatchedMoment, seconds: float, gradients: Mapping[str, Sequence[str]]) -> Unit:
        step = watched.step
        assert step is not None
        known = self._figures.kinds
        own = gradients.get(step.bundle, ())
        opened = [key for key, _ in step.gradients if key in own]
        return Unit(
            step.optimizer,
            step.bundle,
            step.state if step.state in known else None,
            tuple(dict.fromkeys((*opened, *own))),
            seconds,
            seconds if step.is_on_host else None,
            step.may_be_ahead,
        )

    # --- what is not known --------------------------------------------------------------------

    def _assumptions(self) -> list[str]:
        said: list[str] = []
        if all(each.live_bytes is None for each in self._moments):
            said.append(
                "what the program has on the device beside the store was not measured: it counts as 0"
            )
        elif all(each.peak_bytes is None for each in self._moments):
            said.append("what operators take while they run was not measured: it counts as 0")
        if self._watched.evaluations:
            said.append(f"{self._watched.evaluations} evaluations within the step are left out")
        if any(key.startswith(ACTIVATION) for key in self._made):
            said.append("an activation that is swapped counts as the program's own, too, until it has left")
        if self._foreign:
            keys = ", ".join(sorted(self._foreign)[:3])
            said.append(f"{len(self._foreign)} keys that are not the run's are left out: {keys}")
        own = _asked(self._moments)
        if any(_asked(each) != own for each in self._others):
            said.append(f"recorded steps differ: the program is that of step {self._step.number}")
        if not self._recording.is_whole:
            said.append("there was no memory for all that was recorded")
        return said


def _with_end(moments: list[WatchedMoment]) -> list[WatchedMoment]:
    """Return moments with one between steps at their end."""
    last = moments[-1]
    if last.phase is Phase.BETWEEN:
        return moments
    return [*moments, WatchedMoment(Phase.BETWEEN, last.end_s, last.end_s, last.end_s)]


def _places(moments: Sequence[WatchedMoment]) -> list[tuple[_Place, WatchedMoment]]:
    """Return what tells moments of one step from each other: phase, name, and which of these it is."""
    counts: defaultdict[tuple[Phase, str], int] = defaultdict(int)
    found: list[tuple[_Place, WatchedMoment]] = []
    for each in moments:
        place = (each.phase, each.name)
        found.append(((*place, counts[place]), each))
        counts[place] += 1
    return found


def _asked(moments: Sequence[WatchedMoment]) -> list[tuple[Phase, str]]:
    """Return the moments in which something of the store's is used, but between steps."""
    return [(each.phase, each.name) for each in moments if each.uses and each.phase is not Phase.BETWEEN]


def _layer_of(key: str) -> int | None:
    """Return the layer that an activation's key names."""
    layer = key.removeprefix(ACTIVATION).partition("/")[0]
    return int(layer) if layer.isascii() and layer.isdecimal() else None
