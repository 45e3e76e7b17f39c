"""What the rows of a table are before anybody has written them: a pure function of their ids.

A table calls it for rows that it meets for the first time, in any order, and again for those that it has
forgotten because nobody changed them.  The ones here can be pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from tierstore.tables import philox

InitialRows = Callable[[torch.Tensor], torch.Tensor]
"""From ids, int64 ``[n]``, to rows ``[n, width]`` of the table's dtype; the same id gives the same bits."""


@dataclass(frozen=True)
class ConstantRows:
    """Rows of which every element is ``value``."""

    width: int
    dtype: torch.dtype
    value: float = 0.0

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``ids``: see `InitialRows`."""
        return torch.full((len(ids), self.width), self.value, dtype=self.dtype, device="cpu")


@dataclass(frozen=True)
class NormalRows:
    """Rows of normally distributed values, see `tierstore.tables.philox.normal`.

    They are made in float64 and rounded once; for types below float32, as PyTorch does it, by way of float32.

    Attributes:
        width: elements of a row.
        dtype: a floating point type.
        seed: 0 to 2**64 - 1.
        mean: of the distribution.
        std: its standard deviation.
        is_drawn: whether nobody has given the seed: a table that is restored has that of its checkpoint.
    """

    width: int
    dtype: torch.dtype
    seed: int
    mean: float = 0.0
    std: float = 1.0
    is_drawn: bool = field(default=False, repr=False, compare=False)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``ids``: see `InitialRows`."""
        values = philox.normal(self.seed, ids.numpy(), self.width)
        values *= self.std
        values += self.mean
        return torch.from_numpy(values).to(self.dtype)


@dataclass(frozen=True)
class UniformRows:
    """Rows of values spread evenly between ``low`` and ``high``, see `tierstore.tables.philox.uniform`.

    They are made in float64 and rounded once, so ``high`` itself may appear; otherwise see `NormalRows`.
    """

    width: int
    dtype: torch.dtype
    seed: int
    low: float = 0.0
    high: float = 1.0
    is_drawn: bool = field(default=False, repr=False, compare=False)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``ids``: see `InitialRows`."""
        values = philox.uniform(self.seed, ids.numpy(), self.width)
        values *= self.high - self.low
        values += self.low
        return torch.from_numpy(values).to(self.dtype)


def seed_of(initial_rows: InitialRows) -> int | None:
    """Return the seed of rows; ``None``: they have none."""
    return initial_rows.seed if isinstance(initial_rows, NormalRows | UniformRows) else None


def has_drawn_seed(initial_rows: InitialRows) -> bool:
    """Return whether rows have a seed that nobody has given."""
    return isinstance(initial_rows, NormalRows | UniformRows) and initial_rows.is_drawn


def with_seed(initial_rows: InitialRows, seed: int | None) -> InitialRows:
    """Return rows whose seed was drawn with another one; those whose seed was given stay as they are."""
    if seed is None or not isinstance(initial_rows, NormalRows | UniformRows) or not initial_rows.is_drawn:
        return initial_rows
    return replace(initial_rows, seed=seed)
