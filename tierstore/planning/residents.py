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

Where backward steps each parameter it is another sum: see `tierstore.planning.residents_in_backward`.

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
        keys: of parameters, and of their state after them.
        gradients: keys of theirs.
        kept_bytes: of ``keys``.
        gradient_bytes: of ``gradients``.
        state_bytes: of the state among ``keys``.
        is_trained: false of what is only used.
        may_stay: false of what is stepped in another tier, where it has new values in every step: it comes
            and goes, and its state is not there at all.
    """

    keys: tuple[str, ...]
    gradients: tuple[str, ...]
    kept_bytes: int
    gradient_bytes: int
    state_bytes: int = 0
    is_trained: bool = True
    may_stay: bool = True

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.kept_bytes + self.gradient_bytes

    @property
    def key(self) -> str:
        """That of the parameters."""
        return self.keys[0]

    @property
    def state(self) -> tuple[str, ...]:
        """The keys of the state."""
        return self.keys[1:]

    @property
    def parameter_bytes(self) -> int:
        """Those of the parameters."""
        return self.kept_bytes - self.state_bytes


@dataclass(frozen=True, slots=True)
class Staying:
    """What stays in the fastest tier.

    Attributes:
        keys: that do.
        leaving: keys of state that goes down whenever it was used.
        ahead_bytes: of all but ``keys`` that may be ahead there; ``None``: as far as prefetching goes anyway.
    """

    keys: frozenset[str] = frozenset()
    leaving: frozenset[str] = frozenset()
    ahead_bytes: int | None = None


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
