"""What a user says about activations: which are swapped, which are computed again.

`RecomputeConfig` and `SwapConfig` are what ``recompute_config`` and ``swap_config`` say, checked as a whole;
`plan_layers` makes of them one `LayerPlan` a layer, and `lines` says it in the log.  Nothing here knows a
model: a layer is a number, an operator a path of names.
"""

from tierstore.training.activations.config.patterns import Pattern
from tierstore.training.activations.config.plan import ActivationPlan, LayerMatches, LayerPlan, plan_layers
from tierstore.training.activations.config.recompute_config import LayerRecompute, RecomputeConfig
from tierstore.training.activations.config.sections import Sections, read_sections, sections_of
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
    "sections_of",
]
