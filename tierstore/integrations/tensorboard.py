"""A run's metrics in TensorBoard, or in whatever else has a ``SummaryWriter``.

Extra ``tierstore[tensorboard]``.  Nothing of TensorBoard is imported: the caller has the writer.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from tierstore.integrations.logged import Measured, scalars


class ScalarWriter(Protocol):
    """What is used of a ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object:
        """Write one number."""
        ...


def write(writer: ScalarWriter, measured: Measured, step: int, names: Collection[str] | None = None) -> None:
    """Write the metrics of a run or a store as scalars of one step.

    Args:
        writer: from ``torch.utils.tensorboard``.
        measured: the run or the store.
        step: what they are written for.
        names: of the metrics; ``None``: every one.
    """
    for tag, value in scalars(measured, names).items():
        writer.add_scalar(tag, value, step)
