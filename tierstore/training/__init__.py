"""Training with more than the device holds: `offload(model, optimizer, config)`.

`recompute(model, config)` keeps less for backward.
"""

from tierstore.training.activations.recompute import Recompute, RecomputeStats, recompute
from tierstore.training.former import Resumed
from tierstore.training.offload import Offload, RunStats, offload

__all__ = ["Offload", "Recompute", "RecomputeStats", "Resumed", "RunStats", "offload", "recompute"]
