"""Placements that a search looks at: today's rules, what was given, and what each lever makes of them.

A *lever* is something that a placement may say otherwise without a change of the numbers that are computed;
who may not pull one leaves it out of `Levers`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tierstore.planning import rules
from tierstore.planning.homes import CPU, BundleHomes, Stashing, Treatment
from tierstore.planning.machine import Machine, TierMedium
from tierstore.planning.placement import Placement
from tierstore.planning.program import ByteKind, Phase, Program
from tierstore.planning.searching.greedy import keep_greedily
from tierstore.planning.searching.variants import marked_layers, with_marks, with_steps_on_host


class Levers(enum.Flag):
    """What a search may change."""

    HIGH = enum.auto()  # from where on a tier writes back early
    AHEAD = enum.auto()  # how much comes before its use
    HOST_STEPS = enum.auto()  # whether the host steps; only where its numbers are the device's
    SWAP = enum.auto()  # activations that leave between forward and backward
    RECOMPUTE = enum.auto()  # activations that are made again
    STASHING = enum.auto()  # whether gradients are the store's from the beginning
    RESIDENTS = enum.auto()  # what stays from step to step; only where computing is in host memory
    SHARES = enum.auto()  # less of the first tier than there is
    HOMES = enum.auto()  # state that goes down at once after its step
    ALL = HIGH | AHEAD | HOST_STEPS | SWAP | RECOMPUTE | STASHING | RESIDENTS | SHARES | HOMES


HIGHS = (0.9, 0.75, 0.5)
AHEADS = (0.0625, 0.125, 0.25, 0.5)
GRID = 8
"""Quotas are looked at in steps of an eighth of an octave."""

_FEWER = 2 ** (-1 / GRID)


def todays(program: Program, machine: Machine) -> Placement:
    """Return what `tierstore.planning.rules` decide where nobody wishes anything.

    Args:
        program: whose bundles.
        machine: whose tiers.
    """
    owned: dict[str, int] = {}
    for datum in program.data.values():
        if datum.kind in (ByteKind.PARAMETERS, ByteKind.BUFFER):
            owned[datum.key] = owned.get(datum.key, 0) + datum.nbytes
        elif datum.kind in (ByteKind.GRADIENT, ByteKind.STATE) and datum.owner is not None:
            owned[datum.owner] = owned.get(datum.owner, 0) + datum.nbytes
    bundles = [rules.BundleFacts(key, nbytes) for key, nbytes in owned.items()]
    tiers = {tier.name: tier.capacity_bytes for tier in machine.tiers}
    if machine.tiers[0].medium is TierMedium.HOST and machine.tiers[0].name != rules.HOST:
        # The rules know host memory by its name.
        tiers = {rules.HOST: machine.tiers[0].capacity_bytes, **dict(list(tiers.items())[1:])}
    placement = rules.place(rules.RunFacts(tiers, bundles, rules.Wishes()))
    names = {tier.name for tier in machine.tiers}
    return replace(placement, ahead={name: each for name, each in placement.ahead.items() if name in names})


@dataclass(frozen=True)
class Lever:
    """One thing that may be otherwise.

    Attributes:
        name: for people.
        options: makes of a placement those that differ in this one thing; best guesses first.
    """

    name: str
    options: Sequence[Placement]


def neighbours(program: Program, machine: Machine, placement: Placement, levers: Levers) -> Iterator[Lever]:
    """Yield, lever by lever, the placements that differ in it alone.

    Args:
        program: that is placed.
        machine: that it runs on.
        placement: to start from.
        levers: that may be pulled.
    """
    for lever, options in (
        (Levers.HIGH, _highs),
        (Levers.AHEAD, _aheads),
        (Levers.HOST_STEPS, _host_steps),
        (Levers.SWAP, _swapped),
        (Levers.RECOMPUTE, _recomputed),
        (Levers.STASHING, _stashing),
        (Levers.RESIDENTS, _residents),
        (Levers.SHARES, _shares),
        (Levers.HOMES, _homes),
    ):
        if lever in levers and len(machine.tiers) > 1:
            found = [each for each in options(program, machine, placement) if each != placement]
            if found:
                yield Lever(str(lever.name), found)


def _highs(program: Program, machine: Machine, placement: Placement) -> Iterator[Placement]:
    del program
    first = machine.tiers[0].name
    others = {tier: high for tier, high in placement.high.items() if tier != first}
    yield replace(placement, high=others)
    # Where copies go on beside what computes, all of a device is not what is usual.
    is_usual = not machine.has_streams or machine.tiers[0].medium is not TierMedium.DEVICE
    highs = HIGHS if is_usual else (*HIGHS, 1.0)
    for high in highs:
        yield replace(placement, high={**others, first: high})


def _aheads(program: Program, machine: Machine, placement: Placement) -> Iterator[Placement]:
    del program
    for ahead in AHEADS:
        yield replace(placement, ahead={**placement.ahead, machine.tiers[0].name: ahead})


def _host_steps(program: Program, machine: Machine, placement: Placement) -> Iterator[Placement]:
    """Yield placements with steps on the host: of all bundles, and of the first ones in the units' order."""
    if machine.tiers[0].medium is not TierMedium.DEVICE or machine.tiers[1].medium is not TierMedium.HOST:
        return
    able = [
        unit.bundle
        for unit in program.units
        if unit.host_step_s is not None and not _is_bound(placement, unit.bundle)
    ]
    if len(able) == len(program.units) and able:
        yield with_steps_on_host(placement, able)
    for count in _doubling(len(able)) if _steps_apart(program) else ():
        yield with_steps_on_host(placement, able[:count])
        yield with_steps_on_host(placement, able[-count:])


