"""What all that is done with a model's activations has in common, in each thread that runs the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from tierstore.training.activations.runtime.module_calls import CallStack
from tierstore.training.activations.runtime.operator_mode import WatchedOperators
from tierstore.training.activations.runtime.saved_activations import SavedActivations


@dataclass(frozen=True, slots=True)
class ActivationRuntime:
    """The runtime of one model.

    Attributes:
        calls: of its modules.
        operators: and who watches them.
        saved: who takes what is saved.
    """

    calls: CallStack
    operators: WatchedOperators
    saved: SavedActivations

    @classmethod
    def new(cls) -> Self:
        """Return one in which nothing is done."""
        operators = WatchedOperators()
        return cls(CallStack(), operators, SavedActivations(operators))

    def discard_interrupted(self) -> None:
        """End what a ``KeyboardInterrupt`` or its like has left in force in this thread."""
        self.calls.discard_interrupted()
        self.operators.settle()
