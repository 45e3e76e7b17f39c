"""What stays in a tier from step to step, where not everything can.

A step changes every trained parameter and all optimizer state, and a gradient can be read until it is
zeroed.  When backward has ended and the optimizer has not stepped yet, all of them have to exist: what
the tier does not hold then was written to the tier below in this very step, whatever the order.  So a
step writes least if the tier is full, at that moment, of bytes that are never written: parameters and
state of *residents*, and gradients.

1. Residents are what is trained last in backward.  While the others are trained, the room that the
   residents' gradients will take is free for bytes that come and go, and no byte needs to come or go
   when those gradients are there.
2. Beside the residents' parameters and state there is room for several of the others.
3. Beside the residents' parameters, state and gradients nothing needs room.

Pure: sizes in, keys out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

OTHERS = 2.5
"""How many of the largest others find room beside the residents: one that is trained, one that comes
and a part of one that leaves."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What is trained together.

    Attributes:
        keys: of parameters and state.
        gradients: keys of theirs.
        kept_bytes: of ``keys``.
        gradient_bytes: of ``gradients``.
    """

    keys: tuple[str, ...]
    gradients: tuple[str, ...]
    kept_bytes: int
    gradient_bytes: int

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.kept_bytes + self.gradient_bytes


def choose_residents(trained: Iterable[Trained], quota_bytes: int) -> frozenset[str]:
    """Choose what stays in a tier; return the keys.

    Args:
        trained: all that is trained, what is trained last in backward first.
        quota_bytes: of the tier.
    """
    order = list(trained)
    others_bytes = int(OTHERS * max((each.nbytes for each in order), default=0))
    keys: list[str] = []
    kept_bytes = gradient_bytes = 0
    for each in order:
        kept_bytes += each.kept_bytes
        gradient_bytes += each.gradient_bytes
        if kept_bytes + max(gradient_bytes, others_bytes) > quota_bytes:
            break
        keys += [*each.keys, *each.gradients]
    return frozenset(keys)
