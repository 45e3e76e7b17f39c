"""What of one model stays in host memory, where that is where computing happens.

What is trained together stays together: a bundle, the optimizers' state of it, and room for its gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tierstore.planning import Trained, choose_residents
from tierstore.store import Store
from tierstore.training.autograd.gradients import Gradients
from tierstore.training.bundles.bindings import Binding
from tierstore.training.bundles.placements import HOST
from tierstore.training.optimizers.in_backward import Stepping
from tierstore.training.optimizers.step_units import Steps


class Trainee(Protocol):
    """What is trained, where, and how: a session, as this module sees it."""

    @property
    def store(self) -> Store:
        """Holds all of it."""
        ...

    @property
    def bundles(self) -> Sequence[Binding]:
        """Of parameters."""
        ...

    @property
    def steps(self) -> Sequence[Steps]:
        """Of the optimizers."""
        ...

    @property
    def gradients(self) -> Gradients:
        """Of the parameters."""
        ...

    @property
    def stepping(self) -> Stepping:
        """When the optimizers step."""
        ...


class Residents:
    """Chooses for one session.

    Args:
        trainee: whose bundles.
    """

    def __init__(self, trainee: Trainee) -> None:
        self._trainee = trainee

    def choose(self, accesses: Sequence[str], gradients: Sequence[str]) -> frozenset[str]:
        """Return the keys that stay; none, where computing happens elsewhere.

        Args:
            accesses: the keys that a step used, first use first.
            gradients: those of them that came to be in it.
        """
        trainee = self._trainee
        fastest = trainee.store.tier_names[0]
        if fastest != HOST:
            return frozenset()
        bundles = {binding.key: binding for binding in trainee.bundles}
        order = [bundles[key] for key in dict.fromkeys(accesses) if key in bundles]
        states: dict[Binding, list[Binding]] = {}
        for steps in trainee.steps:
            for bundle, state in steps.state.bindings.items():
                states.setdefault(bundle, []).append(state)
        made = frozenset(gradients)
        trained = [self._trained([bundle, *states.get(bundle, ())], made) for bundle in order]
        return choose_residents(
            [each for each in trained if each.gradients or trainee.stepping is Stepping.IN_BACKWARD],
            trainee.store.stats().tiers[fastest].capacity_bytes,
        )

    def _trained(self, parts: Sequence[Binding], gradients: frozenset[str]) -> Trained:
        """Return what is trained together: a bundle, with state of it."""
        bundle = parts[0]
        found = {
            gradient.usual_key: place.nbytes
            for parameter, place in zip(bundle.tensors, bundle.places, strict=True)
            if (gradient := self._trainee.gradients.find(parameter)) is not None
            and gradient.usual_key in gradients
        }
        return Trained(
            keys=tuple(part.key for part in parts),
            gradients=tuple(found),
            kept_bytes=sum(part.nbytes for part in parts),
            gradient_bytes=sum(found.values()),
        )
