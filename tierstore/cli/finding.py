"""A placement found for one program on one machine, or simulated as it was given: what the verb then tells.

1. What is given decides how much is looked for: a placement, or ``auto_offload`` off, is simulated as it is;
   else all levers are free that leave the run as it was configured.
2. What is given is laid over what the rules decide, as in a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction

from tierstore.cli.no_collection import no_collection
from tierstore.cli.plan_result import PlanResult
from tierstore.cli.seconds import format_seconds
from tierstore.config import OffloadConfig
from tierstore.errors import CapacityError, UsageError
from tierstore.planning import ByteKind, Machine, PlacedMark, Placement, Program, Timeline
from tierstore.planning.coarsening import coarsened
from tierstore.planning.ranks import RankGroup, one_rank
from tierstore.planning.roofline import roofline
from tierstore.planning.rules import BundleFacts, RunFacts, Wishes, obey
from tierstore.planning.searching import Levers, lower_bound, remedies, search
from tierstore.planning.simulating import Conditions, simulate
from tierstore.solving import find_solver
from tierstore.training.activations import Sections
from tierstore.training.placing import marks_in
from tierstore.training.run_machine import conditions_of
from tierstore.units import format_bytes


@dataclass(frozen=True)
class RunWish:
    """What is wanted of a run, beside its program and machine.

    Attributes:
        settings: its configuration.
        sections: what its document says happens to activations.
        placement: plain values of one that is to be simulated; ``None``: the configuration's.
        section_values: the sections as they were written.
        asks_remedies: whether what would make it fit is looked for.
        ranks: that train together, of which one is planned; ``None``: one process alone.
    """

    settings: OffloadConfig
    sections: Sections = field(default_factory=Sections)
    placement: Mapping[str, object] | None = None
    section_values: Mapping[str, object] = field(default_factory=dict)
    asks_remedies: bool = True
    ranks: RankGroup | None = None

    @property
    def is_free(self) -> bool:
        """Whether a placement is to be looked for."""
        return self.placement is None and self.settings.auto_offload

    def marks(self, program: Program) -> tuple[PlacedMark, ...]:
        """Return what the document says happens to activations of a program.

        Raises:
            ConfigError: it does not fit the number of layers.
            UsageError: no layers were found.
        """
        if self.sections.recompute is None and self.sections.swap is None:
            return ()
        layers = {datum.layer for datum in program.data.values() if datum.layer is not None}
        if not layers:
            raise UsageError(
                f"the configuration swaps or recomputes layers, and {program.name} has none: it has not one "
                "list of modules of one class"
            )
        return marks_in(self.sections, max(layers) + 1)


def find(
    program: Program,
    machine: Machine,
    wish: RunWish,
    remarks: tuple[str, ...] = (),
    memory_bytes: int | None = None,
) -> PlanResult:
    """Return what a run would do, or why it cannot.

    Args:
        program: what each step does.
        machine: with the quotas of the run; those below the device are shared by the ranks of a host.
        wish: what is wanted.
        remarks: that are told with what the simulation assumes.
        memory_bytes: all of the first tier, where its quota is the store's alone; ``None``: the quota is all
            there is, and the simulation keeps it.

    Raises:
        ConfigError: a placement that is given does not fit the program or the machine.
    """
    asked, program = program, roofline(program, machine)
    conditions = conditions_of(wish.settings, machine)
    if wish.ranks is not None:
        # Nothing is written of it: joints of a layer's moments, which ranks gather together, will do.
        rank = one_rank(coarsened(program), machine, wish.ranks, conditions=conditions)
        program, machine, conditions = rank.program, rank.machine, rank.conditions
    given = given_placement(program, machine, wish)
    assumptions = tuple(dict.fromkeys((*remarks, *program.assumptions)))
    result = PlanResult(
        program, machine, assumptions=assumptions, asked=asked if wish.ranks is None else None
    )
    with no_collection():
        found = _found(result, given, wish, conditions)
    return found if memory_bytes is None or wish.ranks is not None else _within(memory_bytes, found)


def _within(memory_bytes: int, found: PlanResult) -> PlanResult:
    """Return what was found if all of it fits into memory, where a quota limits no more than the store."""
    if found.timeline is None:
        return found
    first = found.machine.tiers[0]
    peak_bytes = found.timeline.peak_bytes.get(first.name, 0)
    held = f"{format_bytes(peak_bytes)} of {first.name} are held at most"
    beside = f"the program's own bytes are beside the quota of {format_bytes(first.capacity_bytes)}"
    if peak_bytes > memory_bytes:
        why = f"{held}, and there are {format_bytes(memory_bytes)}: without a device {beside}"
        return replace(found, timeline=None, placement=None, why=why)
    if peak_bytes <= first.capacity_bytes:
        return found
    return replace(found, assumptions=(*found.assumptions, f"{held}: without a device {beside}"))


def _found(result: PlanResult, given: Placement, wish: RunWish, conditions: Conditions) -> PlanResult:
    program, machine = result.program, result.machine
    levers, solve = levers_of(wish.settings), find_solver()
    try:
        if not wish.is_free:
            timeline = simulate(program, machine, given, conditions=conditions)
            bound_s = lower_bound(
                program, machine, given=given, levers=levers, conditions=conditions, solve=solve
            )
            return _with(replace(result, placement=given, bound_s=bound_s), timeline)
        found = search(program, machine, given=given, levers=levers, conditions=conditions, solve=solve)
    except CapacityError as error:
        if not wish.asks_remedies:
            return replace(result, why=str(error))
        helps = remedies(program, machine, given=given, levers=levers, conditions=conditions)
        texts = tuple(f"{each.text}: {format_seconds(each.step_s)} a step" for each in helps)
        return replace(result, why=str(error), remedies=texts)
    told = (*result.assumptions, *_of_steps(found.placement, given, machine))
    rejected = tuple((each.why, each.step_s) for each in found.rejected)
    chosen = replace(result, placement=found.placement, bound_s=found.bound_s, why=found.why)
    return _with(replace(chosen, rejected=rejected, assumptions=told), found.timeline)


def no_slower(found: PlanResult, former: PlanResult | None, wish: RunWish, tier: str) -> PlanResult:
    """Return what was found, or what was found with less of a tier, where that is faster: less can be used.

    Args:
        found: on a machine.
        former: of the same program, on one that differs in having less of the tier; ``None``: nothing.
        wish: of both.
        tier: of which there is more.
    """
    if former is None or former.placement is None or former.timeline is None or not wish.is_free:
        return found
    is_faster = found.timeline is not None and found.timeline.step_s <= former.timeline.step_s
    if is_faster or found.program.data.keys() != former.program.data.keys():
        return found
    used_bytes = math.floor(
        Fraction(former.placement.shares.get(tier, 1.0)) * former.machine.tier(tier).capacity_bytes
    )
    share = share_of(used_bytes, found.machine.tier(tier).capacity_bytes)
    placement = replace(former.placement, shares={**former.placement.shares, tier: share})
    conditions = conditions_of(wish.settings, found.machine)
    try:
        timeline = simulate(found.program, found.machine, placement, conditions=conditions)
    except CapacityError:
        return found
    if found.timeline is not None and found.timeline.step_s <= timeline.step_s:
        return found
    why = f"{format_bytes(used_bytes)} of {tier} are used, with which was found: {former.why}"
    return _with(replace(found, placement=placement, why=why), timeline)


def share_of(nbytes: int, capacity_bytes: int) -> float:
    """Return the least share of a capacity that is so many bytes, rounded down."""
    share = nbytes / capacity_bytes
    while math.floor(Fraction(share) * capacity_bytes) < nbytes:
        share = math.nextafter(share, 2.0)
    return share


def levers_of(settings: OffloadConfig) -> Levers:
    """Return what a search may change in a run that is configured so."""
    return Levers.ALL & ~Levers.HOST_STEPS if settings.optimizer_in_backward else Levers.ALL


def _of_steps(chosen: Placement, given: Placement, machine: Machine) -> tuple[str, ...]:
    """Say it if optimizers step elsewhere than was given, and numbers may differ by that."""
    moved = [
        key
        for key, homes in chosen.bundles.items()
        if key in given.bundles and homes.state.device != given.bundles[key].state.device
    ]
    if not moved or not machine.has_streams:
        return ()
    told = (
        f"{len(moved)} of {len(chosen.bundles)} bundles are stepped on the host: its kernels may round "
        "otherwise than the device's, so numbers may differ in their last bits from steps on the device"
    )
    return (told,)


def given_placement(program: Program, machine: Machine, wish: RunWish) -> Placement:
    """Return the placement that rules, configuration and a placement that was given make together.

    Raises:
        ConfigError: it does not fit the program or the machine.
    """
    settings = wish.settings
    wishes = {each.name: getattr(settings, each.name) for each in fields(Wishes)}
    tiers = {tier.name: tier.capacity_bytes for tier in machine.tiers}
    facts = RunFacts(tiers, bundle_facts(program), Wishes(**wishes))
    given = wish.placement if wish.placement is not None else settings.placement
    placement = obey(given or {}, facts)
    return replace(placement, marks=placement.marks or wish.marks(program))


def bundle_facts(program: Program) -> list[BundleFacts]:
    """Return what rules know of a program's bundles: each with its gradients and state."""
    beside: dict[str, int] = {}
    for datum in program.data.values():
        if datum.owner is not None and datum.kind in (ByteKind.GRADIENT, ByteKind.STATE):
            beside[datum.owner] = beside.get(datum.owner, 0) + datum.nbytes
    return [
        BundleFacts(key, datum.nbytes + beside.get(key, 0))
        for key, datum in program.data.items()
        if datum.kind in (ByteKind.PARAMETERS, ByteKind.BUFFER)
    ]


def _with(result: PlanResult, timeline: Timeline) -> PlanResult:
    told = dict.fromkeys((*result.assumptions, *timeline.assumptions))
    return replace(result, timeline=timeline, assumptions=tuple(told))
