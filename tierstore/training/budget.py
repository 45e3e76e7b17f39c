"""How much of the device the store may have: what activations and workspace leave of the budget.

1. In the first step the store has only what the largest bundle needs to be trained, and a prefetch.
2. What the program takes beside it is measured in the first two steps; from then on the store has the
   rest of the budget, less a margin.
3. When inputs grow, the store makes room in proportion before the model runs, and it is measured
   again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierstore.errors import CapacityError
from tierstore.store import Store
from tierstore.training.footprint import Meter, tensors_in
from tierstore.units import format_bytes

LEARNING_STEPS = 2
MARGIN = 1.05
"""Steps differ a little: allocations overlap otherwise, a metric is kept a while longer."""


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """The bytes that have to be on the device together, for one bundle.

    Attributes:
        name: of its first parameter.
        bundle_bytes: of its parameters.
        nbytes: with gradients and optimizer state.
    """

    name: str
    bundle_bytes: int
    nbytes: int


class DeviceBudget:
    """Sets the quota of the store's device tier.

    Args:
        store: with a device tier as its fastest.
        limit_bytes: all that the program may have on the device.
        sets: of every bundle.
        meter: of what the program has outside the store.
        resized: told of each new quota.

    Raises:
        CapacityError: one bundle alone does not fit.
    """

    def __init__(
        self,
        store: Store,
        limit_bytes: int,
        sets: Sequence[WorkingSet],
        meter: Meter,
        resized: Callable[[int], None],
    ) -> None:
        self._store = store
        self._tier = store.tier_names[0]
        self._limit_bytes = limit_bytes
        self._meter = meter
        self._resized = resized
        largest = max(sets, key=lambda each: each.nbytes)
        if largest.nbytes > limit_bytes:
            raise CapacityError(
                f"{largest.name!r} cannot be trained on the device: its parameters, gradients and optimizer "
                f"state need {format_bytes(largest.nbytes)} together, and max_device_memory is "
                f"{format_bytes(limit_bytes)}. Raise it, or split the module.",
                key=largest.name,
                tier=self._tier,
                needed_bytes=largest.nbytes,
                free_bytes=limit_bytes,
            )
        prefetch_bytes = max(each.bundle_bytes for each in sets)
        self._least_bytes = min(limit_bytes, largest.nbytes + prefetch_bytes)
        self._quota_bytes = 0
        self._steps_to_learn = LEARNING_STEPS
        self._is_learning = False
        self._seen_elements = 0
        self._program_bytes = 0
        self._give(self._least_bytes)

    # --- a step -------------------------------------------------------------------------------

    def begin_forward(self, inputs: Sequence[object]) -> None:
        """The model begins to run on ``inputs``."""
        elements = sum(tensor.numel() for tensor in tensors_in(inputs))
        if elements > self._seen_elements:
            self._make_room(elements)
        if self._steps_to_learn:
            self._is_learning = True
            self._meter.begin(inputs)

    def _make_room(self, elements: int) -> None:
        """The inputs are larger than any before: so will be what is made of them."""
        if self._seen_elements:
            share = elements / self._seen_elements
            self._give(self._rest(int(self._program_bytes * share)))
            self._program_bytes = 0
            self._steps_to_learn = LEARNING_STEPS
        self._seen_elements = elements

    def look(self) -> None:
        """Take a sample of what the program has."""
        if self._is_learning:
            self._meter.look()

    def end_step(self) -> None:
        """A step, or a use of the model without one, has ended."""
        if not self._is_learning:
            return
        self._is_learning = False
        self._steps_to_learn -= 1
        measured = self._meter.end()
        # The first step also makes the optimizer's state: the last one measured counts.
        self._program_bytes = measured
        if self._steps_to_learn == 0:
            self._give(self._rest(measured))

    def close(self) -> None:
        """Stop measuring."""
        if self._is_learning:
            self._is_learning = False
            self._meter.end()

    # --- quotas -------------------------------------------------------------------------------

    def _rest(self, program_bytes: int) -> int:
        """Return what the program leaves of the budget, at least what is needed to train at all."""
        return max(self._least_bytes, self._limit_bytes - int(program_bytes * MARGIN))

    def _give(self, quota_bytes: int) -> None:
        if quota_bytes == self._quota_bytes:
            return
        self._store.resize(self._tier, quota_bytes)
        self._quota_bytes = quota_bytes
        self._resized(quota_bytes)
