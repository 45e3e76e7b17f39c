"""Training with more than the device holds: `offload(model, optimizer, config)`.

`swap` and `recompute` do it for activations alone.
"""

from pathlib import Path

from tierstore import signals
from tierstore.training.activations import RecomputeConfig, SwapConfig
from tierstore.training.activations.activation_store import ActivationStore
from tierstore.training.activations.recompute import Recompute, RecomputeStats, recompute
from tierstore.training.activations.selective import create_selective_checkpoint_contexts
from tierstore.training.activations.swap import Swap, SwapStats, swap
from tierstore.training.former import Resumed
from tierstore.training.known import register_optimizer
from tierstore.training.offload import Offload, RunStats, offload

__all__ = [
    "ActivationStore",
    "Offload",
    "Recompute",
    "RecomputeConfig",
    "RecomputeStats",
    "Resumed",
    "RunStats",
    "Swap",
    "SwapConfig",
    "SwapStats",
    "create_selective_checkpoint_contexts",
    "offload",
    "recompute",
    "register_optimizer",
    "swap",
]

signals.wait_in(Path(__file__).parent)
