"""What one run has: bundles, optimizers' steps and gradients, filled as they are taken in."""

from __future__ import annotations

from tierstore.planning.deciding import ALIGNMENT_BYTES
from tierstore.training.autograd.gradient_table import GradientTable
from tierstore.training.bundles.bindings import Binding
from tierstore.training.optimizers.step_units import Steps
from tierstore.units import align_up


class Inventory:
    """Made before those who decide for a run and those who act in it; both are given it.

    Attributes:
        bundles: of parameters, in their order.
        steps: of the optimizers, in their order.
        gradients: of the parameters.
        nbytes: of each bundle that was taken in, by its key.
    """

    def __init__(self) -> None:
        self.bundles: list[Binding] = []
        self.steps: list[Steps] = []
        self.gradients = GradientTable()
        self.nbytes: dict[str, int] = {}

    def state_bytes(self) -> int:
        """Return the bytes of the optimizers' state that there is, but of what is computed on the host."""
        return sum(
            align_up(state.nbytes, ALIGNMENT_BYTES)
            for steps in self.steps
            for bundle, state in steps.state.bindings.items()
            if bundle.confined_to is None
        )

    def nbytes_of(self, key: str) -> int:
        """Return the bytes of what is under a key; 0: it is no bundle."""
        return self.nbytes.get(key, 0)
