"""Training with more than the device holds: `offload(model, optimizer, config)`.

`swap` and `recompute` do it for activations alone.
"""

from pathlib import Path

from tierstore import signals
from tierstore.training.activations import RecomputeConfig, SwapConfig
from tierstore.training.activations.recomputation.recompute import Recompute, RecomputeStats, recompute
from tierstore.training.activations.swapping.activation_store import ActivationStore
from tierstore.training.activations.swapping.selective_checkpoint import create_selective_checkpoint_contexts
from tierstore.training.activations.swapping.swap import Swap, SwapStats, swap
from tierstore.training.checkpoints.initial_values import InitialValues
from tierstore.training.checkpoints.resumed import Resumed
from tierstore.training.checkpoints.without_values import without_values
from tierstore.training.offload import offload
from tierstore.training.optimizers.registered import register_optimizer
from tierstore.training.place import place
from tierstore.training.run import Offload
from tierstore.training.run_stats import RunStats

__all__ = [
    "ActivationStore",
    "InitialValues",
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
    "place",
    "recompute",
    "register_optimizer",
    "swap",
    "without_values",
]

signals.wait_in(Path(__file__).parent)
