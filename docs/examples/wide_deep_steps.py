"""How Wide&Deep is trained: two optimizers, one backward pass, and losses scaled against underflow.

The original makes two passes: gradients of the wide loss for FTRL's parameters, and of the deep loss for
LazyAdam's.  The deep loss is the wide one with a penalty on the deep table, which says nothing about FTRL's
parameters; so one pass gives the same gradients, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tierstore.optim import FTRL, LazyAdam
from wide_deep import Groups, Losses, WideDeep, losses_of

SENSITIVITY = 1024.0
"""What losses are multiplied by before backward, and optimizers divide gradients by: a power of two."""

WIDE_RATE, WIDE_PENALTY, WIDE_START = 5e-2, 1e-8, 1.0
DEEP_RATE, DEEP_EPS = 3.5e-4, 1e-8


class Batch(NamedTuple):
    """Lines of clicks.

    Attributes:
        ids: ``(lines, fields)``, ``int64``.
        weights: ``(lines, fields)``, ``float32``.
        labels: ``(lines,)``, ``float32``: 1 where it was clicked on.
    """

    ids: Tensor
    weights: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        return Batch(*(tensor.to(device) for tensor in self))


def optimizers_of(groups: Groups, target: str = "CPU", deep_rate: float = DEEP_RATE) -> tuple[FTRL, LazyAdam]:
    """Return the optimizers of the wide and of the deep group.

    Args:
        groups: what they step.
        target: where they step: ``"CPU"`` or ``"device"``.
        deep_rate: the deep group's learning rate.
    """
    wide = FTRL(
        groups.wide,
        lr=WIDE_RATE,
        l1=WIDE_PENALTY,
        l2=WIDE_PENALTY,
        initial_accumulator_value=WIDE_START,
        loss_scale=SENSITIVITY,
        target=target,
    )
    deep = LazyAdam(groups.deep, lr=deep_rate, eps=DEEP_EPS, loss_scale=SENSITIVITY, target=target)
    return wide, deep


def train_step(
    model: WideDeep, optimizers: Sequence[torch.optim.Optimizer], batch: Batch, l2: float = 0.0
) -> Losses:
    """Make one step; return the losses before it.

    Args:
        model: is changed.
        optimizers: of all its parameters.
        batch: what is learned from.
        l2: see `wide_deep.losses_of`.
    """
    losses = losses_of(model, model(batch.ids, batch.weights), batch.labels, l2)
    losses.deep.backward(torch.full_like(losses.deep, SENSITIVITY))
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return losses
