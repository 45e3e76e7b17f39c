"""What a program does when activations are made again: a function from a program to a program.

An activation that a mark means, and that only its own layer's backward reads, ends when the layer's forward
has run.  Before the layer's backward, the moments that make such activations run again, as part of backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tierstore.planning.homes import PlacedMark, Treatment
from tierstore.planning.program import Does, KeyUse, Moment, Phase, Program
from tierstore.planning.simulating.marking import mark_of


def with_recomputation(program: Program, marks: Sequence[PlacedMark]) -> Program:
    """Return the program in which marked activations are made again before they are used.

    What ends before backward begins is left as it is: a program in which this was done already stays.
    """
    again = _made_again(program, marks)
    if not again:
        return program
    moments: list[Moment] = []
    passed: dict[int | None, list[Moment]] = {}  # by layer, moments of forward that are to run again
    for number, moment in enumerate(program.moments):
        made = [use.key for use in moment.uses if use.does is Does.MAKE and use.key in again]
        if moment.phase is Phase.FORWARD:
            if made:
                passed.setdefault(moment.layer, []).append(_again(moment, again))
            moments.append(moment)
            if _is_last_of_layer(program.moments, number):
                moments[-1] = _ended(moment, passed.get(moment.layer, ()), again)
        else:
            if moment.phase is Phase.BACKWARD:
                moments += passed.pop(moment.layer, ())
            moments.append(moment)
    return replace(program, moments=tuple(moments))


def _made_again(program: Program, marks: Sequence[PlacedMark]) -> frozenset[str]:
    """Return the keys that are made again."""
    found = {
        key
        for key, datum in program.data.items()
        if (mark := mark_of(datum, marks)) is not None and mark.treatment is Treatment.RECOMPUTE
    }
    for moment in program.moments:
        for use in moment.uses:
            is_elsewhere = moment.layer != program.data[use.key].layer
            if use.key in found and (
                is_elsewhere or (moment.phase is Phase.FORWARD and use.does is Does.END)
            ):
                found.discard(use.key)
    return frozenset(found)


def _is_last_of_layer(moments: Sequence[Moment], number: int) -> bool:
    """Say whether a moment of forward is the last one of its layer in its pass."""
    layer = moments[number].layer
    for later in moments[number + 1 :]:
        if later.phase is not Phase.FORWARD:
            return True
        if later.layer == layer:
            return False
    return True


def _again(moment: Moment, again: frozenset[str]) -> Moment:
    """Return a moment that makes only what is made again."""
    uses = tuple(use for use in moment.uses if use.does is not Does.MAKE or use.key in again)
    return replace(moment, phase=Phase.BACKWARD, name=f"{moment.name} again", uses=uses)


def _ended(moment: Moment, passed: Sequence[Moment], again: frozenset[str]) -> Moment:
    """Return a layer's last moment with the end of what is made again."""
    keys = [use.key for each in passed for use in each.uses if use.does is Does.MAKE and use.key in again]
    return replace(moment, uses=(*moment.uses, *(KeyUse(key, Does.END) for key in dict.fromkeys(keys))))
