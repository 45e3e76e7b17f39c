"""What a program does on a device, phase by phase, and what was measured of it: what a share is told.

Pure: no torch, threads, clocks or files.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

_FREE = 0.25
"""The most of the store's own that is written back early."""
_FREE_BUNDLES = 1.5
"""How many of the largest bundles, with gradients and state, there is room for in it."""


class StepPhase(enum.Enum):
    """What the program does."""

    MODEL = enum.auto()  # forward and backward
    OPTIMIZER = enum.auto()
    EVALUATION = enum.auto()  # forward alone
    BETWEEN = enum.auto()  # nothing of the model's: inputs are made

    __hash__ = object.__hash__  # an enum's own is a call into Python, for every use


class EvaluationEnd(enum.Enum):
    """How an evaluation ended."""

    WHOLE = enum.auto()
    BROKEN = enum.auto()  # by an exception, such as one with the features that are wanted
    OUT_OF_MEMORY = enum.auto()


@dataclass(frozen=True, slots=True)
class TrainedBytes:
    """What the store has to hold of a run: all that is trained, and buffers.

    Attributes:
        all_bytes: parameters, buffers, gradients and state.
        gradient_bytes: the gradients among them.
        pinned_bytes: what always stays on the device.
        largest_bytes: what has to be there together to train the largest bundle, with all that is pinned.
        largest_bundle_bytes: the parameters of the largest bundle.
        state_bytes: the optimizers' state among all.
        widening: the most numbers that a matrix makes of each it is given.
    """

    all_bytes: int
    gradient_bytes: int
    pinned_bytes: int
    largest_bytes: int
    largest_bundle_bytes: int
    widening: float = 1.0
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CameBytes:
    """What there was so far of what is trained, whoever steps it, and as far as it came.

    Attributes:
        gradient_bytes: of all gradients that backward has made, each once.
        state_bytes: of the optimizers' state.
    """

    gradient_bytes: int = 0
    state_bytes: int = 0

    def at_least(self, other: CameBytes) -> CameBytes:
        """Return the most of both."""
        return CameBytes(
            max(self.gradient_bytes, other.gradient_bytes), max(self.state_bytes, other.state_bytes)
        )


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """What was measured of a phase that ends.

    Attributes:
        program_bytes: the most that the program had beside the store.
        is_hidden: whether that may be too low, as an earlier peak hid it.
        whole_bytes: the most that the whole device had; 0: it is not known.
    """

    program_bytes: int = 0
    is_hidden: bool = False
    whole_bytes: int = 0


def high_of(kept_bytes: int, trained: TrainedBytes, below_bytes: int, elsewhere_bytes: int = 0) -> float:
    """Return above which share of a device the store writes back early, where nobody says it.

    Args:
        kept_bytes: of the device, that are the store's; 0: it is not known yet.
        trained: what the store has to hold.
        below_bytes: what the tiers below can hold together.
        elsewhere_bytes: of what is trained, that are the program's own.
    """
    largest_bytes = trained.largest_bytes - trained.pinned_bytes
    fits = trained.all_bytes - elsewhere_bytes <= kept_bytes
    if fits or not kept_bytes or trained.all_bytes + largest_bytes > below_bytes:
        return 1.0
    return round(1 - min(_FREE, _FREE_BUNDLES * largest_bytes / kept_bytes), 2)
