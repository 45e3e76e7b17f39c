"""Ids of a batch: checked, and brought down to distinct ones."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tierstore.errors import ConfigError
from tierstore.nn.repeats import Repeats
from tierstore.quoting import quoted

_INTEGERS = (torch.int64, torch.int32)


class DistinctIds(NamedTuple):
    """What a lookup needs of a batch's ids.

    Attributes:
        ids: int64 in host memory, ascending, distinct, all in range.
        inverse: of the shape of the batch: where each one's id stands in ``ids``; ``len(ids)`` for those out
            of range.
        repeats: of the batch in one dimension; ``None``: some ids are out of range.
    """

    ids: torch.Tensor
    inverse: torch.Tensor
    repeats: Repeats | None

    @property
    def has_strangers(self) -> bool:
        """Whether some are out of range."""
        return self.repeats is None


def checked(ids: object, what: str = "ids") -> torch.Tensor:
    """Return ids as int64 in host memory.

    Raises:
        TypeError: they are no tensor of int64 or int32.
    """
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"{what} are {quoted(ids)}: they have to be a tensor of int64 or int32")
    if ids.dtype not in _INTEGERS:
        raise TypeError(f"{what} are of {ids.dtype}: they have to be of int64 or int32")
    return ids.detach().to("cpu", torch.int64)


def distinct(ids: torch.Tensor, num_rows: int, name: str, takes_strangers: bool) -> DistinctIds:
    """Find the distinct ids of a batch.

    Args:
        ids: int64 in host memory, of any shape.
        num_rows: of the table.
        name: of the table, for the message.
        takes_strangers: whether ids out of range are let through.

    Raises:
        IndexError: some are out of range.
    """
    repeats = Repeats.of(ids.reshape(-1))
    found, inverse = repeats.ids, repeats.inverse.view(ids.shape)
    if not len(found) or (found[0] >= 0 and found[-1] < num_rows):
        return DistinctIds(found, inverse, repeats)
    strange = (ids < 0) | (ids >= num_rows)
    if not takes_strangers:
        raise IndexError(_out_of_range(ids, strange, num_rows, name))
    found, inverse = torch.unique(ids.masked_fill(strange, num_rows), return_inverse=True)
    return DistinctIds(found[:-1], inverse, None)


def in_range(ids: torch.Tensor, num_rows: int, name: str) -> torch.Tensor:
    """Return the same ids.

    Raises:
        IndexError: some are out of range.
    """
    strange = (ids < 0) | (ids >= num_rows)
    if strange.any():
        raise IndexError(_out_of_range(ids, strange, num_rows, name))
    return ids


def checked_offsets(offsets: object, length: int) -> torch.Tensor:
    """Return where bags begin, as int64 in host memory.

    Args:
        offsets: 1-D, from 0, ascending.
        length: how many ids there are.

    Raises:
        TypeError: they are no tensor of int64 or int32.
        ConfigError: they do not begin at 0, descend, lie beyond the ids, or are not 1-D.
    """
    begins = checked(offsets, "offsets")
    if begins.ndim != 1:
        raise ConfigError(f"offsets have {begins.ndim} dimensions, not 1")
    if len(begins) and begins[0] != 0:
        raise ConfigError(f"offsets begin at {int(begins[0])}, not at 0")
    if (begins[1:] < begins[:-1]).any():
        place = int((begins[1:] < begins[:-1]).nonzero()[0])
        raise ConfigError(
            f"offsets descend from {int(begins[place])} to {int(begins[place + 1])} at {place + 1}"
        )
    if len(begins) and begins[-1] > length:
        raise ConfigError(f"offsets reach {int(begins[-1])}, and there are {length} ids")
    if length and not len(begins):
        raise ConfigError(f"no offsets, and {length} ids: they are in no bag")
    return begins


def _out_of_range(ids: torch.Tensor, strange: torch.Tensor, num_rows: int, name: str) -> str:
    first = strange.nonzero()[0].tolist()
    count = int(strange.sum())
    return (
        f"table {name!r} has rows 0 to {num_rows - 1}: {count} of {ids.numel()} ids are out of range, the "
        f"first is {int(ids[tuple(first)])} at {first}"
    )
