"""What a lever makes of a program or of a placement; what stands in them is enough, no model is needed.

Recomputing changes what a program does: its forward happens again before its backward.  Swapping and stepping
on the host change only where bytes are: a program knows nothing of that, and a placement says it.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field, replace

from tierstore.planning.homes import CPU, BundleHomes, PlacedMark, Treatment
from tierstore.planning.placement import Placement
from tierstore.planning.program import ByteKind, Does, KeyUse, Moment, Phase, Program


def marked_layers(placement: Placement, treatment: Treatment) -> tuple[int, ...]:
    """Return the layers of which a placement says as a whole what becomes of their activations."""
    said: dict[int, Treatment] = {}
    for mark in placement.marks:
        if not mark.operators:
            said[mark.layer] = mark.treatment
    return tuple(sorted(layer for layer, each in said.items() if each is treatment))


def with_marks(
    placement: Placement, layers: Iterable[int], treatment: Treatment, ahead: int = 0
) -> Placement:
    """Return a placement that treats the activations of some layers so; other marks stay as they are."""
    marks = [PlacedMark(layer, "", treatment, ahead) for layer in layers]
    return replace(placement, marks=[*placement.marks, *marks]) if marks else placement


def with_steps_on_host(placement: Placement, bundles: Iterable[str]) -> Placement:
    """Return a placement in which the host steps some bundles."""
    homes = dict(placement.bundles)
    for key in bundles:
        former = homes.get(key, BundleHomes())
        homes[key] = replace(
            former,
            gradients=replace(former.gradients, device=CPU),
            state=replace(former.state, device=CPU),
        )
    return replace(placement, bundles=homes)


def swapped_keys(program: Program, placement: Placement) -> tuple[str, ...]:
    """Return the activations that a placement swaps: of whole layers, and of operators that it names."""
    layers = set(marked_layers(placement, Treatment.SWAP))
    named = {
        (mark.layer, mark.operators)
        for mark in placement.marks
        if mark.operators and mark.treatment is Treatment.SWAP
    }
    return tuple(
        key
        for key, datum in program.data.items()
        if datum.kind is ByteKind.ACTIVATION
        and (datum.layer in layers or (datum.layer, datum.operator) in named)
    )


def as_placed(program: Program, placement: Placement) -> Program:
    """Return what a program does under a placement: it recomputes the layers that are marked so."""
    layers = marked_layers(placement, Treatment.RECOMPUTE)
    return recomputed(program, layers) if layers else program


def recomputed(program: Program, layers: Iterable[int]) -> Program:
    """Return a program that makes the activations of some layers again before their backward.

    They end when the layer's forward has ended; its forward happens again before the first moment of its
    backward.  What another layer reads between stays.  A layer that keeps nothing is as it was: to recompute
    twice is to recompute once.
    """
    chosen = frozenset(layers)
    kept = _kept_keys(program, chosen)
    before: dict[int, list[Moment]] = {}
    ended: dict[int, list[str]] = {}
    blocks: dict[int, _ForwardBlock] = {}
    for number, moment in enumerate(program.moments):
        if moment.layer not in chosen or moment.layer is None:
            continue
        block = blocks.setdefault(moment.layer, _ForwardBlock())
        if moment.phase is Phase.FORWARD:
            block.take(number, moment)
        elif moment.phase is Phase.BACKWARD and block.moments:
            alive = block.alive(program, kept)
            if alive:
                before[number] = block.again(alive)
                ended.setdefault(block.last, []).extend(alive)
            blocks[moment.layer] = _ForwardBlock()
    return replace(program, moments=tuple(_inserted(program.moments, before, ended)))


@dataclass
class _ForwardBlock:
    """The moments of one layer's forward in one pass."""

    moments: list[Moment] = field(default_factory=list)
    last: int = 0

    def take(self, number: int, moment: Moment) -> None:
        self.moments.append(moment)
        self.last = number

    def alive(self, program: Program, kept: Set[str]) -> list[str]:
        """Return the activations that the block makes and leaves."""
        found: dict[str, None] = {}
        for moment in self.moments:
            for use in moment.uses:
                if use.does is Does.MAKE and program.data[use.key].kind is ByteKind.ACTIVATION:
                    found[use.key] = None
                elif use.does is Does.END:
                    found.pop(use.key, None)
        return [key for key in found if key not in kept]

    def again(self, alive: list[str]) -> list[Moment]:
        """Return the moments that make them again: what else they made is there."""
        made = {use.key for moment in self.moments for use in moment.uses if use.does is Does.END} | set(
            alive
        )
        count = len(self.moments)
        return [
            replace(
                moment,
                phase=Phase.BACKWARD,
                name=f"{moment.name} again",
                uses=tuple(
                    replace(use, moments=min(use.moments, count - place))
                    for use in moment.uses
                    if use.does is not Does.MAKE or use.key in made
                ),
            )
            for place, moment in enumerate(self.moments)
        ]


def _kept_keys(program: Program, chosen: Set[int]) -> frozenset[str]:
    """Return the activations of some layers that moments of others use, too."""
    return frozenset(
        use.key
        for moment in program.moments
        for use in moment.uses
        if use.does is not Does.END
        and program.data[use.key].kind is ByteKind.ACTIVATION
        and program.data[use.key].layer in chosen
        and moment.layer != program.data[use.key].layer
    )


def _inserted(
    moments: tuple[Moment, ...], before: dict[int, list[Moment]], ended: dict[int, list[str]]
) -> list[Moment]:
    """Return moments with others before some of them; windows stay open over what comes between."""
    places: list[int] = []
    found: list[Moment] = []
    for number, moment in enumerate(moments):
        found += before.get(number, [])
        places.append(len(found))
        found.append(moment)
    for number, moment in enumerate(moments):
        last = len(moments) - 1
        uses = [
            replace(use, moments=places[min(number + use.moments - 1, last)] - places[number] + 1)
            for use in moment.uses
        ]
        uses += [KeyUse(key, Does.END) for key in ended.get(number, [])]
        found[places[number]] = replace(moment, uses=tuple(uses))
    return found
