"""The area under the ROC curve: the chance that a click scores higher than what was not clicked on."""

from __future__ import annotations

import torch
from torch import Tensor


def area_under_curve(scores: Tensor, labels: Tensor) -> float:
    """Return the share of pairs of a 1 and a 0 in which the 1 has the higher score; equal scores count half.

    Counted in whole numbers, from the ranks: no threshold is chosen and no curve is drawn.

    Args:
        scores: ``(lines,)``.
        labels: ``(lines,)``, 0 or 1.

    Raises:
        ValueError: there is no 1 or no 0, a score is not a number, or the shapes differ.
    """
    if scores.shape != labels.shape or scores.dim() != 1:
        raise ValueError(f"AUC needs a score for each label, not {[*scores.shape]} for {[*labels.shape]}")
    if scores.isnan().any():
        raise ValueError(f"AUC: {int(scores.isnan().sum())} of {len(scores)} scores are not numbers")
    ones = int((labels != 0).sum())
    zeros = len(labels) - ones
    if not ones or not zeros:
        raise ValueError(f"AUC needs both kinds of labels; there are {ones} ones and {zeros} zeros")
    distinct, places = torch.unique(scores, return_inverse=True)
    ones_there = torch.bincount(places[labels != 0], minlength=len(distinct))
    zeros_there = torch.bincount(places[labels == 0], minlength=len(distinct))
    zeros_below = zeros_there.cumsum(0) - zeros_there
    twice = int((ones_there * (2 * zeros_below + zeros_there)).sum())
    return twice / (2 * ones * zeros)
