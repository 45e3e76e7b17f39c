"""What a program does when activations are made again: a function from a program to a program.

An activation that a mark means, and that only its own layer's backward reads, ends when the layer's forward
has run.  Before the layer's backward, the moments that make such activations run again, as part of backward.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from tierstore.planning.homes import PlacedMark, Treatment
from tierstore.planning.program import Does, KeyUse, Moment, Phase, Program
from tierstore.planning.simulating.marking import mark_of


def with_recomputation(program: Program, marks: Sequence[PlacedMark]) -> Program:
    """Return the program in which marked activations are made again before they are used.

    What ends before backward begins is left as it is: a program in which this was done already stays.
    Windows that span moments before which something is made again stay open over that, too.
    """
    again = _made_again(program, marks)
    if not again:
        return program
    lasts = _last_of_layers(program.moments)
    moments: list[Moment] = []
    places: list[int] = []  # of each moment in the new program
    passed: dict[int | None, list[int]] = {}  # by layer, moments of forward that are to run again
    for number, moment in enumerate(program.moments):
        made = [use.key for use in moment.uses if use.does is Does.MAKE and use.key in again]
        if moment.phase is Phase.BACKWARD:
            moments += _again(program.moments, passed.pop(moment.layer, ()), again)
        places.append(len(moments))
        moments.append(moment)
        if moment.phase is Phase.FORWARD:
            if made:
                passed.setdefault(moment.layer, []).append(number)
            if number in lasts:
                run = [program.moments[each] for each in passed.get(moment.layer, ())]
                moments[-1] = _ended(moment, run, again)
    for number, place in enumerate(places):
        moments[place] = _kept_open(moments[place], number, places)
    return replace(program, moments=tuple(moments))


def _kept_open(moment: Moment, number: int, places: Sequence[int]) -> Moment:
    """Return a moment whose windows close where they did, however many moments came between."""
    if all(use.moments == 1 for use in moment.uses):
        return moment
    lasts = [min(number + use.moments, len(places)) - 1 for use in moment.uses]
    uses = [
        use if use.moments == 1 else replace(use, moments=places[last] - places[number] + 1)
        for use, last in zip(moment.uses, lasts, strict=True)
    ]
    return replace(moment, uses=tuple(uses))


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


def _last_of_layers(moments: Sequence[Moment]) -> frozenset[int]:
    """Return the moments of forward that are the last ones of their layers in their pass."""
    lasts: list[int] = []
    later: set[int | None] = set()  # layers of what follows in the same pass
    for number in reversed(range(len(moments))):
        if moments[number].phase is not Phase.FORWARD:
            later.clear()
        elif moments[number].layer not in later:
            later.add(moments[number].layer)
            lasts.append(number)
    return frozenset(lasts)


def _again(moments: Sequence[Moment], numbers: Sequence[int], again: frozenset[str]) -> list[Moment]:
    """Return the moments of some numbers as they run again: they make only what is made again."""
    found: list[Moment] = []
    for place, number in enumerate(numbers):
        moment = moments[number]
        uses = tuple(
            replace(use, moments=bisect_left(numbers, number + use.moments) - place)
            for use in moment.uses
            if use.does is not Does.MAKE or use.key in again
        )
        found.append(replace(moment, phase=Phase.BACKWARD, name=f"{moment.name} again", uses=uses))
    return found


def _ended(moment: Moment, passed: Sequence[Moment], again: frozenset[str]) -> Moment:
    """Return a layer's last moment with the end of what is made again."""
    keys = [use.key for each in passed for use in each.uses if use.does is Does.MAKE and use.key in again]
    return replace(moment, uses=(*moment.uses, *(KeyUse(key, Does.END) for key in dict.fromkeys(keys))))
