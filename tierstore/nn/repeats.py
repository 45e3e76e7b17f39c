"""Which ids a batch repeats, and sums over the repeats: what PyTorch's ``coalesce`` gives, bit for bit.

Rule 1: a batch is sorted once, by PyTorch's own sort, as ``coalesce`` sorts it.  From 17 elements on the sort
is not stable, and its order is the one in which repeats are added.
Rule 2: sums are those of ``embedding_bag``, which adds a bag in order, a sixth of the time of ``coalesce``.
It begins with +0.0, and ``coalesce`` with the first: where it matters, that one does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import torch
from torch.nn import functional

_SUMMED: Final = (torch.float32, torch.float64)
"""Types that ``embedding_bag`` sums in themselves: sums of narrower ones are rounded once, not at each."""


class Repeats(NamedTuple):
    """A batch's ids, sorted.

    Attributes:
        ids: int64, ascending, distinct.
        inverse: of each id of the batch, where it stands in ``ids``.
        order: places in the batch, by their ids; of one id in the order in which they are summed.
        begins: of each of ``ids``, where its places begin in ``order``.
    """

    ids: torch.Tensor
    inverse: torch.Tensor
    order: torch.Tensor
    begins: torch.Tensor

    @classmethod
    def of(cls, index: torch.Tensor) -> Self:
        """Sort a batch: int64, ``[n]``; what it gives is where that is."""
        ascending, order = index.sort()
        ids, inverse, counts = torch.unique_consecutive(ascending, return_inverse=True, return_counts=True)
        inverse = torch.empty_like(order).scatter_(0, order, inverse)
        return cls(ids, inverse, order, counts.cumsum(0).sub_(counts))

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return what the values of each id come to, added in order.

        Args:
            values: ``[n, width]``, one row for each id of the batch.

        Returns:
            ``[len(ids), width]``.
        """
        if can_sum(values):
            found = functional.embedding_bag(self.order, values, self.begins, mode="sum")
            if not _has_zero(found) or not _has_negative_zero(values):
                return found
        compact = torch.sparse_coo_tensor(
            self.inverse[None], values, (len(self.ids), *values.shape[1:]), check_invariants=False
        )
        return compact.coalesce().values()


@dataclass(frozen=True)
class KnownRepeats:
    """The repeats of a batch that may come again.

    Attributes:
        index: the batch, which nobody else writes to.
        repeats: of it.
    """

    index: torch.Tensor
    repeats: Repeats


def repeats_of(index: torch.Tensor, known: KnownRepeats | None) -> Repeats:
    """Return the repeats of a batch; they are not sorted again if it is the one that is known."""
    if known is not None and index.is_cpu and torch.equal(known.index, index):
        return known.repeats
    return Repeats.of(index)


def can_sum(values: torch.Tensor) -> bool:
    """Whether sums of such values take less time than ``coalesce``."""
    return values.dtype in _SUMMED and values.ndim == 2 and values.is_cpu and values.numel() > 0


def _has_zero(values: torch.Tensor) -> bool:
    """Whether there is +0.0, whose bits are those of 0."""
    return bool(values.detach().numpy().view(f"u{values.itemsize}").min() == 0)


def _has_negative_zero(values: torch.Tensor) -> bool:
    """Whether there is -0.0, whose bits are those of the least integer."""
    least = values.detach().contiguous().numpy().view(f"i{values.itemsize}").min()
    return int(least) == -(1 << 8 * values.itemsize - 1)
