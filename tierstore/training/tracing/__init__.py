"""Programs from models that are nowhere: what a step would do and need, without memory for it."""

from tierstore.training.tracing.built import Built
from tierstore.training.tracing.bundles_of import Grouping
from tierstore.training.tracing.configs import build_from_config, optimizer_named
from tierstore.training.tracing.example_inputs import Inputs
from tierstore.training.tracing.trace_model import RESIDENT_PEAK, trace_model

__all__ = [
    "RESIDENT_PEAK",
    "Built",
    "Grouping",
    "Inputs",
    "build_from_config",
    "optimizer_named",
    "trace_model",
]
