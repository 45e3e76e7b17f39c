"""A plan before the first step: from what a copy of the model without bytes does, as long as a machine takes.

1. How long operators take is not measured yet: it is what the figures of the machine say (`roofline`).  What
   of these is assumed is said beside the choice.
2. A count bounds the work, never a clock: of a long program neighbouring moments are looked at as one, and
   what is still too long is left to the steps, which show more.
3. Only shares of tiers are chosen, so that what was found for joined moments holds for all of them.
"""

from __future__ import annotations

from dataclasses import replace

from tierstore.errors import UsageError
from tierstore.planning.coarsening import coarsen
from tierstore.planning.machine import Machine
from tierstore.planning.placement import Placement
from tierstore.planning.program import Program
from tierstore.planning.roofline import roofline
from tierstore.planning.searching import Choice, Effort, Levers, search
from tierstore.planning.simulating import Conditions

LEVERS = Levers.HIGH | Levers.AHEAD
"""What can be changed once a run has been opened: shares of tiers."""

SPARE = 0.15
"""Of a step: a placement that moves less may be predicted to take longer by so much.  That is what single
predictions are off by at most (figure `planned-step`); the bytes of a step are not."""

MOST_MOMENTS = 100
"""That are simulated: about a second of one core, measured, within a factor of two."""


def first_choice(program: Program, machine: Machine, given: Placement, conditions: Conditions) -> Choice:
    """Choose a placement by what nobody has measured yet.

    Args:
        program: of a step, without seconds.
        machine: that it will run on.
        given: that holds so far.
        conditions: of the run.

    Raises:
        UsageError: the program is too long.
        CapacityError: it does not fit, as far as is known.
        ConfigError: the machine does not say how fast it computes.
    """
    joint = coarsen(roofline(program, machine), MOST_MOMENTS)
    if len(joint.program.moments) > MOST_MOMENTS:
        raise UsageError(f"a step has {len(joint.program.moments)} moments, and {MOST_MOMENTS} are looked at")
    narrowed = joint.narrowed(given)
    found = search(
        joint.program,
        machine,
        given=narrowed,
        levers=LEVERS,
        effort=Effort.LITTLE,
        conditions=conditions,
        spare=SPARE,
    )
    rejected = [
        replace(each, placement=given if each.placement == narrowed else joint.spread(each.placement))
        for each in found.rejected
    ]
    chosen = replace(given, high=found.placement.high, ahead=found.placement.ahead)
    return replace(found, placement=chosen, rejected=tuple(rejected))


def assumed_of(machine: Machine) -> str:
    """Return which figures of a run's machine are assumed, as people say it; empty: none.

    Args:
        machine: as `tierstore.training.run_machine.machine_of` knows it.
    """
    links = [each.name for each in machine.links if machine.sources.get(f"links.{each.name}") == "assumed"]
    computes = machine.sources.get("device") == "assumed"
    return ", ".join([*["how fast it computes"] * computes, *links])
