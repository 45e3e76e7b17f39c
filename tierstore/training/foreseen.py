"""What cannot fit is refused before a step begins, by what a copy of the model without bytes has shown.

1. A run is looked at where parameters, gradients and state take more than half of the device: the program of
   its step is simulated on the run's machine.
2. A run is refused only if it would need more than the device has by a tenth.  In the steps that are looked
   at, those that a run learns from, the store has on the device exactly what is in use: what they need does
   not depend on the quota, so a run that is refused is not one that another division would have let through.
3. On an emulated device nothing stops what the program makes itself, as long as no lease is in need of room.
   It is not refused there, either: a run that is refused is one whose leases would be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from tierstore.config import OffloadConfig
from tierstore.errors import CapacityError
from tierstore.planning import Machine, Placement, Program
from tierstore.planning.deciding import LEARNING_STEPS
from tierstore.planning.rules import HOST
from tierstore.planning.searching import remedies, told
from tierstore.planning.simulating import Conditions, simulate
from tierstore.training.bundles.grouping import Group
from tierstore.training.run_machine import conditions_of
from tierstore.units import format_bytes

MARGIN = 1.1
"""How much more than there is a run has to need to be refused: neither its loss is known, nor its kernels."""

CERTAIN_SHARE = 0.5
"""Of the device; where less is certain to be there, nothing is refused."""

_ENOUGH = 2**50


class ForeseenRun(NamedTuple):
    """What is known of a run before its first step.

    Attributes:
        config: of the run.
        placement: where everything lives.
        groups: what travels together.
        certain_bytes: of parameters, gradients and state together.
        is_plain: whether all that the model has and computes is on the device, and nothing of it in tables.
        is_planned: whether it is chosen what moves when.
    """

    config: OffloadConfig
    placement: Placement
    groups: Sequence[Group]
    certain_bytes: int
    is_plain: bool
    is_planned: bool


def may_be_refused(machine: Machine, run: ForeseenRun) -> bool:
    """Say whether a run's first step is worth to be looked at.

    Args:
        machine: with the quotas that were given.
        run: what is known.
    """
    fastest = machine.tiers[0]
    return fastest.name != HOST and run.certain_bytes > CERTAIN_SHARE * fastest.capacity_bytes


def refusal(program: Program, machine: Machine, run: ForeseenRun) -> CapacityError | None:
    """Return why a step does not fit on the device, even if there were a tenth more of it; ``None``: it does.

    Args:
        program: of the step.
        machine: with the quotas that were given.
        run: what is known.
    """
    first = machine.tiers[0]
    conditions = replace(conditions_of(run.config, machine), is_enforced=machine.has_streams)
    room = dict.fromkeys((tier.name for tier in machine.tiers[1:]), _ENOUGH)
    error: CapacityError | None = None
    for nbytes in (first.capacity_bytes, int(MARGIN * first.capacity_bytes)):
        roomy = machine.with_capacities({**room, first.name: nbytes})
        try:
            simulate(program, roomy, run.placement, conditions=conditions, steps=LEARNING_STEPS)
        except CapacityError as found:
            error = error or found
        else:
            return None
    assert error is not None
    return _explained(program, machine, run, conditions, error)


def _explained(
    program: Program, machine: Machine, run: ForeseenRun, conditions: Conditions, error: CapacityError
) -> CapacityError:
    first = machine.tiers[0]
    whole = replace(conditions, is_enforced=True)  # what helps has room for what operators make, too
    found = remedies(program, machine, given=run.placement, conditions=whole)
    advice = told(found) or "Raise it, take smaller batches, or swap or recompute more."
    return CapacityError(
        f"a step on these inputs does not fit into max_device_memory, which is "
        f"{format_bytes(first.capacity_bytes)}: {error} {advice} Nothing was computed; this was found by a "
        "step of a copy of the model that has no bytes, and foresee: false lets it be tried.",
        tier=first.name,
        needed_bytes=error.needed_bytes,
        free_bytes=error.free_bytes,
    )
