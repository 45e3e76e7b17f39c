"""What of one model stays in host memory, where that is where computing happens.

What is trained together stays together: a bundle, the optimizers' state of it, and room for its gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.planning import Trained, choose_residents
from tierstore.store import Store
from tierstore.training.bundles.bindings import Binding
from tierstore.training.bundles.placements import HOST
from tierstore.training.inventory import Inventory
from tierstore.training.optimizers.in_backward import Stepping


class Residents:
    """Chooses for one run.

    Args:
        store: that all of it is in.
        inventory: what is trained.
        stepping: when the optimizers step.
    """

    def __init__(self, store: Store, inventory: Inventory, stepping: Stepping) -> None:
        self._store = store
        self._inventory = inventory
        self._stepping = stepping

    def choose(self, accesses: Sequence[str], gradients: Sequence[str]) -> frozenset[str]:
        """Return the keys that stay; none, where computing happens elsewhere.

        Args:
            accesses: the keys that a step used, first use first.
            gradients: those of them that came to be in it.
        """
        fastest = self._store.tier_names[0]
        if fastest != HOST:
            return frozenset()
        bundles = {binding.key: binding for binding in self._inventory.bundles}
        order = [bundles[key] for key in dict.fromkeys(accesses) if key in bundles]
        states: dict[Binding, list[Binding]] = {}
        for steps in self._inventory.steps:
            for bundle, state in steps.state.bindings.items():
                states.setdefault(bundle, []).append(state)
        made = frozenset(gradients)
        trained = [self._trained([bundle, *states.get(bundle, ())], made) for bundle in order]
        return choose_residents(
            [each for each in trained if each.gradients or self._stepping is Stepping.IN_BACKWARD],
            self._store.stats().tiers[fastest].capacity_bytes,
        )

    def _trained(self, parts: Sequence[Binding], gradients: frozenset[str]) -> Trained:
        """Return what is trained together: a bundle, with state of it."""
        bundle = parts[0]
        found = {
            gradient.usual_key: place.nbytes
            for parameter, place in zip(bundle.tensors, bundle.places, strict=True)
            if (gradient := self._inventory.gradients.find(parameter)) is not None
            and gradient.usual_key in gradients
        }
        return Trained(
            keys=tuple(part.key for part in parts),
            gradients=tuple(found),
            kept_bytes=sum(part.nbytes for part in parts),
            gradient_bytes=sum(found.values()),
        )
