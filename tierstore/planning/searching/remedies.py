"""What would make a program fit that does not: the least changes, each tried by the simulator.

1. A quota is raised, of one tier.  The least one that fits is found to half a percent, and told rounded up.
2. Activations are swapped that one pattern of operators means, in all layers, or those of the fewest layers.
3. The activations of the fewest layers are made again.

Counts bound the work.  What is told fits: the simulator ran it.  On the way to it two steps are run of each
trial, the one that learns and one that follows; only where what was found so does not fit later, all are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tierstore.errors import CapacityError
from tierstore.planning.homes import PlacedMark, Treatment
from tierstore.planning.machine import Machine, TierFigures, TierMedium
from tierstore.planning.placement import Placement
from tierstore.planning.program import ByteKind, Program
from tierstore.planning.searching.alternatives import Levers, layers_with_activations, ranges
from tierstore.planning.searching.variants import with_marks
from tierstore.planning.simulating import Conditions, simulate
from tierstore.planning.timeline import Timeline
from tierstore.units import GIB, KIB, MIB

MOST = 3
_PATTERNS = 8  # the operators with most bytes
_FINE = 1.005
_FIRST_STEPS = 2
_DOUBLINGS = 24
_ABSURD = 2**62

Fits = Callable[[Machine, Placement], bool]


@dataclass(frozen=True)
class Remedy:
    """A change that makes a program fit.

    Attributes:
        text: what to do, as ``"raise max_device_memory to 5.1GB"``.
        machine: with it.
        placement: with it.
        step_s: seconds that a step then takes.
    """

    text: str
    machine: Machine
    placement: Placement
    step_s: float


def remedies(
    program: Program,
    machine: Machine,
    *,
    given: Placement = Placement(),  # noqa: B008 - it is frozen
    levers: Levers = Levers.ALL,
    conditions: Conditions = Conditions(),  # noqa: B008 - it is frozen
) -> tuple[Remedy, ...]:
    """Return up to three changes that make a program fit; none, if it does, or if nothing was found.

    Args:
        program: that does not fit.
        machine: that it does not fit on.
        given: where everything lives.
        levers: that may be pulled: `Levers.SWAP` and `Levers.RECOMPUTE` are asked for.
        conditions: of the run.
    """
    trial = _Trial(program, conditions)
    if trial.step_s(machine, given) is not None:
        return ()
    found: list[Remedy] = []
    kinds: list[Iterator[Remedy]] = [_raised(trial, machine, given, 0)]
    opens = trial.opens(machine, given)  # else what activations do is no matter: there are none by then
    if opens and Levers.SWAP in levers and len(machine.tiers) > 1:
        kinds.append(_swapped(trial, program, machine, given))
    if opens and Levers.RECOMPUTE in levers:
        kinds.append(_recomputed(trial, program, machine, given))
    kinds += [_raised(trial, machine, given, place) for place in range(1, len(machine.tiers))]
    for remedy in itertools.chain.from_iterable(itertools.islice(kind, 1) for kind in kinds):
        found.append(remedy)
        if len(found) == MOST:
            break
    return tuple(found)


def told(found: Sequence[Remedy]) -> str:
    """Return a sentence of what would help: ``"Raise max_device_memory to 5.1GB, or swap `attention`."``.

    Args:
        found: remedies; none gives an empty text.
    """
    if not found:
        return ""
    text = ", or ".join(remedy.text for remedy in found)
    return f"{text[0].upper()}{text[1:]}."


class _Trial:
    """Says whether a placement fits, by the simulator."""

    def __init__(self, program: Program, conditions: Conditions) -> None:
        self._program = program
        self._conditions = conditions
        self._known: dict[tuple[str, str, int | None], Timeline | None] = {}

    def step_s(self, machine: Machine, placement: Placement) -> float | None:
        """Return how long a step takes; ``None``: it does not fit."""
        timeline = self._timeline(machine, placement, None)
        return None if timeline is None else timeline.step_s

    def fits(self, machine: Machine, placement: Placement) -> bool:
        """Say whether a placement fits."""
        return self._timeline(machine, placement, None) is not None

    def begins(self, machine: Machine, placement: Placement) -> bool:
        """Say whether the first steps fit: the one that learns, and one that follows."""
        return self._timeline(machine, placement, _FIRST_STEPS) is not None

    def opens(self, machine: Machine, placement: Placement) -> bool:
        """Say whether what is there before the first step fits."""
        return self._timeline(machine, placement, 0) is not None

    def _timeline(self, machine: Machine, placement: Placement, steps: int | None) -> Timeline | None:
        name = repr(machine), repr(placement), steps  # mappings in them are not hashed
        if name not in self._known:
            try:
                self._known[name] = simulate(
                    self._program, machine, placement, conditions=self._conditions, steps=steps
                )
            except CapacityError:
                self._known[name] = None
        return self._known[name]

    def remedy(self, text: str, machine: Machine, placement: Placement) -> Remedy | None:
        """Return a remedy, if it is one."""
        step_s = self.step_s(machine, placement)
        return None if step_s is None else Remedy(text, machine, placement, step_s)


# ---------------------------------------------------------------------- quotas


def _raised(trial: _Trial, machine: Machine, given: Placement, place: int) -> Iterator[Remedy]:
    """Yield the least quota of one tier that fits, if any does."""
    tier = machine.tiers[place]
    for fits in (trial.begins, trial.fits):
        high = _least_fitting(fits, machine, given, tier)
        if high is None:
            return
        # A little more is no help where sizes fall together badly: then what was tried is.
        for amount, nbytes in (rounded_up(high), (f"{high}B", high)):
            text = f"raise {_name_of(tier.medium, place)} to {amount}"
            remedy = trial.remedy(text, machine.with_capacities({tier.name: nbytes}), given)
            if remedy is not None:
                yield remedy
                return


def _least_fitting(fits: Fits, machine: Machine, given: Placement, tier: TierFigures) -> int | None:
    """Return about the least quota that fits; ``None``: not even the largest does, or none was found."""

    def has_room(nbytes: int) -> bool:
        return fits(machine.with_capacities({tier.name: nbytes}), given)

    low = max(tier.capacity_bytes, 1)
    doubled = [low << doubling for doubling in range(1, _DOUBLINGS + 1) if low << doubling < _ABSURD]
    if not doubled or not has_room(doubled[-1]):
        return None
    high = next(nbytes for nbytes in doubled if has_room(nbytes))
    low = max(low, high // 2)
    while high / low > _FINE and high - low > 1:
        middle = math.isqrt(low * high)
        low, high = (low, middle) if has_room(middle) else (middle, high)
    return high


def _name_of(medium: TierMedium, place: int) -> str:
    """Return the configuration's key of a tier's quota."""
    if place == 0 and medium is TierMedium.DEVICE:
        return "max_device_memory"
    return "offload_cpu_size" if medium is not TierMedium.STORAGE else "offload_disk_size"


def rounded_up(nbytes: int) -> tuple[str, int]:
    """Return bytes as a configuration says them, with a digit behind the point, and how many they then are.

    Args:
        nbytes: that are needed at least.
    """
    unit, size = next(
        ((unit, size) for unit, size in (("GB", GIB), ("MB", MIB), ("KB", KIB)) if nbytes >= size), ("B", 1)
    )
    if size == 1:
        return f"{nbytes}B", nbytes
    tenths = -(-nbytes * 10 // size)
    if tenths * size // 10 < nbytes:  # a configuration cuts off fractions of a byte
        tenths += 1
    whole, tenth = divmod(tenths, 10)
    return f"{whole}.{tenth}{unit}" if tenth else f"{whole}{unit}", tenths * size // 10


# ---------------------------------------------------------------------- activations


def _swapped(trial: _Trial, program: Program, machine: Machine, given: Placement) -> Iterator[Remedy]:
    """Yield the pattern of fewest bytes that is enough; else the fewest layers."""
    layers = layers_with_activations(program)
    by_operator: dict[str, int] = {}
    for datum in program.data.values():
        if datum.kind is ByteKind.ACTIVATION and datum.operator and datum.layer is not None:
            by_operator[datum.operator] = by_operator.get(datum.operator, 0) + datum.nbytes
    largest = sorted(by_operator, key=lambda name: -by_operator[name])[:_PATTERNS]
    for operator in sorted(largest, key=lambda name: by_operator[name]):
        marks = [PlacedMark(layer, _pattern_of(operator), Treatment.SWAP, 1) for layer in layers]
        remedy = trial.remedy(f"swap `{operator}`", machine, replace(given, marks=[*given.marks, *marks]))
        if remedy is not None:
            yield remedy
    yield from _fewest(
        trial,
        machine,
        layers,
        lambda chosen: with_marks(given, chosen, Treatment.SWAP, 1),
        "swap the activations of",
    )


def _pattern_of(operator: str) -> str:
    r"""Return the pattern that means one path of operators: its levels are separated by ``\.``."""
    return "\\.".join(_escaped(level) for level in operator.split("."))


def _escaped(name: str) -> str:
    return "".join(each if each.isalnum() or each == "_" else f"[{each}]" for each in name)


def _recomputed(trial: _Trial, program: Program, machine: Machine, given: Placement) -> Iterator[Remedy]:
    yield from _fewest(
        trial,
        machine,
        layers_with_activations(program),
        lambda chosen: with_marks(given, chosen, Treatment.RECOMPUTE),
        "recompute",
    )


def _fewest(
    trial: _Trial,
    machine: Machine,
    layers: Sequence[int],
    place: Callable[[Sequence[int]], Placement],
    verb: str,
) -> Iterator[Remedy]:
    """Yield the fewest first layers that are enough: more of them need no more room."""
    if not layers:
        return
    for fits in (trial.begins, trial.fits):
        if not fits(machine, place(layers)):
            return
        low, high = 0, len(layers)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(machine, place(layers[:middle])) else (middle, high)
        remedy = trial.remedy(f"{verb} {ranges(layers[:high])}", machine, place(layers[:high]))
        if remedy is not None:
            yield remedy
            return
