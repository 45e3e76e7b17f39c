"""Swap and recompute of one model in one store: one plan, one log, and both applied.

What is recomputed is settled first: whatever it keeps is no longer swap's to see.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
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
from tierstore.training.activations.recomputation.chosen_layers import match_layers
from tierstore.training.activations.recomputation.recompute import Recompute, RecomputeStats
from tierstore.training.activations.runtime.activation_runtime import ActivationRuntime
from tierstore.training.activations.swapping.activation_stats import ActivationStats
from tierstore.training.activations.swapping.activation_store import ActivationStore
from tierstore.training.activations.swapping.marks import Marks, mark
from tierstore.training.activations.swapping.swap import Swap, check_tiers, warn_of_idle

log = logging.getLogger("tierstore")


class Activations:
    """What is done with one model's activations.  Made by `apply`.

    Attributes:
        recompute: what is computed again; ``None``: nothing was asked for.
        swap: what is swapped; ``None``: nothing.
        plan: what both were told; ``None``: nothing.
        runtime: of the model.
    """

    def __init__(self) -> None:
        self.recompute: Recompute | None = None
        self.swap: Swap | None = None
        self.plan: ActivationPlan | None = None
        self.runtime = ActivationRuntime.new()

    @property
    def swap_stats(self) -> ActivationStats | None:
        """What was swapped so far; ``None``: nothing is to be."""
        return None if self.swap is None else self.swap.stats().activations

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
            for each in (self.recompute, self.swap):
                if each is not None:
                    both.callback(each.close)


def apply(
    model: nn.Module,
    sections: Sections,
    layers: Names,
    store: Store | None,
) -> Activations:
    """Do what a document says about activations; log it once, in the order of the layers.

    Args:
        model: whose.
        sections: of the document.
        layers: names of the containers of its layers; ``None``: to be found.
        store: where swapped activations go; ``None``: nothing is offloaded, and they stay.

    Raises:
        ConfigError: the configuration does not fit the number of layers.
        UsageError: no layers were found, or the store has no tier below the device.
    """
    if sections.recompute is None and sections.swap is None:
        return Activations()
    found = find_layers(model, layers)
    modules = list(found.values())
    layout: Mapping[str, Any] = sections.layout
    plan = plan_layers(sections.recompute, sections.swap, num_layers=len(modules), **layout)
    marks = mark(modules, plan)
    _say(modules, plan, marks)
    done = Activations()
    done.plan = plan
    try:
        if sections.recompute is not None:
            done.recompute = recompute.apply(model, modules, plan, done.runtime)
        if plan.swap.swap and store is not None:
            check_tiers(store)
            done.swap = Swap(model, done.runtime, marks, ActivationStore(store), owns_store=False)
        elif plan.swap.swap:
            log.warning("memory_offload is OFF: activations are not swapped either.")
    except BaseException:
        done.close()
        raise
    return done


def _say(modules: list[nn.Module], plan: ActivationPlan, marks: Marks) -> None:
    again = match_layers(modules, plan)
    found = [replace(mine, swap=swapped.swap) for mine, swapped in zip(again, marks.matches, strict=True)]
    config_log.say(plan, found)
    if plan.swap.swap and plan.recompute.recompute is not True:
        paths = [(each.operators, [(match.path, match.pattern) for match in each.swap]) for each in found]
        for warning in overlaps([(layer.recompute, layer.swap) for layer in plan.layers], paths):
            log.warning("%s", warning)
    warn_of_idle(marks)
