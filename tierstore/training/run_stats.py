"""What `Offload.stats` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tierstore.stats import StoreStats, TierStats, Traffic, plain_values
from tierstore.tables import RowStats
from tierstore.training.activations.recomputation.recompute import RecomputeStats
from tierstore.training.activations.swapping.activation_stats import ActivationStats


@dataclass(frozen=True, slots=True)
class RunStats:
    """What a run did so far.

    Attributes:
        store: the store's own counts; ``None`` if nothing is offloaded.
        forward_s: seconds in the model's forward.
        backward_s: seconds from there to the last gradient.
        optimizer_s: seconds in the optimizers' steps, with those made during backward.
        stall_s: how long all of these waited for bytes.
        checkpoints: how many `Offload.checkpoint` has made, with those of the runs before.
        checkpoint_s: seconds that those of this run took.
        activations: which of them have left the device, by swap or by ``offload_checkpoint``, and how;
            ``None`` if none are to.
        recompute: what was computed again; ``None`` if nothing is to be.
        tables: where the rows of each table were, by its name.
        steps: how many have ended, as far as one can see: all optimizers have stepped since the model ran.
    """

    store: StoreStats | None
    forward_s: float
    backward_s: float
    optimizer_s: float
    stall_s: float
    checkpoints: int = 0
    checkpoint_s: float = 0.0
    activations: ActivationStats | None = None
    recompute: RecomputeStats | None = None
    tables: Mapping[str, RowStats] = field(default_factory=dict)
    steps: int = 0

    @property
    def tiers(self) -> Mapping[str, TierStats]:
        """The store's tiers by name; none if nothing is offloaded."""
        return {} if self.store is None else self.store.tiers

    @property
    def traffic(self) -> Mapping[tuple[str, str], Traffic]:
        """The store's copies by (from, to); none if nothing is offloaded."""
        return {} if self.store is None else self.store.traffic

    def as_dict(self) -> dict[str, Any]:
        """Return what ``dataclasses.asdict`` does, in words that JSON has: see `StoreStats.as_dict`."""
        told: dict[str, Any] = plain_values(self)
        return told
