"""The placement of one run: what is known of the run for it, and what is learned while steps run.

What is trained together stays together: a bundle, the optimizers' state of it, and room for its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from tierstore.config import OffloadConfig
from tierstore.errors import ConfigError
from tierstore.planning import (
    BundleHomes,
    Home,
    PlacedMark,
    Placement,
    Trained,
    Treatment,
)
from tierstore.planning.deciding import ResidentChoice
from tierstore.planning.homes import CPU
from tierstore.planning.placement import tiers_in
from tierstore.planning.residents import Staying
from tierstore.planning.rules import BundleFacts, RunFacts, Wishes, obey, place
from tierstore.quoting import quoted
from tierstore.store import Store
from tierstore.training.activations.config.layers import Names, find_layers
from tierstore.training.activations.config.plan import ActivationPlan, plan_layers
from tierstore.training.activations.config.sections import Sections
from tierstore.training.bundles.binding import natively
from tierstore.training.bundles.bindings import Binding
from tierstore.training.bundles.bundle_tiers import access_after_use
from tierstore.training.bundles.grouping import Group
from tierstore.training.bundles.working_sets import WorkingSet
from tierstore.training.inventory import Inventory
from tierstore.training.optimizers import registered
from tierstore.training.optimizers.in_backward import Stepping


def placement_of(
    config: OffloadConfig,
    store: Store,
    optimizers: Sequence[torch.optim.Optimizer],
    groups: Sequence[Group],
    sets: Sequence[WorkingSet],
    marks: tuple[PlacedMark, ...],
) -> tuple[RunFacts, Placement]:
    """Return what is known of a run that is to be opened, and where everything of it lives.

    Args:
        config: of the run.
        store: where to.
        optimizers: that train.
        groups: of what travels together.
        sets: what each of them needs.
        marks: what happens to activations.

    Raises:
        ConfigError: a tier is asked for that is not there, or the placement that is given cannot be right,
            or says something else of activations.
    """
    given = {each.name: getattr(config, each.name) for each in fields(Wishes)}
    given["hbm_ratio"] = tiers_in(config.placement).high.get(store.tier_names[0], config.hbm_ratio)
    bundles = [
        BundleFacts(
            group.key,
            each.nbytes,
            group.is_pinned,
            _whole_optimizer(group, optimizers),
            group.is_on_host,
            group.target,
        )
        for group, each in zip(groups, sets, strict=True)
    ]
    tiers = {name: tier.capacity_bytes for name, tier in store.stats().tiers.items()}
    facts = RunFacts(tiers, bundles, Wishes(**given))
    is_plain = config.placement is None and facts.is_usual
    placement = place(facts) if is_plain else obey(config.placement or {}, facts)
    if placement.marks and placement.marks != marks:
        raise ConfigError(
            f"placement: marks={quoted(list(map(str, placement.marks)))}: swap_config and "
            f"recompute_config decide these, and say {quoted(list(map(str, marks)))}. Leave the key out."
        )
    return facts, replace(placement, marks=marks)


def use_tiers(store: Store, placement: Placement) -> None:
    """Let a run use as much of each tier as a placement says, and write back above the share that it says.

    Args:
        store: of the run, into which nothing was taken yet.
        placement: of which `Placement.high` and `Placement.shares` are looked at; names of other tiers than
            the store's are passed over.

    Raises:
        CapacityError: a checkpoint that is there takes more.
    """
    for tier in store.config.tiers:
        if tier.name in placement.shares or tier.name in placement.high:
            used_bytes = placement.used_bytes(tier.name, tier.capacity_bytes)
            store.resize(tier.name, used_bytes, high=placement.high.get(tier.name))


def marks_of(model: nn.Module, sections: Sections, layers: Names) -> tuple[PlacedMark, ...]:
    """Return what happens to activations of a model that is to be opened, as its document says.

    Raises:
        ConfigError: the document does not fit the number of layers.
        UsageError: no layers were found.
    """
    if sections.recompute is None and sections.swap is None:
        return ()
    return marks_in(sections, len(find_layers(model, layers)))


def marks_in(sections: Sections, num_layers: int) -> tuple[PlacedMark, ...]:
    """Return what a document says happens to activations of a model of so many layers.

    Raises:
        ConfigError: the document does not fit the number of layers.
    """
    if sections.recompute is None and sections.swap is None:
        return ()
    layout: Mapping[str, Any] = sections.layout
    return tuple(_marks(plan_layers(sections.recompute, sections.swap, num_layers=num_layers, **layout)))


def _whole_optimizer(group: Group, optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
    """Return the name of the optimizer that steps a bundle together with others; ``None``: none does."""
    if group.optimizer is None or registered.is_per_parameter(optimizers[group.optimizer]):
        return None
    return f"{type(optimizers[group.optimizer]).__name__} (number {group.optimizer})"


def _marks(plan: ActivationPlan) -> Iterator[PlacedMark]:
    """Yield what happens to activations, layer by layer; communication has none."""
    for layer in plan.layers:
        again, swap = layer.recompute, layer.swap
        if again.is_whole:
            yield PlacedMark(layer.layer_id, "", Treatment.RECOMPUTE)
        for pattern in again.operators:
            yield PlacedMark(layer.layer_id, pattern.text, Treatment.RECOMPUTE)
        for pattern in again.exclude:
            yield PlacedMark(layer.layer_id, pattern.text, Treatment.KEEP)
        if swap.prefetch is not None:
            yield PlacedMark(layer.layer_id, "", Treatment.SWAP, swap.prefetch)
        for pattern, ahead in swap.operators:
            yield PlacedMark(layer.layer_id, pattern.text, Treatment.SWAP, ahead)


class Placing:
    """Keeps the placement of one run.

    Args:
        placement: as it was decided before the first step.
        store: that all of it is in.
        inventory: what is trained.
        stepping: when the optimizers step.
        room_bytes: returns what of the fastest tier can be kept from step to step; 0: it is not known yet.
        has_device: whether that is a device's.

    Attributes:
        placement: with what was learned so far.
    """

    def __init__(
        self,
        placement: Placement,
        store: Store,
        inventory: Inventory,
        stepping: Stepping,
        room_bytes: Callable[[], int],
        *,
        has_device: bool,
    ) -> None:
        self.placement = placement
        self._store = store
        self._inventory = inventory
        self._stepping = stepping
        self._has_device = has_device
        self._choice = ResidentChoice(
            placement, room_bytes, self._low_share, in_backward=stepping is Stepping.IN_BACKWARD
        )

    def change(self, placement: Placement) -> None:
        """Let another placement hold from now on, in what tiers write back early and have ahead."""
        self.placement = replace(self.placement, high=placement.high, ahead=placement.ahead)

    def homes(self, bundle: Binding) -> BundleHomes:
        """Return where all of a bundle lives."""
        return self.placement.bundles[bundle.key]

    @property
    def is_stale(self) -> bool:
        """See `tierstore.planning.deciding.ResidentChooser.is_stale`."""
        return self._choice.is_stale

    def choose(self, accesses: Sequence[str], gradients: Sequence[str]) -> Staying:
        """Return what stays from step to step; unless that was given, choose and note it.

        Args:
            accesses: the keys that a step used, first use first.
            gradients: those of them that came to be in it.
        """
        if not self._choice.is_open and not self._choice.residents:
            return Staying()
        trained = self._trained(accesses, frozenset((*accesses, *gradients)))
        staying = self._choice.choose(trained, accesses, self._inventory.nbytes)
        if self._stepping is Stepping.IN_BACKWARD:
            self._let_leave(staying.leaving)
        if self._choice.is_open:
            self.placement = replace(
                self.placement,
                residents=self._choice.residents,
                residents_without_state=self._choice.without_state,
            )
            return staying
        # Beside what is trained, buffers may be named, too.
        return replace(staying, keys=staying.keys | self._choice.residents.intersection(accesses))

    def _low_share(self) -> float:
        """Return down to which share of what can be kept in the fastest tier it writes back early."""
        fastest = self._store.config.tiers[0]
        if fastest.name in self.placement.high or fastest.low is None:
            return 1.0
        return fastest.low / fastest.high

    def _let_leave(self, leaving: frozenset[str]) -> None:
        """Let state go down whenever it was used, and what is not among it as its home says."""
        lower = [Home(tier, returns=True) for tier in self._store.tier_names[1:]]
        for steps in self._inventory.steps:
            for bundle, state in steps.state.bindings.items():
                own = self.homes(bundle).state
                goes = state.key in leaving and bool(lower) and not own.returns
                state.after_use = access_after_use(lower[0] if goes else own, self._store)

    def _is_stepped_there(self, key: str) -> bool:
        """Whether a bundle is stepped in the fastest tier: else it has new values elsewhere in every step."""
        return not self._has_device or self.placement.bundles[key].state.device != CPU

    def _trained(self, accesses: Iterable[str], gradients: frozenset[str]) -> Mapping[str, Trained]:
        """Return what is trained together, by the bundle's key, in the order of its use."""
        bundles = {binding.key: binding for binding in self._inventory.bundles}
        states: dict[Binding, list[Binding]] = {}
        for steps in self._inventory.steps:
            for bundle, state in steps.state.bindings.items():
                states.setdefault(bundle, []).append(state)
        used = [bundles[key] for key in dict.fromkeys(accesses) if key in bundles]
        with natively():
            stepped = {
                id(parameter)
                for steps in self._inventory.steps
                for group in steps.optimizer.param_groups
                for parameter in group["params"]
                if parameter.requires_grad
            }
        return {each.key: self._together([each, *states.get(each, ())], gradients, stepped) for each in used}

    def _together(
        self, parts: Sequence[Binding], gradients: frozenset[str], stepped: Container[int]
    ) -> Trained:
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
            state_bytes=sum(part.nbytes for part in parts[1:]),
            is_trained=any(id(each) in stepped for each in bundle.tensors),
            may_stay=self._is_stepped_there(bundle.key),
        )
