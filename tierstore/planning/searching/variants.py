"""What a lever makes of a placement, and a placement of a program.

Recomputing changes what a program does: its forward happens again before its backward.  Swapping and stepping
on the host change only where bytes are: a program knows nothing of that, and a placement says it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tierstore.planning.homes import CPU, BundleHomes, PlacedMark, Treatment
from tierstore.planning.placement import Placement
from tierstore.planning.program import Program
from tierstore.planning.simulating import with_recomputation
from tierstore.planning.simulating.marking import mark_of


def with_marks(
    placement: Placement, layers: Iterable[int], treatment: Treatment, ahead: int = 0
) -> Placement:
    """Return a placement that treats the activations of some layers so; it overrides what it said of them.

    Args:
        placement: of which marks of other layers stay.
        layers: their numbers.
        treatment: what becomes of their activations.
        ahead: of those that are swapped, see `PlacedMark.ahead`.
    """
    chosen = tuple(layers)
    marks = [mark for mark in placement.marks if mark.layer not in chosen]
    return replace(placement, marks=[*marks, *(PlacedMark(layer, "", treatment, ahead) for layer in chosen)])


def with_steps_on_host(placement: Placement, bundles: Iterable[str]) -> Placement:
    """Return a placement in which the host steps some bundles.

    Args:
        placement: of which homes keep their tiers.
        bundles: their keys.
    """
    homes = dict(placement.bundles)
    for key in bundles:
        former = homes.get(key, BundleHomes())
        homes[key] = replace(
            former,
            gradients=replace(former.gradients, device=CPU),
            state=replace(former.state, device=CPU),
        )
    return replace(placement, bundles=homes)


def marked_keys(program: Program, placement: Placement, treatment: Treatment) -> tuple[str, ...]:
    """Return the activations that are treated so.

    Args:
        program: whose data.
        placement: whose marks.
        treatment: what becomes of them.
    """
    if not placement.marks:
        return ()
    found = ((key, mark_of(datum, placement.marks)) for key, datum in program.data.items())
    return tuple(key for key, mark in found if mark is not None and mark.treatment is treatment)


def marked_layers(placement: Placement, treatment: Treatment) -> tuple[int, ...]:
    """Return the layers of which a placement says as a whole what becomes of their activations.

    Args:
        placement: whose marks: later ones override.
        treatment: what becomes of them.
    """
    said = {mark.layer: mark.treatment for mark in placement.marks if not mark.operators}
    return tuple(sorted(layer for layer, each in said.items() if each is treatment))


def as_placed(program: Program, placement: Placement) -> Program:
    """Return what a program does under a placement: what is marked so is made again before backward."""
    if not any(mark.treatment is Treatment.RECOMPUTE for mark in placement.marks):
        return program
    return with_recomputation(program, placement.marks)