def _is_bound(placement: Placement, bundle: str) -> bool:
    homes = placement.bundles.get(bundle)
    return homes is not None and (homes.is_pinned or homes.state.device == CPU)


def _steps_apart(program: Program) -> bool:
    """Say whether each unit is stepped in a moment of its own: else some step all at once, on one device."""
    bundles = {unit.bundle for unit in program.units}
    stepped = [
        sum(use.key in bundles for use in moment.uses)
        for moment in program.moments
        if moment.phase is Phase.OPTIMIZER
    ]
    return max(stepped, default=0) <= 1


def layers_with_activations(program: Program) -> list[int]:
    """Return the layers that make activations, in order."""
    layers = {
        datum.layer
        for datum in program.data.values()
        if datum.kind is ByteKind.ACTIVATION and datum.layer is not None
    }
    return sorted(layers)


def _marked(program: Program, placement: Placement, treatment: Treatment, ahead: int) -> Iterator[Placement]:
    """Yield placements in which the first layers are treated so, on top of what is said of others."""
    said = {mark.layer for mark in placement.marks}
    free = [layer for layer in layers_with_activations(program) if layer not in said]
    for count in _doubling(len(free)):
        yield with_marks(placement, free[:count], treatment, ahead)


def _swapped(program: Program, machine: Machine, placement: Placement) -> Iterator[Placement]:
    del machine
    for ahead in (1, 8):
        yield from _marked(program, placement, Treatment.SWAP, ahead)


def _recomputed(program: Program, machine: Machine, placement: Placement) -> Iterator[Placement]:
    del machine
    yield from _marked(program, placement, Treatment.RECOMPUTE, 0)


def _stashing(program: Program, machine: Machine, placement: Placement) -> Iterator[Placement]:
    del program
    if machine.tiers[0].medium is TierMedium.DEVICE:
        yield replace(placement, stashing=Stashing.WITHOUT_ROOM)
    yield replace(placement, stashing=Stashing.ALWAYS)


def _residents(program: Program, machine: Machine, placement: Placement) -> Iterator[Placement]:
    if machine.tiers[0].medium is TierMedium.DEVICE:
        return  # beside a device the rules refuse them
    bundles = [unit.bundle for unit in program.units]
    yield replace(placement, residents=None)
    yield replace(placement, residents=frozenset())
    for count in _doubling(len(bundles)):
        yield replace(placement, residents=frozenset(bundles[:count]))
        yield replace(placement, residents=frozenset(bundles[-count:]))


