"""Training with more than the device holds: `offload(model, optimizer, config)`."""

from tierstore.training.offload import Offload, RunStats, offload

__all__ = ["Offload", "RunStats", "offload"]
