"""Training with more than the device holds: `offload(model, optimizer, config)`."""

from tierstore.training.activations import RecomputeConfig, SwapConfig
from tierstore.training.activations.swap import Swap, SwapStats, swap
from tierstore.training.former import Resumed
from tierstore.training.offload import Offload, RunStats, offload

__all__ = [
    "Offload",
    "RecomputeConfig",
    "Resumed",
    "RunStats",
    "Swap",
    "SwapConfig",
    "SwapStats",
    "offload",
    "swap",
]
