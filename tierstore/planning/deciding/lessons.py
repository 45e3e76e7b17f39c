"""How much is known of a program's uses of a model, and of the parts that it calls itself, way by way."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

MARGIN = 1.1
"""Steps differ a little: allocations overlap otherwise, a metric is kept a while longer."""

_LITTLE_LARGER = MARGIN
"""Inputs so many times as large need no measuring: what grows with their square is within the margin, too."""


@dataclass(slots=True, eq=False)
class CalledPart:
    """What is known of the inputs of a model, or of a part that the program calls, in one way to call it."""

    seen_elements: int = -1  # of the largest inputs so far
    measured_elements: int = -1  # of the largest ones that were measured
    elements: int = 0  # of the last inputs
    too_many_elements: int | None = None  # of inputs that took more than the budget, with nothing to take
    needed_bytes: int = 0  # by them
    made_bytes: int = 0  # of the device, by an evaluation at most, beside what was there when it began

    def has_grown(self, elements: int) -> bool:
        """Say whether what is made of such inputs may be more than what was measured, and its margin."""
        return elements > self.measured_elements * _LITTLE_LARGER


@dataclass(slots=True)
class Lesson:
    """How much of one kind of use is known: of steps, or of evaluations."""

    uses_to_learn_from: int
    steps_to_learn: int = 0
    is_known: bool = False  # whether the store's own is what such uses leave
    measured_bytes: int = (
        0  # of the device, that the program had in an evaluation at most, as it was measured
    )
    parts: dict[Hashable, CalledPart] = field(default_factory=dict)  # that were called
    part: CalledPart = field(default_factory=CalledPart)  # that was called last

    def __post_init__(self) -> None:
        self.learn_again()

    @property
    def has_several(self) -> bool:
        """Whether the program calls several parts, or one in several ways."""
        return len(self.parts) > 1

    @property
    def made_bytes(self) -> int:
        """What an evaluation makes on the device at most, whichever part is called."""
        return max((part.made_bytes for part in self.parts.values()), default=0)

    def note_made(self, nbytes: int) -> None:
        """Take in what an evaluation of the part that was called last has made, beside what was there."""
        former_bytes = 0 if self.steps_to_learn else self.part.made_bytes
        self.part.made_bytes = max(former_bytes, nbytes)

    def begin(self, called: Hashable) -> None:
        """The model, or a part of it, is called."""
        self.part = self.parts.setdefault(called, CalledPart())

    def learn_again(self) -> None:
        """What is known is of other inputs."""
        self.steps_to_learn = self.uses_to_learn_from
