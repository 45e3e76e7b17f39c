"""What a run's metrics are called in a log of training: scalars for a tracker, without labels.

`scalars` is for whoever logs: the callback of Hugging Face's Trainer, the strategy of Lightning,
`tierstore.integrations.tensorboard`, and a callback of your own.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Protocol

from tierstore.metrics import Number, Sample, samples

FEW: Final = frozenset(
    {
        "tierstore_run_steps_total",
        "tierstore_run_forward_seconds_total",
        "tierstore_run_backward_seconds_total",
        "tierstore_run_optimizer_seconds_total",
        "tierstore_run_stall_seconds_total",
        "tierstore_run_checkpoints_total",
        "tierstore_tier_charged_bytes",
        "tierstore_tier_peak_charged_bytes",
        "tierstore_tier_hits_total",
        "tierstore_tier_faults_total",
        "tierstore_traffic_bytes_total",
    }
)
"""The names that a log of training has unless more are asked for: where bytes and time went."""


class Measured(Protocol):
    """A run, or a store."""

    def stats(self) -> object:
        """Return what it did so far."""
        ...


def scalars(measured: Measured, names: Collection[str] | None = FEW) -> dict[str, Number]:
    """Return metrics for a log, such as ``{"tierstore/tier_charged_bytes/host": 1048576, ...}``.

    Values of labels follow the name.  Safe from any thread; it takes less than a millisecond.

    Args:
        measured: a run of `tierstore.training.offload`, also one that is closed, or a store.
        names: of the metrics, as the reference lists them; ``None``: every one.
    """
    return {
        tag(each): each.value for each in samples(measured.stats()) if names is None or each.name in names
    }


def tag(sample: Sample) -> str:
    """Return what a sample is called in a log."""
    name = sample.name.replace("tierstore_", "tierstore/", 1)
    return "/".join([name, *(value for _, value in sample.labels)])
