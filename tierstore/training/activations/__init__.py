"""Activations: which are swapped, which are computed again, and how.

`RecomputeConfig` and `SwapConfig` are what ``recompute_config`` and ``swap_config`` say, checked as a whole;
`plan_layers` makes of them one `LayerPlan` a layer, and `config_log` says it in the log.  ``config`` knows no
model: a layer is a number, an operator a path of names.  ``swapping`` and ``recomputation`` do it, each as a
policy of ``runtime``; `apply` does both for one model.
"""

from tierstore.training.activations.config.patterns import Pattern
from tierstore.training.activations.config.plan import ActivationPlan, LayerMatches, LayerPlan, plan_layers
from tierstore.training.activations.config.recompute_config import LayerRecompute, RecomputeConfig
from tierstore.training.activations.config.sections import (
    Sections,
    read_sections,
    section_values,
    sections_of,
)
from tierstore.training.activations.config.swap_config import LayerSwap, Mark, SwapConfig

__all__ = [
    "ActivationPlan",
    "LayerMatches",
    "LayerPlan",
    "LayerRecompute",
    "LayerSwap",
    "Mark",
    "Pattern",
    "RecomputeConfig",
    "Sections",
    "SwapConfig",
    "plan_layers",
    "read_sections",
    "section_values",
    "sections_of",
]
