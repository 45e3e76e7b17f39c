"""What the rows of a table are before anybody has written them, as its maker says it.

Rows are made when they are first looked up, so a table is never in memory at once.  A row is a pure function
of the seed and its id: neither batches nor growth change it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tierstore.errors import ConfigError
from tierstore.modes import Unseen
from tierstore.quoting import quoted
from tierstore.tables import ConstantRows, InitialRows, NormalRows, UniformRows


@dataclass(frozen=True)
class Normal:
    """Normally distributed values.

    Attributes:
        std: the standard deviation, at least 0.
        mean: of the distribution.
    """

    std: float = 1.0
    mean: float = 0.0

    def __post_init__(self) -> None:
        if not self.std >= 0:
            raise ConfigError(f"Normal(std={self.std!r}): it has to be at least 0")


@dataclass(frozen=True)
class Uniform:
    """Values spread evenly.

    Attributes:
        low: the least.
        high: the largest; at least ``low``.
    """

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not self.high >= self.low:
            raise ConfigError(
                f"Uniform({self.low!r}, {self.high!r}): the second has to be at least the first"
            )


RowsOfIds = Callable[[torch.Tensor], torch.Tensor]
Initializer = None | float | str | Normal | Uniform | RowsOfIds


@dataclass(frozen=True)
class CheckedRows:
    """A function of the program's, held to what it has to return."""

    function: RowsOfIds
    width: int
    dtype: torch.dtype

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``ids``.

        Raises:
            ConfigError: the function returned something else than rows of the table.
        """
        with torch.no_grad():
            rows: object = self.function(ids)
        wanted = (len(ids), self.width)
        if not isinstance(rows, torch.Tensor) or tuple(rows.shape) != wanted or rows.dtype != self.dtype:
            got = f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, torch.Tensor) else quoted(rows)
            raise ConfigError(f"init returned {got} for {len(ids)} ids; rows are {self.dtype} {list(wanted)}")
        return rows.detach().cpu()


def rows_of(init: Initializer, width: int, dtype: torch.dtype, seed: int | None) -> InitialRows:
    """Return what computes rows from their ids.

    Args:
        init: ``None``: N(0, 1), as ``nn.Embedding`` has it; a number: that; ``"zeros"``; `Normal`; `Uniform`;
            or a function from ids to rows.
        width: elements of a row.
        dtype: of the table.
        seed: from 0 to 2**64 - 1; ``None``: PyTorch's default generator draws one.

    Raises:
        ConfigError: ``init`` is a text that is not known.
        TypeError: it is nothing of the above.
    """
    seed, is_drawn = _drawn(seed)
    if init is None:
        init = Normal()
    if isinstance(init, Normal):
        return NormalRows(width, dtype, seed, init.mean, init.std, is_drawn)
    if isinstance(init, Uniform):
        return UniformRows(width, dtype, seed, init.low, init.high, is_drawn)
    if isinstance(init, str):
        if init != "zeros":
            raise ConfigError(f"init={init!r}: the only text that it takes is 'zeros'")
        init = 0.0
    if isinstance(init, int | float) and not isinstance(init, bool):
        return ConstantRows(width, dtype, float(init))
    if not callable(init):
        raise TypeError(
            f"init={quoted(init)}: it takes None, a number, 'zeros', Normal, Uniform, or a function"
        )
    return CheckedRows(init, width, dtype)


def _drawn(seed: int | None) -> tuple[int, bool]:
    """Return a seed, and whether it was drawn as none was given."""
    if seed is not None:
        return seed, False
    with Unseen():
        return int(torch.randint(2**63 - 1, (), device="cpu")), True
