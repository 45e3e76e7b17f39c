"""Which rows of a parameter a gradient is about, and what it comes to for each."""

from __future__ import annotations

from typing import NamedTuple, Self

import torch

from tierstore.nn.repeats import KnownRepeats, can_sum, repeats_of


class TouchedRows(NamedTuple):
    """The rows that a gradient touches: those of a sparse one's first dimension, or all.

    Attributes:
        numbers: theirs, ascending, ``int64``; ``None``: all.
        gradient: of them, the sum of all that was said of each.
        named: the rows, as often as each was named, in any order; ``None``: once, as is a row of which single
            elements are named.
    """

    numbers: torch.Tensor | None
    gradient: torch.Tensor
    named: torch.Tensor | None

    @classmethod
    def of(cls, gradient: torch.Tensor, known: KnownRepeats | None = None) -> Self:
        """Read a gradient, which PyTorch lets be strided or COO.

        Args:
            gradient: of a parameter.
            known: the repeats of rows that may be those of the gradient.
        """
        if gradient.layout is torch.strided:
            return cls(None, gradient, None)
        if gradient.sparse_dim() == 0:  # of a parameter without dimensions
            return cls(None, gradient.to_dense(), None)
        if gradient.sparse_dim() == 1 and not gradient.is_coalesced() and can_sum(gradient._values()):  # noqa: SLF001
            named = gradient._indices()[0]  # noqa: SLF001 - `indices()` refuses repeats
            repeats = repeats_of(named, known)
            sums = repeats.sums(gradient._values())  # noqa: SLF001 - likewise
            return cls(repeats.ids, sums, None if len(named) == len(sums) else named)
        summed = gradient.coalesce()
        numbers = summed.indices()[0]
        if gradient.sparse_dim() > 1:
            numbers = numbers.unique()
            return cls(numbers, gradient.to_dense().index_select(0, numbers), None)
        named, values = gradient._indices()[0], summed.values()  # noqa: SLF001 - `indices()` refuses repeats
        return cls(numbers, values, None if len(named) == len(numbers) else named)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return these rows of a tensor: a copy, or the tensor itself if they are all."""
        return tensor if self.numbers is None else tensor.index_select(0, self.numbers)

    def put(self, tensor: torch.Tensor, rows: torch.Tensor) -> None:
        """Let these rows of a tensor be those that `take` has returned, as they are now."""
        if self.numbers is not None:
            tensor.index_copy_(0, self.numbers, rows)

    def with_decay(self, rows: torch.Tensor, weight_decay: float) -> torch.Tensor:
        """Return the gradient with ``weight_decay`` times the rows themselves, once for each occurrence."""
        if not weight_decay:
            return self.gradient
        if self.named is not None:
            counts = self.named.unique(return_counts=True)[1].to(rows.dtype)
            rows = rows * counts.view(-1, *(1 for _ in rows.shape[1:]))
        return self.gradient.add(rows, alpha=weight_decay)
