"""Swap and recompute of one model in one store: one plan, one log, and both applied.

What is recomputed is settled first: whatever it keeps is no longer swap's to see.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from tierstore.store import Store
from tierstore.training.activations.config import config_log
from tierstore.training.activations.config.conflicts import overlaps
from tierstore.training.activations.config.layers import Names, find_layers
from tierstore.training.activations.config.plan import ActivationPlan, plan_layers
from tierstore.training.activations.config.sections import Sections
from tierstore.training.activations.recomputation import recompute
from tierstore.training.activations.recomputation.checkpointed_modules import InputPolicies
from tierstore.training.activations.recomputation.chosen_layers import match_layers
from tierstore.training.activations.recomputation.recompute import Recompute, RecomputeStats
from tierstore.training.activations.runtime.activation_runtime import ActivationRuntime
from tierstore.training.activations.swapping.activation_stats import ActivationStats
from tierstore.training.activations.swapping.activation_store import ActivationStore
from tierstore.training.activations.swapping.marks import Marks, mark
from tierstore.training.activations.swapping.recomputed_inputs import OffloadedInputs
from tierstore.training.activations.swapping.swap import Swap, check_tiers, warn_of_idle

log = logging.getLogger("tierstore")


class Activations:
    """What is done with one model's activations.  Made by `apply`.

    Attributes:
        recompute: what is computed again; ``None``: nothing was asked for.
        swap: what is swapped; ``None``: nothing.
        store: of the activations of both; ``None``: they stay.
        runtime: of the model.
    """

    def __init__(self) -> None:
        self.recompute: Recompute | None = None
        self.swap: Swap | None = None
        self.store: ActivationStore | None = None
        self.runtime = ActivationRuntime.new()

    @property
    def swap_stats(self) -> ActivationStats | None:
        """What has left the device so far; ``None``: nothing is to."""
        return None if self.store is None else self.store.stats

    @property
    def recompute_stats(self) -> RecomputeStats | None:
        """What was computed again so far; ``None``: nothing is to be."""
        return None if self.recompute is None else self.recompute.stats()

    def swap_paused(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which nothing is swapped: see `Swap.paused`."""
        return contextlib.nullcontext() if self.swap is None else self.swap.paused()

    def close(self) -> None:
        """Remove all hooks.  Idempotent."""
        with contextlib.ExitStack() as both:
            if self.store is not None:
                both.callback(self.store.sweep)
            for each in (self.recompute, self.swap):
                if each is not None:
                    both.callback(each.close)


def apply(
    model: nn.Module,
    sections: Sections,
    layers: Names,
    store: Store | None,
    inputs_tier: str | None = None,
    is_on_host: Callable[[nn.Module], bool] = lambda _: False,
) -> Activations:
    """Do what a document says about activations; log it once, in the order of the layers.

    Args:
        model: whose.
        sections: of the document.
        layers: names of the containers of its layers; ``None``: to be found.
        store: where activations go; ``None``: nothing is offloaded, and they stay.
        inputs_tier: of the store, where what recomputed modules are given goes; ``None``: it stays.
        is_on_host: says which modules compute on the host, beside a device: nothing of theirs is swapped.

    Raises:
        ConfigError: the configuration does not fit the number of layers.
        UsageError: no layers were found, or the store has no tier below the device.
    """
    inputs_tier = _below_the_fastest(inputs_tier, store)
    if sections.recompute is None and sections.swap is None:
        _say_if_idle(inputs_tier, None)
        return Activations()
    found = find_layers(model, layers)
    modules = list(found.values())
    layout: Mapping[str, Any] = sections.layout
    plan = plan_layers(sections.recompute, sections.swap, num_layers=len(modules), **layout)
    marks = mark(modules, plan)
    _say(modules, plan, marks)
    _say_what_is_on_host(found, plan, marks, is_on_host)
    done = Activations()
    try:
        if store is not None and (plan.swap.swap or inputs_tier is not None):
            done.store = ActivationStore(store)
        if sections.recompute is not None:
            inputs = _policies(done.store, inputs_tier)
            done.recompute = recompute.apply(model, modules, plan, done.runtime, inputs)
        _say_if_idle(inputs_tier, done.recompute)
        if plan.swap.swap and store is not None:
            check_tiers(store)
            done.swap = Swap(model, done.runtime, marks, done.store, owns_store=False)
        elif plan.swap.swap:
            log.warning("memory_offload is OFF: activations are not swapped either.")
    except BaseException:
        done.close()
        raise
    return done


def _say_what_is_on_host(
    layers: Mapping[str, nn.Module],
    plan: ActivationPlan,
    marks: Marks,
    is_on_host: Callable[[nn.Module], bool],
) -> None:
    """Log which marks have no effect, as their modules compute on the host."""
    names: dict[str, None] = {}
    for (name, layer), each, found in zip(layers.items(), plan.layers, marks.matches, strict=True):
        known = dict(layer.named_modules())
        paths = [".".join(match.path) for match in found.swap]
        for path in [""] * (each.swap.prefetch is not None) + paths:
            if path in known and is_on_host(known[path]):
                names[f"{name}.{path}".rstrip(".")] = None
    if names:
        log.warning(
            "swap_config: %d marked modules compute on the host, where what they save is in host memory: the "
            "marks have no effect: %s",
            len(names),
            ", ".join(list(names)[:4]),
        )


def _policies(activation_store: ActivationStore | None, inputs_tier: str | None) -> InputPolicies | None:
    if activation_store is None or inputs_tier is None:
        return None
    return OffloadedInputs(activation_store, inputs_tier).of_call


def _below_the_fastest(inputs_tier: str | None, store: Store | None) -> str | None:
    """Return where what recomputed modules are given goes; ``None``: it is there, which is said."""
    if store is None or inputs_tier != store.tier_names[0]:
        return inputs_tier
    log.warning("offload_checkpoint has no effect: what is computed with is in %r anyway.", inputs_tier)
    return None


def _say_if_idle(inputs_tier: str | None, done: Recompute | None) -> None:
    if inputs_tier is not None and (done is None or not done.has_regions):
        log.warning(
            "offload_checkpoint has no effect: nothing is recomputed as a whole. It is for layers in the "
            "recompute_config of the same document; recompute(model, ...) keeps what its layers are given."
        )


def _say(modules: list[nn.Module], plan: ActivationPlan, marks: Marks) -> None:
    again = match_layers(modules, plan)
    found = [replace(mine, swap=swapped.swap) for mine, swapped in zip(again, marks.matches, strict=True)]
    config_log.say(plan, found)
    if plan.swap.swap and plan.recompute.recompute is not True:
        paths = [(each.operators, [(match.path, match.pattern) for match in each.swap]) for each in found]
        for warning in overlaps([(layer.recompute, layer.swap) for layer in plan.layers], paths):
            log.warning("%s", warning)
    warn_of_idle(marks)
