"""What all that is done with a model's activations has in common, in each thread that runs the model."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierstore.training.activations.runtime.module_calls import CallStack
from tierstore.training.activations.runtime.operator_mode import WatchedOperators


@dataclass(frozen=True, slots=True)
class ActivationRuntime:
    """The runtime of one model.

    Attributes:
        calls: of its modules.
        operators: and who watches them.
    """

    calls: CallStack = field(default_factory=CallStack)
    operators: WatchedOperators = field(default_factory=WatchedOperators)

    def discard_interrupted(self) -> None:
        """End what a ``KeyboardInterrupt`` or its like has left in force in this thread."""
        self.calls.discard_interrupted()
        self.operators.settle()