def _shares(program: Program, machine: Machine, placement: Placement) -> Iterator[Placement]:
    """Yield a placement that uses a little less: some quotas fall together badly with sizes of keys."""
    del program
    first = machine.tiers[0].name
    yield replace(placement, shares={**placement.shares, first: placement.shares.get(first, 1.0) * _FEWER})


def _homes(program: Program, machine: Machine, placement: Placement) -> Iterator[Placement]:
    """Yield placements whose state goes down after each step: what does so by `keep_greedily`, and all of it.

    What leaves anyway has left before its room is asked for.
    """
    leaving = keep_greedily(program, machine).homes()
    free = [
        unit
        for unit in program.units
        if unit.state is not None and _may_go_home(placement.bundles.get(unit.bundle, BundleHomes()))
    ]
    for going in (
        {unit.bundle: leaving[unit.state] for unit in free if unit.state in leaving},
        {unit.bundle: leaving.get(str(unit.state), 1) for unit in free},
    ):
        bundles = dict(placement.bundles)
        for key, place in going.items():
            former = bundles.get(key, BundleHomes())
            home = replace(former.state, tier=machine.tiers[place].name, returns=True)
            bundles[key] = replace(former, state=home)
        yield replace(placement, bundles=bundles)


def _may_go_home(homes: BundleHomes) -> bool:
    return homes.state.tier is None and homes.state.device != CPU and not homes.is_pinned


def _doubling(count: int) -> Iterator[int]:
    """Yield 1, 2, 4, ... and the count itself."""
    number = 1
    while number < count:
        yield number
        number *= 2
    if count:
        yield count


def differences(placement: Placement, base: Placement) -> list[str]:
    """Return what one placement says otherwise than another one, as people say it.

    Args:
        placement: that is told of.
        base: that it is compared with.
    """
    found = [
        f"{tier} filled without writing back early" if high == 1 else f"high {high:.4g} of {tier}"
        for tier, high in placement.high.items()
        if base.high.get(tier) != high
    ]
    found += [f"high of {tier} as configured" for tier in base.high if tier not in placement.high]
    found += [
        f"{share:.4g} of {tier} ahead"
        for tier, share in placement.ahead.items()
        if base.ahead.get(tier) != share
    ]
    stepped = _on_host(placement) - _on_host(base)
    found += [f"{_counted(len(stepped), 'bundle')} stepped on the host"] * bool(stepped)
    returning = _returning(placement) - _returning(base)
    found += [f"state of {_counted(len(returning), 'bundle')} down after each step"] * bool(returning)
    for treatment, verb in ((Treatment.SWAP, "swapped"), (Treatment.RECOMPUTE, "recomputed")):
        layers = sorted(set(marked_layers(placement, treatment)) - set(marked_layers(base, treatment)))
        found += [f"{ranges(layers)} {verb}"] * bool(layers)
    if placement.stashing is not base.stashing:
        found.append(f"gradients stashed: {placement.stashing.value}")
    if placement.residents != base.residents:
        residents = placement.residents
        found.append("residents learned" if residents is None else f"{_counted(len(residents), 'resident')}")
    found += [
        f"{share:.4g} of {tier} used"
        for tier, share in placement.shares.items()
        if base.shares.get(tier, 1.0) != share
    ]
    return found


def _on_host(placement: Placement) -> set[str]:
    return {key for key, homes in placement.bundles.items() if homes.state.device == CPU}


def _returning(placement: Placement) -> set[str]:
    return {key for key, homes in placement.bundles.items() if homes.state.returns}


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def ranges(layers: Sequence[int]) -> str:
    """Return numbers of layers as people say them: ``"layers 0-3, 7"``."""
    parts: list[list[int]] = []
    for layer in sorted(layers):
        if parts and parts[-1][-1] == layer - 1:
            parts[-1] = [parts[-1][0], layer]
        else:
            parts.append([layer])
    told = ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
    return f"layer{'s' * (len(layers) != 1)} {told}"
