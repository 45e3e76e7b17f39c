"""What is logged when something is recomputed, and what of a configuration changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from tierstore.training.activations import lines
from tierstore.training.activations.chosen import is_distributed, submodule
from tierstore.training.activations.plan import ActivationPlan, LayerMatches
from tierstore.training.activations.recompute_config import RecomputeConfig
from tierstore.training.activations.swap_config import SwapConfig

log = logging.getLogger("tierstore")


def say(plan: ActivationPlan, matches: Sequence[LayerMatches]) -> None:
    """Log what is recomputed; `lines.say` says what is swapped as well.

    Args:
        plan: of all layers.
        matches: what it means, by layer.
    """
    tables = lines.table_lines(plan.recompute.tables_on(plan.geometry))
    for line in [*lines.geometry_lines(plan.geometry), *tables]:
        log.info("%s", line)
    for warning in plan.warnings:
        log.warning("%s", warning)
    for layer, found in zip(plan.layers, matches, strict=True):
        alone = replace(layer, swap=SwapConfig().decide(layer.layer_id))
        for line in lines.layer_lines(alone, replace(found, swap=()), by_index=plan.swap.swap):
            log.info("%s", line)


def say_what_has_no_effect(
    layers: Sequence[nn.Module], plan: ActivationPlan, matches: Sequence[LayerMatches]
) -> None:
    """Log keys that change nothing here, exclusions of modules, and patterns that mean nothing.

    Args:
        layers: of the model.
        plan: for them.
        matches: what it means, by layer.
    """
    for key in _idle_keys(plan.recompute):
        log.info("%s has no effect here: see 'Recompute on PyTorch' in the documentation", key)
    for layer, found in zip(plan.layers, matches, strict=True):
        module = layers[layer.layer_id]
        for path in found.exclude:
            if submodule(module, path) is not None:
                name = ".".join(path)
                log.info("Excluding the module %s at layer %d has no effect", name, layer.layer_id)
    for text in _meaningless(plan, matches):
        log.warning("select_recompute: no layer has a submodule or an operator '%s'", text)


def _idle_keys(config: RecomputeConfig) -> list[str]:
    asked = {
        "recompute_slice_activation": config.recompute_slice_activation,
        "parallel_optimizer_comm_recompute": config.parallel_optimizer_comm_recompute,
        "mp_comm_recompute": not config.mp_comm_recompute and not is_distributed(),
        "select_comm_recompute": bool(config.select_comm_recompute),
    }
    return [key for key, is_asked in asked.items() if is_asked]


def _meaningless(plan: ActivationPlan, matches: Sequence[LayerMatches]) -> list[str]:
    """Return the patterns of operators that match nothing in any layer that they are for."""
    met: dict[str, bool] = {}
    for layer, found in zip(plan.layers, matches, strict=True):
        for pattern in layer.recompute.operators:
            is_met = pattern.is_aten or any(pattern.matches(path) for path in found.operators)
            met[pattern.text] = met.get(pattern.text, False) or is_met
    return [text for text, is_met in met.items() if not is_met]
