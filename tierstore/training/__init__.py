"""Training with more than the device holds: `offload(model, optimizer, config)`.

`recompute(model, config)` keeps less for backward.
"""

from tierstore.training.activations.recompute import Recompute, RecomputeStats, recompute
from tierstore.training.activations.selective import create_selective_checkpoint_contexts
from tierstore.training.activations.vault import Vault
from tierstore.training.former import Resumed
from tierstore.training.offload import Offload, RunStats, offload

__all__ = [
    "Offload",
    "Recompute",
    "RecomputeStats",
    "Resumed",
    "RunStats",
    "Vault",
    "create_selective_checkpoint_contexts",
    "offload",
    "recompute",
]
